"""What the values of options name: configs, folders and runs."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from jaxformer.cli.options import CommandLine
from jaxformer.config import Config, ModelConfig
from jaxformer.config.files import load_module
from jaxformer.data.infer_config import fit_patches
from jaxformer.data.storage import is_url
from jaxformer.errors import UserError
from jaxformer.runs.storage import local_folder

DEFAULT_CONFIG = "quick"
RUNS = Path("runs")
"""Folder of the runs that are not named."""


def with_fitting_patches(model: ModelConfig, line: CommandLine) -> ModelConfig:
    """Return the model's config; if the options, which are not yet parsed, set either the image size or the patch size,
    set it and adjust the other so that patches divide images. The data may still change the image size."""
    holder = model.contract.patches
    if holder is None:
        return model
    prefix = f"--model.{holder}." if holder else "--model."
    fields = {f"{prefix}{part}-size": f"{part}_size" for part in ("image", "patch")}
    given = fields.keys() & line.given
    if len(given) != 1:
        return model
    (flag,) = given
    size = line.value(flag, tuple[int, ...])
    if not holder:
        return fit_patches(model, fields[flag], size)
    return replace(model, **{holder: fit_patches(getattr(model, holder), fields[flag], size)})


def folder_named(flag: str, value: str) -> Path:
    """Return the folder that an option names, which need not exist. Raises `UserError` if the name is empty, a file or
    a URL."""
    folder = Path(value)
    if not value or is_url(value) or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{flag} is {value!r}; it must be a local folder, such as runs/mine.")
    return folder


def run_named(flag: str, value: str) -> Path:
    """Return the folder of a run that an option names by path or by URL on object storage. Raises `UserError` as
    `folder_named` and `local_folder` do."""
    if not is_url(value):
        return folder_named(flag, value)
    return local_folder(value)


def load_config(spec: str) -> Config:
    """Return the config that `FILE:NAME` names; `FILE` alone means the config with the file's name. FILE is the name of
    one of this project's files, such as `quick`, or a path. Raises `UserError` if there is no such config, and as
    `config.files.load_module` does."""
    path, colon, name = spec.rpartition(":")
    if not colon or {"/", "\\"} & {*name}:  # the colon follows a Windows drive
        path, name = spec, Path(spec).stem
    configs = {key: value for key, value in vars(load_module(path)).items() if isinstance(value, Config)}
    if name not in configs:
        near = get_close_matches(name, configs, 1)
        hint = f"did you mean {path}:{near[0]}?" if near else f"it has {', '.join(configs) or 'none'}."
        raise UserError(f"{path} has no config {name!r}; {hint}")
    return configs[name]
