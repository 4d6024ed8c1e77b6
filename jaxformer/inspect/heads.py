"""What each head looks at, and what the loss would be without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.data.dataset import Batch
from jaxformer.inspect.attention import CROSS, text_of
from jaxformer.inspect.trace import editing, trace, trace_names
from jaxformer.models.objective import Params, mean_loss
from jaxformer.ops.attention import row_entropy

Heads = dict[str, jax.Array]
"""A number for each head, `(H,)`, by the name of its layer."""


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of the heads of one layer, each `(H,)` float32: means over the rows of an example, and of
    `head_statistics` over the examples that have such rows; NaN where none has."""

    entropy: Any
    """Of the weights in a row, in nats; see `ops.attention.row_entropy`."""
    share: Any
    """Of the most that it could be, log t where t places are visible; of rows with more than one."""
    distance: Any
    """Places between a query and what it looks at."""
    first: Any
    """Weight on the first place, of all rows but the first."""
    previous: Any
    """Weight on the place before, of the same rows."""
    duplicate: Any
    """Weight on earlier places with the same token, of rows that have one."""
    induction: Any
    """Weight on what followed the same token earlier, of rows that have one: what is to be copied if the text repeats
    itself (the prefix-matching score of Olsson et al. 2022)."""

    def of_another_text(self) -> HeadStatistics:
        """Without what is said of places, which are not those of the rows."""
        nowhere = self.entropy * jnp.nan
        return replace(self, distance=nowhere, first=nowhere, previous=nowhere)


def gaze(
    weights_HTS: jax.Array, visible_TS: jax.Array, tokens_T: jax.Array | None = None, valid_T: jax.Array | None = None
) -> HeadStatistics:
    """Where the heads of one layer look in one example.

    Args:
      weights_HTS: of a sequence to itself, S = T, or to another one; see `HeadStatistics.of_another_text`.
      visible_TS: what the mask shows.
      tokens_T: of which the weights are; `duplicate` and `induction` need them.
      valid_T: rows that count; padding does not.
    """
    _, T, S = weights_HTS.shape
    row_T, place_S = jnp.arange(T)[:, None], jnp.arange(S)
    valid_T = jnp.ones(T, bool) if valid_T is None else valid_T
    seen_T = jnp.sum(visible_TS, axis=-1)
    later_T = valid_T & (jnp.arange(T) > 0)

    def mean(value_HT: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.mean(value_HT, axis=-1, where=jnp.broadcast_to(rows, value_HT.shape))

    def on(places_TS: jax.Array, rows_T: jax.Array) -> jax.Array:
        """Mean weight on some places, of the rows that have one."""
        return mean(jnp.sum(weights_HTS * places_TS, axis=-1), rows_T & places_TS.any(axis=-1))

    entropy_HT = row_entropy(weights_HTS)
    nowhere_TS = jnp.zeros((T, S), bool)
    same_TS = nowhere_TS if tokens_T is None else (tokens_T[:, None] == tokens_T) & (place_S < row_T)
    after_TS = jnp.pad(same_TS, ((0, 0), (1, 0)))[:, :S]
    return HeadStatistics(
        mean(entropy_HT, valid_T),
        mean(entropy_HT / jnp.log(jnp.maximum(seen_T, 2)), valid_T & (seen_T > 1)),
        mean(jnp.sum(weights_HTS * jnp.abs(row_T - place_S), axis=-1), valid_T),
        on(jnp.broadcast_to(place_S == 0, (T, S)), later_T),
        on(place_S == row_T - 1, later_T),
        on(same_TS, valid_T),
        on(after_TS, valid_T),
    )


jax.tree_util.register_dataclass(HeadStatistics)


def head_statistics(
    model: nn.Module, params: Params, *inputs_B: Any, counts_BT: Any = None
) -> dict[str, HeadStatistics]:
    """Where every head looks, by layer, over several examples. Rows of padding are left out where the inputs tell what
    is padding, as they do of a source.

    Tokens are compared in self-attention alone, where each place of the sequence is a token; what is said of places is
    NaN for attention to another sequence.

    Args:
      inputs_B: what the model is called with, of several examples.
      counts_BT: True where a target of theirs is no padding.
    """
    found = jax.device_get(_head_statistics(model, params, inputs_B, counts_BT))
    return {name: found[name] for name in _layers(model, params, inputs_B)}


@partial(jax.jit, static_argnames="model")
def _head_statistics(
    model: nn.Module, params: Params, inputs_B: tuple[Any, ...], counts_BT: Any
) -> dict[str, HeadStatistics]:
    def one(example: tuple[tuple[Any, ...], Any]) -> dict[str, HeadStatistics]:
        inputs, counts_T = example
        found = trace(model, params, *inputs, names=("*attention.weights", "*attention.visible"))
        layers = [name.removesuffix(".weights") for name in found if name.endswith(".weights")]
        looks = {
            at: gaze(found[f"{at}.weights"], found[f"{at}.visible"], *text_of(at, inputs, counts_T)) for at in layers
        }
        return {at: look.of_another_text() if CROSS in at else look for at, look in looks.items()}

    # One example after the other: the weights are as large as the square of its length.
    return jax.tree.map(lambda x_BH: jnp.nanmean(x_BH, axis=0), jax.lax.map(one, (inputs_B, counts_BT)))


def counts_of(batch: Batch) -> Any:
    """Where the targets of a batch are no padding, `(B, T)`; None where all count, or not each has a place."""
    return None if batch.weights is None or batch.weights.ndim != 2 else batch.weights > 0


def _layers(model: nn.Module, params: Params, inputs_B: tuple[Any, ...]) -> list[str]:
    """The names of all layers of attention, in the order of the computation."""
    first = jax.tree.map(lambda x: x[0], inputs_B)
    return [name.removesuffix(".heads") for name in trace_names(model, params, *first, names="*attention.heads")]


@dataclass(frozen=True)
class Ablation:
    """By how much the mean loss of a batch rises, in nats, where one head is silenced and all others are as ever; each
    by layer, `(H,)`."""

    loss: float
    """With all heads."""
    zero: Heads
    """Where the head gives zeros."""
    mean: Heads
    """Where it gives the mean of what it gives at all places of the batch, which keeps what does not depend on the
    text."""
    zero_estimate: Heads
    """The first order of `zero`, all heads by one gradient (Michel et al. 2019, equation 3, with its sign)."""
    mean_estimate: Heads


def ablate_heads(model: nn.Module, params: Params, batch: Batch) -> Ablation:
    """Silence each head of every layer of attention, one after the other.

    Args:
      batch: examples side by side; see `mean_loss`.
    """
    batch, means, kept = _whole(model, params, batch)
    found: dict[str, Heads] = {}
    for kind, instead in (("zero", jax.tree.map(jnp.zeros_like, means)), ("mean", means)):
        loss, slope = _loss_and_slope(model, params, batch, kept, instead)
        found[f"{kind}_estimate"] = jax.tree.map(jnp.negative, slope)
        found[kind] = {
            name: jnp.stack([
                _loss(model, params, batch, kept | {name: row.at[head].set(0)}, instead) - loss
                for head in range(len(row))
            ])
            for name, row in kept.items()
        }  # fmt: skip
    order = _layers(model, params, batch.inputs)
    of_layers = {kind: {name: by_layer[name] for name in order} for kind, by_layer in jax.device_get(found).items()}
    return Ablation(float(loss), **of_layers)


def loss_without(model: nn.Module, params: Params, batch: Batch, heads: Iterable[tuple[str, int]]) -> float:
    """The mean loss in nats where some heads, by layer and number, all give their means: heads that do the same can
    stand in for each other, and only together are missed."""
    batch, means, kept = _whole(model, params, batch)
    for name, head in heads:
        kept[name] = kept[name].at[head].set(0)
    return float(_loss(model, params, batch, kept, means))


def _whole(model: nn.Module, params: Params, batch: Batch) -> tuple[Batch, dict[str, jax.Array], Heads]:
    """The batch as arrays, what heads give in it on average, and that all are kept."""
    batch = jax.tree.map(jnp.asarray, batch)
    means = _mean_heads(model, params, batch.inputs, counts_of(batch))
    return batch, means, {name: jnp.ones(len(x_HK)) for name, x_HK in means.items()}


@partial(jax.jit, static_argnames="model")
def _mean_heads(
    model: nn.Module, params: Params, inputs_B: tuple[jax.Array, ...], counts_BT: Any
) -> dict[str, jax.Array]:
    """What each head gives, the mean over places and examples, `(H, K)` by layer."""

    def one(example: tuple[tuple[Any, ...], Any]) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Sums over the places that are no padding, and how many these are."""
        inputs, counts_T = example
        sums = {}
        for name, x_HTK in trace(model, params, *inputs, names="*attention.heads").items():
            valid_T = text_of(name, inputs, counts_T)[1]
            valid_T = jnp.ones(x_HTK.shape[1]) if valid_T is None else valid_T.astype(jnp.float32)
            sums[name.removesuffix(".heads")] = jnp.einsum("htk,t->hk", x_HTK, valid_T), valid_T.sum()
        return sums

    found = jax.lax.map(one, (inputs_B, counts_BT))
    return {name: sums_BHK.sum(axis=0) / n_B.sum() for name, (sums_BHK, n_B) in found.items()}


@partial(jax.jit, static_argnames="model")
def _loss(model: nn.Module, params: Params, batch: Batch, kept: Heads, instead: dict[str, jax.Array]) -> jax.Array:
    """The mean loss where heads are kept so far: 1 leaves a head as it is, 0 puts something else in its place."""

    def silence(name: str, value: jax.Array) -> jax.Array:
        layer = name.removesuffix(".heads")
        if layer == name or layer not in kept:
            return value
        keep_H11, other_H1K = kept[layer][:, None, None], instead[layer][:, None]
        return (keep_H11 * value + (1 - keep_H11) * other_H1K).astype(value.dtype)

    with editing(silence):
        return mean_loss(model, params, batch)


_loss_and_slope = jax.jit(jax.value_and_grad(_loss, argnums=3), static_argnums=0)
