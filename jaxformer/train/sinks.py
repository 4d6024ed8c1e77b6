"""Where a run's metrics go besides `metrics.jsonl`: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
import os
import shlex
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxformer.config import Config, flatten, to_dict
from jaxformer.errors import UserError, user_error_on_write
from jaxformer.runs import write_atomically
from jaxformer.train.log import Sink, read_metrics

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""What each extra installs."""
TENSORBOARD = "tensorboard"
WANDB_ID = "wandb/id"


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row but its step, by their path in it: `loss`, `entropy/1/3`, `gradients/W_pos/update`."""
    return {
        name: value
        for name, value in flatten(row, separator="/").items()
        if isinstance(value, int | float) and name != "step"
    }


def prepare(names: Iterable[str]) -> None:
    """See to it that `open_sinks` can succeed; at a terminal, Weights & Biases may ask for a login.

    Raises:
      UserError: an extra is not installed, or nobody is logged in.
    """
    for name in names:
        package = _package(name)
        if name == "wandb":
            with _reaching(package, "log in with 'wandb login', or set WANDB_MODE=offline."):
                if package.setup().settings.mode in ("online", "shared", "run"):
                    package.login(verify=False)  # opening a run verifies it


@contextmanager
def open_sinks(folder: Path | None, config: Config) -> Iterator[list[Sink]]:
    """What `config.train.log_to` names; nothing without a folder.

    A sink goes on where `metrics.jsonl` ends: what it has beyond does not count any more, and rows that it never had
    it is given at once.

    Raises:
      UserError: see `prepare`; or it cannot be written or reached.
    """
    with ExitStack() as stack:
        opened: list[Sink] = []
        if folder is not None:
            for name in dict.fromkeys(config.train.log_to):
                opened.append(stack.enter_context(_OPENERS[name](folder, config)))
        yield opened


@contextmanager
def _tensorboard(folder: Path, config: Config) -> Iterator[Sink]:
    """An event file of this start's own below the folder's tensorboard/, with all rows there are.

    Events are written here and now: tensorboardX's SummaryWriter has a thread for it, which dies of a full disk and
    lets training wait for it forever; its RecordWriter waits for the disk after each.
    """
    _package("tensorboard")
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c

    place = folder / TENSORBOARD
    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # read in this order
    with user_error_on_write(folder, TENSORBOARD):
        place.mkdir(exist_ok=True)
        file = (place / name).open("xb")

    def write(**event: Any) -> None:
        content = Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(content))
        checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
        with user_error_on_write(folder, TENSORBOARD):
            file.write(b"".join((length, checksums[0], content, checksums[1])))  # TFRecord
            file.flush()

    def sink(row: dict[str, Any]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(row).items()]
        write(step=row["step"], summary=Summary(value=values))

    try:
        write(file_version="brain.Event:2")
        # From this step on, readers forget what earlier files say: all of it, which may lack or have steps too many.
        write(step=0, session_log=SessionLog(status=SessionLog.START))
        for row in read_metrics(folder):
            sink(row)
        yield sink
    finally:
        with suppress(OSError):  # every event was flushed, or its failure told
            file.close()


@contextmanager
def _weights_and_biases(folder: Path, config: Config) -> Iterator[Sink]:
    """A run of the project jaxformer, which a resumed one goes on with: its id is kept in the folder.

    Of the steps before, Weights & Biases counts as lacking what it says that it lacks: after a run that was offline,
    all of them, so that what is uploaded last is whole. What it has beyond the last checkpoint it keeps, and the same
    steps, which come out the same, are not given again: its history only grows. A run that was rolled back is a new one
    there; see `forget`.
    """
    wandb, file = _package("wandb"), folder / WANDB_ID
    again = f"go on with: python train.py --resume --run {shlex.quote(str(folder))}"
    with _reaching(wandb, "try again, or set WANDB_MODE=offline."):
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxformer"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=str(folder), config=to_dict(config), resume="allow",
            id=file.read_text(encoding="utf-8").strip() if file.exists() else None,
        )  # fmt: skip

    reached = 0

    def sink(row: dict[str, Any]) -> None:
        nonlocal reached
        reached = row["step"]
        if reached >= run.starting_step and (found := scalars(row)):
            with _reaching(wandb, again):
                run.log(found, step=reached, commit=True)

    try:
        with user_error_on_write(folder, WANDB_ID):
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, run.id + "\n")
        for row in read_metrics(folder):
            sink(row)
        yield sink
    except BaseException:
        with suppress(Exception):  # what comes first is told
            run.finish(exit_code=1)
        raise
    with _reaching(wandb, again):
        run.finish(exit_code=int(reached < config.steps))  # also a run that was interrupted, or diverged, is not done


def forget(folder: Path) -> None:
    """Let a run that was rolled back begin a new run of Weights & Biases: the steps of the old one came out otherwise.

    Raises:
      UserError: its id cannot be removed.
    """
    with user_error_on_write(folder, WANDB_ID):
        (folder / WANDB_ID).unlink(missing_ok=True)


_OPENERS = {"tensorboard": _tensorboard, "wandb": _weights_and_biases}


def _package(name: str) -> ModuleType:
    """The package that an extra installs, or `UserError`."""
    with suppress(ImportError):
        package = importlib.import_module(PACKAGES[name])
        if getattr(package, "__file__", None):  # else a folder that happens to be called like it
            return package
    raise UserError(f"train.log_to {name} needs {PACKAGES[name]}; get it by pip install 'jaxformer[{name}]'.")


@contextmanager
def _reaching(wandb: ModuleType, remedy: str) -> Iterator[None]:
    """Turn what Weights & Biases complains about into a `UserError`."""
    try:
        yield
    except (wandb.Error, OSError, ValueError) as error:
        what = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"Weights & Biases failed: {what}; {remedy}") from error
