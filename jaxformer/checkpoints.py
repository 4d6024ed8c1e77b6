"""The checkpoints of a run: written in the background, verified before they are believed."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers

from jaxformer.distributed import all_gather, barrier, broadcast, is_main_process
from jaxformer.errors import (
    UserError,
    folder_vanished_error,
    os_error_reason,
    parse_json,
    user_error_on_write,
    write_error,
)

CHECKPOINTS, LOCK = "checkpoints", ".lock"
CHECKSUMS = "sha256.json"
"""In each checkpoint's folder: the SHA-256 of every file of its items."""
METADATA = "_CHECKPOINT_METADATA"
"""Orbax's own, dated by it after the sums are made."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""How Orbax ends the name of a checkpoint's folder until it is whole."""
ARRAYS = ("params/", "opt_state/")
"""Where nearly all bytes of a checkpoint are."""
EVERY, NONE = slice(None), slice(0)
HASHING_THREADS = 4
SAVING_SECONDS = 6 * 3600
"""A save under way is given up after so long; Orbax's 20 minutes are short for terabytes and their sums."""
LOCK_SECONDS = 0.3
"""Longer than a look at the lock takes."""
MISSING = " is missing"
QUIET, LONGEST_WAIT = 0.5, 20
"""Seconds without a sign of the writers of a save that failed, and seconds until they are given up."""

_LOCKED_EARLY = set[Path]()
"""Folders that this process has locked for `CheckpointManager` that it has not entered yet."""

warn = logging.getLogger(__name__).warning
logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells of every file, and of every error that it raises


def find_corruption(checkpoint: Path, share: slice = EVERY) -> str | None:
    """What is wrong with a checkpoint's folder, in a few words; None if it is as it was saved.

    Orbax notices a file that is missing or cut short, but restores a flipped bit without a word.

    Args:
      share: which of the files with arrays to read. Of the others it is enough that they are there.
    """
    try:
        sums = parse_json((checkpoint / CHECKSUMS).read_bytes())
        parse_json((checkpoint / METADATA).read_bytes())
        if not (isinstance(sums, dict) and sums and all(map(_is_inside, sums))):
            raise ValueError
        for name in sums:
            if not stat.S_ISREG((checkpoint / name).stat().st_mode):  # a device may be read for ever
                return f"{name} is not a file"
        arrays = [name for name in sums if name.startswith(ARRAYS)]
        actual = _sums(checkpoint, sorted({*sums} - {*arrays} | {*arrays[share]}))
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(checkpoint)}{MISSING}"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except ValueError:
        return f"{CHECKSUMS} or {METADATA} is not what was saved"
    return next((f"{name} is not what was saved" for name in actual if actual[name] != sums[name]), None)


def _is_inside(name: str) -> bool:
    """Return whether a name is a plain path below a folder."""
    return not name.startswith("/") and ".." not in name.split("/")


def _sums(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of files below a folder, in hexadecimal."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


class CheckpointReader:
    """The checkpoints that lie in a run's folder, to read. A run that goes on meanwhile is not disturbed.

    Each is a folder, called by its step, that plain Orbax reads, too. Parameters, optimizer state and position
    (the step, and the text's fingerprint) are separate items, so that sampling reads the first alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._place = folder, (folder / CHECKPOINTS).absolute()
        self._verdicts: dict[int, str | None] = {}

    def steps(self) -> list[int]:
        """The steps of all checkpoints, whole or damaged, in order."""
        return sorted(int(p.name) for p in self._place.glob("*") if re.fullmatch("0|[1-9][0-9]*", p.name))

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self.steps())

    def step(self, which: str | int = "last") -> int:
        """The step of the last or the best checkpoint that is not damaged, or the given one.

        What is passed over is named in a warning. Best is the lowest validation loss.

        Raises:
          UserError: there is none, all are damaged, or the given one is.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"{self._folder} has no whole checkpoint yet; train longer, or choose another run.")
        if which == "last":
            return self._first_good(steps[::-1])
        if which == "best":
            return self._first_good(sorted(steps, key=self._quality))
        if str(which) not in map(str, steps):
            raise UserError(f"{self._folder} has no checkpoint {which!r}; it has {steps}, 'last' and 'best'.")
        step = int(which)
        if reason := self._damage(step):
            near = next((s for s in sorted(steps, key=lambda s: abs(s - step)) if not self._damage(s)), None)
            hint = "no other is good" if near is None else f"the nearest good one is {near}"
            raise UserError(f"checkpoint {step} of {self._folder} is damaged: {reason}; {hint}.")
        return step

    def restore_params(self, step: int, abstract: Any) -> Any:
        """The parameters alone, shaped and placed as the leaves of `abstract` say.

        Args:
          step: of the checkpoint.
          abstract: a tree of `ShapeDtypeStruct`; a leaf without a sharding goes to the first device.
        """
        return self._restore(step, "params", abstract)

    def restore(self, step: int, params: Any, opt_state: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Parameters, optimizer state and position; the first two as in `restore_params`."""
        file = self._place / str(step) / "position" / "metadata"
        try:
            position = dict(parse_json(file.read_bytes()))
        except (ValueError, TypeError, OSError) as error:
            raise self._unreadable(step, error) from error
        return self._restore(step, "params", params), self._restore(step, "opt_state", opt_state), position

    def is_healthy(self, step: int) -> bool:
        """Return False if the loss was diverging as the checkpoint was made."""
        try:
            position = parse_json((self._place / str(step) / "position" / "metadata").read_bytes())
            return bool(position.get("healthy", True))
        except (OSError, ValueError, AttributeError):
            return False

    def arrays(self, step: int) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint by their path in it, such as `params/blocks_0/attention/W_Q`."""
        arrays: dict[str, np.ndarray] = {}
        for item in ("params", "opt_state"):
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), self._metadata(step, item))
            restored = ocp.PyTreeCheckpointer().restore(self._place / str(step) / item, restore_args=as_numpy)
            arrays |= {f"{item}/{name}": array for name, array in _named(restored).items()}
        return arrays

    def _restore(self, step: int, item: str, abstract: Any) -> Any:
        def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            place = x.sharding or SingleDeviceSharding(jax.devices()[0])
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        args = ocp.args.StandardRestore(jax.tree.map(placed, abstract))
        try:
            self._check_fit(step, item, abstract)
            return ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(self._place / str(step) / item, args=args)
        except (ValueError, TypeError, OSError, KeyError) as error:
            with _without_echoes():
                traceback.clear_frames(error.__traceback__)
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> UserError:
        why = f"{type(error).__name__} {error}".strip().splitlines()[0][:200]
        return UserError(
            f"checkpoint {step} of {self._folder} cannot be read: {why}; put back a copy, or choose another one with "
            "--checkpoint (in training: --from-step)."
        )

    def _check_fit(self, step: int, item: str, abstract: Any) -> None:
        """Raise `UserError` where a checkpoint holds other arrays than the config makes, naming the first of them:
        Orbax fails of it in its own time and with pages of its own."""
        expected, stored = _shapes(abstract), _shapes(self._metadata(step, item))
        for name in sorted({**expected, **stored}):
            if stored.get(name) != expected.get(name):
                there, here = (f"of shape {x[name]}" if name in x else "absent" for x in (stored, expected))
                raise UserError(
                    f"checkpoint {step} of {self._folder} does not fit the config: {item}/{name} is {there} in the "
                    f"checkpoint and {here} in the config; put back the config.json that was written with the run."
                )

    def _metadata(self, step: int, item: str) -> Any:
        """A tree of what Orbax knows of an item's arrays."""
        return ocp.PyTreeCheckpointer().metadata(self._place / str(step) / item).item_metadata.tree

    def _damage(self, step: int) -> str | None:
        """As `find_corruption`, told again without reading again."""
        if step not in self._verdicts:
            self._verdicts[step] = self._examine(step)
        return self._verdicts[step]

    def last_intact_step(self) -> int | None:
        """Return the step of the last checkpoint that is not damaged, without a warning; None where there is none.

        Raises:
          UserError: all are damaged.
        """
        steps = self.steps()[::-1]
        return self._find_whole(steps) if steps else None

    def _examine(self, step: int) -> str | None:
        return find_corruption(self._place / str(step))

    def _first_good(self, steps: Sequence[int]) -> int:
        """The first of these that is not damaged, with a warning for each before it."""
        good = self._find_whole(steps)
        for step in steps[: steps.index(good)]:
            warn(f"checkpoint {step} of {self._folder} is damaged: {self._damage(step)}; {good} is used instead")
        return good

    def _find_whole(self, steps: Sequence[int]) -> int:
        good = next((step for step in steps if not self._damage(step)), None)
        if good is None:
            raise self._all_damaged(steps)
        return good

    def _all_damaged(self, steps: Sequence[int]) -> UserError:
        return UserError(
            f"every checkpoint of {self._folder} is damaged ({steps[0]}: {self._damage(steps[0])}); "
            "put back a copy of its folder, or train anew."
        )

    def _quality(self, step: int) -> tuple[float, int]:
        """Lowest for the best: the validation loss, and among equals the newest.

        Where no loss was measured, it is infinite; one that cannot be read comes first, so that its damage is told.
        """
        try:
            loss = json.loads((self._place / str(step) / "metrics" / "metrics").read_bytes())["val_loss"]
            return float(loss) if math.isfinite(loss) else math.inf, -step
        except FileNotFoundError:
            return math.inf, -step
        except (OSError, ValueError, KeyError, TypeError):
            return -math.inf, -step


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `blocks_0/attention/W_Q`."""
    return {
        "/".join(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in _named(tree).items()}


class CheckpointManager(CheckpointReader):
    """The checkpoints of a run that is being trained, to read and to write; one process at a time.

    It keeps the last two, of those made at a validation the one with the lowest loss, and the last two made while the
    loss was not diverging: it tells of the parameters a step before, so that the last of them may be lost already.
    Saving goes on in the background; a checkpoint appears whole, with its sums, by a rename, or not at all. Several
    processes of one `jax.distributed` job make one each and call it alike.

    On entering, the last checkpoint is read once, by all processes together, each a share of its files. If it is
    damaged, it is named in a warning and goes out of the way, so that its step can be saved again, and the one before
    it is read. Of those still older it is enough that all files are there.

    Raises on entering:
      UserError: another process trains in the folder, it cannot be written, or every checkpoint is damaged.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._saving: int | None = None
        self._healthy: set[int] = set()

    def __enter__(self) -> CheckpointManager:
        with contextlib.ExitStack() as opened:
            opened.enter_context(_without_echoes())
            if is_main_process():
                opened.enter_context(run_lock(self._folder))
            self._quarantine()
            barrier()  # from here on, all see the same steps
            self._healthy = {step for step in self.steps() if self.is_healthy(step)}
            policy = checkpoint_managers.AnyPreservationPolicy(
                [
                    checkpoint_managers.LatestN(2),
                    _LastOf(self._healthy),
                    checkpoint_managers.BestN(
                        get_metric_fn=lambda metrics: -metrics["val_loss"],
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            )
            with user_error_on_write(self._folder, CHECKPOINTS):
                self._manager = ocp.CheckpointManager(
                    self._place,
                    options=ocp.CheckpointManagerOptions(
                        cleanup_tmp_directories=True,
                        preservation_policy=policy,
                        best_fn=lambda metrics: -metrics["val_loss"],
                        async_options=ocp.AsyncOptions(
                            timeout_secs=SAVING_SECONDS, post_finalization_callback=self._write_sums
                        ),
                    ),
                    item_names=("params", "opt_state", "position"),
                )
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for a save under way. If an error brought us here, one of saving does not take its place, and of several
        processes this one does not wait: the others may never come to the end of that save."""
        with self._opened:
            if kind is not None and jax.process_count() > 1:
                return
            errors = []
            for _attempt in range(3):  # an error comes once; after it, closing goes on where it stopped
                try:
                    self._manager.close()
                    break
                except (OSError, ValueError) as error:
                    errors.append(self._told(error))
                    if jax.process_count() > 1:
                        break
            self._remove_leftovers()
            del self._manager  # and with it what its threads failed of
            if errors and kind is None:
                raise errors[0]

    def steps(self) -> list[int]:
        """The steps of all checkpoints, whole or damaged, in order, as process 0 sees them."""
        return json.loads(broadcast(json.dumps(super().steps())))

    def save(self, step: int, params: Any, opt_state: Any, position: Mapping[str, Any], val_loss: float | None) -> None:
        """Begin to save; a step that is already there is left as it is.

        If the save before this one failed, this one takes its place, and is waited for.

        Raises:
          UserError: it cannot be written.
        """
        lost, failure = self._saving, self._failure()
        if step in self._manager.all_steps():
            return
        self._saving = step
        if position.get("healthy", True):
            self._healthy.add(step)
        else:
            self._healthy.discard(step)
        try:
            if not self._place.is_dir():  # orbax would make another
                raise FileNotFoundError
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    opt_state=ocp.args.StandardSave(opt_state),
                    position=ocp.args.JsonSave(dict(position)),
                ),
                # NaN would count as the best.
                metrics=None if val_loss is None or not math.isfinite(val_loss) else {"val_loss": val_loss},
            )
            if failure:
                self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._told(error) from error
        if failure:
            warn(f"checkpoint {lost} of {self._folder} could not be written: {failure}; {step} is saved instead")

    def last_healthy_step(self, began: int) -> int:
        """Return the step of the last healthy checkpoint, or 0. Waits for a save under way.

        Args:
          began: the first step whose loss was too high; the parameters that gave it are those after the step before.
        """
        self._failure()
        return max((step for step in self.steps() if step < began - 1 and step in self._healthy), default=0)

    def remove_after(self, step: int) -> list[int]:
        """Remove the checkpoints of all later steps, the last first; return their steps.

        Raises:
          UserError: one cannot be removed.
        """
        later = [later for later in self.steps() if later > step]
        with user_error_on_write(self._folder, CHECKPOINTS):
            for number in reversed(later):
                self._manager.delete(number)
        self._healthy.difference_update(later)
        barrier()
        return later

    def _failure(self) -> str | None:
        """Wait for the save under way; why it failed, if the system kept it from being written."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            if (told := self._told(error)) is error:
                raise
            if jax.process_count() > 1:  # the others still wait for this one in the save that failed
                raise told from error
            self._remove_leftovers()
            return os_error_reason(error) or str(told)
        return None

    def _told(self, error: Exception) -> Exception:
        """The error as the user should see it; one that no fault of the disk explains stays as it is."""
        # The other parts of the save are let go here, where their complaints go unheard.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        if isinstance(error.__cause__, jax.errors.JaxRuntimeError):  # Orbax calls a lost process a timeout
            return error.__cause__
        what = f"checkpoint {self._saving}"
        if not self._place.is_dir() or not (self._folder / LOCK).exists():
            return folder_vanished_error(self._folder, what)
        if (why := os_error_reason(error)) is None:
            return error
        good = next((n for n in reversed(super().steps()) if not find_corruption(self._place / str(n), NONE)), None)
        kept = "there is none before it" if good is None else f"{good} is whole"
        return write_error(self._folder, f"{what} ({kept})", why)

    def _write_sums(self) -> None:
        """Orbax calls this, in the background of process 0, when all files are written and not yet renamed."""
        temporary = self._place.glob(f"{self._saving}{TEMPORARY}*")
        folder = next(temporary, self._place / str(self._saving))
        files = sorted(p for item in folder.iterdir() if item.is_dir() for p in item.rglob("*") if p.is_file())
        sums = _sums(folder, [p.relative_to(folder).as_posix() for p in files])
        (folder / CHECKSUMS).write_text(json.dumps(sums, indent=0), encoding="utf-8")

    def _examine(self, step: int) -> str | None:
        mine = find_corruption(self._place / str(step), slice(jax.process_index(), None, jax.process_count()))
        return next(filter(None, all_gather(mine or "")), None)

    def _quarantine(self) -> None:
        """Put aside what is newer than the last good checkpoint, and remove what is left of a deletion."""
        steps = self.steps()
        if not steps:
            return
        good = next((step for step in reversed(steps) if not self._damage(step)), None)
        if good is None:
            raise self._all_damaged(steps[::-1])
        wanted = {*steps[-2:], min(steps, key=self._quality)}
        for step in steps if is_main_process() else ():
            here, aside = self._place / str(step), self._place / f"{step}.damaged"
            why = self._damage(step) if step >= good else find_corruption(here, NONE)
            if why is None:
                continue
            with user_error_on_write(self._folder, CHECKPOINTS):
                if step > good:
                    shutil.rmtree(aside, ignore_errors=True)
                    here.rename(aside)
                    done = f"put aside as {aside.name}, {good} is used instead"
                else:  # of no use any more
                    shutil.rmtree(here)
                    done = "removed"
            # A kill while one that is not wanted any more was being deleted leaves some of its files.
            if step > good or step in wanted or not why.endswith(MISSING):
                warn(f"checkpoint {step} of {self._folder} is damaged: {why}; {done}")
        self._verdicts = {good: None}  # the others may be saved again

    def _remove_leftovers(self) -> None:
        """A save that failed leaves its temporary folder, and where the disk is full that is in the way.

        It fails with the first of its writers. The others make the folder anew as long as they write: Orbax's threads
        are waited for, and nothing that they left to the library below may come back for `QUIET` seconds.
        """
        if jax.process_count() > 1:  # some of them wait for other processes; the next start removes it
            return
        writers = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")]
        for thread in writers:
            threading.Thread.join(thread, LONGEST_WAIT)  # their own `join` raises what they failed of
        quiet, began = time.monotonic() if writers else -math.inf, time.monotonic()
        while True:
            for folder in self._place.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(folder, ignore_errors=True)
                quiet = time.monotonic()
            if time.monotonic() > min(quiet + QUIET, began + LONGEST_WAIT):
                return
            time.sleep(0.02)


@dataclass(frozen=True)
class _LastOf:
    """Orbax's protocol of a `PreservationPolicy`: the last two checkpoints whose steps are in a set."""

    steps: Set[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        last = sorted(info.step for info in checkpoints if info.step in self.steps)[-2:]
        return [info.step in last for info in checkpoints]


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a run's folder. The kernel ends it with this process, however that dies.

    Raises:
      UserError: another one is at it, or the folder cannot be written.
    """
    if (this := folder.resolve()) in _LOCKED_EARLY:
        _LOCKED_EARLY.remove(this)  # it serves one
        yield
        return
    with user_error_on_write(folder, LOCK):
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock_alone(lock)
        except BlockingIOError as error:
            process = f"process {os.pread(lock, 20, 0).decode() or '(just started)'}"
            raise UserError(
                f"{process} is training in {folder}; wait for it or stop it, or choose another --run."
            ) from error
        except OSError:  # a file system without locks
            pass
        with contextlib.suppress(OSError):  # the lock holds without a number in it
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def _lock_alone(file: int) -> None:
    """Lock a file, waiting up to `LOCK_SECONDS` for others: `is_run_locked` holds the lock for a moment."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(LOCK_SECONDS / 10)


def is_run_locked(folder: Path) -> bool:
    """Return whether a process is training in a run's folder."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock, or none that can be read
        return False
    return False


@contextlib.contextmanager
def hold_run_lock(folder: Path) -> Iterator[None]:
    """As `run_lock`, for a caller that has much to do before it enters `CheckpointManager` inside."""
    with run_lock(folder):
        _LOCKED_EARLY.add(folder.resolve())
        try:
            yield
        finally:
            _LOCKED_EARLY.discard(folder.resolve())


@contextlib.contextmanager
def _without_echoes() -> Iterator[None]:
    """When one part of a save fails, each of the others has something of its own to say of it, some of them late:
    inside, drop what goes to asyncio's log, to an event loop that is closed by then, and to the interpreter."""
    hook, log = sys.unraisablehook, logging.getLogger("asyncio")

    def echo(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        log.addFilter(_is_no_echo)
        sys.unraisablehook = echo
        try:
            yield
        finally:
            gc.collect()  # what is still to be said is said now
            sys.unraisablehook = hook
            log.removeFilter(_is_no_echo)


def _is_no_echo(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()
