"""Metric writers in addition to `metrics.jsonl`: TensorBoard, Weights & Biases."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType

from jaxformer.config import Config
from jaxformer.config.fields import flatten, to_dict
from jaxformer.errors import UserError, import_extra, resume_fields, user_error_on_write
from jaxformer.files import write_atomically
from jaxformer.train.log import MetricWriter, Row, read_metrics

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Package of each writer."""
TENSORBOARD = "tensorboard"
FLUSH_SECONDS = 10.0
"""Interval at which TensorBoard's events reach its file; each flush waits for the disk. What a kill loses is written
again when the run is resumed."""
WANDB_ID = "wandb/id"


def scalars(row: Row) -> dict[str, float]:
    """Return the numeric values of a row without its step, by path: `loss`, `entropy/1/3`, `gradients/W_pos/update`."""
    return {
        name: value
        for name, value in flatten(row, separator="/").items()
        if isinstance(value, int | float) and name != "step"
    }


def prepare_writers(names: Iterable[str]) -> None:
    """Check that the packages of these writers are installed; at a terminal, Weights & Biases may prompt for a login.

    Raises:
      UserError: an extra is not installed, or no login exists.
    """
    for name in names:
        package = _package(name)
        if name == "wandb":
            with _connection(package, "log in with 'wandb login', or set WANDB_MODE=offline."):
                if package.setup().settings.mode in ("online", "shared", "run"):
                    package.login(verify=False)  # the login is verified when a run is opened


@contextmanager
def open_writers(folder: Path | None, config: Config) -> Iterator[list[MetricWriter]]:
    """Open the writers of `config.train.log_to`; none without a folder.

    Each is first synchronised with `metrics.jsonl`: rows that it lacks are sent at once, and steps beyond the last
    row are superseded.

    Raises:
      UserError: see `prepare_writers`; or a writer cannot be written to or reached.
    """
    with ExitStack() as stack:
        opened: list[MetricWriter] = []
        if folder is not None:
            for name in dict.fromkeys(config.train.log_to):
                opened.append(stack.enter_context(_OPENERS[name](folder, config)))
        yield opened


@contextmanager
def _tensorboard(folder: Path, config: Config) -> Iterator[MetricWriter]:
    """Write a new event file with all existing rows to the folder's tensorboard/.

    Events are written by the training loop's own thread: that of tensorboardX's SummaryWriter dies if the disk is full,
    and training would then wait for it forever.
    """
    events, summaries, records = (
        _package("tensorboard", part) for part in (".proto.event_pb2", ".proto.summary_pb2", ".record_writer")
    )
    name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"  # readers sort files by name
    with user_error_on_write(folder, TENSORBOARD):
        (folder / TENSORBOARD).mkdir(exist_ok=True)
        events_file = records.RecordWriter(str(folder / TENSORBOARD / name))
    flushed = 0.0

    def write_event(**event: object) -> None:
        nonlocal flushed
        with user_error_on_write(folder, TENSORBOARD):
            events_file.write(events.Event(wall_time=time.time(), **event).SerializeToString())
            if time.monotonic() - flushed >= FLUSH_SECONDS:
                events_file.flush()
                flushed = time.monotonic()

    def write(row: Row) -> None:
        values = [summaries.Summary.Value(tag=name, simple_value=value) for name, value in scalars(row).items()]
        write_event(step=row["step"], summary=summaries.Summary(value=values))

    try:
        write_event(file_version="brain.Event:2")
        # From this step on, readers discard earlier files, which may have missing or superfluous steps.
        write_event(step=0, session_log=events.SessionLog(status=events.SessionLog.START))
        for row in read_metrics(folder):
            write(row)
        flushed = 0.0  # so that the first row of this run is seen at once
        yield write
        with user_error_on_write(folder, TENSORBOARD):
            events_file.flush()
    finally:
        with suppress(OSError):  # only the first error is raised
            events_file.close()


@contextmanager
def _weights_and_biases(folder: Path, config: Config) -> Iterator[MetricWriter]:
    """Log to a run of the project jaxformer, whose id is stored in the folder so that resuming continues it.

    Only steps from the run's `starting_step` on are sent, because its history is append-only. After an online run, no
    step is sent twice; after an offline run, all are sent again, so that the last upload is complete. A run that was
    rolled back begins a new one; see `discard_wandb_run`.
    """
    wandb, file = _package("wandb"), folder / WANDB_ID
    resume = f"resume with {resume_fields(folder)}"
    with _connection(wandb, "try again, or set WANDB_MODE=offline."):
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxformer"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=str(folder),
            config=to_dict(config),
            resume="allow",
            id=file.read_text(encoding="utf-8").strip() if file.exists() else None,
        )

    step = 0

    def write(row: Row) -> None:
        nonlocal step
        step = row["step"]
        if step >= run.starting_step and (values := scalars(row)):
            with _connection(wandb, resume):
                run.log(values, step=step, commit=True)

    try:
        with user_error_on_write(folder, WANDB_ID):
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, run.id + "\n")
        for row in read_metrics(folder):
            write(row)
        yield write
    except BaseException:
        with suppress(Exception):  # only the first error is raised
            run.finish(exit_code=1)
        raise
    with _connection(wandb, resume):
        run.finish(exit_code=int(step < config.steps))  # also 1 after an interruption or divergence


def discard_wandb_run(folder: Path) -> None:
    """Remove the id of a run that was rolled back, so that Weights & Biases begins a new run: its old steps would
    differ.

    Raises:
      UserError: the id cannot be removed.
    """
    with user_error_on_write(folder, WANDB_ID):
        (folder / WANDB_ID).unlink(missing_ok=True)


_OPENERS = {"tensorboard": _tensorboard, "wandb": _weights_and_biases}


def _package(name: str, part: str = "") -> ModuleType:
    """Return the package of a writer, or a submodule such as `.record_writer`; raise `UserError` if it is not
    installed."""
    return import_extra(f"{PACKAGES[name]}{part}", f"`train.log_to` {name}")


@contextmanager
def _connection(wandb: ModuleType, remedy: str) -> Iterator[None]:
    """Turn errors of Weights & Biases into a `UserError`."""
    try:
        yield
    except (wandb.Error, OSError, ValueError) as error:
        message = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"Weights & Biases failed: {message}; {remedy}") from error
