"""A run's folder: everything that one training run leaves, and all that sampling and inspecting need."""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers

import jaxformer.models
from jaxformer.config import Config, ModelConfig, from_dict, to_dict
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.models.objective import Params, next_token_nll

CONFIG, TOKENIZER, METRICS, SAMPLES = "config.json", "tokenizer.json", "metrics.jsonl", "samples.txt"
CHECKPOINTS, PLOTS = "checkpoints", "plots"

logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells of every file


@dataclass(frozen=True)
class Run:
    """A trained model with what belongs to it."""

    path: Path
    config: Config
    model: nn.Module
    params: Params
    tokenizer: Tokenizer
    step: int
    """Optimizer steps that made the parameters."""

    def loss(self, params: Params, tokens_T: jax.Array) -> jax.Array:
        """Mean next-token loss in nats of one sequence, a float32 scalar; made for `jax.grad`."""
        return jnp.mean(next_token_nll(self.model, params, jnp.asarray(tokens_T)))


def load_run(path: str | Path, checkpoint: str | int = "last") -> Run:
    """Open a run's folder.

    Args:
      path: the folder.
      checkpoint: 'last', 'best' (lowest validation loss), or a step.

    Raises:
      UserError: no such run, no such checkpoint, or a file of it that cannot be read.
    """
    folder = Path(path)
    config = read_config(folder)
    model = config.model.build()
    with Checkpoints(folder, read_only=True) as checkpoints:
        step = checkpoints.step(checkpoint)
        params = checkpoints.restore_params(step, abstract_params(model, config.model))
    return Run(folder, config, model, params, Tokenizer.load(folder / TOKENIZER), step)


def abstract_params(model: nn.Module, config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without making them."""
    tokens_T = jax.ShapeDtypeStruct((config.context_length,), jnp.int32)
    return jax.eval_shape(lambda t: model.init(jax.random.key(0), t), tokens_T)["params"]


def count_parameters(params: Params) -> int:
    """How many numbers a tree of arrays holds."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def create_run(folder: Path, config: Config, tokenizer: Tokenizer, may_number: bool) -> Path:
    """Make a run's folder with its config and tokenizer; the place where it came to lie.

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
        tokenizer.save(scratch / TOKENIZER)
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
            if not may_number:
                raise UserError(f"{folder} exists; add --resume to go on with it, or choose another --run.")
            number += 1
            place = folder.with_name(f"{folder.name}-{number}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_atomically(file: Path, text: str) -> None:
    """Replace a file's text: whoever reads it, or comes after a crash, finds the old or the new."""
    scratch = file.with_name(f"{file.name}.new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


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
        what = "is no run: it has no config.json" if folder.is_dir() else "does not exist"
        near = ", ".join(sorted(str(p.parent) for p in folder.parent.glob(f"*/{CONFIG}"))[:5])
        raise UserError(f"{folder} {what}; " + (f"runs there: {near}." if near else "train one with train.py."))
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        model = dict(values["model"])
        model_class = _model_class(model.pop("kind"))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} cannot be read as a run's config ({type(error).__name__}: {error}).") from error
    return from_dict(Config, {**values, "model": from_dict(model_class, model, f"{file}: model")}, str(file))


def latest_run(parent: Path) -> Path:
    """The run below a folder that was written to last.

    Raises:
      UserError: there is none.
    """
    runs = list(parent.glob(f"*/{CONFIG}"))
    if not runs:
        raise UserError(f"there is no run below {parent}; name one with --run, or train one with train.py.")
    newest = max(
        runs, key=lambda file: (file.parent / METRICS if (file.parent / METRICS).exists() else file).stat().st_mtime
    )
    return newest.parent


def _model_class(kind: Any) -> type[ModelConfig]:
    """The config class that `file.Class` names; only `jaxformer.models` is searched."""
    module_name, _, class_name = str(kind).partition(".")
    if module_name not in {m.name for m in pkgutil.iter_modules(jaxformer.models.__path__)}:
        raise ValueError(f"no model file {module_name!r}")
    found = getattr(importlib.import_module(f"jaxformer.models.{module_name}"), class_name, None)
    if not (isinstance(found, type) and issubclass(found, ModelConfig)):
        raise ValueError(f"{kind!r} is no model")
    return found


class Checkpoints:
    """The checkpoints of a run: the last two, and of those made at a validation the one with the lowest loss.

    Parameters, optimizer state and position (the step, and the text's fingerprint) are separate items, so that
    sampling reads the first alone. Saving goes on in the background; a checkpoint appears whole, by a rename, or
    not at all.
    """

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        place = (folder / CHECKPOINTS).absolute()
        if read_only and not place.is_dir():
            raise UserError(f"{folder} has no checkpoints; train longer, or choose another run.")
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(2),
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: -metrics["val_loss"],
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self._folder = folder
        self._manager = ocp.CheckpointManager(
            place,
            options=ocp.CheckpointManagerOptions(
                read_only=read_only,
                create=not read_only,
                cleanup_tmp_directories=not read_only,
                preservation_policy=None if read_only else policy,
                best_fn=lambda metrics: -metrics["val_loss"],
            ),
            item_names=("params", "opt_state", "position"),
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()  # waits for a save under way

    def save(
        self, step: int, params: Params, opt_state: Any, position: Mapping[str, Any], val_loss: float | None
    ) -> None:
        """Begin to save; a step that is already there is left as it is."""
        if step in self._manager.all_steps():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                opt_state=ocp.args.StandardSave(opt_state),
                position=ocp.args.JsonSave(dict(position)),
            ),
            metrics=None if val_loss is None else {"val_loss": val_loss},
        )

    def __bool__(self) -> bool:
        """Whether there is a whole one."""
        return bool(self._manager.all_steps())

    def step(self, which: str | int = "last") -> int:
        """The step of the last or best checkpoint, or the given one if it is there."""
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise UserError(f"{self._folder} has no whole checkpoint yet; train longer, or choose another run.")
        if which == "last":
            return steps[-1]
        if which == "best":
            best = self._manager.best_step()
            return steps[-1] if best is None else best
        if str(which).isdigit() and int(which) in steps:
            return int(which)
        raise UserError(f"{self._folder} has no checkpoint {which!r}; it has {steps}, 'last' and 'best'.")

    def restore_params(self, step: int, abstract: Params, sharding: NamedSharding | None = None) -> Params:
        """The parameters alone."""
        return self._restore(step, params=ocp.args.StandardRestore(_placed(abstract, sharding)))["params"]

    def restore(self, step: int, params: Params, opt_state: Any) -> tuple[Params, Any, dict[str, Any]]:
        """Parameters, optimizer state and position, shaped and placed as asked."""
        items = self._restore(
            step,
            params=ocp.args.StandardRestore(params),
            opt_state=ocp.args.StandardRestore(opt_state),
            position=ocp.args.JsonRestore(),
        )
        return items["params"], items["opt_state"], items["position"]

    def _restore(self, step: int, **args: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**args))
        except (ValueError, OSError, KeyError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise UserError(f"checkpoint {step} of {self._folder} cannot be read: {reason}") from error


def _placed(tree: Any, sharding: NamedSharding | None) -> Any:
    place = sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)
