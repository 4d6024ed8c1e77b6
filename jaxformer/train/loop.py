"""The training loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsInt

import jax
import numpy as np

from jaxformer.data.dataset import Batch, Dataset
from jaxformer.nn.parameter_norms import in_order, norm_rows, row_names
from jaxformer.parallel.determinism import check_deterministic
from jaxformer.parallel.mesh import assemble, batch_sharding, local_rows
from jaxformer.parallel.processes import AsyncMax, barrier, is_main_process
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.train.divergence import HISTORY_STEPS, Divergence, Mover, first_to_move
from jaxformer.train.evaluate import Evaluation, Evaluator, perplexity
from jaxformer.train.log import Log, Sink, print_line
from jaxformer.train.profile import Profiler
from jaxformer.train.remedies import remedies
from jaxformer.train.resume import Rollback, Start, find_start
from jaxformer.train.setup import TrainSetup, TrainState
from jaxformer.train.signals import STOPPING, record_signals
from jaxformer.train.sinks import open_sinks
from jaxformer.train.step import CompiledStep, StepMetrics, allowed_failures

SLOW_STEP_MS = 2000
"""Time of a step from which on the pause of the device between two steps does not matter."""
FIRST_REPORT = 100
"""Step of the first samples and update ratios, before those at the regular interval."""


@dataclass(frozen=True)
class Callback:
    """Function that training calls as `call(step, state, batch, row)` after every `every`-th step, after step
    `also_at` and after the last; with `at_start` also before the first.

    The row holds the step's metrics so far, and the entries that `call` returns are added to it. The batch is the one
    that the step was trained on, on the devices.
    """

    every: int
    call: Callable[[int, TrainState, Batch, dict[str, Any]], dict[str, Any] | None]
    at_start: bool = False
    also_at: int = 0

    def is_due(self, step: int) -> bool:
        """Return True if the callback is called after a step other than the last."""
        return (is_due(self.every, step) or step == self.also_at) if step else self.at_start


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
    mover: Mover | None = None
    """Parameter that moved first when the loss left its minimum; None if none stands out."""
    healthy: int = 0
    """Step of the last checkpoint before the loss left its minimum; 0 if there is none."""
    diverging_since: int = 0
    """For 'done', the step at which the loss left its minimum, if it is still diverging; 0 otherwise."""


def train(
    setup: TrainSetup, data: Dataset, folder: Path, callbacks: Sequence[Callback] = (), resume: bool = False,
    allow_changed_data: bool = False, sinks: Sequence[Sink] = (), rollback: Rollback | None = None,
) -> Outcome:  # fmt: skip
    """Train until `config.steps`, an interruption, a non-finite loss, or a divergence; return the outcome.

    The last state is saved, except after a divergence, where the earlier checkpoints remain.

    With `resume`, training continues from the folder's last checkpoint, or from the start if there is none, and is
    bit-identical to a run that was never interrupted. Data that has changed since is refused, or with
    `allow_changed_data` noted in the log.

    Every process must call this function. Only the first writes files, except checkpoints, which all write together.

    Args:
      rollback: with `resume`, continue from a checkpoint other than the last. Later checkpoints and rows of the log
        are removed once that checkpoint, the config and the data are verified.
      sinks: receivers of the log's rows, in addition to its file and the sinks in `config.train.log_to`.

    Raises:
      UserError: data and config do not fit each other, the devices or, with `resume`, the run; the run's folder
        cannot be written; or another process is training in it.
    """
    if setup.config.compute.deterministic:
        check_deterministic(setup.mesh.devices.flat[0].platform)
    rows = local_rows(batch_sharding(setup.mesh), setup.config.train.batch_size)
    train_step = CompiledStep(setup, print_line)
    print_line("compiling the training step ...")
    print_line(train_step.compile(data.batch(0, rows)))
    evaluate = Evaluator(setup, data)
    barrier()  # processes that had the compiled step in their cache wait for the others
    with ExitStack() as stack:
        # Signals are recorded until the last save is finished.
        signals = stack.enter_context(record_signals(*STOPPING))
        checkpoints = stack.enter_context(CheckpointManager(folder))
        start = find_start(setup, data, folder, checkpoints, resume, allow_changed_data, rollback)
        if start.resumed and rollback is None:
            print_line(f"resumed from step {start.step:,}")
        t, written = start.config.train, folder if is_main_process() else None
        sinks = [*stack.enter_context(open_sinks(written, start.config)), *sinks]
        show_every = 0 if t.eval_every else 10 * t.log_every
        log = stack.enter_context(Log(written, start.step, setup.config.steps, sinks, t.show_entropy, show_every))
        profiler = stack.enter_context(Profiler(folder, t.profiled_steps, start.step, print_line))
        agreement = AsyncMax(setup.mesh)
        loop = TrainLoop(
            setup, data, start, train_step, evaluate, callbacks, checkpoints, log, profiler,
            lambda: agreement.reduce(signals),
        )  # fmt: skip
        return loop.run()


class Unchecked(NamedTuple):
    """A step that was started but not yet checked."""

    step: int
    batch: Batch
    metrics: StepMetrics
    signal: SupportsInt
    """Number of a signal that any process had received by then, or by now for a single process; 0 for none."""


class TrainLoop:
    """Training loop and the objects it uses; `run` is the loop, and the other methods are its parts."""

    def __init__(
        self, setup: TrainSetup, data: Dataset, start: Start, train_step: CompiledStep, evaluate: Evaluator,
        callbacks: Sequence[Callback], checkpoints: CheckpointManager, log: Log, profiler: Profiler,
        received_signal: Callable[[], SupportsInt],
    ) -> None:  # fmt: skip
        """Start reading the data.

        Args:
          received_signal: returns the number of a signal that any process has received, or 0.
        """
        self.setup, self.config, self.data, self.start = setup, start.config, data, start
        self.train_step, self.evaluate, self.callbacks = train_step, evaluate, callbacks
        self.checkpoints, self.log, self.profiler, self.received_signal = checkpoints, log, profiler, received_signal
        self.state, self.monitor, self.n_skipped = start.state, start.monitor, start.skipped
        self.names = row_names(setup.abstract_state.params)
        self.split = batch_sharding(setup.mesh)
        self.rows = local_rows(self.split, self.config.train.batch_size)
        shift = self.config.train.skip_batches
        self.batch = self._assemble(data.batch(start.step + shift, self.rows))
        self.stream = data.stream(start.step + shift, self.config.steps + shift, self.rows)
        self.throughput = Throughput(start.step, data)
        self.unchecked = deque[Unchecked]()
        self.norms = deque[tuple[int, jax.Array]](maxlen=HISTORY_STEPS)
        self.failures, self.signal = int(start.state.failures), 0
        self.is_slow, self.checked_at = False, time.perf_counter()
        self.evaluation: Evaluation | None = None
        self.val_loss: float | None = None

    def run(self) -> Outcome:
        """Train to the last step, or until a signal, a failure or a divergence."""
        self._log_start()
        for step in range(self.start.step + 1, self.config.steps + 1):
            self.throughput.exclude(self.profiler.begin(step, self.state))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                self.batch = self._next_batch()
                self.state, metrics = self.train_step(self.state, self.batch, step - 1)
            self.throughput.exclude(self.profiler.end(step, self.state))
            self.log.advance(step)
            due = self._is_due(step)
            self.unchecked.append(Unchecked(step, self.batch, metrics, self.received_signal()))
            if (failure := self._check(all_steps=due)) is not None:
                return failure
            row = self._log_step(step, metrics) if due else {}
            if step == self.config.steps or self.signal or is_due(self.config.train.checkpoint_every, step):
                self._save(step, row)
            if self.signal and step < self.config.steps:
                return Outcome("interrupted", step, self.state, self.batch, signal=self.signal)
            if due:
                self.throughput.restart(step)
        return self._finish()

    def _next_batch(self) -> Batch:
        """Return the next batch on the devices, and count the time spent waiting for data."""
        began = time.perf_counter()
        with jax.profiler.TraceAnnotation("data wait"):
            rows = next(self.stream)
        self.throughput.data_wait += time.perf_counter() - began
        return self._assemble(rows)

    def _assemble(self, rows: Batch) -> Batch:
        batch: Batch = assemble(rows, self.rows, self.config.train.batch_size, self.split)
        return batch

    def _is_due(self, step: int) -> bool:
        """Return True if a step has a row in the log, an evaluation, a checkpoint or a callback."""
        t = self.config.train
        intervals = t.log_every, t.eval_every, t.checkpoint_every, t.gradients_every
        return (
            step == self.config.steps
            or any(is_due(every, step) for every in intervals)
            or any(callback.is_due(step) for callback in self.callbacks)
        )

    def _check(self, all_steps: bool) -> Outcome | None:
        """Check all steps but the last, or all, for signals, failures and divergences; return the outcome if training
        ends.

        Checking one step late keeps the device busy with the last one and is safe: once too many steps have failed, the
        state no longer changes. Slow steps are checked at once, so that a signal ends training after the current one.
        """
        at_once = self.is_slow and jax.process_count() == 1  # several processes could disagree
        while len(self.unchecked) > (0 if all_steps or self.signal or at_once else 1):
            done = self.unchecked.popleft()
            self.norms.append((done.step, done.metrics.norms_3R))
            outcome = self._check_loss(done) if done.metrics.finite else self._count_failure(done)
            self.signal = self.signal or int(done.signal)
            if outcome is not None:
                return outcome
            now, was_slow = time.perf_counter(), self.is_slow
            step_ms, self.checked_at = 1e3 * (now - self.checked_at), now
            self.is_slow = step_ms >= SLOW_STEP_MS
            if self.is_slow and was_slow:  # a single one may have waited for data
                self.log.estimate(done.step, step_ms)
        return None

    def _check_loss(self, done: Unchecked) -> Outcome | None:
        """Return the outcome of a divergence, or log a warning, as set by `train.divergence`."""
        self.failures, was_noticed, policy = 0, self.monitor.noticed, self.config.train.divergence
        loss, grad_norm = float(done.metrics.loss), float(done.metrics.grad_norm)
        divergence = self.monitor.update(done.step, loss, grad_norm)
        if divergence is not None and policy == "stop":
            row: dict[str, Any] = {"step": done.step, "loss": loss, "grad_norm": grad_norm}
            row |= {"update_norm": float(done.metrics.update_norm), "diverged": asdict(divergence)}
            self.log.row(row)
            return self._failed("diverged", done, divergence)
        if policy == "warn" and self.monitor.noticed != was_noticed:
            warning = {"warning": f"{divergence}; what usually helps: {remedies(self.config)}"}
            recovery = {"note": "the loss has recovered to near its minimum"}
            self.log.row({"step": done.step, **(warning if divergence else recovery)})
        return None

    def _count_failure(self, done: Unchecked) -> Outcome | None:
        """Count a non-finite step; save the state and return the outcome after too many in a row."""
        self.failures += 1
        if self.failures > allowed_failures(self.config):
            self._save_state(done.step - 1, None)
            return self._failed("non_finite", done)
        self.n_skipped += 1
        print_line(f"step {done.step:,} was skipped: loss or gradient is not finite ({self.failures} in a row)")
        return None

    def _failed(
        self, status: Literal["non_finite", "diverged"], done: Unchecked, divergence: Divergence | None = None
    ) -> Outcome:
        began = divergence.began if divergence else self.monitor.began or done.step
        norms = [(step, np.asarray(norms_3R)) for step, norms_3R in self.norms]
        mover = first_to_move(self.names, norms, began, self.setup.schedule)
        healthy = self.checkpoints.last_healthy_step(began)
        return Outcome(
            status, done.step, self.state, done.batch, divergence=divergence, mover=mover, healthy=healthy
        )  # fmt: skip

    def _log_start(self) -> None:
        """Log the notes and, for a fresh state, a row for step 0."""
        for note in self.start.notes:
            self.log.row({"step": self.start.step, "note": note})
        if not self.start.resumed:
            self.log.row(self._measure(0, {"step": 0, "epoch": 0.0, self.data.unit: 0}))
        self.throughput.restart(self.start.step)

    def _log_step(self, step: int, metrics: StepMetrics) -> dict[str, Any]:
        """Log a row with the step's metrics, norms, evaluation and callbacks, and return it."""
        t, loss, learning_rate = self.config.train, float(metrics.loss), float(metrics.learning_rate)
        row: dict[str, Any] = {
            "step": step,
            "epoch": round(step / self.data.steps_per_epoch, 4),
            self.data.unit: round(step * self.data.per_step),
            "loss": loss,
            **({} if self.data.token_lengths is None else {"ppl": perplexity(loss)}),
            "lr": learning_rate,
            "grad_norm": float(metrics.grad_norm),
            "update_norm": float(metrics.update_norm),
            **({"skipped": self.n_skipped} if self.n_skipped else {}),
            **self.throughput.since_restart(step),
        }
        reported = is_due(t.report_every, step) or (t.report_every and step == FIRST_REPORT)
        is_early = step < t.gradients_every and is_doubled(t.log_every, step)
        if metrics.finite and (step == self.config.steps or is_due(t.gradients_every, step) or reported or is_early):
            g_R, update_R, w_R = np.asarray(metrics.norms_3R).tolist()
            rows = norm_rows(self.names, learning_rate, g_R, w_R, update_R)
            row["gradients"] = [asdict(each) for each in in_order(rows, self.setup.parameter_order)]
        self.log.row(self._measure(step, row))
        self.n_skipped = 0
        return row

    def _measure(self, step: int, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row with the results of the evaluation and the callbacks that are due."""
        t, last = self.config.train, step == self.config.steps
        if last and t.eval_every:
            self.evaluation = self.evaluate(self.setup.model_params(self.state))
            row |= self.evaluation.as_row()
        elif is_due(t.eval_every, step):
            row |= self.evaluate(self.setup.model_params(self.state), t.eval_examples).as_row()
        for callback in self.callbacks:
            if last or callback.is_due(step):
                row |= callback.call(step, self.state, self.batch, row) or {}
        return row

    def _save(self, step: int, row: dict[str, Any]) -> None:
        """Save a checkpoint, ranked by the loss on the examples of a periodic evaluation."""
        if self.evaluation is None:
            self.val_loss = row.get("val_loss")
        else:  # the last row has the loss on the whole validation split
            self.val_loss = self.evaluate(self.setup.model_params(self.state), self.config.train.eval_examples).loss
        self._save_state(step, self.val_loss)

    def _save_state(self, step: int, val_loss: float | None) -> None:
        # A run that stopped at a non-finite step may retry it with other options.
        failures = min(int(self.state.failures), allowed_failures(self.config))
        position = {
            "step": step, "fingerprint": self.data.fingerprint, "failures": failures, "skipped": self.n_skipped,
            "skip_batches": self.config.train.skip_batches, "healthy": self.monitor.healthy,
            "monitor": self.monitor.as_dict(),
        }  # fmt: skip
        self.checkpoints.save(step, self.state.params, self.state.opt_state, position, val_loss)

    def _finish(self) -> Outcome:
        if self.evaluation is None and self.config.train.eval_every:  # the run had already reached its last step
            self.evaluation = self.evaluate(self.setup.model_params(self.state))
        diverging_since = self.monitor.began if self.monitor.noticed else 0
        return Outcome(
            "done", self.config.steps, self.state, self.batch, self.evaluation, self.val_loss,
            diverging_since=diverging_since,
        )  # fmt: skip


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
        self.data_wait = 0.0
        """Seconds spent waiting for data since the restart."""

    def exclude(self, seconds: float) -> None:
        """Exclude some of the time since the restart."""
        self._began += seconds

    def since_restart(self, step: int) -> dict[str, float]:
        """Return means over the steps since the restart: milliseconds per step, throughput, and data wait in
        milliseconds."""
        n, elapsed = step - self._step, time.perf_counter() - self._began
        return {
            "step_ms": 1e3 * elapsed / n,
            f"{self._data.unit}_per_s": self._data.per_step * n / elapsed,
            "data_wait_ms": 1e3 * self.data_wait / n,
        }
