"""The training loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.data.corpus import Corpus
from jaxformer.data.windows import Windows
from jaxformer.errors import UserError
from jaxformer.runs import Checkpoints
from jaxformer.sharding import batch_split, replicated
from jaxformer.train.evaluate import Evaluation, Evaluator, perplexity
from jaxformer.train.log import Log, cut_metrics
from jaxformer.train.optimizer import make_optimizer, make_schedule
from jaxformer.train.step import TrainState, init_state, make_train_step


@dataclass(frozen=True)
class Hook:
    """Something to do on the way: `call(step, state, batch)` after every `every`-th step, and after the last;
    `at_start` also before the first. What it returns joins the step's row of metrics."""

    every: int
    call: Callable[[int, TrainState, np.ndarray], dict[str, Any] | None]
    at_start: bool = False


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    status: Literal["done", "interrupted", "non_finite"]
    step: int
    """Steps taken; for 'non_finite', of which the last was not applied."""
    state: TrainState
    batch: np.ndarray
    """What the last step was given."""
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
    config: Config, corpus: Corpus, folder: Path, mesh: Mesh, hooks: Sequence[Hook], resume: bool = False
) -> Outcome:
    """Train until `config.steps`, an interruption, or a loss that is not finite. Saves on every way out.

    With `resume` it goes on from the folder's last checkpoint, and everything after that is the same to the
    last bit as if the run had never stopped.
    """
    windows = make_windows(config, corpus)
    model = config.model.build()
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = make_schedule(config.optimizer, config.steps)
    train_step = make_train_step(config, model, optimizer, mesh)
    evaluate = Evaluator(
        model, config.model, corpus.val.tokens, corpus.tokenizer.token_lengths, config.train.batch_size, mesh
    )
    split, t = batch_split(mesh), config.train
    tokens_per_step = t.batch_size * (windows.length - 1)

    with Checkpoints(folder) as checkpoints, catch_signals() as caught:
        start, val_loss = 0, None
        if resume:
            start, state, val_loss = _restore(checkpoints, config, model, optimizer, mesh, corpus)
            cut_metrics(folder, start)
        else:
            state = init_state(config, model, optimizer, mesh)

        def measure(step: int, state: TrainState, batch: np.ndarray, last: bool) -> dict[str, Any]:
            nonlocal val_loss, evaluation
            row: dict[str, Any] = {}
            if step % t.eval_every == 0 or last:
                evaluation = evaluate(state.params, None if last else t.eval_windows)
                val_loss = evaluation.loss
                row |= {"val_loss": val_loss, "val_ppl": evaluation.perplexity}
                row |= {"val_bpb": evaluation.bits_per_byte, "val_tokens": evaluation.tokens}
            for hook in hooks:
                if (step % hook.every == 0 and (step or hook.at_start)) or last:
                    row |= hook.call(step, state, batch) or {}
            return row

        def save(step: int, state: TrainState) -> None:
            position = {"step": step, "fingerprint": corpus.fingerprint, "val_loss": val_loss}
            checkpoints.save(step, state.params, state.opt_state, position, val_loss)

        def ended(status: Literal["done", "interrupted", "non_finite"], step: int) -> Outcome:
            return Outcome(status, step, state, batch, evaluation if status == "done" else None, caught.number)

        evaluation: Evaluation | None = None
        batch = windows[min(start, config.steps - 1)]
        with Log(folder, start, config.steps) as log:
            if start == 0:
                log.row({"step": 0, "epoch": 0.0, "tokens": 0, **measure(0, state, batch, last=False)})
            if start >= config.steps:
                evaluation = evaluate(state.params)
                return ended("done", start)
            stream = windows.stream(start, config.steps)
            since, steps_since, waited = time.perf_counter(), 0, 0.0
            healthy = state.healthy
            for step in range(start + 1, config.steps + 1):
                before_wait = time.perf_counter()
                previous, batch = batch, next(stream)
                waited += time.perf_counter() - before_wait
                was_healthy = healthy
                state, loss = train_step(state, jax.device_put(batch, split), step - 1)
                healthy, steps_since = state.healthy, steps_since + 1
                # Looking at the step before keeps this one running meanwhile; a step that breaks leaves the
                # state as it was, so that nothing is lost by looking late.
                if not was_healthy:
                    batch = previous
                    save(step - 2, state)
                    return ended("non_finite", step - 1)
                last = step == config.steps
                log.advance(step)
                if step % t.log_every == 0 or step % t.eval_every == 0 or last:
                    if not healthy:
                        save(step - 1, state)
                        return ended("non_finite", step)
                    loss_now, elapsed = float(loss), time.perf_counter() - since
                    row = {
                        "step": step,
                        "epoch": round(step / windows.steps_per_epoch, 4),
                        "tokens": step * tokens_per_step,
                        "loss": loss_now,
                        "ppl": perplexity(loss_now),
                        "lr": float(schedule(step - 1)),
                        "step_ms": 1e3 * elapsed / steps_since,
                        "tokens_per_s": tokens_per_step * steps_since / elapsed,
                        "data_wait_ms": 1e3 * waited / steps_since,
                    }
                    log.row(row | measure(step, state, batch, last))
                    since, steps_since, waited = time.perf_counter(), 0, 0.0
                elif any(step % hook.every == 0 for hook in hooks):
                    measure(step, state, batch, last)
                if step % t.checkpoint_every == 0 or last or caught.number:
                    if not healthy:
                        save(step - 1, state)
                        return ended("non_finite", step)
                    save(step, state)
                    if caught.number and not last:
                        return ended("interrupted", step)
            return ended("done", config.steps)


def _restore(
    checkpoints: Checkpoints, config: Config, model: Any, optimizer: Any, mesh: Mesh, corpus: Corpus
) -> tuple[int, TrainState, float | None]:
    """Step, state and last validation loss from the last checkpoint, if it was made from the same text."""
    step = checkpoints.step("last")
    like = jax.eval_shape(lambda: init_state(config, model, optimizer, mesh))
    params, opt_state, position = checkpoints.restore(step, like.params, like.opt_state, replicated(mesh))
    if position["fingerprint"] != corpus.fingerprint:
        raise UserError(
            f"the text at {config.data.path} is not what this run was trained on: its content or split has changed "
            "since; restore it, or start a new run."
        )
    healthy = jax.device_put(np.array(True), replicated(mesh))
    return step, TrainState(params, opt_state, healthy), position["val_loss"]


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
