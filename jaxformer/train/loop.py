"""The training loop."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.checkpoints import CheckpointManager
from jaxformer.config import Config
from jaxformer.data.dataset import Batch, Dataset
from jaxformer.distributed import AsyncMax, barrier, is_main_process
from jaxformer.errors import UserError
from jaxformer.parameters import norm_rows, row_names
from jaxformer.runs import write_config
from jaxformer.sharding import assemble, batch_split, local_rows, place, replicated
from jaxformer.signals import record_signals
from jaxformer.train.divergence import HISTORY_STEPS, Divergence, DivergenceMonitor, Mover, chance_loss, first_to_move
from jaxformer.train.evaluate import Evaluation, Evaluator, perplexity
from jaxformer.train.log import Log, Sink, say, truncate_log
from jaxformer.train.optimizer import make_schedule, updates_taken
from jaxformer.train.remedies import remedies
from jaxformer.train.sinks import discard_wandb_run, open_sinks
from jaxformer.train.step import CompiledStep, TrainState, abstract_state, allowed_failures, init_state

FIRST_REPORT = 100
"""The step of the first samples and update ratios, where the others come later."""


@dataclass(frozen=True)
class Callback:
    """Something to do on the way: `call(step, state, batch, row)` after every `every`-th step, after step `also_at` and
    after the last; `at_start` also before the first. What it returns joins the step's row of metrics, of which it is
    given what there is already. The batch is the one that the step learned from, on the devices."""

    every: int
    call: Callable[[int, TrainState, Batch, dict[str, Any]], dict[str, Any] | None]
    at_start: bool = False
    also_at: int = 0

    def due(self, step: int) -> bool:
        """Return whether it is called after a step that is not the last."""
        return (is_due(self.every, step) or step == self.also_at) if step else self.at_start


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    status: Literal["done", "interrupted", "non_finite", "diverged"]
    step: int
    """Steps taken; for 'non_finite', of which the last was not applied; for 'diverged', when it was noticed."""
    state: TrainState
    batch: Batch
    """What that step was given."""
    evaluation: Evaluation | None = None
    """On all that is held out, once done; None without evaluations."""
    val_loss: float | None = None
    """On the part of it that evaluations on the way take, in nats; None unless the last step was taken just now."""
    signal: int = 0
    """The signal that interrupted."""
    divergence: Divergence | None = None
    """Of 'diverged'."""
    mover: Mover | None = None
    """The parameter that moved first as the loss left its minimum; None if none stands out."""
    healthy: int = 0
    """The step of the last checkpoint from before that; 0 if there is none."""
    diverging_since: int = 0
    """Of 'done', the step at which the loss left its minimum, if that was a divergence that has not ended."""


@dataclass(frozen=True)
class Rollback:
    """Going back to a checkpoint, to go on from there in another way."""

    step: int
    """Of the checkpoint; 0 is the start, which needs none."""
    skip_batches: int = 0
    """Batches to leave out from there on, besides those left out until then."""
    changes: str = ""
    """Options that differ from there on, for the log."""


def train(
    config: Config, data: Dataset, folder: Path, mesh: Mesh, callbacks: Sequence[Callback], resume: bool = False,
    allow_changed_data: bool = False, sinks: Sequence[Sink] = (), rollback: Rollback | None = None,
) -> Outcome:  # fmt: skip
    """Train until `config.steps`, an interruption, a loss that is not finite, or one that diverges. Saves on every way
    out but the last, of which the checkpoints from before are kept.

    With `resume` it goes on from the folder's last checkpoint, or from the start if there is none, and everything
    after that is the same to the last bit as if the run had never stopped. Data that has changed since is refused,
    or with `allow_changed_data` noted in the log.

    Of several processes, all call this; only the first writes, but for checkpoints, which they write together.

    Args:
      rollback: with `resume`, go on from another checkpoint than the last. Later checkpoints and rows of the log are
        removed once that checkpoint, the config and the data are verified.
      sinks: what takes the rows of the log besides its file and what `config.train.log_to` names.

    Raises:
      UserError: data or config do not fit each other, the devices or, with `resume`, the run; the run's folder
        cannot be written, or another process trains in it.
    """
    t, split = config.train, batch_split(mesh)
    schedule = make_schedule(config.optimizer, config.steps)
    held, agreement = local_rows(split, t.batch_size), AsyncMax(mesh)
    train_step = CompiledStep(config, mesh, data.batch(0, held), say)
    names = row_names(abstract_state(config, mesh).params)
    evaluate = Evaluator(config, mesh, data)
    whole: Evaluation | None = None
    barrier()  # some may have found the compiled step in their cache

    # The signals are caught until the last save is finished.
    with (
        record_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as caught,
        CheckpointManager(folder) as checkpoints,
    ):
        resumed, changed, skipped = resume and bool(checkpoints), False, 0
        if rollback is not None:
            resumed = rollback.step > 0
        if resumed:
            start, state, position = _restore(checkpoints, config, mesh, rollback.step if rollback else "last")
            skipped = position.get("skipped", 0)  # a run from before it was stored lacks it
            changed = position["fingerprint"] != data.fingerprint
            if changed and not allow_changed_data:
                raise UserError(
                    f"the data is not what this run was trained on: its content or split has changed since, it is "
                    f"{data.describe()}; restore it, start a new run, or go on regardless with --allow-changed-data."
                )
        else:
            start, state, position = 0, init_state(config, mesh), {}
        notes = [f"the data is not what it was before; now it is {data.describe()}"] if changed else []
        if rollback is not None:
            t = replace(t, skip_batches=position.get("skip_batches", t.skip_batches) + rollback.skip_batches)
            config = replace(config, train=t)
            removed = checkpoints.remove_after(start)
            if is_main_process():
                discard_wandb_run(folder)
            notes.append(_describe(rollback, t.skip_batches, removed))
        if resume and is_main_process():
            if resumed or rollback is not None:
                write_config(folder, config)
            truncate_log(folder, start if resumed else -1)
        monitor = DivergenceMonitor.restore(
            None if changed else position.get("monitor"), chance_loss(config.model), stops=t.divergence == "stop"
        )

        def save(step: int, val_loss: float | None = None) -> None:
            # A run that stopped at such a step may try it again, with other options.
            failures = min(int(state.failures), allowed_failures(config))
            position = {
                "step": step, "fingerprint": data.fingerprint, "failures": failures, "skipped": skipped,
                "skip_batches": t.skip_batches, "healthy": monitor.healthy, "monitor": monitor.as_dict(),
            }  # fmt: skip
            checkpoints.save(step, state.params, state.opt_state, position, val_loss)

        def measure(step: int, batch: Batch, row: dict[str, Any]) -> dict[str, Any]:
            """The row with validation and hooks, where they are due."""
            nonlocal whole
            last = step == config.steps
            if last and t.eval_every:
                whole = evaluate(state.params)
                row |= whole.as_row()
            elif is_due(t.eval_every, step):
                row |= evaluate(state.params, t.eval_examples).as_row()
            for callback in callbacks:
                if last or callback.due(step):
                    row |= callback.call(step, state, batch, row) or {}
            return row

        written = folder if is_main_process() else None
        with (
            open_sinks(written, config) as opened,
            Log(
                written, start, config.steps, [*opened, *sinks], t.show_entropy, 0 if t.eval_every else 10 * t.log_every
            ) as log,
        ):
            for note in notes:
                log.row({"step": start, "note": note})
            shift = t.skip_batches
            batch = assemble(data.batch(start + shift, held), held, t.batch_size, split)
            if not resumed:
                log.row(measure(0, batch, {"step": 0, "epoch": 0.0, data.unit: 0}))
            paces = t.log_every, t.eval_every, t.checkpoint_every, t.gradients_every
            stream = data.stream(start + shift, config.steps + shift, held)
            pace, unchecked = Pace(start, data), deque[tuple]()
            norms = deque[tuple[int, jax.Array]](maxlen=HISTORY_STEPS)

            def ended(status: Literal["non_finite", "diverged"], divergence: Divergence | None = None) -> Outcome:
                began = divergence.began if divergence else monitor.began or checked
                mover = first_to_move(names, [(step, np.asarray(x)) for step, x in norms], began, schedule)
                healthy = checkpoints.last_healthy_step(began)
                return Outcome(status, checked, state, its_batch, divergence=divergence, mover=mover, healthy=healthy)

            in_a_row, stop = int(state.failures), 0
            ranked: float | None = None
            row: dict[str, Any]
            for step in range(start + 1, config.steps + 1):
                with pace.waiting():
                    rows = next(stream)
                batch = assemble(rows, held, t.batch_size, split)
                state, metrics = train_step(state, batch, step - 1)
                log.advance(step)
                last = step == config.steps
                due = (
                    last
                    or any(is_due(every, step) for every in paces)
                    or any(callback.due(step) for callback in callbacks)
                )
                # Looking at the step before keeps the device busy with this one meanwhile. Looking late loses
                # nothing: from a step that broke on, the state stays as it was.
                unchecked.append((step, batch, metrics, agreement.ask(caught.number)))
                while len(unchecked) > (0 if due or stop else 1):
                    checked, its_batch, its_metrics, signalled = unchecked.popleft()
                    stop = stop or int(signalled)
                    norms.append((checked, its_metrics.norms_3R))
                    if its_metrics.finite:
                        in_a_row, was_noticed = 0, monitor.noticed
                        loss, grad_norm = float(its_metrics.loss), float(its_metrics.grad_norm)
                        divergence = monitor.update(checked, loss, grad_norm)
                        if divergence is not None and t.divergence == "stop":
                            row = {"step": checked, "loss": loss, "grad_norm": grad_norm}
                            row |= {"update_norm": float(its_metrics.update_norm), "diverged": asdict(divergence)}
                            log.row(row)
                            return ended("diverged", divergence)
                        if t.divergence == "warn" and monitor.noticed != was_noticed:
                            warning = {"warning": f"{divergence}; what usually helps: {remedies(config)}"}
                            back = {"note": "the loss has come back near its minimum"}
                            log.row({"step": checked, **(warning if divergence else back)})
                        continue
                    in_a_row += 1
                    if in_a_row > allowed_failures(config):
                        save(checked - 1)
                        return ended("non_finite")
                    skipped += 1
                    say(f"step {checked:,} is not finite and was left out, {in_a_row} in a row")
                row = {}
                if due:
                    loss = float(metrics.loss)
                    # A step that was left out leaves its learning rate to the next.
                    lr = float(schedule(int(updates_taken(state.opt_state)) - bool(metrics.finite)))
                    row = {
                        "step": step,
                        "epoch": round(step / data.steps_per_epoch, 4),
                        data.unit: round(step * data.per_step),
                        "loss": loss,
                        **({} if data.token_lengths is None else {"ppl": perplexity(loss)}),
                        "lr": lr,
                        "grad_norm": float(metrics.grad_norm),
                        "update_norm": float(metrics.update_norm),
                        **({"skipped": skipped} if skipped else {}),
                        **pace.lap(step),
                    }
                    reported = is_due(t.report_every, step) or (t.report_every and step == FIRST_REPORT)
                    if metrics.finite and (last or is_due(t.gradients_every, step) or reported):
                        g_R, update_R, w_R = np.asarray(metrics.norms_3R).tolist()
                        row["gradients"] = [asdict(each) for each in norm_rows(names, lr, g_R, w_R, update_R)]
                    measure(step, batch, row)
                    log.row(row)
                    skipped = 0
                if last or stop or is_due(t.checkpoint_every, step):
                    # The last row holds the loss on all that is held out; checkpoints are ranked by the same part.
                    ranked = evaluate(state.params, t.eval_examples).loss if whole else row.get("val_loss")
                    save(step, ranked)
                if stop and not last:
                    return Outcome("interrupted", step, state, batch, signal=stop)
                if due:
                    pace.restart(step)
            if whole is None and t.eval_every:  # it was at its end before
                whole = evaluate(state.params)
        diverging_since = (monitor.sank or monitor.began) if monitor.noticed else 0
        return Outcome("done", config.steps, state, batch, whole, ranked, diverging_since=diverging_since)


def is_due(every: int, step: int) -> bool:
    """Return whether what happens after every `every`-th step, never where that is 0, happens after a step."""
    return every > 0 and step % every == 0


class Pace:
    """Times steps, without what is measured between them."""

    def __init__(self, step: int, data: Dataset) -> None:
        self._data = data
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin a lap after a step."""
        self._began, self._step, self._waited = time.perf_counter(), step, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        before = time.perf_counter()
        yield
        self._waited += time.perf_counter() - before

    def lap(self, step: int) -> dict[str, float]:
        """Means over the steps of this lap."""
        n, elapsed = step - self._step, time.perf_counter() - self._began
        return {
            "step_ms": 1e3 * elapsed / n,
            f"{self._data.unit}_per_s": self._data.per_step * n / elapsed,
            "data_wait_ms": 1e3 * self._waited / n,
        }


def _describe(rollback: Rollback, skip_batches: int, removed: Sequence[int]) -> str:
    parts = [f"rolled back to step {rollback.step:,}", rollback.changes]
    if rollback.skip_batches:
        parts.append(f"{rollback.skip_batches:,} batches left out, {skip_batches:,} in all")
    if removed:
        parts.append(f"checkpoints removed: {', '.join(map(str, removed))}")
    return "; ".join(filter(None, parts))


def _restore(
    checkpoints: CheckpointManager, config: Config, mesh: Mesh, which: str | int = "last"
) -> tuple[int, TrainState, dict[str, Any]]:
    """Step and state of a checkpoint, laid out for this mesh, and what else was stored about it."""
    step = checkpoints.step(which)
    if step > config.steps:
        raise UserError(f"the run has taken {step} steps already; steps is {config.steps}, and must be at least that.")
    like = abstract_state(config, mesh)
    params, opt_state, position = checkpoints.restore(step, like.params, like.opt_state)
    failures = place(np.array(position["failures"], np.int32), replicated(mesh))
    return step, TrainState(params, opt_state, failures), position
