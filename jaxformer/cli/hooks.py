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

from jaxformer.config import Config, TokenModelConfig
from jaxformer.data.dataset import Batch, Dataset
from jaxformer.decode import Sampling, can_continue, generate
from jaxformer.distributed import is_first
from jaxformer.errors import writing
from jaxformer.inspect import attention_entropy, router_report
from jaxformer.inspect.gradients import Norms, parameter_norms, report_of_norms
from jaxformer.runs import SAMPLES, abstract_params, count_parameters
from jaxformer.sharding import local_copy, replicated
from jaxformer.train.log import say
from jaxformer.train.loop import Hook
from jaxformer.train.memory import capacity
from jaxformer.train.optimizer import make_optimizer, make_schedule, updates_taken
from jaxformer.train.step import TrainState, make_gradient

PROBED = 16
"""Held-out examples that attention is looked at on."""


def make_hooks(config: Config, mesh: Mesh, data: Dataset, folder: Path) -> list[Hook]:
    """Attention entropy and what routers do with every validation; gradient table and samples at their own pace.

    Of several processes, all must call them; the first one prints and writes.
    """
    t, gradients = config.train, Hook(config.train.report_every, _gradients(config, mesh))
    if not _can_be_copied(config, mesh):
        say("attention entropy and samples are left out: the model is too large to be copied to one device")
        return [gradients]
    hooks = [Hook(t.eval_every, _probe(config, mesh, data), at_start=True), gradients]
    if can_continue(config.model.build()):
        hooks.append(Hook(t.report_every, _samples(config, mesh, data, folder)))
    return hooks


def _can_be_copied(config: Config, mesh: Mesh) -> bool:
    """Whether all parameters, and the attention weights of a block, take less than a quarter of a device's memory."""
    has = capacity(mesh.local_devices[0])
    parameters = count_parameters(abstract_params(config.model.build(), config.model))
    longest = max((len(x) for x in config.model.example() if x.ndim == 1), default=0)
    weights = getattr(config.model, "n_heads", 0) * longest**2
    return has is None or 4 * (parameters + weights) < has / 4


def _probe(config: Config, mesh: Mesh, data: Dataset) -> Any:
    model, probe = config.model.build(), next(data.held_out(PROBED, PROBED))
    weights_BN = probe.weights.reshape(len(probe.weights), -1)
    kept = weights_BN.all(axis=1) if weights_BN.all(axis=1).any() else weights_BN.any(axis=1)  # no filling
    inputs_B = jax.tree.map(lambda x: x[kept], probe.inputs)

    def call(step: int, state: TrainState, batch: Batch) -> dict[str, Any] | None:
        params = local_copy(state.params, mesh)
        entropy = [np.asarray(heads).tolist() for heads in attention_entropy(model, params, *inputs_B)]
        found = {"entropy": entropy, "router": router_report(model, params, inputs_B)}
        return {name: value for name, value in found.items() if value}

    return call


def _gradients(config: Config, mesh: Mesh) -> Any:
    gradient, optimizer = make_gradient(config, mesh), make_optimizer(config.optimizer, config.steps)
    schedule = make_schedule(config.optimizer, config.steps)

    @partial(jax.jit, out_shardings=replicated(mesh))
    def norms(state: TrainState, batch: Batch, step: jax.Array) -> tuple[Norms, Norms, Norms]:
        grads = gradient(state, batch, step)[1]
        updates = optimizer.update(grads, state.opt_state, state.params)[0]
        return parameter_norms(state.params), parameter_norms(grads), parameter_norms(updates)

    def call(step: int, state: TrainState, batch: Batch) -> dict[str, Any] | None:
        if not (lr := float(schedule(updates_taken(state.opt_state)))):
            return None  # a schedule that has come down to nothing moves nothing
        w, g, update = norms(state, batch, step)
        report = report_of_norms(w, g, lr, update)
        say(str(report))
        return {"gradients": [asdict(row) for row in report.rows]}

    return call


def _samples(config: Config, mesh: Mesh, data: Dataset, folder: Path) -> Any:
    model, t, tokenizer = config.model.build(), config.train, data.tokenizer
    assert isinstance(config.model, TokenModelConfig) and tokenizer is not None  # so of all that can be continued
    context_length = config.model.context_length
    prompt = tokenizer.encode(t.sample_prompt)[-context_length:]

    def call(step: int, state: TrainState, batch: Batch) -> None:
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
