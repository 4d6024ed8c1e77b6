"""The start of training: from a fresh state, the last checkpoint, or an earlier one that the run is rolled back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path

import jax
import numpy as np

from jaxformer.config import Config, LoraConfig
from jaxformer.config.fields import differences
from jaxformer.data.dataset import Dataset
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.parallel.mesh import global_device_put, replicated
from jaxformer.parallel.processes import barrier, is_main_process
from jaxformer.runs.checkpoints import CheckpointManager, CheckpointReader, Metadata
from jaxformer.runs.run import BASE, create_run, write_config
from jaxformer.train.divergence import DivergenceMonitor, chance_loss
from jaxformer.train.log import print_line, truncate_log
from jaxformer.train.metric_writers import discard_wandb_run
from jaxformer.train.setup import TrainSetup, TrainState

RESUMABLE_FIELDS = {"steps", "data.path", "data.val_path", "data.tokenizer", "mesh"}
"""Fields that may change on resuming, besides `compute` and most of `train`; data is compared by content."""
LEARNING_FIELDS = {"train.batch_size", "train.label_smoothing", "train.skip_batches"}
"""Fields of `train` that affect the parameters; the others set reports, their intervals, and when to stop."""


@dataclass(frozen=True)
class Rollback:
    """Rollback to an earlier checkpoint, from which training continues with other options."""

    step: int
    """Step of the checkpoint; 0 for the start, which needs no checkpoint."""
    skip_batches: int = 0
    """Batches to skip from there on, in addition to those skipped before."""
    changes: str = ""
    """Options that differ from there on, for the log."""


@dataclass(frozen=True)
class Resume:
    """Continuation of a run: from its last checkpoint or, with a rollback, from another one."""

    allow_changed_data: bool = False
    """Accept data that has changed since, and note it in the log, instead of refusing it."""
    rollback: Rollback | None = None
    """Rollback; later checkpoints and rows of the log are removed once its checkpoint, the config and the data are
    verified."""


@dataclass(frozen=True)
class Start:
    """State of a run before its first step."""

    config: Config
    """The run's config; a rollback has increased its `train.skip_batches`."""
    step: int
    """Number of optimizer steps taken so far."""
    state: TrainState
    monitor: DivergenceMonitor
    skipped: int = 0
    """Non-finite steps skipped since the last row of the log."""
    notes: tuple[str, ...] = ()
    """Notes for the log."""
    resumed: bool = False
    """True unless the state is fresh."""


def find_start(
    setup: TrainSetup, data: Dataset, folder: Path, checkpoints: CheckpointManager, resume: Resume | None
) -> Start:
    """Return the state in which a run begins. Once checkpoint, config and data are verified, remove later rows of the
    log if the run is resumed, and later checkpoints if it is rolled back.

    Raises:
      UserError: the checkpoint does not exist or does not fit the config, or the data has changed since.
    """
    config, t, metadata = setup.config, setup.config.train, Metadata()
    step, notes, rollback = 0, list[str](), resume.rollback if resume else None
    resumed = bool(resume and checkpoints if rollback is None else rollback.step)
    if resumed:
        step, state, metadata = restore_state(setup, checkpoints, rollback.step if rollback else "last")
    else:
        state = setup.init_state()
        if config.lora.rank:
            _save_base(folder / BASE, replace(config, lora=LoraConfig()), data, state.frozen_params)
    data_changed = resumed and metadata["fingerprint"] != data.fingerprint
    if data_changed:
        if not (resume and resume.allow_changed_data):
            reason = "its content has changed, or this version splits or tokenizes it differently"
            raise UserError(
                f"the data differs from what this run was trained on: {reason}; it is now {data.describe()}; restore "
                "it, start a new run, or resume regardless with `allow_changed_data`."
            )
        notes.append(f"the data has changed; it is now {data.describe()}")
    if rollback is not None:
        skip_batches = metadata.get("skip_batches", t.skip_batches) + rollback.skip_batches
        config = replace(config, train=replace(t, skip_batches=skip_batches))
        notes.append(_describe(rollback, skip_batches, checkpoints.remove_after(step)))
        if is_main_process():
            discard_wandb_run(folder)
    if resume is not None and is_main_process():
        if resumed or rollback is not None:
            write_config(folder, config)
        truncate_log(folder, step if resumed else -1)
    stored = None if data_changed else metadata.get("monitor")
    skipped = metadata["skipped"] if resumed else 0
    monitor = DivergenceMonitor.restore(stored, chance_loss(config.model), stops=t.divergence == "stop")
    if resumed and rollback is None:
        print_line(f"resumed from step {step:,}")
    return Start(config, step, state, monitor, skipped, tuple(notes), resumed)


def _save_base(base: Path, config: Config, data: Dataset, params: Params) -> None:
    """Save the base parameters of the adapters as a run inside the run's folder, unless it exists already."""
    if is_main_process() and not base.exists():
        create_run(base, config, data.tokenizer, allow_suffix=False, classes=data.classes)
    barrier()
    with CheckpointManager(base) as checkpoints:  # all processes write their shards
        checkpoints.save(0, params, None, {"step": 0}, None)


def restore_state(
    setup: TrainSetup, checkpoints: CheckpointManager, which: str | int = "last"
) -> tuple[int, TrainState, Metadata]:
    """Return step and state of a checkpoint, in this mesh's shardings, and the metadata stored with it.

    Raises:
      UserError: the checkpoint does not exist, or has more steps than the config.
    """
    step, steps = checkpoints.step(which), setup.config.steps
    if step > steps:
        raise UserError(f"`steps` is {steps}; it must be at least {step}, the steps that the run has already taken.")
    like = setup.abstract_state
    params, opt_state, metadata = checkpoints.restore(step, like.params, like.opt_state)
    failures = global_device_put(np.array(metadata["failures"], np.int32), replicated(setup.mesh))
    frozen = setup.load_params() if setup.config.lora.rank else None
    return step, TrainState(params, opt_state, failures, frozen), metadata


def _describe(rollback: Rollback, skip_batches: int, removed: Sequence[int]) -> str:
    parts = [f"rolled back to step {rollback.step:,}", rollback.changes]
    if rollback.skip_batches:
        parts.append(f"{rollback.skip_batches:,} batches skipped, {skip_batches:,} in all")
    if removed:
        parts.append(f"checkpoints removed: {', '.join(map(str, removed))}")
    return "; ".join(filter(None, parts))


def fixed_differences(stored: Config, config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield name, old and new value of each field that differs although resuming must not change it."""
    for name, *values in differences(stored, config):
        if name in RESUMABLE_FIELDS or (name.startswith(("compute.", "train.")) and name not in LEARNING_FIELDS):
            continue
        old, new = (type(x).__name__ if is_dataclass(x) else repr(x) for x in values)
        yield name, old, new


def starts_from_scratch(folder: Path, from_step: int | None) -> bool:
    """Return True if a resumed run has no checkpoint to continue from, or is rolled back to its start."""
    return from_step == 0 or not CheckpointReader(folder)


def is_finished(folder: Path, config: Config, same_data: bool, from_step: int | None) -> bool:
    """Return True if a run has no steps left to train, without reading its data or compiling the step.

    Raises:
      UserError: there is no checkpoint of `from_step`, or all checkpoints are corrupt.
    """
    if jax.process_count() > 1:  # processes must read checkpoints together
        return False
    checkpoints = CheckpointReader(folder)
    if from_step is None:
        return checkpoints.last_intact_step() == config.steps and same_data
    if from_step:
        checkpoints.step(from_step)
    return False
