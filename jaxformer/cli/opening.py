"""Opening a run for those commands that only read it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxformer.cli.train import RUNS

if TYPE_CHECKING:
    import flax.linen as nn
    from jax.sharding import Mesh

    from jaxformer.runs import Run


@dataclass(frozen=True)
class RunOptions:
    """Which parameters, and where they are to lie."""

    run: str | None = None
    """The run's folder; without it, the newest below runs/."""
    checkpoint: str = "last"
    """'last', 'best', or a step."""
    weights: Literal["float32", "bfloat16", "int8"] = "float32"
    """What matrices are kept in. A step of decoding reads them all, so the smaller, the faster; and a little worse."""
    mesh: str = ""
    """How the devices share the work, such as 'data=2' or 'tensor=2'; without it, eval takes all, sample the first."""


def run_folder(options: RunOptions) -> Path:
    """The folder of the run that was asked for; raises UserError where none was, and there is none."""
    from jaxformer.runs import latest_run

    return latest_run(RUNS) if options.run is None else Path(options.run)


def model_of(options: RunOptions) -> nn.Module:
    """The model of the run that was asked for, without its parameters; raises UserError where there is no such run."""
    from jaxformer.runs import read_config  # orbax takes a second to import

    return read_config(run_folder(options)).model.build()


def open_run(options: RunOptions, mesh: Mesh | None) -> Run:
    """The run that was asked for, with its parameters on a mesh, or on the first device.

    Raises:
      UserError: see `load_run`.
    """
    from jaxformer.decode.weights import store
    from jaxformer.runs import load_run  # orbax takes a second to import

    run = load_run(run_folder(options), options.checkpoint, mesh)
    return dataclasses.replace(run, params=store(run.params, options.weights))
