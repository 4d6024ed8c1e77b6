"""The film of a run: its parameters after steps 0, 1, 2, 4, 8, … and the last, saved with `train.film`."""

from __future__ import annotations

from pathlib import Path

from jaxformer.models.objective import Params
from jaxformer.runs.checkpoints import FILM, CheckpointReader
from jaxformer.runs.run import Run, abstract_params, read_config, restore_params


def frames(folder: Path) -> list[int]:
    """Return the steps of a run's frames, in order; empty if it was trained without `train.film`."""
    return CheckpointReader(folder, FILM).steps()


def load_frame(run: Run, step: int) -> Params:
    """Return the model's parameters after a step, float32 on the first device, with adapters merged.

    Raises:
      UserError: the run has no intact frame of this step.
    """
    reader = CheckpointReader(run.path, FILM)
    return restore_params(run.path, read_config(run.path), reader, reader.step(step), abstract_params(run.model))
