"""Steps that were started and whose metrics are not read yet; reading them finds failures, divergences and signals."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from typing import NamedTuple, SupportsInt

import jax

from jaxformer.data.dataset import Batch, Dataset
from jaxformer.runs.checkpoints import Metadata
from jaxformer.train.divergence import Divergence
from jaxformer.train.hints import hint_text
from jaxformer.train.log import Log, print_line
from jaxformer.train.resume import Start
from jaxformer.train.setup import TrainState
from jaxformer.train.step import StepMetrics, allowed_failures

SLOW_STEP_MS = 2000
"""Time of a step from which on the pause of the device between two steps does not matter."""


class PendingStep(NamedTuple):
    """A step whose metrics are not read yet, so that the device may still be computing it."""

    step: int
    batch: Batch
    metrics: StepMetrics
    signal: SupportsInt
    """Number of a signal that any process had received by then, or by now for a single process; 0 for none."""


class PendingSteps:
    """Queue of the pending steps, and what the metrics read so far have shown.

    Reading metrics one step late keeps the device busy with the last step, and is safe: once too many steps have
    failed, the state no longer changes. Slow steps are read at once, so that a signal ends training after the current
    one.
    """

    def __init__(self, data: Dataset, start: Start, log: Log) -> None:
        self.signal = 0
        """Number of the signal that ends training; 0 for none."""
        self.divergence: Divergence | None = None
        """Divergence that ends training."""
        self.monitor, self._n_skipped, self._failures = start.monitor, start.skipped, int(start.state.failures)
        self._data, self._config, self._log = data, start.config, log
        self._steps = deque[PendingStep]()
        self._is_slow, self._read_at = False, time.perf_counter()

    def add(self, step: int, batch: Batch, metrics: StepMetrics, signal: SupportsInt) -> None:
        """Add a step that was just started."""
        self._steps.append(PendingStep(step, batch, metrics, signal))

    def read(self, all_steps: bool) -> PendingStep | None:
        """Read the metrics of all steps but the last, or of all; return a step that ends training, if there is one:
        at `divergence`, or after too many non-finite steps."""
        at_once = self._is_slow and jax.process_count() == 1  # several processes could disagree
        while len(self._steps) > (0 if all_steps or self.signal or at_once else 1):
            done = self._steps.popleft()
            is_failure = self._read_loss(done) if done.metrics.finite else self._count_failure(done.step)
            self.signal = self.signal or int(done.signal)
            if is_failure:
                return done
            self._time(done.step)
        return None

    def take_skipped(self) -> dict[str, int]:
        """Return the number of non-finite steps skipped since the last call, for the log; `{}` for none."""
        n, self._n_skipped = self._n_skipped, 0
        return {"skipped": n} if n else {}

    def metadata(self, step: int, state: TrainState) -> Metadata:
        """Return what a checkpoint stores for a resumed run to continue like an uninterrupted one."""
        return {
            "step": step,
            "fingerprint": self._data.fingerprint,
            # A run that stopped at a non-finite step may retry it with other options.
            "failures": min(int(state.failures), allowed_failures(self._config)),
            "skipped": self._n_skipped,
            "skip_batches": self._config.train.skip_batches,
            "healthy": self.monitor.healthy,
            "monitor": self.monitor.as_dict(),
        }

    def began(self, failed: PendingStep) -> int:
        """Return the step at which the loss left its minimum."""
        return self.divergence.began if self.divergence else self.monitor.began or failed.step

    def _read_loss(self, done: PendingStep) -> bool:
        """Monitor the loss; return True at a divergence that ends training, or log a warning, as set by
        `train.divergence`."""
        self._failures, was_noticed, policy = 0, self.monitor.noticed, self._config.train.divergence
        loss, grad_norm = float(done.metrics.loss), float(done.metrics.grad_norm)
        divergence = self.monitor.update(done.step, loss, grad_norm)
        if divergence is not None and policy == "stop":
            self.divergence = divergence
            row = {"step": done.step, "loss": loss, "grad_norm": grad_norm}
            self._log.row({**row, "update_norm": float(done.metrics.update_norm), "diverged": asdict(divergence)})
        elif policy == "warn" and self.monitor.noticed != was_noticed:
            warning = {"warning": f"{divergence}; what usually helps: {hint_text(self._config)}"}
            recovery = {"note": "the loss has recovered to near its minimum"}
            self._log.row({"step": done.step, **(warning if divergence else recovery)})
        return self.divergence is not None

    def _count_failure(self, step: int) -> bool:
        """Count a non-finite step; return True after too many in a row."""
        self._failures += 1
        if self._failures > allowed_failures(self._config):
            return True
        self._n_skipped += 1
        print_line(f"step {step:,} was skipped: loss or gradient is not finite ({self._failures} in a row)")
        return False

    def _time(self, step: int) -> None:
        """Note whether steps are slow; if two in a row are, print an estimate of the time left."""
        now, was_slow = time.perf_counter(), self._is_slow
        step_ms, self._read_at = 1e3 * (now - self._read_at), now
        self._is_slow = step_ms >= SLOW_STEP_MS
        if self._is_slow and was_slow:  # a single one may have waited for data
            self._log.estimate(step, step_ms)
