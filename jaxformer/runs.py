"""A run's folder: everything that one training run leaves, and all that sampling and inspecting need."""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
import shutil
import tempfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jaxformer.data
import jaxformer.models
from jaxformer.checkpoints import CHECKSUMS, CheckpointReader
from jaxformer.config import Config, DataConfig, ModelConfig, TokenModelConfig
from jaxformer.contract import contract_of
from jaxformer.data.dataset import Dataset
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, abbreviate, parse_json
from jaxformer.fields import from_dict, to_dict
from jaxformer.files import write_atomically
from jaxformer.models.inputs import check_next_tokens
from jaxformer.models.objective import Params, is_causal_lm, next_token_nll
from jaxformer.nn.parameters import parameter_axes
from jaxformer.parameters import dotted
from jaxformer.sharding import abstract, shardings

T = TypeVar("T")
CONFIG, TOKENIZER, CLASSES = "config.json", "tokenizer.json", "classes.json"
METRICS, SAMPLES = "metrics.jsonl", "samples.txt"
PLOTS = "plots"


@dataclass(frozen=True)
class Run:
    """A trained model with what belongs to it."""

    path: Path
    config: Config
    model: nn.Module
    params: Params
    tokenizer: Tokenizer | None
    """None where there is no text in its data."""
    step: int
    """Optimizer steps that made the parameters."""
    classes: tuple[str, ...] = ()
    """Names of what it tells apart, where it is known and is no text."""

    def text_model(self) -> tuple[TokenModelConfig, Tokenizer]:
        """The config and the tokenizer of a model of text.

        Raises:
          UserError: it is none.
        """
        if self.tokenizer is None or not isinstance(self.config.model, TokenModelConfig):
            kind = type(self.model).__name__
            raise UserError(f"{self.path} holds a {kind}, which writes no text; name a run that does.")
        return self.config.model, self.tokenizer

    def loss(self, params: Params, tokens_T: jax.Array) -> jax.Array:
        """Mean next-token loss in nats per token of one sequence, a float32 scalar; made for `jax.grad`.

        Args:
          tokens_T: ids from 0 to below the vocabulary's size, at least 2; for a model of learned positions at most one
            more than its context length.

        Raises:
          UserError: the model predicts no next tokens, or these are not the tokens of one sequence.
        """
        if not is_causal_lm(self.model):
            kind = type(self.model).__name__
            raise UserError(f"{self.path} holds a {kind}, which predicts no next token; see models.objective.")
        tokens_T = jnp.asarray(tokens_T)
        check_next_tokens(contract_of(self.model), tokens_T)
        return jnp.mean(next_token_nll(self.model, params, tokens_T))


def load_run(path: str | Path, checkpoint: str | int = "last", mesh: Mesh | None = None) -> Run:
    """Open a run's folder.

    Args:
      path: the folder.
      checkpoint: 'last', 'best' (lowest validation loss), or a step. Of the first two, one that is damaged is
        passed over with a warning.
      mesh: over which the parameters are to lie; without it, on the first device.

    Raises:
      UserError: no such run, no such checkpoint, all of them or the given one damaged, a file that cannot be read, or a
        tokenizer or names of classes that are not the run's own.
    """
    folder = Path(path)
    config = read_config(folder)
    model = config.model.build()
    checkpoints = CheckpointReader(folder)
    step = checkpoints.step(checkpoint)
    has_text = isinstance(config.model, TokenModelConfig) or (folder / TOKENIZER).exists()
    tokenizer = Tokenizer.load(_own(folder, TOKENIZER)) if has_text else None
    classes = _read_classes(folder)
    shapes = abstract_params(model, config.model)
    if mesh is not None:
        shapes = abstract(shapes, shardings(shapes, parameter_axes(model), mesh))
    params = checkpoints.restore_params(step, shapes)
    return Run(folder, config, model, params, tokenizer, step, classes)


def _own(folder: Path, name: str, remedy: str = "") -> Path:
    """Return the path of a file that came into a run's folder with the run, and is still the same.

    Raises:
      UserError: it has changed since, or `CHECKSUMS`, which would say so, is missing or cannot be read.
    """
    if not (folder / name).is_file():
        raise UserError(f"{folder} has no {name}; put back the one it was trained with{remedy}, or train anew.")
    if not (folder / CHECKSUMS).is_file():
        raise UserError(
            f"{folder} has no {CHECKSUMS} to verify {name} with; put back the one that was written with it, or train "
            "anew."
        )
    try:
        expected = parse_json((folder / CHECKSUMS).read_bytes())[name]
        actual = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{folder / CHECKSUMS} has no checksum of {name}; put back the one that was written with the run{remedy}."
        ) from error
    if actual != expected:
        raise UserError(
            f"{folder / name} is not the one that this run was trained with; put that back{remedy}, or train anew."
        )
    return folder / name


def _read_classes(folder: Path) -> tuple[str, ...]:
    """Names of classes; none, where there is no such file."""
    if not (folder / CLASSES).exists():
        return ()
    remedy = ", or remove it to have numbers"
    file = _own(folder, CLASSES, remedy)
    try:
        names = parse_json(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file} cannot be read as names of classes ({error}); put it right{remedy}.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file} is no list of names; put it right{remedy}.")
    return tuple(names)


def load_data(folder: Path | None, config: Config, fixed: Container[str] | None = None) -> Dataset:
    """Return the data of a run's config, read with the run's own tokenizer if it has tokens.

    Args:
      folder: of the run; None for a new one, whose model is to be the data's `model`.
      fixed: of a new run, names of the model's fields that must not be fitted to the data; see `DataConfig.load`.

    Raises:
      UserError: the tokenizer is missing or cannot be read, or see `DataConfig.load`.
    """
    if folder is None:
        return config.data.load(config.model, config.train.batch_size, config.seed, fixed=fixed)
    file = folder / TOKENIZER
    tokenizer = Tokenizer.load(_own(folder, TOKENIZER)) if file.exists() else None
    data = config.data.load(config.model, config.train.batch_size, config.seed, tokenizer)
    if tokenizer is None and data.tokenizer is not None:
        raise UserError(f"{file} does not exist, and no other tokenizer fits the run; put it back, or train anew.")
    return data


def abstract_params(model: nn.Module, config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without making them."""
    return jax.eval_shape(lambda *example: model.init(jax.random.key(0), *example), *config.example())["params"]


def parameter_order(model: nn.Module, config: ModelConfig) -> list[str]:
    """Return the dotted names of the parameters in the order in which the model first uses them; last its own, such as
    the unembedding, which no module within it has."""
    names: list[str] = []

    def walk(tree: Params, path: tuple[str, ...] = ()) -> None:
        for name, child in tree.items():  # as they were made; jax.tree would sort them
            if isinstance(child, Mapping):
                walk(child, (*path, name))
            else:
                names.append(dotted((*path, name)))

    jax.eval_shape(lambda *example: walk(model.init(jax.random.key(0), *example)["params"]), *config.example())
    return sorted(names, key=lambda name: "." not in name)


def count_parameters(params: Params) -> int:
    """How many numbers a tree of arrays holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def create_run(
    folder: Path, config: Config, tokenizer: Tokenizer | None, allow_suffix: bool, classes: Sequence[str] = ()
) -> Path:
    """Make a run's folder with its config, and its tokenizer and the names of classes if there are any, with their
    sums; the place where it came to lie.

    It appears whole, by a rename. A folder that another process made meanwhile is left alone: the next free
    number is appended, if that is allowed.

    Raises:
      UserError: the folder exists, or the config could not be read back (a model from elsewhere).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        scratch.chmod(0o755)
        write_config(scratch, config)
        if tokenizer is not None:
            tokenizer.save(scratch / TOKENIZER)
        if classes:
            write_atomically(scratch / CLASSES, json.dumps(list(classes), indent=2) + "\n")
        files = [file for file in (scratch / TOKENIZER, scratch / CLASSES) if file.exists()]
        sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        write_atomically(scratch / CHECKSUMS, json.dumps(sums, indent=2) + "\n")
        if read_config(scratch) != config:
            raise UserError(f"the config of {folder} does not come back from JSON as it is; use plain field types.")
        place, number = folder, 1
        while True:
            if not place.exists():
                try:
                    scratch.rename(place)
                    return place
                except OSError:
                    if not place.exists():
                        raise
            if not allow_suffix:
                raise UserError(f"{folder} exists; add --resume to go on with it, or choose another --run.")
            number += 1
            place = folder.with_name(f"{folder.name}-{number}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_writable_parent(folder: Path) -> None:
    """Raise `UserError` where a run's folder could not be made."""
    parent = next((path for path in folder.absolute().parents if path.exists()), Path("/"))
    try:
        tempfile.TemporaryDirectory(prefix=".new-", dir=parent).cleanup()
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made: {parent} cannot be written to ({error.strerror}); choose another --run, or see "
            "to it that it can."
        ) from error


def write_config(folder: Path, config: Config) -> None:
    """Store a config as JSON."""
    write_atomically(folder / CONFIG, json.dumps(to_dict(config), indent=2) + "\n")


def read_config(folder: Path) -> Config:
    """Read what `write_config` wrote; runs no code from it.

    Raises:
      UserError: the folder is no run, or its config does not fit this version.
    """
    file = folder / CONFIG
    if not file.is_file():
        what = "is no run: it has no config.json" if folder.exists() else "does not exist"
        near = ", ".join(sorted(str(p.parent) for p in folder.parent.glob(f"[!.]*/{CONFIG}"))[:5])
        raise UserError(f"{folder} {what}; " + (f"runs there: {near}." if near else "train one with train.py."))
    try:
        values = parse_json(file.read_bytes())
        model, data, train = dict(values["model"]), dict(values["data"]), dict(values.get("train", {}))
        model_class = _class_of(model.pop("kind"), jaxformer.models, ModelConfig)
        data_class = _class_of(data.pop("kind", "windows.TextConfig"), jaxformer.data, DataConfig)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{file} cannot be read as a run's config ({type(error).__name__}: {error}); put back the one that was "
            "written with the run, or train anew."
        ) from error
    if "eval_windows" in train:  # of a run from when all data was text, and had no kind either
        train["eval_examples"] = train.pop("eval_windows")
    parts = {
        "train": train,
        "model": from_dict(model_class, model, f"{file}: model"),
        "data": from_dict(data_class, data, f"{file}: data"),
    }
    return from_dict(Config, {**values, **parts}, str(file))


def latest_run(parent: Path, with_checkpoint: bool = False) -> Path:
    """Return the run below a folder that was written to last; one with a checkpoint, if that is wanted and there is
    any.

    Raises:
      UserError: there is none.
    """
    runs = list(parent.glob(f"[!.]*/{CONFIG}"))  # one with a dot is not finished
    if with_checkpoint:
        runs = [file for file in runs if CheckpointReader(file.parent)] or runs
    if not runs:
        raise UserError(f"there is no run below {parent}; name a run's folder, or train one with train.py.")
    newest = max(
        runs, key=lambda file: (file.parent / METRICS if (file.parent / METRICS).exists() else file).stat().st_mtime
    )
    return newest.parent


def _class_of(kind: Any, package: ModuleType, base: type[T]) -> type[T]:
    """The config class that `file.Class` names; only one package is searched."""
    module_name, _, class_name = str(kind).partition(".")
    if module_name not in {m.name for m in pkgutil.iter_modules(package.__path__)}:
        raise ValueError(f"no file {abbreviate(module_name)} in {package.__name__}")
    found = getattr(importlib.import_module(f"{package.__name__}.{module_name}"), class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{abbreviate(kind)} is no {base.__name__}")
    return found
