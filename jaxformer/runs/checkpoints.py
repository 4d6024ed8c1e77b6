"""Checkpoints of a run, saved in the background and verified before they are restored."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers

from jaxformer.errors import (
    UserError,
    folder_vanished_error,
    foreign,
    os_error_reason,
    parse_json,
    resume_fields,
    run_name,
    user_error_on_write,
    write_error,
)
from jaxformer.models.objective import Params
from jaxformer.parallel.processes import all_gather, barrier, broadcast, is_main_process
from jaxformer.runs.integrity import MISSING, NO_ARRAYS, find_corruption, find_unindexed, write_checksums
from jaxformer.runs.lock import LOCK, run_lock

if TYPE_CHECKING:
    from optax import OptState

Metadata = dict[str, Any]
"""JSON values that training stores with a checkpoint, such as its step and the data's fingerprint."""
METADATA = "position"
"""Name of the item in a checkpoint that holds them."""
CHECKPOINTS, SNAPSHOTS = "checkpoints", "snapshots"
"""Folders of a run: its checkpoints, and its snapshots, which have only parameters; see `runs.snapshots`."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""Suffix of a checkpoint's folder in Orbax until it is complete."""
SAVE_TIMEOUT_SECONDS = 6 * 3600
"""Timeout of a save; Orbax's default of 20 minutes is too short for terabytes and their checksums."""
QUIET_SECONDS, MAX_WAIT_SECONDS = 0.5, 20
"""Seconds without activity after which the writers of a failed save count as finished, and the maximum wait."""
PART_BYTES = 2**26
"""Minimum bytes of parameters that are read together if they are converted as they are read."""

PLAIN_PATH = re.compile(r"(?:[A-Za-z]:)?(?!/(?:gs|s3|az|hf)/)[\w ./,;+=@#%~-]*")
"""Pattern of a path in which nothing is special to Orbax or to its libraries, which expand `[…]`, read a backslash as a
separator, and take `/s3/` for a bucket."""

warn = logging.getLogger(__name__).warning


IRRELEVANT = (
    "Requested `tracked_metric`; did not provide metrics",  # a save without a validation loss
    "Waiting for previous save to complete took",  # snapshots intend this
    "Metadata file does not exist",  # a folder that was removed during a save, which our own errors name
    "_SignalingThread.run() raised an exception",  # parts of a failed save, whose error is raised
    "or the Commit callback in background save thread",
    "Save Finalize thread",
    "Checkpointer failed: one or more items may not be finalized",
)
"""Parts of what Orbax logs about what is intended or said otherwise."""


def _is_relevant(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in IRRELEVANT)


logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax logs every file at a lower level
logging.getLogger("absl").addFilter(_is_relevant)


READ_ERRORS = (ValueError, TypeError, OSError, KeyError)
"""Errors that Orbax raises for files that it cannot read."""


class CheckpointReader:
    """Read-only access to the checkpoints in a run's folder, which does not disturb a run that is training there.

    Each checkpoint is a folder in Orbax's format, named by its step. Parameters, optimizer state and metadata (such as
    the step and the data's fingerprint) are separate items, so that sampling reads only the parameters.
    """

    def __init__(self, folder: Path, kind: str = CHECKPOINTS) -> None:
        self._folder, self._kind, self._path = folder, kind, (folder / kind).absolute()
        self._title = run_name(folder) if kind == CHECKPOINTS else f"the snapshots of {run_name(folder)}"
        self._corruption: dict[int, str | None] = {}

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, intact or corrupt, in order."""
        return sorted(int(p.name) for p in self._path.glob("*") if re.fullmatch("0|[1-9][0-9]*", p.name))

    def __bool__(self) -> bool:
        """Return True if there is a checkpoint."""
        return bool(self.steps())

    def step(self, checkpoint: str | int = "last") -> int:
        """Return the step of an intact checkpoint: 'last', 'best' (lowest validation loss), or a given step.

        For 'last' and 'best', corrupt checkpoints are skipped with a warning.

        Raises:
          UserError: there is no checkpoint, all are corrupt, or the given one does not exist or is corrupt.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"{self._title} has no complete checkpoint yet; train longer, or choose another run.")
        if checkpoint == "last":
            return self._first_intact(steps[::-1])
        if checkpoint == "best":
            return self._first_intact(sorted(steps, key=self._rank))
        if str(checkpoint) not in map(str, steps):
            raise UserError(f"{self._title} has no checkpoint {checkpoint!r}; it has {steps}, 'last' and 'best'.")
        step = int(checkpoint)
        if reason := self._find_corruption(step):
            by_distance = sorted(steps, key=lambda s: abs(s - step))
            nearest = next((s for s in by_distance if not self._find_corruption(s)), None)
            hint = "no other is intact" if nearest is None else f"the nearest intact one is {nearest}"
            raise UserError(f"checkpoint {step} of {self._title} is corrupt: {reason}; {hint}.")
        return step

    def last_intact_step(self) -> int | None:
        """Return the step of the last intact checkpoint, without warnings; None if there is no checkpoint.

        Raises:
          UserError: all checkpoints are corrupt.
        """
        steps = self.steps()[::-1]
        return self._require_intact(steps) if steps else None

    def is_healthy(self, step: int) -> bool:
        """Return False if the loss was diverging when the checkpoint was saved, or its metadata cannot be read."""
        try:
            return bool(self._read_metadata(step).get("healthy", True))
        except READ_ERRORS:
            return False

    def fingerprint(self, step: int) -> str | None:
        """Return the fingerprint of the data that a checkpoint was trained on; None if it stores none."""
        try:
            return self._read_metadata(step).get("fingerprint")
        except READ_ERRORS:
            return None

    def restore_params(self, step: int, abstract: Params, convert: Callable[[Params], Params] | None = None) -> Params:
        """Return the parameters, with the shapes, dtypes and shardings of `abstract`.

        Args:
          abstract: tree of `ShapeDtypeStruct`; leaves without a sharding are placed on the first device.
          convert: function that is applied to the parameters as they are read, some entries of the tree at a time, so
            that what it replaces is never held as a whole.
        """
        return self._restore(step, "params", abstract, convert)

    def restore(self, step: int, params: Params, opt_state: OptState) -> tuple[Params, OptState, Metadata]:
        """Return parameters, optimizer state and metadata; the first two as in `restore_params`.

        Raises:
          UserError: the checkpoint cannot be read, or has only parameters.
        """
        if not (self._path / str(step) / "opt_state").exists():
            raise UserError(
                f"checkpoint {step} of {self._title} has parameters only, so training cannot resume from it; start a "
                f"new run from them with `init_from={str(self._folder)!r}`."
            )
        try:
            metadata = self._read_metadata(step)
        except READ_ERRORS as error:
            raise self._unreadable(step, error) from error
        return self._restore(step, "params", params), self._restore(step, "opt_state", opt_state), metadata

    def in_stored_dtypes(self, step: int, abstract: Params) -> Params:
        """Return a tree of `ShapeDtypeStruct` for the parameters, with the dtypes of the checkpoint's arrays."""
        try:
            stored = {name: x.dtype for name, x in _leaves_by_path(self._array_metadata(f"{step}/params")).items()}
        except READ_ERRORS as error:
            raise self._unreadable(step, error) from error
        name_of = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")  # noqa: E731
        return jax.tree.map_with_path(lambda path, x: x.update(dtype=stored.get(name_of(path), x.dtype)), abstract)

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint by their path, such as `params/blocks_0/attention/W_Q`."""
        arrays: dict[str, np.ndarray] = {}
        for item in ("params", "opt_state"):
            if not (self._path / str(step) / item).exists():  # parameters only
                continue
            stored = self._array_metadata(f"{step}/{item}")
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored)
            with _plain_path(self._path) as path:
                restored = ocp.PyTreeCheckpointer().restore(path / str(step) / item, restore_args=as_numpy)
            arrays |= {f"{item}/{name}": array for name, array in _leaves_by_path(restored).items()}
        return arrays

    def _read_metadata(self, step: int) -> Metadata:
        return dict(parse_json((self._path / str(step) / METADATA / "metadata").read_bytes()))

    def _restore(
        self, step: int, item: str, abstract: Params, convert: Callable[[Params], Params] | None = None
    ) -> Params:
        first = SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first), abstract)
        try:
            self._check_shapes(step, item, abstract)
            with _plain_path(self._path) as path:
                folder = path / str(step) / item
                if convert is None:
                    args = ocp.args.StandardRestore(target)
                    return ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(folder, args=args)

                def read(part: Params) -> Params:
                    of_part = ocp.checkpoint_utils.construct_restore_args(part)
                    args = ocp.args.PyTreeRestore(part, restore_args=of_part, partial_restore=True)
                    return ocp.PyTreeCheckpointer().restore(folder, args=args)

                restored: Params = {}
                with ThreadPoolExecutor(1) as pool:  # reads the next part, and no further ones, while one is converted
                    part, *others = _parts(target)
                    reading = pool.submit(read, part)
                    for part in others:
                        ready, reading = reading.result(), pool.submit(read, part)
                        restored |= convert(ready)
                    restored |= convert(reading.result())
                return {name: restored[name] for name in target}
        except READ_ERRORS as error:
            with _ignore_late_errors():
                traceback.clear_frames(error.__traceback__)
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> UserError:
        return UserError(
            f"checkpoint {step} of {self._title} cannot be read: {_first_line(error)}; restore a copy, or choose "
            "another with `checkpoint` (in training: `from_step`)."
        )

    def _check_shapes(self, step: int, item: str, abstract: Params) -> None:
        """Raise `UserError` for the first array of a checkpoint that does not match the config."""
        trees = self._array_metadata(f"{step}/{item}"), abstract
        stored, expected = ({name: tuple(x.shape) for name, x in _leaves_by_path(tree).items()} for tree in trees)
        if difference := first_difference(stored, expected):
            raise UserError(
                f"checkpoint {step} of {self._title} does not fit the config: {item}/{difference[0]} is "
                f"{difference[1]} in the checkpoint and {difference[2]} in the config; restore the config.json that "
                "was written with the run."
            )

    def _array_metadata(self, item: str) -> Params:
        """Return Orbax's tree of the metadata of an item's arrays, which is read from the arrays themselves.

        Args:
          item: name of the item, such as `100/params`.
        """
        if not (self._path / item).is_dir():
            name = item.rpartition("/")[2]
            raise FileNotFoundError(f"{name} is missing; a run still training there may have removed it")
        with _plain_path(self._path) as path:
            return ocp.StandardCheckpointHandler().metadata(path / item).tree

    def _find_corruption(self, step: int) -> str | None:
        """Return a description of a checkpoint's corruption, or None; the result is cached."""
        if step not in self._corruption:
            self._corruption[step] = self._verify(step) or find_unindexed(self._path / str(step))
        return self._corruption[step]

    def _find_missing(self, step: int) -> str | None:
        """Return a description of a checkpoint's corruption, or None, without reading the content of its arrays."""
        return find_corruption(self._path / str(step), NO_ARRAYS)

    def _verify(self, step: int) -> str | None:
        return find_corruption(self._path / str(step))

    def _first_intact(self, steps: Sequence[int]) -> int:
        """Return the first of these steps whose checkpoint is intact, with a warning for each before it."""
        intact = self._require_intact(steps)
        for step in steps[: steps.index(intact)]:
            reason = self._find_corruption(step)
            warn(f"checkpoint {step} of {self._title} is corrupt: {reason}; {intact} is used instead")
        return intact

    def _require_intact(self, steps: Sequence[int]) -> int:
        """Return the first of these steps whose checkpoint is intact; raise `UserError` if none is."""
        for step in steps:
            if not self._find_corruption(step):
                return step
        raise UserError(
            f"every checkpoint of {self._title} is corrupt ({steps[0]}: {self._find_corruption(steps[0])}); "
            "restore a copy of its folder, or train again."
        )

    def _rank(self, step: int) -> tuple[float, int]:
        """Return the sort key for 'best': validation loss, with newest first among equals.

        Checkpoints without a loss come last; those with unreadable metrics come first, so that they are reported.
        """
        try:
            loss = json.loads((self._path / str(step) / "metrics" / "metrics").read_bytes())["val_loss"]
            return float(loss) if math.isfinite(loss) else math.inf, -step
        except FileNotFoundError:
            return math.inf, -step
        except (OSError, ValueError, KeyError, TypeError):
            return -math.inf, -step


def _parts(abstract: Params) -> Iterator[Params]:
    """Yield the entries of a tree in groups, largest first, each ended by the entry with which it exceeds
    `PART_BYTES`."""
    size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    part: Params = {}
    for name, entry in sorted(abstract.items(), key=lambda item: -size(item[1])):
        part[name] = entry
        if size(part) > PART_BYTES:
            yield part
            part = {}
    if part:
        yield part


def _from_one_device(tree: Params) -> Params:
    """Return the tree with one copy of each array that is replicated on all devices of this process. Orbax would
    otherwise have each device write a slice, and compile a program per slice (google/orbax#2934)."""
    is_copied = lambda x: isinstance(x, jax.Array) and x.is_fully_replicated and x.is_fully_addressable  # noqa: E731
    return jax.tree.map(lambda x: x.addressable_data(0) if is_copied(x) else x, tree)


@contextlib.contextmanager
def _plain_path(path: Path) -> Iterator[Path]:
    """Yield a path to a folder for Orbax: its own, or if that is not plain, one through a temporary link."""
    if PLAIN_PATH.fullmatch(path.as_posix()):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxformer-") as scratch:
        link = Path(scratch, "run")
        link.symlink_to(path.parent, target_is_directory=True)
        yield link / path.name


def _leaves_by_path(tree: Params) -> dict[str, Any]:
    """Return the leaves of a tree by their path, such as `blocks_0/attention/W_Q`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def first_difference(one: Mapping[str, object], other: Mapping[str, object]) -> tuple[str, object, object] | None:
    """Return the first name whose value differs between two descriptions of arrays, with both values, "absent" for a
    missing one; None if they are equal."""
    for name in sorted({**one, **other}):
        values = one.get(name, "absent"), other.get(name, "absent")
        if values[0] != values[1]:
            return name, *values
    return None


def _describe(item: str, tree: Params) -> dict[str, str]:
    """Return dtype and shape of the arrays of an item, such as `float32[8, 4]`, by name."""
    return {f"{item}/{name}": f"{x.dtype}{list(x.shape)}" for name, x in _leaves_by_path(tree).items()}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {foreign(error)}".strip().splitlines()[0][:200]


class _ReadBackError(OSError):
    """A checkpoint that was saved without an error, but cannot be read."""


class CheckpointManager(CheckpointReader):
    """Access to the checkpoints of a run in training, for reading and writing by one process or job at a time.

    It preserves the last two checkpoints, the one with the lowest validation loss, and the last two that were saved
    while the loss was not diverging: a loss reflects the parameters of the previous step, so the last of them may
    already have diverged. Saving runs in the background. Once all files of a checkpoint are written, the names, shapes
    and dtypes of its arrays are read back and compared with the state's; only then are its checksums written, a rename
    publishes it, and older ones are removed. Every process of a `jax.distributed` job creates a manager and calls it in
    the same order.

    On entering, the last checkpoint is verified, its files divided among the processes. If it is corrupt, it is
    quarantined with a warning, so that its step can be saved again, and the previous one is verified. Older checkpoints
    are only checked for missing files.

    Snapshots are written next to the checkpoints, by the process that holds their lock. All are preserved, and saving
    one waits until it is complete, so that a checkpoint has all snapshots before it.

    Args:
      max_gb: gigabytes of an item's arrays that are compressed at a time, more than the largest of them has. Half of
        these are in memory beside the arrays.

    Raises on entering:
      UserError: another process is training in the folder, it cannot be written, or every checkpoint is corrupt.
    """

    def __init__(self, folder: Path, kind: str = CHECKPOINTS, max_gb: int = 96) -> None:
        super().__init__(folder, kind)
        self._max_gb = max_gb
        self._saving: int | None = None
        self._saved: dict[str, str] = {}
        self._healthy: set[int] = set()

    def __enter__(self) -> CheckpointManager:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_ignore_late_errors())
            self._plain = path = stack.enter_context(_plain_path(self._path))
            if self._kind == CHECKPOINTS and is_main_process():
                stack.enter_context(run_lock(self._folder))
            self._quarantine()
            barrier()  # from here on, all processes see the same steps
            self._healthy = {step for step in self.steps() if self.is_healthy(step)}
            score = lambda metrics: -metrics["val_loss"]  # noqa: E731
            policy = checkpoint_managers.AnyPreservationPolicy(
                [
                    checkpoint_managers.LatestN(2),
                    _LatestOf(self._healthy),
                    checkpoint_managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False),
                ]
            )
            options = ocp.CheckpointManagerOptions(
                cleanup_tmp_directories=True,
                preservation_policy=policy if self._kind == CHECKPOINTS else None,
                best_fn=score,
                async_options=ocp.AsyncOptions(
                    timeout_secs=SAVE_TIMEOUT_SECONDS, post_finalization_callback=self._complete
                ),
            )
            with user_error_on_write(self._folder, self._kind):
                arrays = lambda: ocp.StandardCheckpointHandler(save_concurrent_gb=self._max_gb)  # noqa: E731
                handlers = {"params": arrays(), "opt_state": arrays(), METADATA: ocp.JsonCheckpointHandler()}
                self._manager = ocp.CheckpointManager(path, options=options, item_handlers=handlers)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the save in progress. An error that is already being raised takes precedence over an error of the
        save; in that case a multi-process job does not wait, because the other processes may never finish the save."""
        with self._stack:
            if kind is not None and jax.process_count() > 1:
                return
            errors = []
            for _attempt in range(3):  # an error is raised once; calling again continues closing
                try:
                    self._manager.close()
                    break
                except (OSError, ValueError) as error:
                    errors.append(self._explain(error))
                    if jax.process_count() > 1:
                        break
            self._remove_temporary()
            del self._manager  # together with the errors of its threads
            if errors and kind is None:
                raise errors[0]

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, intact or corrupt, in order, as process 0 sees them."""
        return json.loads(broadcast(json.dumps(super().steps())))

    def save(self, step: int, params: Params, opt_state: OptState, metadata: Metadata, val_loss: float | None) -> None:
        """Start saving a checkpoint; an existing step is not saved again.

        If the previous save failed, wait for this one to finish.

        Args:
          opt_state: None for parameters from which training is not resumed.
          metadata: JSON values to resume from; `healthy` is False while the loss is diverging.
          val_loss: validation loss in nats per target; None if not evaluated.

        Raises:
          UserError: the checkpoint cannot be written.
        """
        previous, failure = self._saving, self._wait()
        if step in self._manager.all_steps():
            return
        self._saving = step
        self._saved = _describe("params", params) | _describe("opt_state", opt_state)
        if metadata.get("healthy", True):
            self._healthy.add(step)
        else:
            self._healthy.discard(step)
        try:
            if not self._path.is_dir():  # otherwise Orbax would create it
                raise FileNotFoundError
            if not self._plain.exists():  # the temporary folder was cleaned
                self._plain.parent.parent.mkdir(mode=0o700, exist_ok=True)
                self._plain.parent.symlink_to(self._path.parent, target_is_directory=True)
            trees = {"params": params} if opt_state is None else {"params": params, "opt_state": opt_state}
            items = {name: ocp.args.StandardSave(_from_one_device(tree)) for name, tree in trees.items()}
            items[METADATA] = ocp.args.JsonSave(metadata)
            self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                # NaN would count as the best.
                metrics=None if val_loss is None or not math.isfinite(val_loss) else {"val_loss": val_loss},
            )
            if failure or self._kind != CHECKPOINTS:
                self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._explain(error) from error
        if failure:
            warn(f"checkpoint {previous} of {self._title} could not be written: {failure}; {step} is saved instead")

    def last_healthy_step(self, diverged: int) -> int:
        """Return the step of the last healthy checkpoint, or 0, after waiting for the save in progress.

        Args:
          diverged: first step with a loss that was too high, which reflects the parameters after the previous step.
        """
        self._wait()
        return max((step for step in self.steps() if step < diverged - 1 and step in self._healthy), default=0)

    def remove_after(self, step: int) -> list[int]:
        """Remove the checkpoints of all later steps, latest first; return their steps.

        Raises:
          UserError: a checkpoint cannot be removed.
        """
        later = [later for later in self.steps() if later > step]
        with user_error_on_write(self._folder, self._kind):
            for number in reversed(later):
                self._manager.delete(number)
        self._healthy.difference_update(later)
        barrier()
        return later

    def _wait(self) -> str | None:
        """Wait for the save in progress; return the reason if the file system failed to write it."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            if (explained := self._explain(error)) is error:
                raise
            if jax.process_count() > 1:  # in the failed save, the others still wait for this process
                raise explained from error
            self._remove_temporary()
            return os_error_reason(error) or str(explained)
        return None

    def _explain(self, error: Exception) -> Exception:
        """Return the `UserError` for a file-system failure, or any other error unchanged."""
        traceback.clear_frames(error.__traceback__)  # releases the other parts of the save
        gc.collect()
        if isinstance(error.__cause__, jax.errors.JaxRuntimeError):  # Orbax reports a lost process as a timeout
            return error.__cause__
        name = f"checkpoint {self._saving}"
        if not self._path.is_dir() or not (self._folder / LOCK).exists():
            return folder_vanished_error(self._folder, name)
        if (reason := os_error_reason(error)) is None:
            return error
        steps = reversed(super().steps())
        intact = next((n for n in steps if not self._find_missing(n)), None)
        previous = "there is none before it" if intact is None else f"{intact} is intact"
        if isinstance(error, _ReadBackError):
            return UserError(
                f"{name} ({previous}) was written to {self._folder}, but {reason}; move the run to another disk, "
                f"then resume with {resume_fields(self._folder)}"
            )
        return write_error(self._folder, f"{name} ({previous})", reason)

    def _complete(self) -> None:
        """Read the checkpoint back and write its checksums. Orbax calls this in a thread of process 0, after all files
        are written, and before the rename and the removal of older checkpoints."""
        checkpoint = next(self._path.glob(f"{self._saving}{TEMPORARY}*"), self._path / str(self._saving))
        self._read_back(checkpoint.name)
        write_checksums(checkpoint)

    def _read_back(self, checkpoint: str) -> None:
        """Raise `_ReadBackError` unless a checkpoint's folder has the arrays that were saved: names, dtypes, shapes."""
        stored: dict[str, str] = {}
        try:
            for item in sorted({name.partition("/")[0] for name in self._saved}):
                stored |= _describe(item, self._array_metadata(f"{checkpoint}/{item}"))
        except READ_ERRORS as error:
            raise _ReadBackError(f"it cannot be read back: {_first_line(error)}") from error
        if difference := first_difference(self._saved, stored):
            name, saved, read = difference
            raise _ReadBackError(f"{name} is {saved} in memory and {read} when it is read back")

    def _verify(self, step: int) -> str | None:
        """Return a description of a checkpoint's corruption, or None; each process verifies its share of the files."""
        own_files = slice(jax.process_index(), None, jax.process_count())
        return next(filter(None, all_gather(find_corruption(self._path / str(step), own_files) or "")), None)

    def _quarantine(self) -> None:
        """Quarantine checkpoints newer than the last intact one, and remove the remains of interrupted deletions."""
        steps = self.steps()
        if not steps:
            return
        intact = self._require_intact(steps[::-1])
        preserved = {*steps[-2:], min(steps, key=self._rank)}
        for step in steps if is_main_process() else ():
            path, quarantine = self._path / str(step), self._path / f"{step}.corrupt"
            reason = self._find_corruption(step) if step >= intact else self._find_missing(step)
            if reason is None:
                continue
            with user_error_on_write(self._folder, self._kind):
                if step > intact:
                    shutil.rmtree(quarantine, ignore_errors=True)
                    path.rename(quarantine)
                    action = f"quarantined as {quarantine.name}, {intact} is used instead"
                else:
                    shutil.rmtree(path)
                    action = "removed"
            # A checkpoint with missing files that need not be preserved was being deleted when the process was killed.
            if step > intact or step in preserved or not reason.endswith(MISSING):
                warn(f"checkpoint {step} of {self._title} is corrupt: {reason}; {action}")
        self._corruption = {intact: None}  # the others may be saved again

    def _remove_temporary(self) -> None:
        """Remove the temporary folder of a failed save, which takes space on a full disk.

        A save fails when its first writer fails, but the others may recreate the folder while they still write.
        Therefore Orbax's threads are joined first, and then no folder may reappear for `QUIET_SECONDS`.
        """
        if jax.process_count() > 1:  # some threads wait for other processes; the next start removes the folder
            return
        writers = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")]
        for thread in writers:
            threading.Thread.join(thread, MAX_WAIT_SECONDS)  # their overridden `join` would raise their errors
        last_activity, start = time.monotonic() if writers else -math.inf, time.monotonic()
        while True:
            for folder in self._path.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(folder, ignore_errors=True)
                last_activity = time.monotonic()
            if time.monotonic() > min(last_activity + QUIET_SECONDS, start + MAX_WAIT_SECONDS):
                return
            time.sleep(0.02)


@dataclass(frozen=True)
class _LatestOf:
    """Orbax `PreservationPolicy`: the last two checkpoints whose steps are in a set."""

    steps: Set[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        last = sorted(info.step for info in checkpoints if info.step in self.steps)[-2:]
        return [info.step in last for info in checkpoints]


@contextlib.contextmanager
def _ignore_late_errors() -> Iterator[None]:
    """Ignore what Python prints of the parts of a save or read whose error is raised: that their own errors were not
    retrieved, or that their event loop is closed by then."""
    hook, log = sys.unraisablehook, logging.getLogger("asyncio")
    is_other = lambda record: "exception was never retrieved" not in record.getMessage()  # noqa: E731
    sys.unraisablehook = lambda late: None if str(late.exc_value) == "Event loop is closed" else hook(late)
    log.addFilter(is_other)
    try:
        yield
    finally:
        gc.collect()  # the late errors come now
        sys.unraisablehook = hook
        log.removeFilter(is_other)
