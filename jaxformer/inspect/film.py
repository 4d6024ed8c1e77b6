"""The training film of a run: measurements of its snapshots, the frames, and its heads patched back to earlier ones.
See `runs.snapshots`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log2
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import contract_of
from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.inspect.activations import Inputs, capture
from jaxformer.inspect.heads import (
    HEAD_AXES,
    ablate_heads,
    attention_parameters,
    head_statistics,
    patched_back,
    singular_values,
    target_mask,
)
from jaxformer.inspect.residual_stream import STREAM, logit_lens
from jaxformer.inspect.samples import continuations
from jaxformer.models.objective import Params, is_causal_lm, mean_loss
from jaxformer.runs.run import Run
from jaxformer.runs.snapshots import load_snapshot, snapshot_steps

N_REPEATED, MAX_REPEATED = 16, 128
"""Sequences of repeated random tokens, and their maximum length."""
NEW_TOKENS = 32
"""Tokens of a continuation."""
N_BUMPS, N_CHANGED = 3, 3
"""Bumps of the loss, and heads named for each."""
COMPARED = ("previous", "induction", "normalized_entropy")
"""Scores between 0 and 1 by whose change heads are ranked."""


@dataclass(frozen=True)
class Frame:
    """Measurements of the parameters after one step."""

    step: int
    loss: float
    """Held-out loss in nats."""
    heads: dict[str, dict[str, list[float]]]
    """By layer and score, one value per head: the fields of `HeadStatistics`, of which `induction` is measured on
    repeated random tokens; `ablation`, the rise of the loss under mean ablation; `rank_QK` and `rank_OV`, the stable
    ranks of W_QK and W_OV; `patched`, the rise of the last frame's loss if only this head is as in this frame."""
    stream: dict[str, dict[str, float]]
    """By name of the residual stream, such as `blocks.0.resid_post`: `agreement`, the fraction of positions at which
    the logit lens has the model's own most likely token; `norm`, the mean norm over positions. Empty without one."""
    texts: list[str] = field(default_factory=list)
    """Greedy continuations of the prompts."""


def film(
    run: Run, batch: Batch, prompts: Sequence[str] = (), progress: Callable[[str], object] = lambda _: None
) -> Iterator[Frame]:
    """Yield the measurements of each frame of a run, in order.

    Args:
      batch: held-out examples.
      prompts: texts to continue.
      progress: called with the name of each frame before it is measured.

    Raises:
      UserError: the run has no snapshots, or its model is no causal language model that reads parts of a window.
    """
    contract, steps = contract_of(run.model), snapshot_steps(run.path)
    if not is_causal_lm(run.model) or contract.has_prefix or contract.fixed_length:
        kind = type(run.model).__name__
        raise UserError(f"{run.path} holds a {kind}; a film shows causal language models without a prefix.")
    if not steps:
        raise UserError(f"{run.path} has no snapshots; train it anew with `train.snapshots='doubling'`.")
    last, batch = load_snapshot(run, steps[-1]), jax.tree.map(jnp.asarray, batch)
    config, tokenizer = run.text_model()
    encoded = list(map(tokenizer.encode_prompt, prompts))
    repeated_BT = repeated_tokens(tokenizer.vocab_size, min(config.context_length, MAX_REPEATED))
    for step in steps:
        progress(f"step {step:,}")
        params = load_snapshot(run, step)
        heads = _heads(run.model, params, last, batch, repeated_BT)
        texts = continuations(config, run.model, params, tokenizer, encoded, range(len(encoded)), NEW_TOKENS, (0.0,))
        yield Frame(
            step,
            float(_loss(run.model, params, batch)),
            {
                layer: {name: np.asarray(x_H).tolist() for name, x_H in scores.items()}
                for layer, scores in heads.items()
            },
            _stream(run.model, params, batch),
            [tokenizer.decode_part(new) for *_, new in texts] if prompts else [],
        )


def repeated_tokens(vocab_size: int, length: int) -> np.ndarray:
    """Return sequences of random tokens whose second half repeats the first, `(N_REPEATED, length)` int32."""
    half = np.random.default_rng(0).integers(0, vocab_size, (N_REPEATED, -(-length // 2)))
    return np.tile(half, 2)[:, :length].astype(np.int32)


def _heads(
    model: nn.Module, params: Params, last: Params, batch: Batch, repeated_BT: np.ndarray
) -> dict[str, dict[str, Any]]:
    """Return the scores of all heads by layer and name; see `Frame.heads`."""
    statistics = head_statistics(model, params, *batch.inputs, target_mask_BT=target_mask(batch))
    if not statistics:
        return {}
    induction = head_statistics(model, params, repeated_BT)
    ablation, loss = ablate_heads(model, params, batch).mean, _loss(model, last, batch)
    scores: dict[str, dict[str, Any]] = {}
    for layer, of_layer in statistics.items():
        scores[layer] = {
            **vars(of_layer),
            "induction": induction[layer].induction,
            "ablation": ablation[layer],
            "patched": _patched_losses(model, last, params, batch, layer) - loss,
        }
        attention = attention_parameters(params, layer)
        if "W_Q" in attention:
            for name, values_HK in zip(("rank_QK", "rank_OV"), singular_values(attention), strict=True):
                scores[layer][name] = jnp.sum(jnp.square(values_HK), axis=-1) / jnp.square(values_HK[:, 0])
    return scores


@partial(jax.jit, static_argnames=("model", "layer"))
def _patched_losses(model: nn.Module, params: Params, earlier: Params, batch: Batch, layer: str) -> jax.Array:
    """Return the mean loss with each head of a layer patched back, `(H,)`."""
    H = attention_parameters(params, layer)["W_Q"].shape[HEAD_AXES["W_Q"]]
    loss = lambda head: mean_loss(model, patched_back(params, earlier, layer, head), batch)  # noqa: E731
    return jax.lax.map(loss, jnp.arange(H))


_loss = jax.jit(mean_loss, static_argnums=0)


def _stream(model: nn.Module, params: Params, batch: Batch) -> dict[str, dict[str, float]]:
    """Return the measurements of the residual stream; see `Frame.stream`."""
    try:
        measured = jax.device_get(_measure_stream(model, params, batch.inputs, target_mask(batch)))
    except ValueError:  # of `logit_lens`, for a model that it does not apply to
        return {}
    return {name: {key: float(x) for key, x in values.items()} for name, values in measured.items()}


@partial(jax.jit, static_argnames="model")
def _measure_stream(
    model: nn.Module, params: Params, inputs_B: Inputs, mask_BT: jax.Array | None
) -> dict[str, dict[str, jax.Array]]:
    def of_example(
        example: tuple[Inputs, jax.Array | None],
    ) -> tuple[OrderedDict[str, dict[str, jax.Array]], jax.Array]:
        inputs, mask_T = example
        likeliest = {name: jnp.argmax(x_TV, axis=-1) for name, x_TV in logit_lens(model, params, *inputs).items()}
        stream, last_T = capture(model, params, *inputs, names=STREAM), list(likeliest.values())[-1]
        mask_T = jnp.ones(len(last_T)) if mask_T is None else mask_T
        sums = OrderedDict[str, dict[str, jax.Array]]()
        for name, x_TD in stream.items():
            norm_T = jnp.linalg.norm(x_TD.astype(jnp.float32), axis=-1)
            sums[name] = {"agreement": jnp.sum((likeliest[name] == last_T) * mask_T), "norm": jnp.sum(norm_T * mask_T)}
        return sums, jnp.sum(mask_T)

    sums_B, n_B = jax.lax.map(of_example, (inputs_B, mask_BT))
    return jax.tree.map(lambda x_B: x_B.sum() / n_B.sum(), sums_B)


@dataclass(frozen=True)
class Bump:
    """A frame at which the held-out loss changes its slope."""

    before: int
    step: int
    after: int
    """Steps of the frame and of its neighbours."""
    slopes: tuple[float, float]
    """Change of the loss per doubling of the steps before and after it, in nats."""
    changes: list[tuple[str, int, str, float, float]]
    """The heads that changed most between the neighbours, at most `N_CHANGED`: layer, head, score of `COMPARED`, and
    its values there."""


def bumps(film: Sequence[Frame]) -> list[Bump]:
    """Return the frames with the largest changes of slope, at most `N_BUMPS`, the largest first. Steps are compared by
    the logarithm of step + 1."""
    found = []
    for before, at, after in zip(film, film[1:], film[2:], strict=False):
        x, y = ([f(frame) for frame in (before, at, after)] for f in (lambda f: log2(f.step + 1), lambda f: f.loss))
        slopes = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
        changes = [
            (layer, head, score, *values)
            for layer, scores in after.heads.items()
            for score in COMPARED
            for head, values in enumerate(zip(before.heads[layer][score], scores[score], strict=True))
        ]
        by_head: dict[tuple[str, int], tuple[str, int, str, float, float]] = {}
        for change in sorted(changes, key=lambda c: -np.nan_to_num(abs(c[4] - c[3]))):
            by_head.setdefault(change[:2], change)
        found.append(Bump(before.step, at.step, after.step, slopes, list(by_head.values())[:N_CHANGED]))
    return sorted(found, key=lambda bump: -np.nan_to_num(abs(bump.slopes[1] - bump.slopes[0])))[:N_BUMPS]


@dataclass(frozen=True)
class Birth:
    """Steps between which a head became what it is: the last frame whose version of it, patched back into the last
    frame's model, costs at least half of what mean ablation of the head costs, and the next one."""

    use: float
    """Rise of the last frame's loss under mean ablation of the head, in nats."""
    before: int
    """Step of the former frame; that of the first, like `at`, if its version costs less than that."""
    at: int
    """Step of the latter."""
    rises: tuple[float, float]
    """Rise of the loss with the head as after these two steps, in nats."""


def births(film: Sequence[Frame]) -> dict[tuple[str, int], Birth]:
    """Return the birth of each head, by layer and head."""
    found = {}
    for layer, scores in film[-1].heads.items():
        for head, use in enumerate(scores["ablation"]):
            rises = [frame.heads[layer]["patched"][head] for frame in film]
            last = max((i for i, rise in enumerate(rises) if rise >= use / 2), default=-1)
            before, at = max(last, 0), min(last + 1, len(film) - 1)
            found[layer, head] = Birth(use, film[before].step, film[at].step, (rises[before], rises[at]))
    return found
