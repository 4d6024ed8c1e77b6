"""`train.py`: train a model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import jax

from jaxformer.cli import machine
from jaxformer.cli.arguments import (
    DEFAULT_CONFIG,
    RUNS,
    folder_named,
    load_config,
    run_named,
    with_fitting_patches,
)
from jaxformer.cli.command import as_command, command, resume_command
from jaxformer.cli.options import MERGED, CommandLine, CommandOptions
from jaxformer.config import Config
from jaxformer.config.fields import NonNegative
from jaxformer.data.storage import is_url
from jaxformer.errors import UserError, run_name
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
from jaxformer.train.signals import HANGUP, STOPPING, raise_on_signals, record_signals

if TYPE_CHECKING:
    from jaxformer.data.dataset import Dataset
    from jaxformer.runs.pretrained import Pretrained
    from jaxformer.train.loop import Outcome
    from jaxformer.train.resume import Rollback
    from jaxformer.train.setup import TrainSetup

DESCRIPTION = f"""Train a model; sample from it with {command("sample")}.

Ctrl-C, SIGTERM and closing the terminal (SIGHUP) save a checkpoint and stop. With nohup, or if only its output can no
longer be written (| head, a full disk), training continues without output."""
TOO_EARLY = "interrupted before the first step; nothing to save"


@dataclass(frozen=True)
class Arguments(CommandOptions):
    """Options of train.py: these, and every field of the config."""

    run_config: Annotated[Config, MERGED]
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
        needs = {
            "--allow-changed-data": (self.allow_changed_data, "--resume", self.resume),
            "--from-step": (self.from_step is not None, "--resume", self.resume),
            "--skip-batches": (self.skip_batches, "--resume and --from-step", self.from_step is not None),
        }
        for flag, (is_given, needed, has_needed) in needs.items():
            if is_given and not has_needed:
                raise UserError(f"{flag} needs {needed}; give it, too, or omit {flag}.")

    @property
    def model_fields(self) -> set[str]:
        """Names of the fields of the model that were given, such as `image_size`."""
        prefix = "--model."
        return {flag.removeprefix(prefix).replace("-", "_") for flag in self.given if flag.startswith(prefix)}

    @property
    def url(self) -> str | None:
        """URL of the run; None for one in a folder."""
        return self.run if self.run is not None and is_url(self.run) else None


@dataclass(frozen=True)
class Job:
    """A run to train: its options, and what they name."""

    options: Arguments
    folder: Path
    """Folder of the run, which is created for a new one."""
    stored: Config | None = None
    """Config of a resumed run."""
    rollback: Rollback | None = None
    pretrained: Pretrained | None = None
    """Model that a new run starts from."""

    @property
    def config(self) -> Config:
        """Config of the run, before fields of its model are inferred from the data."""
        return self.options.run_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; return the exit status: 0 done, 1 diverged or not finite, 2 wrong input, 128 + signal if interrupted."""
    try:
        status = _main(arguments)
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        status = 1
    return shutdown(status)


@as_command(output_optional=True)
def _main(line: CommandLine) -> int:
    with contextlib.ExitStack() as stack:  # closed after the report
        job = _parse(line, stack)
        _start_processes(job)
        stack.enter_context(exit_on_lost_process("training has not started."))
        with raise_on_signals(*STOPPING, message=TOO_EARLY):  # until training handles them itself
            _reserve_folder(job, stack)
            if _is_finished(job):
                return 0
            setup, data, folder = _prepare(job)
            outcome = _train(job, setup, data, folder)
        return _report(setup, data, folder, outcome)


def _parse(line: CommandLine, stack: contextlib.ExitStack) -> Job:
    """Parse the options. Their defaults are those of the config, resumed run or pretrained model that some of them
    name; a run at a URL is copied, and the copy locked until the stack is closed."""
    spec, run = line.value("--config", str), line.value("--run", str | None)
    resume, folder = line.value("--resume", bool, False), None
    if run is not None and is_url(run):
        if count_processes(os.environ) > 1 or "--distributed.processes" in line.given:
            raise _several_processes_error(run)
        folder = stack.enter_context(training_folder(run, resume))
    elif run is not None:
        folder = folder_named("--run", run)

    # orbax and grain are slow to import; report mistyped options before.
    named = None if spec is None else load_config(spec)  # first, as it may define classes that the stored config uses
    stored = pretrained = rollback = None
    if resume:
        from jaxformer.runs.run import latest_run, read_config

        folder = latest_run(RUNS) if folder is None else folder
        stored = read_config(folder)
    init_from = line.value("--init-from", str | None, None if named is None else named.init_from)
    config = named or stored or load_config(DEFAULT_CONFIG)
    if stored is None and init_from is not None:
        pretrained = open_pretrained(init_from)
        config = starting_config(pretrained, named)
    config = dataclasses.replace(config, model=with_fitting_patches(config.model, line))
    defaults = Arguments(config, spec or DEFAULT_CONFIG, run, resume)
    options = line.parse(defaults, command("train"), DESCRIPTION)
    if pretrained is not None and pretrained.tokenizer is not None and "--data.tokenizer" in line.given:
        raise UserError(f"--data.tokenizer has no effect on {pretrained.path}, which has its own; omit it.")
    if folder is None:
        folder = RUNS / options.run_config.name
    if stored is not None:
        from jaxformer.train.resume import Rollback

        changes = check_resumable(folder, stored, options.run_config, options.from_step is not None, line.given)
        if options.from_step is not None:
            rollback = Rollback(options.from_step, options.skip_batches, changes)
    return Job(options, folder, stored, rollback, pretrained)


def check_resumable(folder: Path, stored: Config, config: Config, rolls_back: bool, given: Collection[str] = ()) -> str:
    """Return the optimizer options that differ from those of a run, as text; they may differ only when rolling back.
    `given` are the flags on the command line, for the message.

    Raises:
      UserError: an option differs that must not.
    """
    from jaxformer.train.resume import fixed_differences

    changes = []
    for name, old, new in fixed_differences(stored, config):
        of_optimizer = name.startswith("optimizer.") and name != "optimizer.name"
        if not (rolls_back and of_optimizer):
            hint = ", keep it and roll back with --from-step" if of_optimizer else ""
            if name == "train.skip_batches":
                hint = ", skip batches with --from-step and --skip-batches"
            group, _, field = name.replace("_", "-").rpartition(".")
            flags = ("--config", f"--{group}.{field}", f"--{group}.no-{field}", f"--{field}")
            below = tuple(f"{flag}." for flag in flags[1:])
            omitted = " and ".join(flag for flag in sorted(given) if flag in flags or flag.startswith(below))
            omitted = omitted or "that option"
            raise UserError(
                f"{folder} was trained with {name} {old}, not {new}; omit {omitted} to resume it{hint}, or start a "
                "new run."
            )
        changes.append(f"{name} {new} instead of {old}")
    return ", ".join(changes)


def named_config(line: CommandLine) -> tuple[Config, str]:
    """Return the config that --config and --init-from name, with defaults, and the name of the former."""
    spec = line.value("--config", str | None)
    named = None if spec is None else load_config(spec)
    config, init_from = named or load_config(DEFAULT_CONFIG), line.value("--init-from", str | None)
    if init_from is not None:
        config = starting_config(open_pretrained(init_from), named)
    return config, spec or DEFAULT_CONFIG


def starting_config(pretrained: Pretrained, named: Config | None) -> Config:
    """Return the config of a run that starts from a pretrained model: the one that --config names, or the model's own,
    with the pretrained model or, for another task, a new head, which is trained in full beside adapters."""
    config = named or pretrained.config or load_config(DEFAULT_CONFIG)
    model, lora = pretrained.model.with_head(config.model), config.lora
    if pretrained.has_new_head(model):
        lora = dataclasses.replace(lora, whole=lora.whole or model.contract.head)
    return dataclasses.replace(config, model=model, init_from=run_name(pretrained.path), lora=lora)


def open_pretrained(path: str) -> Pretrained:
    """Return the model that --init-from names. Raises `UserError` if there is none."""
    from jaxformer.interop.packages import find_model
    from jaxformer.interop.run import is_published, pretrained_model
    from jaxformer.runs.pretrained import pretrained_run

    file = find_model(path)
    is_found = file.is_file() or file != Path(path)  # in a package
    folder = file if is_found else run_named("--init-from", path)
    return pretrained_model(folder) if is_published(folder) else pretrained_run(folder)


def _several_processes_error(url: str) -> UserError:
    return UserError(f"{url} can be trained by one process only; mount the bucket, and name the folder with --run.")


def _start_processes(job: Job) -> None:
    """Set up this machine, and connect to the other processes."""
    config, distributed = job.config, job.options.distributed
    n_processes = distributed.processes or count_processes(os.environ)
    machine.set_up(config.train.batch_size // config.compute.grad_accumulation_steps, config.mesh, n_processes)
    if config.compute.deterministic:
        set_deterministic()
    connect(distributed)
    if (url := job.options.url) is not None and jax.process_count() > 1:
        raise _several_processes_error(url)


def _reserve_folder(job: Job, stack: contextlib.ExitStack) -> None:
    """Check that the folder can be written, before the data is read and the step is compiled. When the stack is closed,
    the last changes are uploaded."""
    from jaxformer.runs.lock import check_not_locked
    from jaxformer.runs.run import check_can_create

    if (url := job.options.url) is not None:
        stack.enter_context(uploading(url, job.folder))
    if is_main_process() and job.stored is None:
        check_can_create(job.folder, job.options.run is None)
        stack.enter_context(no_empty_parents(job.folder))
    elif is_main_process():
        check_not_locked(job.folder)


def _is_finished(job: Job) -> bool:
    """Return True, and say so, if a resumed run has no steps left to train."""
    from jaxformer.train.resume import is_finished

    config, stored = job.config, job.stored
    if stored is None or not is_finished(job.folder, config, config.data == stored.data, job.options.from_step):
        return False
    echo(f"{run_name(job.folder)} finished at step {config.steps:,}; --steps N trains further, to step N.")
    return True


def _prepare(job: Job) -> tuple[TrainSetup, Dataset, Path]:
    """Read the data, create the folder of a new run, and print the header."""
    from jaxformer.cli.training_report import header
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.runs.run import create_run, load_data
    from jaxformer.train.log import console, print_line
    from jaxformer.train.metric_writers import prepare_writers
    from jaxformer.train.setup import TrainSetup

    console.quiet = not is_main_process()
    config, options, folder = job.config, job.options, job.folder
    mesh, pretrained = make_mesh(config.mesh), job.pretrained if job.stored is None else _open_start(job)
    setup = TrainSetup(config, mesh, pretrained)
    setup.check_devices()
    if pretrained is not None:
        pretrained.check_fit(config.model)
    # Try everything that can fail before writing anything.
    if is_main_process():
        prepare_writers(config.train.log_to)
    echo_status("reading the data ...")
    stored_in = None if job.stored is None else folder
    if pretrained is None:
        data = load_data(stored_in, config, options.model_fields)
    else:  # a new run keeps the pretrained model's tokenizer
        fixed = options.model_fields if pretrained.has_new_head(config.model) else None
        data = load_data(stored_in, config, fixed, pretrained.tokenizer)
    if data.model != config.model:
        config = dataclasses.replace(config, model=data.model)
        setup = TrainSetup(config, mesh, pretrained)
        setup.check_devices()
    setup.check_fit(data.batch(0, slice(1)))
    barrier()  # do not create a run if any process failed to load the data

    if job.stored is None:
        if is_main_process():
            sampling = None if pretrained is None else pretrained.sampling
            folder = create_run(folder, config, data.tokenizer, options.run is None, data.classes, sampling=sampling)
        folder = Path(broadcast(str(folder)))
    for line in header(setup, data, folder, options.resume):
        print_line(line)
    return setup, data, folder


def _open_start(job: Job) -> Pretrained | None:
    """Return the pretrained model that a resumed run needs besides its checkpoint: the base of its adapters, or the
    model that it starts over from; None if it needs neither."""
    from jaxformer.runs.checkpoints import CheckpointReader
    from jaxformer.runs.pretrained import pretrained_run
    from jaxformer.runs.run import BASE
    from jaxformer.train.resume import starts_from_scratch

    if (init_from := job.config.init_from) is None:
        return None
    from_scratch, base = starts_from_scratch(job.folder, job.options.from_step), job.folder / BASE
    if job.config.lora.rank and (CheckpointReader(base) or not from_scratch):
        return pretrained_run(base)
    return open_pretrained(init_from) if from_scratch else None


def _train(job: Job, setup: TrainSetup, data: Dataset, folder: Path) -> Outcome:
    """Train; the folder of a new run that fails before its first log row is removed."""
    from jaxformer.inspect.callbacks import make_callbacks, make_printer
    from jaxformer.inspect.pages.training import page_writer
    from jaxformer.runs.run import METRICS
    from jaxformer.train.loop import train
    from jaxformer.train.resume import Resume

    options, t = job.options, setup.config.train
    resume = Resume(options.allow_changed_data, job.rollback) if options.resume else None
    writers = [make_printer(t.show_entropy), *([page_writer(folder)] if t.report_every else [])]
    try:
        with exit_on_lost_process(f"resume from the last checkpoint with: {resume_command(folder)}"):
            return train(setup, data, folder, make_callbacks(setup, data, folder), resume, writers)
    except (UserError, KeyboardInterrupt):
        if is_main_process() and not options.resume and not (folder / METRICS).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _report(setup: TrainSetup, data: Dataset, folder: Path, outcome: Outcome) -> int:
    """Write the page, print the outcome, and return the exit status, even if the terminal closes."""
    from jaxformer.cli.training_report import footer
    from jaxformer.inspect.pages.training import write_training_page
    from jaxformer.train.log import print_line, read_metrics

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
