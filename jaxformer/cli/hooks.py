"""What to look at while training: probes and generations, made into hooks of the training loop."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.data.corpus import Corpus
from jaxformer.data.windows import eval_batches
from jaxformer.decode import Sampling, generate
from jaxformer.distributed import is_first
from jaxformer.errors import writing
from jaxformer.inspect import attention_entropy
from jaxformer.inspect.gradients import Norms, parameter_norms, report_of_norms
from jaxformer.runs import SAMPLES, abstract_params, count_parameters
from jaxformer.sharding import local_copy, replicated
from jaxformer.train.log import say
from jaxformer.train.loop import Hook
from jaxformer.train.memory import capacity
from jaxformer.train.optimizer import make_optimizer, make_schedule
from jaxformer.train.step import TrainState, make_gradient

PROBE_WINDOWS = 16
"""Held-out windows that attention is looked at on."""


def make_hooks(config: Config, mesh: Mesh, corpus: Corpus, folder: Path) -> list[Hook]:
    """Attention entropy with every validation; gradient table and samples at their own pace.

    Of several processes, all must call them; the first one prints and writes.
    """
    t, gradients = config.train, Hook(config.train.report_every, _gradients(config, mesh))
    if not _can_be_copied(config, mesh):
        say("attention entropy and samples are left out: the model is too large to be copied to one device")
        return [gradients]
    return [
        Hook(t.eval_every, _entropy(config, mesh, corpus), at_start=True),
        gradients,
        Hook(t.report_every, _samples(config, mesh, corpus, folder)),
    ]


def _can_be_copied(config: Config, mesh: Mesh) -> bool:
    """Whether all parameters, and the attention weights of a block, take less than a quarter of a device's memory."""
    has = capacity(mesh.local_devices[0])
    parameters = count_parameters(abstract_params(config.model.build(), config.model))
    weights = getattr(config.model, "n_heads", 0) * config.model.context_length**2
    return has is None or 4 * (parameters + weights) < has / 4


def _entropy(config: Config, mesh: Mesh, corpus: Corpus) -> Any:
    model, length = config.model.build(), config.model.context_length
    probe_BT, weights_BT = next(eval_batches(corpus.val.tokens, length, length, PROBE_WINDOWS, PROBE_WINDOWS))
    whole = weights_BT.all(axis=1)
    probe_BT = probe_BT[whole] if whole.any() else probe_BT[:1]  # no row that only fills up

    def call(step: int, state: TrainState, batch: jax.Array) -> dict[str, Any] | None:
        entropy = attention_entropy(model, local_copy(state.params, mesh), probe_BT)
        return {"entropy": [np.asarray(heads).tolist() for heads in entropy]} if entropy else None

    return call


def _gradients(config: Config, mesh: Mesh) -> Any:
    gradient, optimizer = make_gradient(config, mesh), make_optimizer(config.optimizer, config.steps)
    schedule = make_schedule(config.optimizer, config.steps)

    @partial(jax.jit, out_shardings=replicated(mesh))
    def norms(state: TrainState, batch_BT: jax.Array, step: jax.Array) -> tuple[Norms, Norms, Norms]:
        grads = gradient(state, batch_BT, step)[1]
        updates = optimizer.update(grads, state.opt_state, state.params)[0]
        return parameter_norms(state.params), parameter_norms(grads), parameter_norms(updates)

    def call(step: int, state: TrainState, batch: jax.Array) -> dict[str, Any] | None:
        if not (lr := float(schedule(step))):
            return None  # a schedule that has come down to nothing moves nothing
        w, g, update = norms(state, batch, step)
        report = report_of_norms(w, g, lr, update)
        say(str(report))
        return {"gradients": [asdict(row) for row in report.rows]}

    return call


def _samples(config: Config, mesh: Mesh, corpus: Corpus, folder: Path) -> Any:
    model, context_length = config.model.build(), config.model.context_length
    t, tokenizer = config.train, corpus.tokenizer
    prompt = tokenizer.encode(t.sample_prompt)[-context_length:]

    def call(step: int, state: TrainState, batch: jax.Array) -> None:
        params = local_copy(state.params, mesh)
        place = folder / SAMPLES if is_first() else Path(os.devnull)
        with writing(folder, SAMPLES), place.open("a", encoding="utf-8") as file:
            for temperature in (0.5, 0.0):
                pieces = generate(
                    model, params, [prompt], Sampling(temperature), [config.seed], max_new_tokens=t.sample_tokens,
                    context_length=context_length, fill_token=tokenizer.end_of_text,
                )  # fmt: skip
                tokens = prompt + np.concatenate([piece.tokens_BN for piece in pieces], axis=1)[0].tolist()
                text = f"[step {step:,}, temperature {temperature:g}] {tokenizer.decode(tokens)}"
                file.write(text + "\n\n")
                say(text)

    return call
