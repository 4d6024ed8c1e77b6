"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from jaxformer.data.dataset import Batch, Dataset
from jaxformer.nn.parameter_norms import ROW_KEYS, in_order, norm_rows, row_names
from jaxformer.parallel.determinism import check_deterministic
from jaxformer.parallel.mesh import assemble, batch_sharding, local_rows
from jaxformer.parallel.processes import AsyncMax, barrier, is_main_process
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.snapshots import snapshots_folder
from jaxformer.train.divergence import Divergence
from jaxformer.train.evaluate import Evaluation, Evaluator, perplexity
from jaxformer.train.log import Log, MetricWriter, Row, print_line
from jaxformer.train.metric_writers import open_writers
from jaxformer.train.pending import PendingStep, PendingSteps
from jaxformer.train.profile import Profiler
from jaxformer.train.resume import Resume, Start, find_start
from jaxformer.train.setup import TrainSetup, TrainState
from jaxformer.train.signals import STOPPING, record_signals
from jaxformer.train.step import CompiledStep, StepMetrics

FIRST_REPORT = 100
"""Step of the first samples and update ratios, before those at the regular interval."""


@dataclass(frozen=True)
class Callback:
    """Function that training calls as `call(step, state, batch, row)` after every `every`-th step, after the steps
    `also_at` and after the last; with `at_start` also before the first.

    The row holds the step's metrics so far, and the entries that `call` returns are added to it. The batch is the one
    that the step was trained on, on the devices.
    """

    every: int
    call: Callable[[int, TrainState, Batch, Row], Row | None]
    at_start: bool = False
    also_at: Collection[int] = ()

    def is_due(self, step: int) -> bool:
        """Return True if the callback is called after a step other than the last."""
        return (is_due(self.every, step) or step in self.also_at) if step else self.at_start


@dataclass(frozen=True)
class Outcome:
    """Outcome of training."""

    status: Literal["done", "interrupted", "non_finite", "diverged"]
    step: int
    """Steps taken; for 'non_finite', the last one was not applied; for 'diverged', it is the step at which it was
    detected."""
    state: TrainState
    batch: Batch
    """Batch of that step."""
    evaluation: Evaluation | None = None
    """Evaluation on the whole validation split, for 'done'; None without evaluations."""
    val_loss: float | None = None
    """Loss in nats on the part of the validation split that periodic evaluations use; None unless this call took the
    last step."""
    signal: int = 0
    """Number of the signal that interrupted training; 0 for none."""
    divergence: Divergence | None = None
    """Divergence, for 'diverged'."""
    healthy: int = 0
    """Step of the last checkpoint before the loss left its minimum; 0 if there is none."""
    diverging_since: int = 0
    """For 'done', the step at which the loss left its minimum, if it is still diverging; 0 otherwise."""


def train(
    setup: TrainSetup,
    data: Dataset,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    resume: Resume | None = None,
    writers: Sequence[MetricWriter] = (),
) -> Outcome:
    """Train until `config.steps`, an interruption, a non-finite loss, or a divergence; return the outcome.

    The last state is saved, except after a divergence, where the earlier checkpoints remain. Every process must call
    this function. Only the first writes files, except checkpoints, which all write together.

    Args:
      resume: None starts a new run. A resumed one continues from the folder's last checkpoint, or from the start if
        there is none, and is bit-identical to a run that was never interrupted.
      writers: receivers of the log's rows, in addition to its file and the writers in `config.train.log_to`.

    Raises:
      UserError: data and config do not fit each other, the devices or, with `resume`, the run; the run's folder
        cannot be written; or another process is training in it.
    """
    train_step, config, t = compile_step(setup, data), setup.config, setup.config.train
    with ExitStack() as stack:
        # Signals are recorded until the last save is finished.
        signals, agreement = stack.enter_context(record_signals(*STOPPING)), AsyncMax(setup.mesh)
        # Entering locks the folder, so that `find_start` does not truncate the log of another process.
        checkpoints = stack.enter_context(CheckpointManager(folder))
        start = find_start(setup, data, folder, checkpoints, resume)
        callbacks = [*callbacks, *stack.enter_context(open_snapshots(start, folder))]
        written, show_every = folder if is_main_process() else None, 0 if t.eval_every else 10 * t.log_every
        writers = [*stack.enter_context(open_writers(written, start.config)), *writers]
        log = stack.enter_context(Log(written, start.step, config.steps, writers, show_every))
        profiler = stack.enter_context(Profiler(folder, t.profiled_steps, start.step, print_line))
        pending, reports = PendingSteps(data, start, log), Reports(setup, data, callbacks, log)
        timer, state, evaluation, val_loss = Throughput(start.step, data), start.state, None, None
        batch, batches = read_batches(setup, data, start, timer)
        for note in start.notes:
            log.row({"step": start.step, "note": note})
        if not start.resumed:
            reports.log({"step": 0, "epoch": 0.0, data.unit: 0}, state, batch)
        timer.restart(start.step)

        for step in range(start.step + 1, config.steps + 1):
            timer.exclude(profiler.begin(step, state))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                batch = next(batches)
                state, metrics = train_step(state, batch, step - 1)
            timer.exclude(profiler.end(step, state))
            log.advance(step)

            due, is_last, evaluation = reports.are_due(step), step == config.steps, None
            # A signal may reach only one process, but all must stop after the same step.
            pending.add(step, batch, metrics, agreement.reduce(signals))
            # What is due needs a state that is known not to have failed; otherwise the device is not waited for.
            if (failed := pending.read(all_steps=due)) is not None:
                return fail(failed, state, pending, checkpoints)
            if due:
                row = reports.row(step, metrics, {**pending.take_skipped(), **timer.since_restart(step)})
                evaluation = reports.log(row, state, batch)
            if is_last or pending.signal or is_due(t.checkpoint_every, step):
                # The last evaluation is on all held-out examples, but checkpoints are ranked on the same ones.
                ranked = reports.evaluate(state, t.eval_examples) if evaluation and is_last else evaluation
                val_loss = ranked.loss if ranked else None
                checkpoints.save(step, state.params, state.opt_state, pending.metadata(step, state), val_loss)
            if pending.signal and not is_last:
                return Outcome("interrupted", step, state, batch, signal=pending.signal)
            if due:
                timer.restart(step)  # evaluations, callbacks and the wait for a save are not training

        if evaluation is None and t.eval_every:  # the run had already reached its last step
            evaluation = reports.evaluate(state)
        since = pending.monitor.began if pending.monitor.noticed else 0
        return Outcome("done", config.steps, state, batch, evaluation, val_loss, diverging_since=since)


def compile_step(setup: TrainSetup, data: Dataset) -> CompiledStep:
    """Return the training step, compiled for batches of the first one's shapes."""
    if setup.config.compute.deterministic:
        check_deterministic(setup.mesh.devices.flat[0].platform)
    train_step = CompiledStep(setup, print_line)
    print_line("compiling the training step ...")
    rows = local_rows(batch_sharding(setup.mesh), setup.config.train.batch_size)
    print_line(train_step.compile(data.batch(0, rows)))
    barrier()  # processes that had the compiled step in their cache wait for the others
    return train_step


@contextmanager
def open_snapshots(start: Start, folder: Path) -> Iterator[list[Callback]]:
    """Open the run's snapshots, if it has any, and remove those of the steps that are taken again; yield the callback
    that saves them, if `train.snapshots` names steps."""
    steps, name = start.config.steps, snapshots_folder(folder)
    is_on = start.config.train.snapshots == "doubling"
    if not is_on and not (folder / name).exists():
        yield []
        return
    with CheckpointManager(folder, name) as snapshots:
        snapshots.remove_after(start.step if start.resumed else -1)

        def save(step: int, state: TrainState, batch: Batch, row: Row) -> None:
            snapshots.save(step, state.params, None, {"step": step}, None)

        doubling = [2**i for i in range(steps.bit_length())]
        yield [Callback(steps, save, at_start=True, also_at=doubling)] if is_on else []


def read_batches(setup: TrainSetup, data: Dataset, start: Start, timer: Throughput) -> tuple[Batch, Iterator[Batch]]:
    """Return the first batch on the devices, and an iterator over those of all steps, which are read ahead; `timer`
    counts the time spent waiting for them."""
    t, split = start.config.train, batch_sharding(setup.mesh)
    rows, begin = local_rows(split, t.batch_size), start.step + t.skip_batches
    stream = timer.waiting(data.stream(begin, start.config.steps + t.skip_batches, rows))
    put = lambda batch: assemble(batch, rows, t.batch_size, split)  # noqa: E731
    return put(data.batch(begin, rows)), map(put, stream)


def fail(failed: PendingStep, state: TrainState, pending: PendingSteps, checkpoints: CheckpointManager) -> Outcome:
    """Return the outcome of a failed step; if it is not finite, save the state, which it has not changed."""
    if pending.divergence is None:
        step = failed.step - 1
        checkpoints.save(step, state.params, state.opt_state, pending.metadata(step, state), None)
    return Outcome(
        "diverged" if pending.divergence else "non_finite",
        failed.step,
        state,
        failed.batch,
        divergence=pending.divergence,
        healthy=checkpoints.last_healthy_step(pending.began(failed)),
    )


class Reports:
    """Rows of the log, with the evaluations and callbacks that are due."""

    def __init__(self, setup: TrainSetup, data: Dataset, callbacks: Sequence[Callback], log: Log) -> None:
        self._setup, self._data, self._callbacks, self._log = setup, data, callbacks, log
        self._steps, self._train, self._evaluator = setup.config.steps, setup.config.train, Evaluator(setup, data)

    def are_due(self, step: int) -> bool:
        """Return True if a step has a row in the log, an evaluation, a checkpoint or a callback."""
        t = self._train
        intervals = t.log_every, t.eval_every, t.checkpoint_every, t.gradients_every
        called = any(callback.is_due(step) for callback in self._callbacks)
        return called or step == self._steps or any(is_due(every, step) for every in intervals)

    def row(self, step: int, metrics: StepMetrics, others: dict[str, float]) -> Row:
        """Return a row with a step's metrics and, at the steps that report them, the norms of parameters."""
        t, loss, learning_rate = self._train, float(metrics.loss), float(metrics.learning_rate)
        row: Row = {
            "step": step,
            "epoch": round(step / self._data.steps_per_epoch, 4),
            self._data.unit: round(step * self._data.per_step),
            "loss": loss,
            **({} if self._data.token_lengths is None else {"ppl": perplexity(loss)}),
            "lr": learning_rate,
            "grad_norm": float(metrics.grad_norm),
            "update_norm": float(metrics.update_norm),
            **others,
        }
        reported = is_due(t.report_every, step) or (t.report_every and step == FIRST_REPORT)
        is_early = step < t.gradients_every and is_doubled(t.log_every, step)
        if metrics.finite and (step == self._steps or is_due(t.gradients_every, step) or reported or is_early):
            g_R, update_R, w_R = np.asarray(metrics.norms_3R).tolist()
            rows = norm_rows(row_names(self._setup.abstract_state.params), learning_rate, g_R, w_R, update_R)
            rows = in_order(rows, self._setup.parameter_order)
            row["gradients"] = [dict(zip(ROW_KEYS, astuple(each), strict=True)) for each in rows]
        return row

    def log(self, row: Row, state: TrainState, batch: Batch) -> Evaluation | None:
        """Log a row with the results of the evaluation and the callbacks that are due; return the evaluation, which is
        on the whole validation split after the last step."""
        step, t, evaluation = row["step"], self._train, None
        is_last = step == self._steps
        if t.eval_every and (is_last or is_due(t.eval_every, step)):
            evaluation = self.evaluate(state, None if is_last else t.eval_examples)
            row |= evaluation.as_row()
        for callback in self._callbacks:
            if is_last or callback.is_due(step):
                row |= callback.call(step, state, batch, row) or {}
        self._log.row(row)
        return evaluation

    def evaluate(self, state: TrainState, n: int | None = None) -> Evaluation:
        """Return the evaluation on all held-out examples, or on `n` of them."""
        return self._evaluator(self._setup.model_params(state), n)


def is_due(every: int, step: int) -> bool:
    """Return True at every `every`-th step, or never if `every` is 0."""
    return every > 0 and step % every == 0


def is_doubled(first: int, step: int) -> bool:
    """Return True at step `first` times 1, 2, 4, 8, …, or never if `first` is 0."""
    return is_due(first, step) and (step // first).bit_count() == 1


class Throughput:
    """Timer of steps that excludes evaluations and the profiler's work."""

    def __init__(self, step: int, data: Dataset) -> None:
        self._data = data
        self.restart(step)

    def restart(self, step: int) -> None:
        """Restart the timer after a step."""
        self._began, self._step = time.perf_counter(), step
        self._data_wait = 0.0

    def exclude(self, seconds: float) -> None:
        """Exclude some of the time since the restart."""
        self._began += seconds

    def waiting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches, and count the time spent waiting for them."""
        while True:
            began = time.perf_counter()
            with jax.profiler.TraceAnnotation("data wait"):
                batch = next(batches)
            self._data_wait += time.perf_counter() - began
            yield batch

    def since_restart(self, step: int) -> dict[str, float]:
        """Return means over the steps since the restart: milliseconds per step, throughput, and data wait in
        milliseconds."""
        n, elapsed = step - self._step, time.perf_counter() - self._began
        return {
            "step_ms": 1e3 * elapsed / n,
            f"{self._data.unit}_per_s": self._data.per_step * n / elapsed,
            "data_wait_ms": 1e3 * self._data_wait / n,
        }
