"""Snapshots of a run: its parameters after the steps that `train.snapshots` names."""

from __future__ import annotations

from pathlib import Path

from jaxformer.models.objective import Params
from jaxformer.runs.checkpoints import SNAPSHOTS, CheckpointReader
from jaxformer.runs.convert import EARLIER_SNAPSHOTS
from jaxformer.runs.run import Run, abstract_params, read_config, restore_params


def snapshots_folder(folder: Path) -> str:
    """Return the name of the folder of snapshots in a run's folder."""
    return EARLIER_SNAPSHOTS if (folder / EARLIER_SNAPSHOTS).is_dir() else SNAPSHOTS


def snapshot_steps(folder: Path) -> list[int]:
    """Return the steps of a run's snapshots, in order; empty if it was trained without `train.snapshots`."""
    return CheckpointReader(folder, snapshots_folder(folder)).steps()


def load_snapshot(run: Run, step: int) -> Params:
    """Return the model's parameters after a step, float32 on the first device, with adapters merged.

    Raises:
      UserError: the run has no intact snapshot of this step.
    """
    reader = CheckpointReader(run.path, snapshots_folder(run.path))
    return restore_params(run.path, read_config(run.path), reader, reader.step(step), abstract_params(run.model))
