"""What to look at while training: probes and generations, made into hooks of the training loop."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxformer.config import Config
from jaxformer.data.corpus import Corpus
from jaxformer.data.windows import eval_batches
from jaxformer.decode import Sampling, generate
from jaxformer.errors import writing
from jaxformer.inspect import attention_entropy, gradient_report
from jaxformer.runs import SAMPLES
from jaxformer.train.log import console
from jaxformer.train.loop import Hook
from jaxformer.train.optimizer import make_optimizer, make_schedule
from jaxformer.train.step import TrainState, batch_loss

PROBE_WINDOWS = 16
"""Held-out windows that attention is looked at on."""


def make_hooks(config: Config, model: nn.Module, corpus: Corpus, folder: Path) -> list[Hook]:
    """Attention entropy with every validation; gradient table and samples at their own pace."""
    t = config.train
    return [
        Hook(t.eval_every, _entropy(config, model, corpus), at_start=True),
        Hook(t.report_every, _gradients(config, model)),
        Hook(t.report_every, _samples(config, model, corpus, folder)),
    ]


def _entropy(config: Config, model: nn.Module, corpus: Corpus) -> Any:
    length = config.model.context_length
    probe_BT, weights_BT = next(eval_batches(corpus.val.tokens, length, length, PROBE_WINDOWS, PROBE_WINDOWS))
    whole = weights_BT.all(axis=1)
    probe_BT = probe_BT[whole] if whole.any() else probe_BT[:1]  # no row that only fills up

    def call(step: int, state: TrainState, batch: jax.Array) -> dict[str, Any] | None:
        entropy = attention_entropy(model, state.params, probe_BT)
        return {"entropy": [np.asarray(heads).tolist() for heads in entropy]} if entropy else None

    return call


def _gradients(config: Config, model: nn.Module) -> Any:
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = make_schedule(config.optimizer, config.steps)

    @jax.jit
    def probe(state: TrainState, batch_BT: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(batch_loss, argnums=1)(model, state.params, batch_BT)
        return grads, optimizer.update(grads, state.opt_state, state.params)[0]

    def call(step: int, state: TrainState, batch: jax.Array) -> dict[str, Any] | None:
        if not (lr := float(schedule(step))):
            return None  # a schedule that has come down to nothing moves nothing
        grads, updates = probe(state, batch)
        report = gradient_report(state.params, grads, lr, updates)
        console.print(str(report), markup=False)
        return {"gradients": [asdict(row) for row in report.rows]}

    return call


def _samples(config: Config, model: nn.Module, corpus: Corpus, folder: Path) -> Any:
    t, tokenizer, context_length = config.train, corpus.tokenizer, config.model.context_length
    prompt = tokenizer.encode(t.sample_prompt)[-context_length:]

    def call(step: int, state: TrainState, batch: jax.Array) -> None:
        with writing(folder, SAMPLES), (folder / SAMPLES).open("a", encoding="utf-8") as file:
            for temperature in (0.5, 0.0):
                chunks = generate(
                    model, state.params, [prompt], t.sample_tokens, Sampling(temperature),
                    context_length=context_length, fill_token=tokenizer.end_of_text, seed=config.seed,
                )  # fmt: skip
                tokens = prompt + np.concatenate(list(chunks), axis=1)[0].tolist()
                text = f"[step {step:,}, temperature {temperature:g}] {tokenizer.decode(tokens)}"
                file.write(text + "\n\n")
                console.print(text, markup=False)

    return call
