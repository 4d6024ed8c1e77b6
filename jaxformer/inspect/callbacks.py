"""Training callbacks: probes of the model and samples from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from math import nan
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.contract import Contract, Task
from jaxformer.data.chat import ChatDataset
from jaxformer.data.dataset import Batch, Dataset, evenly_spaced
from jaxformer.data.pairs import PairDataset, TargetTokens, encode_sources, encode_targets, start_of_target
from jaxformer.data.windows import TextDataset
from jaxformer.decode.translation import translate_tokens
from jaxformer.errors import missing_extras, user_error_on_write
from jaxformer.inspect import alignment, attention_entropy, check_init, draw_alignment, router_report
from jaxformer.inspect.curvature import nesterov_limit, sharpness
from jaxformer.inspect.gradients import update_grid
from jaxformer.inspect.heads import target_mask
from jaxformer.inspect.samples import continuations
from jaxformer.models.decoder import Decoder
from jaxformer.models.inputs import valid_tokens
from jaxformer.models.objective import Params, is_causal_lm
from jaxformer.nn import parameter_norms
from jaxformer.parallel.memory import memory_capacity
from jaxformer.parallel.mesh import local_copy
from jaxformer.parallel.processes import is_main_process
from jaxformer.runs.run import PLOTS, SAMPLES, count_parameters
from jaxformer.terminal import wrap_columns
from jaxformer.train.log import MetricWriter, Row, print_line
from jaxformer.train.loop import FIRST_REPORT, Callback
from jaxformer.train.setup import TrainSetup, TrainState

PROBE_EXAMPLES = 16
"""Held-out examples on which attention entropy and router load are measured."""
SHARPNESS_EXAMPLES, SHARPNESS_TARGETS, SHARPNESS_TOLERANCE = 16, 512, 0.02
"""Maximum numbers of the training examples and of their targets on which the sharpness is measured, at least one
example, and its relative accuracy."""
INIT_CHECK_EXAMPLES = 4
"""Held-out examples of the initialisation check."""
MIN_LEARNING_RATE = 0.01
"""Fraction of the peak learning rate below which update ratios are not printed."""
N_TRANSLATIONS = 3
"""Held-out sources translated as samples."""

Call = Callable[[int, TrainState, Batch, Row], Row | None]
"""Function that training calls; see `Callback`."""
Write = Callable[[Params], Iterator[tuple[float, str]]]
"""Function that generates texts from parameters, each with its temperature."""


def make_callbacks(setup: TrainSetup, data: Dataset, folder: Path) -> list[Callback]:
    """Return callbacks for the initialisation check, attention entropy, router load, update ratios and samples. Every
    process must call them; only the first prints and writes."""
    config, model, t = setup.config, setup.model, setup.config.train
    if not (fits := _fits_on_one_device(setup)):
        print_line("attention entropy and samples are skipped: the model is too large to copy to one device")
    callbacks = []
    if t.eval_every and isinstance(data, TextDataset) and is_causal_lm(model):
        callbacks.append(Callback(config.steps, partial(_count_losses, data), at_start=True))
    if fits and isinstance(model, Decoder) and t.report_every and config.init_from is None:
        callbacks.append(Callback(config.steps, partial(_init_check, setup, data), at_start=True))
    if fits and t.eval_every:
        callbacks.append(Callback(t.eval_every, _probe(setup, data), at_start=True))
    if fits and t.sharpness_every and config.model.contract.task is not Task.CONTRASTIVE:  # whose loss is no mean
        callbacks.append(Callback(t.sharpness_every, _sharpness(setup, data), at_start=True))
    if t.report_every:
        reports: list[Call] = [partial(_print_update_ratios, setup)]
        if fits and is_causal_lm(model):
            reports.append(partial(_print_samples, setup, folder, partial(_continuations, setup, data)))
        if fits and isinstance(data, PairDataset):
            reports.append(partial(_print_samples, setup, folder, partial(_translations, setup, data)))
            callbacks.append(Callback(t.report_every, _alignment(setup, data, folder)))
        callbacks += [Callback(t.report_every, report, also_at=(FIRST_REPORT,)) for report in reports]
    return callbacks


def _fits_on_one_device(setup: TrainSetup) -> bool:
    """Return True if all parameters and one block's attention maps need less than 1/4 of a device's memory."""
    capacity, config = memory_capacity(setup.mesh.local_devices[0]), setup.config.model
    n_parameters = count_parameters(setup.abstract_params)
    longest = max((len(x) for x in config.example() if x.ndim == 1), default=0)
    n_weights = getattr(config, "n_heads", 0) * longest**2
    return capacity is None or 4 * (n_parameters + n_weights) < capacity / 4


def _probe(setup: TrainSetup, data: Dataset) -> Call:
    """Return a callback that logs attention entropy and router load on held-out examples."""
    model, batch = setup.model, next(data.val_batches(PROBE_EXAMPLES, PROBE_EXAMPLES))
    has_experts = any("experts" in axes.names for axes in setup.parameter_axes.values())
    unpadded_B = _unpadded_examples(setup.config.model.contract, batch)
    inputs_B, mask_BT = jax.tree.map(lambda x: x[unpadded_B], (batch.inputs, target_mask(batch)))
    mask_BT = None if mask_BT is None or mask_BT.all() else mask_BT

    def call(step: int, state: TrainState, batch: Batch, row: Row) -> Row | None:
        params = local_copy(setup.model_params(state), setup.mesh)
        entropy = attention_entropy(model, params, *inputs_B, target_mask_BT=mask_BT)
        heads = [np.asarray(entropy_H).tolist() for entropy_H in entropy]
        values = {"entropy": heads, "router": router_report(model, params, inputs_B) if has_experts else {}}
        return {name: value for name, value in values.items() if value}

    return call


def make_printer(show_entropy: bool) -> MetricWriter:
    """Return a writer that prints, below the line of an evaluation, how tokens are spread over experts and, with
    `show_entropy`, the attention entropy of each head."""

    def write(row: Row) -> None:
        for line in probe_lines(row, show_entropy) if "val_loss" in row else ():
            print_line(line)

    return write


def probe_lines(row: Row, show_entropy: bool) -> list[str]:
    """Return lines, wrapped to `WIDTH`, with the smallest and largest share of tokens that an expert has, and with the
    attention entropy in nats of each head, grouped by block."""
    parts = []
    if "router" in row:
        shares = [share for layer in row["router"].values() for share in layer["share"]]
        parts = [f"     tokens per expert {100 * min(shares):.1f} to {100 * max(shares):.1f} %"]
    if not show_entropy or "entropy" not in row:
        return parts
    shown = [" ".join(f"{nan if head is None else head:.2f}" for head in heads) for heads in row["entropy"]]
    blocks = [f"{i}: {heads}" for i, heads in enumerate(shown)]
    return parts + wrap_columns(["     entropy (nats) of heads per block", *blocks], indent=14)


def _sharpness(setup: TrainSetup, data: Dataset) -> Call:
    """Return a callback that logs the sharpness on some examples of the first batch and, for Nesterov SGD, that above
    which a step of the current learning rate diverges on a quadratic."""
    optimizer, most = setup.config.optimizer, min(setup.config.train.batch_size, SHARPNESS_EXAMPLES)
    examples = data.batch(0, np.arange(most))
    n = max(1, SHARPNESS_TARGETS // examples.targets[0].size)
    examples = jax.tree.map(lambda x: x[:n], examples)

    from scipy.sparse.linalg import ArpackError

    def call(step: int, state: TrainState, batch: Batch, row: Row) -> Row | None:
        params = local_copy(setup.model_params(state), setup.mesh)
        try:  # from the same vector each time, so that a resumed run logs the same
            value, _ = sharpness(setup.model, params, examples, tolerance=SHARPNESS_TOLERANCE)
        except ArpackError:  # the curvature overflows, or is not found; training need not end
            value = float("nan")
        limit = {}
        if optimizer.name == "nesterov_sgd" and row.get("lr"):
            limit["sharpness_limit"] = nesterov_limit(row["lr"], optimizer.momentum)
        return {"sharpness": value, **limit}

    return call


def _unpadded_examples(contract: Contract, batch: Batch) -> np.ndarray:
    """Return a mask `(B,)` of real examples, leaving out those whose padding the model does not mask, such as a window
    at the end of the data; if all have such padding, they are included."""
    weights_BN = batch.weights.reshape(len(batch.weights), -1)
    is_packed = valid_tokens(contract, batch.inputs) is not None
    if is_packed or any(x.dtype == bool for x in jax.tree.leaves(batch.inputs)):
        return weights_BN.any(axis=1)
    return weights_BN[:, -1] > 0 if weights_BN[:, -1].any() else weights_BN.any(axis=1)


def _full_rows(contract: Contract, batch: Batch) -> np.ndarray:
    """Return the tokens of a decoder's batch in rows without padding, `(B, T)`; packed rows are cut anew."""
    tokens_BT, valid_BT = batch.inputs[0], valid_tokens(contract, batch.inputs)
    if valid_BT is None:
        return tokens_BT[_unpadded_examples(contract, batch)]
    tokens_N = tokens_BT[valid_BT]
    T = min(tokens_BT.shape[1], len(tokens_N))
    return tokens_N[: len(tokens_N) // T * T].reshape(-1, T)


def _init_check(setup: TrainSetup, data: Dataset, step: int, state: TrainState, batch: Batch, row: Row) -> Row | None:
    """Print and log the initialisation check before the first step."""
    if step:
        return None
    model, probe = setup.model, next(data.val_batches(INIT_CHECK_EXAMPLES, INIT_CHECK_EXAMPLES))
    assert isinstance(model, Decoder)
    tokens_BT = _full_rows(setup.config.model.contract, probe)
    report = check_init(model, local_copy(setup.model_params(state), setup.mesh), jnp.asarray(tokens_BT))
    print_line(str(report))
    return {"init_check": {side: [asdict(m) for m in getattr(report, side)] for side in ("expected", "observed")}}


def _count_losses(data: TextDataset, step: int, state: TrainState, batch: Batch, row: Row) -> Row | None:
    """Print and log, before the first step, what counting achieves."""
    if step:
        return None
    losses = data.count_losses()
    print_line(f"for comparison, held-out loss of counting tokens {losses['tokens']:.3f}, pairs {losses['pairs']:.3f}")
    return {"count_losses": losses}


def _print_update_ratios(setup: TrainSetup, step: int, state: TrainState, batch: Batch, row: Row) -> None:
    """Print the update ratios in a row of the log, unless the learning rate has decayed to 0: its updates say nothing
    about training."""
    if "gradients" in row and row["lr"] > MIN_LEARNING_RATE * setup.config.optimizer.learning_rate:
        rows = [parameter_norms.Row(*parameter.values()) for parameter in row["gradients"]]
        print_line(update_grid(rows, setup.parameter_order, row["lr"]))


def _print_samples(
    setup: TrainSetup, folder: Path, write: Write, step: int, state: TrainState, batch: Batch, row: Row
) -> None:
    """Print generated texts and append them to the run's samples."""
    params = local_copy(setup.model_params(state), setup.mesh)
    path = folder / SAMPLES if is_main_process() else Path(os.devnull)
    with user_error_on_write(folder, SAMPLES), path.open("a", encoding="utf-8") as file:
        for temperature, text in write(params):
            text = f"[step {step:,}, temperature {temperature:g}] {text}"
            file.write(text + "\n\n")
            print_line(text)


def _continuations(setup: TrainSetup, data: Dataset, params: Params) -> Iterator[tuple[float, str]]:
    """Yield temperature and text for each continuation of the config's prompt, or for each answer to the first held-out
    conversation."""
    config, t, tokenizer = setup.config, setup.config.train, data.tokenizer
    assert isinstance(config.model, TokenModelConfig) and tokenizer is not None  # as for all causal language models
    prompt = data.prompt if isinstance(data, ChatDataset) else tokenizer.encode_prompt(t.sample_prompt)
    ends = tokenizer.ends_of_text if isinstance(data, ChatDataset) else ()
    texts = continuations(config.model, setup.model, params, tokenizer, [prompt], [config.seed], t.sample_tokens)
    for temperature, _, prompt, new in texts:
        end = next((i for i, token in enumerate(new) if token in ends), len(new))
        yield temperature, tokenizer.decode(prompt + new[:end])


def _translations(setup: TrainSetup, data: PairDataset, params: Params) -> Iterator[tuple[float, str]]:
    """Yield temperature and text for each of some held-out sources, translated."""
    tokenizer, length = data.tokenizer, data.context_length
    pairs = [data.val[i] for i in evenly_spaced(len(data.val), N_TRANSLATIONS)]
    sources = encode_sources([pair.source for pair in pairs], tokenizer, length)
    end, special = tokenizer.end_of_text, TargetTokens.of(tokenizer)
    targets = translate_tokens(setup.model, params, sources, end_of_text=end, context_length=length, special=special)
    for pair, target in zip(pairs, targets, strict=True):
        yield 0.0, f"{pair.source} -> {tokenizer.decode(target)} (expected: {pair.target})"


def _alignment(setup: TrainSetup, data: PairDataset, folder: Path) -> Call:
    """Return a callback that plots the alignment of the held-out pair with the longest source, preferring sources whose
    tokens are valid UTF-8."""
    tokenizer, limit = data.tokenizer, data.context_length
    sources = encode_sources([pair.source for pair in data.val], tokenizer)
    targets = encode_targets([pair.target for pair in data.val], tokenizer)
    pairs = [pair for pair in zip(sources, targets, strict=True) if max(map(len, pair)) < limit]
    pairs = pairs or [(sources[0][: limit - 1], targets[0][: limit - 1])]
    is_readable = lambda tokens: all("\ufffd" not in tokenizer.decode([token]) for token in tokens)  # noqa: E731
    source, target = max(pairs, key=lambda pair: (is_readable(pair[0]), len(pair[0])))
    source_S, target_T = jnp.array(source), jnp.array([start_of_target(tokenizer), *target])
    shown = (source, [*target, tokenizer.end_of_text])
    source_texts, target_texts = ([tokenizer.decode_part([token]) for token in tokens] for tokens in shown)

    def call(step: int, state: TrainState, batch: Batch, row: Row) -> None:
        weights_TS = alignment(setup.model, local_copy(setup.model_params(state), setup.mesh), source_S, target_T)
        if weights_TS is not None and is_main_process() and not missing_extras("matplotlib"):
            with user_error_on_write(folder, PLOTS):
                (folder / PLOTS).mkdir(exist_ok=True)
                draw_alignment(np.asarray(weights_TS), source_texts, target_texts, folder / PLOTS / "alignment.png")

    return call
