"""`train.py`: train a model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax

from jaxformer.cli import machine
from jaxformer.cli.arguments import (
    command_call,
    folder_named,
    load_config,
    model_fields,
    options_given,
    parse,
    peek,
    read_value,
    run_named,
    with_fitting_patches,
)
from jaxformer.cli.options import MERGED
from jaxformer.config import Config
from jaxformer.config.fields import NonNegative
from jaxformer.data.storage import is_url
from jaxformer.errors import UserError, command, resume_command, run_name
from jaxformer.files import no_empty_parents
from jaxformer.parallel.determinism import set_deterministic
from jaxformer.parallel.processes import (
    DistributedOptions,
    barrier,
    broadcast,
    connect,
    count_processes,
    exit_on_lost_process,
    is_main_process,
    shutdown,
)
from jaxformer.runs.storage import training_folder, uploading
from jaxformer.terminal import echo, echo_status
from jaxformer.train.signals import STOPPING, raise_on_signals

if TYPE_CHECKING:
    from jaxformer.data.dataset import Dataset
    from jaxformer.runs.pretrained import Pretrained
    from jaxformer.train.loop import Outcome
    from jaxformer.train.setup import TrainSetup

DEFAULT_CONFIG = "quick"
DESCRIPTION = f"""Train a model; sample from it with {command("sample")}.

Ctrl-C, SIGTERM and closing the terminal (SIGHUP) save a checkpoint and stop. With nohup, or if only its output can no
longer be written (| head, a full disk), training continues without output."""
RUNS = Path("runs")
TOO_EARLY = "interrupted before the first step; nothing to save"


@dataclass(frozen=True)
class Arguments:
    """Options of train.py: these, and every field of the config."""

    fields: Annotated[Config, MERGED]
    config: str = DEFAULT_CONFIG
    """Config to start from: quick, quick:modern, or FILE.py:NAME for your own file."""
    run: str | None = None
    """Folder of the run, or its URL on object storage, such as s3://bucket/run; by default, a new folder below runs/
    with the config's name."""
    resume: bool = False
    """Resume from the last checkpoint of --run, or of the newest run below runs/."""
    allow_changed_data: bool = False
    """With --resume: accept changed data, with the run's own tokenizer. The change is logged."""
    from_step: NonNegative | None = None
    """With --resume: step of the checkpoint to roll back to, or 0 for the start; the optimizer's options, but not its
    name, may change. Later checkpoints and log rows are removed. The rollback is logged."""
    skip_batches: NonNegative = 0
    """With --from-step: number of data batches to skip, which is logged."""
    distributed: DistributedOptions = field(default_factory=DistributedOptions)

    def __post_init__(self) -> None:
        if self.allow_changed_data and not self.resume:
            raise UserError("--allow-changed-data needs --resume; a new run uses the data as it is.")
        if self.from_step is not None and not self.resume:
            raise UserError("--from-step needs --resume; name the run to roll back with --run.")
        if self.skip_batches and self.from_step is None:
            raise UserError("--skip-batches needs --resume and --from-step; name the checkpoint to roll back to.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; return the exit status: 0 done, 1 diverged or not finite, 2 wrong input, 128 + signal if interrupted."""
    try:
        with command_call(arguments, output_optional=True) as call, contextlib.ExitStack() as stack:
            if (prepared := _start(call.arguments, stack)) is not None:
                from jaxformer.train.loop import train

                setup, data, folder, early, options = prepared
                with _discard_if_not_begun(folder, options["resume"]):
                    outcome = train(setup, data, folder, **options)
                early.close()
                call.status = _conclude(setup, data, folder, outcome)
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        call.status = 1
    return shutdown(call.status)


class Prepared(NamedTuple):
    """A run that is ready to train."""

    setup: TrainSetup
    data: Dataset
    folder: Path
    early: contextlib.ExitStack
    """Contexts to close after the training loop."""
    options: dict[str, Any]
    """Other arguments of `train.loop.train`."""


def _start(arguments: list[str], stack: contextlib.ExitStack) -> Prepared | None:
    """Read the options and prepare the run; return None for a finished run.

    Args:
      stack: contexts to close at the end of the command.
    """
    given = options_given(arguments)
    known, _ = peek(arguments, {"--config": 1, "--run": 1, "--resume": 0, "--init-from": 1})
    resume, (spec,), (run,) = "--resume" in known, known.get("--config", [None]), known.get("--run", [None])
    url = run if run is not None and is_url(run) else None
    if url is not None:
        if count_processes(os.environ) > 1 or "--distributed.processes" in given:
            raise _several_processes_error(url)
        copy = stack.enter_context(training_folder(url, resume))

    # orbax and grain are slow to import; report mistyped options before.
    named = None if spec is None else load_config(spec)  # first, as it may define classes that the stored config uses
    stored = None
    if resume:
        from jaxformer.runs.run import latest_run, read_config

        if url is not None:
            folder = copy
        elif run is not None:
            folder = folder_named("--run", run)
        else:
            folder = latest_run(RUNS)
        stored = read_config(folder)
    init_from, pretrained = None if named is None else named.init_from, None
    if "--init-from" in known:
        init_from = read_value("--init-from", str | None, known["--init-from"][0])
    if stored is None and init_from is not None:
        pretrained = open_pretrained(init_from)
    config = named or stored or (pretrained and pretrained.config) or load_config(DEFAULT_CONFIG)
    if pretrained is not None:
        config = dataclasses.replace(config, model=pretrained.model, init_from=run_name(pretrained.path))
    config = dataclasses.replace(config, model=with_fitting_patches(config.model, arguments))
    defaults = Arguments(config, spec or DEFAULT_CONFIG, run, resume)
    options = parse(arguments, defaults, command("train"), DESCRIPTION)
    config = options.fields
    if pretrained is not None and pretrained.tokenizer is not None and "--data.tokenizer" in given:
        raise UserError(f"--data.tokenizer has no effect on {pretrained.path}, which has its own; omit it.")
    changes = ""
    if options.run is not None and url is None:
        folder_named("--run", options.run)
    if stored is not None:
        from jaxformer.train.resume import check_resumable, is_finished

        changes = check_resumable(folder, stored, config, options.from_step is not None)
    elif url is not None:
        folder = copy
    elif options.run is not None and Path(options.run).exists():
        raise UserError(f"{options.run} exists; add --resume to continue it, or choose another --run.")
    else:
        folder = RUNS / config.name if options.run is None else Path(options.run)
    n_processes = options.distributed.processes or count_processes(os.environ)
    machine.set_up(config.train.batch_size // config.compute.grad_accumulation_steps, config.mesh, n_processes)
    if config.compute.deterministic:
        set_deterministic()
    connect(options.distributed)
    if url is not None and jax.process_count() > 1:
        raise _several_processes_error(url)
    from jaxformer.runs.lock import check_not_locked
    from jaxformer.runs.run import check_writable_parent

    stack.enter_context(exit_on_lost_process("training has not started."))
    early = stack.enter_context(contextlib.ExitStack())
    early.enter_context(raise_on_signals(*STOPPING, message=TOO_EARLY))
    if url is not None:
        stack.enter_context(uploading(url, folder))
    if is_main_process() and stored is None:  # before the data is read and the step is compiled
        check_writable_parent(folder)
        stack.enter_context(no_empty_parents(folder))
    elif is_main_process():
        check_not_locked(folder)  # before the data is read
    if stored is not None and is_finished(folder, config, config.data == stored.data, options.from_step):
        echo(f"{run_name(folder)} finished at step {config.steps:,}; --steps N trains further, to step N.")
        return None
    if stored is not None and config.init_from is not None:
        pretrained = _open_start(config, folder, options.from_step)
    return _prepare(config, folder, stored is not None, options, changes, model_fields(arguments), pretrained, early)


def _several_processes_error(url: str) -> UserError:
    return UserError(f"{url} can be trained by one process only; mount the bucket, and name the folder with --run.")


def _open_start(config: Config, folder: Path, from_step: int | None) -> Pretrained | None:
    """Return the pretrained model that a resumed run needs besides its checkpoint: the base of its adapters, or the
    model that it starts over from; None if it needs neither."""
    from jaxformer.runs.checkpoints import CheckpointReader
    from jaxformer.runs.pretrained import pretrained_run
    from jaxformer.runs.run import BASE
    from jaxformer.train.resume import begins_anew

    assert config.init_from is not None
    if config.lora.rank and (CheckpointReader(folder / BASE) or not begins_anew(folder, from_step)):
        return pretrained_run(folder / BASE)
    return open_pretrained(config.init_from) if begins_anew(folder, from_step) else None


def open_pretrained(path: str) -> Pretrained:
    """Return the model that --init-from names. Raises `UserError` if there is none."""
    from jaxformer.interop.run import is_published, pretrained_model
    from jaxformer.runs.pretrained import pretrained_run

    folder = run_named("--init-from", path)
    return pretrained_model(folder) if is_published(folder) else pretrained_run(folder)


def _prepare(
    config: Config, folder: Path, resume: bool, options: Arguments, changes: str, fixed: set[str],
    pretrained: Pretrained | None, early: contextlib.ExitStack,
) -> Prepared:  # fmt: skip
    """Read the data, create the folder of a new run, and print the header."""
    from jaxformer.inspect.callbacks import make_callbacks
    from jaxformer.inspect.pages.training import page_sink
    from jaxformer.inspect.training_report import header
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.runs.run import create_run, load_data
    from jaxformer.train.log import console, print_line
    from jaxformer.train.resume import Rollback
    from jaxformer.train.setup import TrainSetup
    from jaxformer.train.sinks import prepare_sinks

    console.quiet = not is_main_process()
    mesh = make_mesh(config.mesh)
    setup = TrainSetup(config, mesh, pretrained)
    setup.check_devices()
    if pretrained is not None:
        pretrained.check_fit(config.model)
    # Try everything that can fail before writing anything.
    if is_main_process():
        prepare_sinks(config.train.log_to)
    echo_status("reading the data ...")
    if pretrained is None:
        data = load_data(folder if resume else None, config, fixed)
    else:  # a new run keeps the pretrained model's tokenizer
        data = load_data(folder if resume else None, config, tokenizer=pretrained.tokenizer)
    if data.model != config.model:
        config = dataclasses.replace(config, model=data.model)
        setup = TrainSetup(config, mesh, pretrained)
        setup.check_devices()
    setup.check_fit(data.batch(0, slice(1)))
    barrier()  # do not create a run if any process failed to load the data

    if not resume:
        if is_main_process():
            folder = create_run(folder, config, data.tokenizer, options.run is None, data.classes)
        folder = Path(broadcast(str(folder)))

    for line in header(setup, data, folder, resume):
        print_line(line)
    callbacks = make_callbacks(setup, data, folder)
    sinks = [page_sink(folder)] if config.train.report_every else []
    step = options.from_step
    arguments = {
        "callbacks": callbacks, "resume": resume, "allow_changed_data": options.allow_changed_data, "sinks": sinks,
        "rollback": None if step is None else Rollback(step, options.skip_batches, changes),
    }  # fmt: skip
    return Prepared(setup, data, folder, early, arguments)


@contextlib.contextmanager
def _discard_if_not_begun(folder: Path, resume: bool) -> Iterator[None]:
    """Remove the folder of a new run that fails before its first log row."""
    from jaxformer.runs.run import METRICS

    try:
        with exit_on_lost_process(f"resume from the last checkpoint with: {resume_command(folder)}"):
            yield
    except (UserError, KeyboardInterrupt):
        if is_main_process() and not resume and not (folder / METRICS).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _conclude(setup: TrainSetup, data: Dataset, folder: Path, outcome: Outcome) -> int:
    """Write the page, print the outcome, and return the exit status, even if the terminal closes."""
    from jaxformer.inspect.pages.training import write_training_page
    from jaxformer.inspect.training_report import footer
    from jaxformer.train.log import print_line, read_metrics
    from jaxformer.train.signals import HANGUP, record_signals

    with record_signals(*HANGUP):
        rows = read_metrics(folder)
        if is_main_process() and setup.config.train.report_every:
            write_training_page(folder, rows)
        barrier()
        for line in footer(setup, data, folder, outcome, rows):
            print_line(line)
    if outcome.status == "interrupted":
        return 128 + outcome.signal
    return 0 if outcome.status == "done" else 1
