"""What to look at while training: probes and generations, made into hooks of the training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.data.dataset import Batch, Dataset, evenly_spaced
from jaxformer.data.pairs import PairDataset
from jaxformer.decode import Sampling, generate
from jaxformer.decode.translate import translate_tokens
from jaxformer.distributed import is_main_process
from jaxformer.errors import user_error_on_write
from jaxformer.inspect import alignment, attention_entropy, check_init, draw_alignment, router_report
from jaxformer.inspect.gradients import update_grid
from jaxformer.inspect.heads import target_mask
from jaxformer.memory import memory_capacity
from jaxformer.models.decoder import Decoder
from jaxformer.models.objective import Params, is_causal_lm
from jaxformer.parameters import Row
from jaxformer.runs import PLOTS, SAMPLES, count_parameters, parameter_order
from jaxformer.sharding import local_copy
from jaxformer.train.log import say
from jaxformer.train.loop import FIRST_REPORT, Callback
from jaxformer.train.setup import TrainSetup, TrainState

PROBED = 16
"""Held-out examples that attention is looked at on."""
FEW = 4
"""Held-out examples that an initialisation is looked at on."""
SHOWN = 3
"""Held-out sources whose translations are shown."""


def make_callbacks(setup: TrainSetup, data: Dataset, folder: Path) -> list[Callback]:
    """Attention entropy and what routers do with every validation; gradient table and samples at their own pace.

    Of several processes, all must call them; the first one prints and writes.
    """
    config, model, t = setup.config, setup.model, setup.config.train
    if not (copied := _can_be_copied(setup)):
        say("attention entropy and samples are left out: the model is too large to be copied to one device")
    callbacks = []
    if copied and isinstance(model, Decoder) and t.report_every:
        callbacks.append(Callback(config.steps, _init_check(setup, data), at_start=True))
    if copied and t.eval_every:
        callbacks.append(Callback(t.eval_every, _probe(setup, data), at_start=True))
    if t.report_every:
        callbacks.append(Callback(t.report_every, _update_ratios(setup), also_at=FIRST_REPORT))
        texts = []
        if copied and is_causal_lm(model):
            texts.append(_continuations(setup, data))
        if copied and isinstance(data, PairDataset):
            texts.append(_translations(setup, data))
            callbacks.append(Callback(t.report_every, _alignment(setup, data, folder)))
        callbacks += [Callback(t.report_every, _samples(setup, folder, write), also_at=FIRST_REPORT) for write in texts]
    return callbacks


def _can_be_copied(setup: TrainSetup) -> bool:
    """Whether all parameters, and the attention weights of a block, take less than a quarter of a device's memory."""
    has, config = memory_capacity(setup.mesh.local_devices[0]), setup.config.model
    parameters = count_parameters(setup.abstract_state.params)
    longest = max((len(x) for x in config.example() if x.ndim == 1), default=0)
    weights = getattr(config, "n_heads", 0) * longest**2
    return has is None or 4 * (parameters + weights) < has / 4


def _probe(setup: TrainSetup, data: Dataset) -> Any:
    model, probe = setup.model, next(data.held_out(PROBED, PROBED))
    inputs_B, mask_BT = jax.tree.map(lambda x: x[_whole(probe)], (probe.inputs, target_mask(probe)))

    def call(step: int, state: TrainState, batch: Batch, row: dict[str, Any]) -> dict[str, Any] | None:
        params = local_copy(state.params, setup.mesh)
        entropy = [
            np.asarray(heads).tolist() for heads in attention_entropy(model, params, *inputs_B, target_mask_BT=mask_BT)
        ]
        found = {"entropy": entropy, "router": router_report(model, params, inputs_B)}
        return {name: value for name, value in found.items() if value}

    return call


def _whole(probe: Batch) -> np.ndarray:
    """Which examples are no filling, and have none that the model is not told of: a window's, at its end."""
    weights_BN = probe.weights.reshape(len(probe.weights), -1)
    if any(x.dtype == bool for x in probe.inputs):
        return weights_BN.any(axis=1)
    return weights_BN[:, -1] > 0 if weights_BN[:, -1].any() else weights_BN.any(axis=1)


def _init_check(setup: TrainSetup, data: Dataset) -> Any:
    """Before the first step, what the initialisation gives beside what it should, and warnings."""
    model, probe = setup.model, next(data.held_out(FEW, FEW))
    assert isinstance(model, Decoder)

    def call(step: int, state: TrainState, batch: Batch, row: dict[str, Any]) -> dict[str, Any] | None:
        if step:
            return None
        found = check_init(model, local_copy(state.params, setup.mesh), *probe.inputs[:1])
        say(str(found))
        return {
            "init_check": {
                "expected": [asdict(m) for m in found.expected],
                "observed": [asdict(m) for m in found.observed],
            }
        }

    return call


def _update_ratios(setup: TrainSetup) -> Any:
    """The update ratios of the row that they stand in are shown."""

    def call(step: int, state: TrainState, batch: Batch, row: dict[str, Any]) -> None:
        if "gradients" in row:
            order = parameter_order(setup.model, setup.config.model)
            say(update_grid([Row(**parameter) for parameter in row["gradients"]], order, row["lr"]))

    return call


def _samples(setup: TrainSetup, folder: Path, write: Callable[[Params], Iterator[tuple[float, str]]]) -> Any:
    """What `write` makes of parameters, at several temperatures, is shown and kept."""

    def call(step: int, state: TrainState, batch: Batch, row: dict[str, Any]) -> None:
        params = local_copy(state.params, setup.mesh)
        place = folder / SAMPLES if is_main_process() else Path(os.devnull)
        with user_error_on_write(folder, SAMPLES), place.open("a", encoding="utf-8") as file:
            for temperature, text in write(params):
                text = f"[step {step:,}, temperature {temperature:g}] {text}"
                file.write(text + "\n\n")
                say(text)

    return call


def _continuations(setup: TrainSetup, data: Dataset) -> Callable[[Params], Iterator[tuple[float, str]]]:
    """The prompt of the config, gone on with."""
    config, model, t, tokenizer = setup.config, setup.model, setup.config.train, data.tokenizer
    assert isinstance(config.model, TokenModelConfig) and tokenizer is not None  # so of all that can be continued
    context_length = config.model.context_length
    prompt = tokenizer.encode(t.sample_prompt)[-context_length:]

    def write(params: Params) -> Iterator[tuple[float, str]]:
        for temperature in (0.5, 0.0):
            pieces = generate(
                model, params, [prompt], Sampling(temperature), [config.seed], max_new_tokens=t.sample_tokens,
                context_length=context_length, fill_token=tokenizer.end_of_text,
            )  # fmt: skip
            tokens = prompt + np.concatenate([piece.tokens_BN for piece in pieces], axis=1)[0].tolist()
            yield temperature, tokenizer.decode(tokens)

    return write


def _translations(setup: TrainSetup, data: PairDataset) -> Callable[[Params], Iterator[tuple[float, str]]]:
    """Some held-out sources and what becomes of them."""
    model, context_length = setup.model, data.context_length
    chosen = [data.val[i] for i in evenly_spaced(len(data.val), SHOWN)]
    sources = [tokens[:context_length] for tokens in data.tokenizer.encode_batch([pair.source for pair in chosen])]

    def write(params: Params) -> Iterator[tuple[float, str]]:
        targets = translate_tokens(
            model, params, sources, end_of_text=data.tokenizer.end_of_text, context_length=context_length
        )
        for pair, target in zip(chosen, targets, strict=True):
            yield 0.0, f"{pair.source} -> {data.tokenizer.decode(target)} (wanted: {pair.target})"

    return write


def _alignment(setup: TrainSetup, data: PairDataset, folder: Path) -> Any:
    """A picture of where a model looks for each part of a target: of the held-out pair with the longest source, among
    those of whose tokens each can be read by itself, if there are any."""
    model, tokenizer, most = setup.model, data.tokenizer, data.context_length
    sources, targets = (tokenizer.encode_batch(texts) for texts in zip(*data.val, strict=True))
    fitting = [pair for pair in zip(sources, targets, strict=True) if max(map(len, pair)) < most]
    fitting = fitting or [(sources[0][: most - 1], targets[0][: most - 1])]
    readable = lambda tokens: all("\ufffd" not in tokenizer.decode([token]) for token in tokens)  # noqa: E731
    source, target = max(fitting, key=lambda pair: (readable(pair[0]), len(pair[0])))
    source_S, target_T = jnp.array(source), jnp.array([tokenizer.end_of_text, *target])
    names = [[tokenizer.decode([token]) for token in tokens] for tokens in (source, [*target, tokenizer.end_of_text])]

    def call(step: int, state: TrainState, batch: Batch, row: dict[str, Any]) -> None:
        weights_TS = alignment(model, local_copy(state.params, setup.mesh), source_S, target_T)
        if weights_TS is not None and is_main_process():
            with user_error_on_write(folder, PLOTS):
                (folder / PLOTS).mkdir(exist_ok=True)
                draw_alignment(np.asarray(weights_TS), names[0], names[1], folder / PLOTS / "alignment.png")

    return call
