"""The training loop."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.checkpoints import Checkpoints
from jaxformer.config import Config
from jaxformer.data.corpus import Corpus
from jaxformer.data.windows import Windows
from jaxformer.errors import UserError
from jaxformer.runs import write_config
from jaxformer.sharding import batch_split, replicated
from jaxformer.train.evaluate import Evaluation, Evaluator, perplexity
from jaxformer.train.log import Log, cut_log
from jaxformer.train.optimizer import make_optimizer, make_schedule
from jaxformer.train.step import TrainState, init_state, make_train_step


@dataclass(frozen=True)
class Hook:
    """Something to do on the way: `call(step, state, batch)` after every `every`-th step, and after the last;
    `at_start` also before the first. What it returns joins the step's row of metrics. The batch, `(B, T + 1)`, is
    the one that the step learned from, on the devices."""

    every: int
    call: Callable[[int, TrainState, jax.Array], dict[str, Any] | None]
    at_start: bool = False


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    status: Literal["done", "interrupted", "non_finite"]
    step: int
    """Steps taken; for 'non_finite', of which the last was not applied."""
    state: TrainState
    batch: jax.Array
    """What that step was given, `(B, T + 1)`."""
    evaluation: Evaluation | None = None
    """On the whole held-out text, once done."""
    signal: int = 0
    """The signal that interrupted."""


def make_windows(config: Config, corpus: Corpus) -> Windows:
    """The training windows that a config asks for."""
    length = config.model.context_length + 1
    stride = config.data.stride or config.model.context_length
    return Windows(corpus.train.tokens, length, stride, config.train.batch_size, config.seed)


def train(
    config: Config, corpus: Corpus, folder: Path, mesh: Mesh, hooks: Sequence[Hook], resume: bool = False,
    allow_changed_data: bool = False,
) -> Outcome:  # fmt: skip
    """Train until `config.steps`, an interruption, or a loss that is not finite. Saves on every way out.

    With `resume` it goes on from the folder's last checkpoint, or from the start if there is none, and everything
    after that is the same to the last bit as if the run had never stopped. Text that has changed since is refused,
    or with `allow_changed_data` noted in the log.

    Raises:
      UserError: data or config do not fit each other or, with `resume`, the run; the run's folder cannot be written,
        or another process trains in it.
    """
    model = config.model.build()
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = make_schedule(config.optimizer, config.steps)
    train_step = make_train_step(config, model, optimizer, mesh)
    t, windows, split = config.train, make_windows(config, corpus), batch_split(mesh)
    tokens_per_step = t.batch_size * config.model.context_length
    evaluate = Evaluator(model, config.model, corpus.val.tokens, corpus.tokenizer.token_lengths, t.batch_size, mesh)
    whole: Evaluation | None = None

    # The signals are caught until the last save is finished.
    with catch_signals() as caught, Checkpoints(folder) as checkpoints:
        resumed = resume and bool(checkpoints)
        if resumed:
            start, state, changed = _restore(checkpoints, config, model, optimizer, mesh, corpus)
            if changed and not allow_changed_data:
                raise UserError(
                    f"the text at {config.data.path} is not what this run was trained on: its content or split has "
                    "changed since; restore it, start a new run, or go on regardless with --allow-changed-data."
                )
            write_config(folder, config)
        else:
            start, state, changed = 0, init_state(config, model, optimizer, mesh), False
        if resume:
            cut_log(folder, start if resumed else -1)

        def save(step: int, val_loss: float | None = None) -> None:
            position = {"step": step, "fingerprint": corpus.fingerprint}
            checkpoints.save(step, state.params, state.opt_state, position, val_loss)

        def measure(step: int, batch: jax.Array) -> dict[str, Any]:
            """Validation and hooks, where they are due."""
            nonlocal whole
            row: dict[str, Any] = {}
            last = step == config.steps
            if last:
                whole = evaluate(state.params)
                row |= whole.as_row()
            elif step % t.eval_every == 0:
                row |= evaluate(state.params, t.eval_windows).as_row()
            for hook in hooks:
                if (step % hook.every == 0 and (step or hook.at_start)) or last:
                    row |= hook.call(step, state, batch) or {}
            return row

        with Log(folder, start, config.steps) as log:
            batch = jax.device_put(windows[start], split)
            if changed:
                log.row({"step": start, "note": f"the text at {config.data.path} is not what it was before"})
            if not resumed:
                log.row({"step": 0, "epoch": 0.0, "tokens": 0, **measure(0, batch)})
            paces = [t.log_every, t.eval_every, t.checkpoint_every, *(hook.every for hook in hooks)]
            stream, pace, unchecked = windows.stream(start, config.steps), Pace(), deque[tuple]()
            for step in range(start + 1, config.steps + 1):
                with pace.waiting():
                    batch = next(stream)
                batch = jax.device_put(batch, split)
                state, loss = train_step(state, batch, step - 1)
                log.advance(step)
                last, stop = step == config.steps, caught.number
                due = last or any(step % every == 0 for every in paces)
                # Checking the loss of the step before keeps the device busy with this one meanwhile. Looking
                # late loses nothing: from a step that broke on, the state stays as it was.
                unchecked.append((step, batch, loss))
                while len(unchecked) > (0 if due or stop else 1):
                    broken, its_batch, its_loss = unchecked.popleft()
                    if not np.isfinite(its_loss):
                        save(broken - 1)
                        return Outcome("non_finite", broken, state, its_batch)
                row: dict[str, Any] = {}
                if due:
                    row = {
                        "step": step,
                        "epoch": round(step / windows.steps_per_epoch, 4),
                        "tokens": step * tokens_per_step,
                        "loss": float(loss),
                        "ppl": perplexity(float(loss)),
                        "lr": float(schedule(step - 1)),
                        **pace.lap(step - start, tokens_per_step),
                    }
                    row |= measure(step, batch)
                    log.row(row)
                if last or stop or step % t.checkpoint_every == 0:
                    # The last row holds the loss on all of the text; checkpoints are ranked by the same part.
                    save(step, evaluate(state.params, t.eval_windows).loss if last else row.get("val_loss"))
                if stop and not last:
                    return Outcome("interrupted", step, state, batch, signal=stop)
                if due:
                    pace.restart(step - start)
        return Outcome("done", config.steps, state, batch, whole or evaluate(state.params))


class Pace:
    """Times steps, without what is measured between them."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, steps: int) -> None:
        """Begin a lap after so many steps."""
        self._began, self._steps, self._waited = time.perf_counter(), steps, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        before = time.perf_counter()
        yield
        self._waited += time.perf_counter() - before

    def lap(self, steps: int, tokens_per_step: int) -> dict[str, float]:
        """Means over the steps of this lap."""
        n, elapsed = steps - self._steps, time.perf_counter() - self._began
        return {
            "step_ms": 1e3 * elapsed / n,
            "tokens_per_s": tokens_per_step * n / elapsed,
            "data_wait_ms": 1e3 * self._waited / n,
        }


def _restore(
    checkpoints: Checkpoints, config: Config, model: Any, optimizer: Any, mesh: Mesh, corpus: Corpus
) -> tuple[int, TrainState, bool]:
    """Step and state of the last checkpoint, and whether the text is another than it was made from."""
    step = checkpoints.step("last")
    if step > config.steps:
        raise UserError(f"the run has taken {step} steps already; steps is {config.steps}, and must be at least that.")
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)),
        jax.eval_shape(lambda: init_state(config, model, optimizer, mesh)),
    )
    params, opt_state, position = checkpoints.restore(step, like.params, like.opt_state)
    healthy = jax.device_put(np.array(True), replicated(mesh))
    return step, TrainState(params, opt_state, healthy), position["fingerprint"] != corpus.fingerprint


class Caught:
    """The signal that came, or 0."""

    number: int = 0


@contextmanager
def catch_signals() -> Iterator[Caught]:
    """Note the first SIGINT or SIGTERM instead of dying of it; a second one acts as it always does."""
    caught = Caught()
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: object) -> None:
        caught.number = number
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
