"""`train.py`: train a model, watch it, save it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax

from jaxformer.cli import machine
from jaxformer.cli.arguments import folder_named, load_config, model_fields, parse, peek, run_command, with_image_size
from jaxformer.cli.options import MERGED
from jaxformer.config import Config
from jaxformer.contract import Task
from jaxformer.distributed import (
    DistributedOptions,
    barrier,
    broadcast,
    connect,
    count_processes,
    exit_on_lost_process,
    is_main_process,
    shutdown,
)
from jaxformer.errors import UserError, user_error_on_write
from jaxformer.fields import differences
from jaxformer.signals import raise_on_signals
from jaxformer.terminal import echo, echo_status

if TYPE_CHECKING:
    from jaxformer.data.dataset import Dataset
    from jaxformer.train.loop import Outcome
    from jaxformer.train.setup import TrainSetup

DEFAULT_CONFIG = "configs/quick.py"
DESCRIPTION = """Train a model; sample from it with sample.py.

Ctrl-C, SIGTERM and closing the terminal (SIGHUP) save a checkpoint and stop. With nohup, and where only the reader of a
pipe leaves (| head), training continues quietly."""
RUNS = Path("runs")
TOO_EARLY = "interrupted before the first step; nothing to save"
MAY_CHANGE = {"steps", "data.path", "data.val_path", "mesh"}
"""Fields that may differ on resuming, besides `compute` and most of `train`: the data is compared by its content."""
LEARNED_FROM = {"train.batch_size", "train.label_smoothing", "train.skip_batches"}
"""Fields of `train` that change what is learned; the others say what is reported, how often, and when to stop."""


@dataclass(frozen=True)
class Arguments:
    """Options of train.py: these, and every field of the config."""

    fields: Annotated[Config, MERGED]
    config: str = DEFAULT_CONFIG
    """FILE.py or FILE.py:NAME, the config to start from."""
    run: str | None = None
    """The run's folder; without it, a new one below runs/, called like the config."""
    resume: bool = False
    """Go on from the last checkpoint of --run, or of the newest run below runs/."""
    allow_changed_data: bool = False
    """With --resume: go on even if the data has changed since, with the run's own tokenizer. The log notes it."""
    from_step: int | None = None
    """With --resume: roll back to the checkpoint of this step, or to the start (0); other options of the optimizer may
    be given, but for its name. Later checkpoints and rows of the log are removed. The log notes it."""
    skip_batches: int = 0
    """With --from-step: leave out the next batches of the data. The log notes it."""
    distributed: DistributedOptions = field(default_factory=DistributedOptions)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the exit status: 0 done, 1 diverged or not finite, 2 wrong input, 128 + the signal where interrupted."""
    try:
        status = run_command(_main, arguments, ignore_closed=True)
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        status = 1
    return shutdown(status)


def _main(arguments: list[str]) -> int:
    value = {"nargs": "?"}
    known, _ = peek(arguments, {"--config": value, "--run": value, "--resume": {"action": "store_true"}})

    # orbax and grain are imported late: a mistyped option is answered sooner without them.
    stored = None
    if known.resume:
        from jaxformer.runs import latest_run, read_config

        folder = latest_run(RUNS) if known.run is None else folder_named("--run", known.run)
        stored = read_config(folder)
    config = load_config(known.config or DEFAULT_CONFIG) if known.config or stored is None else stored
    config = dataclasses.replace(config, model=with_image_size(config.model, arguments))
    defaults = Arguments(config, known.config or DEFAULT_CONFIG, known.run, known.resume)
    asked = parse(arguments, defaults, "train.py", DESCRIPTION)
    config = asked.fields
    if asked.allow_changed_data and stored is None:
        raise UserError("--allow-changed-data goes with --resume; a new run learns from the data as it is.")
    if asked.from_step is not None and stored is None:
        raise UserError("--from-step goes with --resume; name the run to roll back with --run.")
    if asked.from_step is not None and asked.from_step < 0:
        raise UserError(f"--from-step is {asked.from_step}; give the step of a checkpoint, or 0 for the start.")
    if asked.skip_batches < 0:
        raise UserError(f"--skip-batches is {asked.skip_batches}; give a number of batches, at least 0.")
    if asked.skip_batches and asked.from_step is None:
        raise UserError("--skip-batches goes with --resume and --from-step; name the checkpoint to roll back to.")
    changes = ""
    if asked.run is not None:
        folder_named("--run", asked.run)
    if stored is not None:
        changes = _check_same(folder, stored, config, asked.from_step is not None)
    elif asked.run is not None and Path(asked.run).exists():
        raise UserError(f"{asked.run} exists; add --resume to go on with it, or choose another --run.")
    else:
        folder = RUNS / config.name if asked.run is None else Path(asked.run)
    n_processes = asked.distributed.processes or count_processes(os.environ)
    machine.set_up(config.train.batch_size // config.compute.grad_accumulation_steps, config.mesh, n_processes)
    connect(asked.distributed)
    from jaxformer.run_lock import hold_run_lock
    from jaxformer.runs import check_writable_parent

    with exit_on_lost_process("training has not begun."), contextlib.ExitStack() as stack:
        early = stack.enter_context(contextlib.ExitStack())
        early.enter_context(raise_on_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, message=TOO_EARLY))
        if is_main_process() and stored is None:  # before the data is read and the step compiled
            check_writable_parent(folder)
        elif is_main_process():
            stack.enter_context(hold_run_lock(folder))
        if stored is not None and _is_finished(folder, config, config.data == stored.data, asked.from_step):
            echo(f"{folder} finished at step {config.steps:,}; --steps N trains further, to step N.")
            return 0
        return _train(config, folder, stored is not None, asked, changes, model_fields(arguments), early)


def _is_finished(folder: Path, config: Config, same_data: bool, from_step: int | None) -> bool:
    """Return whether a run has nothing left to train, before its data is read and the step compiled.

    Raises:
      UserError: there is no such checkpoint to roll back to, or all are corrupt.
    """
    from jaxformer.checkpoints import CheckpointReader

    if jax.process_count() > 1:  # they read the checkpoints together, a share each
        return False
    checkpoints = CheckpointReader(folder)
    if from_step is None:
        return checkpoints.last_intact_step() == config.steps and same_data
    if from_step:
        checkpoints.step(from_step)
    return False


def _train(
    config: Config, folder: Path, resume: bool, asked: Arguments, changes: str, fixed: set[str],
    early: contextlib.ExitStack,
) -> int:  # fmt: skip
    """Train; the exit status. `early` is what holds until the training loop has ended."""
    from jaxformer.cli.callbacks import make_callbacks
    from jaxformer.cli.report import reporter
    from jaxformer.runs import METRICS, count_parameters, create_run, load_data
    from jaxformer.sharding import make_mesh
    from jaxformer.train.log import console, say
    from jaxformer.train.loop import train
    from jaxformer.train.resume import Rollback
    from jaxformer.train.setup import TrainSetup, check_fit
    from jaxformer.train.sinks import prepare_sinks

    console.quiet = not is_main_process()
    mesh = make_mesh(config.mesh)
    setup = TrainSetup(config, mesh)
    setup.check_devices()
    # As above, what cannot be is refused before anything is written.
    if is_main_process():
        prepare_sinks(config.train.log_to)
    echo_status("reading the data ...")
    data = load_data(folder if resume else None, config, fixed)
    if data.model != config.model:
        config = dataclasses.replace(config, model=data.model)
        setup = TrainSetup(config, mesh)
        setup.check_devices()
    check_fit(config.model, data.batch(0, slice(1)))
    barrier()  # if one of several processes has no data, no run is made

    if not resume:
        made = create_run(folder, config, data.tokenizer, asked.run is None, data.classes) if is_main_process() else ""
        folder = Path(broadcast(str(made)))

    say(f"run {folder}{' (resumed)' if resume else ''}")
    axes = ",".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1)
    split = f", mesh {axes}" if axes else ""
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    say(f"devices: {mesh.size} x {mesh.devices.flat[0].device_kind}{split}{processes}, jax {jax.__version__}")
    say(f"data: {data.describe()}")
    for note in data.notes:
        say(f"note: {note}")
    kind, parameters = type(setup.model).__name__, count_parameters(setup.abstract_state.params)
    say(f"model: {kind}, {parameters:,} parameters; matmuls in {setup.compute_dtype}; {setup.attention_line}")
    tokens = f" ({data.per_step:,.0f} tokens)" if data.unit == "tokens" else ""
    say(
        f"training: {config.steps:,} steps of {config.train.batch_size:,} examples{tokens}, "
        f"{config.steps / data.steps_per_epoch:.2f} epochs; "
        f"{config.optimizer.name}, peak learning rate {config.optimizer.learning_rate:g}"
    )
    if (warmup := config.optimizer.warmup_steps) > config.steps:
        say(
            f"warning: the warm-up of {warmup:,} steps is longer than the run of {config.steps:,}, which never "
            f"reaches the peak learning rate; shorten it, such as --optimizer.warmup-steps {config.steps // 10}"
        )

    callbacks = make_callbacks(setup, data, folder)
    sinks = [reporter(folder)] if config.train.report_every else []
    try:
        command = f"python train.py --resume --run {shlex.quote(str(folder))}"
        with exit_on_lost_process(f"go on from the last checkpoint with: {command}"):
            back = None if asked.from_step is None else Rollback(asked.from_step, asked.skip_batches, changes)
            outcome = train(setup, data, folder, callbacks, resume, asked.allow_changed_data, sinks, back)
    except (UserError, KeyboardInterrupt):
        if is_main_process() and not resume and not (folder / METRICS).exists():
            shutil.rmtree(folder, ignore_errors=True)  # it never began
        raise
    early.close()
    return _conclude(setup, data, folder, outcome)


def _conclude(setup: TrainSetup, data: Dataset, folder: Path, outcome: Outcome) -> int:
    """Draw plots and report, say how training ended, and return the exit status; a closed terminal stops none of it."""
    from jaxformer.cli.report import write_report
    from jaxformer.runs import PLOTS
    from jaxformer.signals import record_signals
    from jaxformer.train.divergence import head_entropy
    from jaxformer.train.log import final_line, plot_metrics, read_metrics, say
    from jaxformer.train.remedies import remedies

    config, quoted = setup.config, shlex.quote(str(folder))
    with record_signals(signal.SIGHUP):
        rows = read_metrics(folder)
        if is_main_process() and config.train.report_every:
            with user_error_on_write(folder, PLOTS):
                plot_metrics(folder)
            write_report(folder, rows)
        barrier()
        if outcome.status == "interrupted":
            say(f"interrupted at step {outcome.step:,} and saved; go on with: python train.py --resume --run {quoted}")
            return 128 + outcome.signal
        if outcome.status == "non_finite":
            culprit, evidence = _autopsy(setup, folder, outcome)
            say(f"step {outcome.step:,} is not finite: first {culprit}; what it takes to repeat it is in {evidence}.")
            say(
                f"Everything up to step {outcome.step - 1:,} is saved in {folder}. "
                f"What usually helps: {remedies(config)}."
            )
            say(_way_back(config, outcome, quoted))
            return 1
        if outcome.status == "diverged":
            say(f"stopped at step {outcome.step:,}: {outcome.divergence}.")
            if outcome.mover is not None:
                say(f"First to move: {outcome.mover}{head_entropy(outcome.mover.name, rows)}.")
            say(f"What usually helps: {remedies(config)}.")
            say(_way_back(config, outcome, quoted))
            return 1
        if (warning := no_better(rows, outcome)) is not None:
            say(f"warning: {warning}: nothing was learned that lasts. What usually helps: {remedies(config)}.")
        if outcome.diverging_since and config.train.divergence == "warn":
            say(
                f"warning: the loss has been diverging since step {outcome.diverging_since:,} and has not come back "
                f"near its minimum. What usually helps: {remedies(config)}."
            )
        trained: dict[str, Any] = next((row for row in reversed(rows) if "loss" in row), {})
        say(final_line(outcome.step, outcome.evaluation.as_row() if outcome.evaluation else trained))
        if (prompt := prompt_to_try(config, data)) is not None:
            say(f"sample from it: python sample.py --run {quoted} --prompt {shlex.quote(prompt)}")
        return 0


def no_better(rows: Sequence[dict[str, Any]], outcome: Outcome) -> str | None:
    """Return, of a run whose loss ended no lower than it began, that it did so; None of any other.

    The loss is that on the same held-out examples; without evaluations, that of a training batch.
    """
    if outcome.evaluation is not None:
        where, begins = "on held-out data", [row["val_loss"] for row in rows if "val_loss" in row]
        ends = [] if outcome.val_loss is None else [outcome.val_loss]
    else:  # a step that was left out has none
        losses = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
        where, begins = "on the last training batch", [loss for _, loss in losses[:1]]
        ends = [loss for _, loss in losses[1:]]
    if not begins or not ends or begins[0] is None or ends[-1] < begins[0]:
        return None
    first = "before the first step" if outcome.evaluation is not None else f"at step {losses[0][0]:,}"
    return f"the loss {where} is {ends[-1]:.4f}, no better than {begins[0]:.4f} {first}"


def prompt_to_try(config: Config, data: Dataset) -> str | None:
    """What a new user may give to `sample.py`; None for a model that writes no text."""
    from jaxformer.data.pairs import PairDataset
    from jaxformer.decode.fill_mask import MASK

    task = config.model.contract.task
    if task is Task.CAUSAL_LM:
        return config.train.sample_prompt
    if task is Task.MASKED_LM:
        return f"The {MASK} of"
    return data.val[0].source if isinstance(data, PairDataset) else None


def _autopsy(setup: TrainSetup, folder: Path, outcome: Outcome) -> tuple[str, Path]:
    """Repeat the step that broke; what was first not finite, and where the evidence is."""
    import jax
    import numpy as np

    from jaxformer.inspect import first_non_finite, save_autopsy
    from jaxformer.nn.execution import Execution
    from jaxformer.sharding import local_copy
    from jaxformer.train.kernels import FusedAttention
    from jaxformer.train.optimizer import gradient_point

    config, mesh, attend = setup.config, setup.mesh, setup.attention
    if isinstance(attend, FusedAttention):
        attend = dataclasses.replace(attend, tensor=1)  # here one device has all heads
    params = local_copy(gradient_point(config.optimizer, outcome.state.params, outcome.state.opt_state), mesh)
    keys_B = setup.example_keys(outcome.step - 1)
    batch = local_copy(outcome.batch, mesh)
    model = config.model.build(Execution(attention=attend))
    report = first_non_finite(model, params, batch, keys_B, setup.compute_dtype)
    evidence = folder / "autopsy"
    if is_main_process():
        evidence = save_autopsy(
            folder, outcome.step, jax.tree.map(np.asarray, batch), np.asarray(jax.random.key_data(keys_B)), report,
            f"{setup.attention_line}, precision: {setup.compute_dtype}",
        )  # fmt: skip
    overflow = "the norm of the gradient, though each of its numbers is finite"
    return overflow if report is None else report.culprit, evidence


def _way_back(config: Config, outcome: Outcome, place: str) -> str:
    """Say which checkpoint is from before a divergence, and the command that rolls back to it."""
    from jaxformer.train.remedies import optimizer_remedies

    kept = (
        f"Checkpoint {outcome.healthy:,} is from before the divergence and is kept"
        if outcome.healthy
        else "No checkpoint is from before the divergence"
    )
    options = optimizer_remedies(config)[0][1]
    command = f"python train.py --resume --run {place} --from-step {outcome.healthy} {options}"
    return f"{kept}; {'roll back to it' if outcome.healthy else 'begin again'} with: {command}"


def _check_same(folder: Path, stored: Config, asked: Config, rolling_back: bool) -> str:
    """Return the options of the optimizer that differ, which may when rolling back.

    Raises:
      UserError: another option differs that must not.
    """
    changes = []
    for name, old, new in differences(stored, asked):
        if name in MAY_CHANGE or (name.startswith(("compute.", "train.")) and name not in LEARNED_FROM):
            continue
        if not (rolling_back and name.startswith("optimizer.") and name != "optimizer.name"):
            hint = ""
            if name == "train.skip_batches":
                hint = ", leave out batches with --from-step and --skip-batches"
            elif name.startswith("optimizer.") and name != "optimizer.name":
                hint = ", roll back with --from-step"
            raise UserError(
                f"{folder} was trained with {name} {_short(old)}, not {_short(new)}; leave --config and that option "
                f"out to go on with it{hint}, or start a new run."
            )
        changes.append(f"{name} {_short(new)} instead of {_short(old)}")
    return ", ".join(changes)


def _short(value: object) -> str:
    return type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)
