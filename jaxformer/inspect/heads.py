"""Statistics of attention heads, head ablation, and heads taken from earlier parameters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import ArrayLike

from jaxformer.contract import ParameterAxes, Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.inspect.activations import Activations, Inputs, capture, intervene
from jaxformer.inspect.attention import CROSS, row_tokens_and_mask
from jaxformer.inspect.names import check_index, unknown_name
from jaxformer.inspect.of_run import of_run
from jaxformer.models.objective import Params, mean_loss, objective_of
from jaxformer.nn.attention import AXES
from jaxformer.nn.parameter_norms import dotted
from jaxformer.ops.attention import row_entropy
from jaxformer.ops.precision import upcast
from jaxformer.terminal import first_rows

MAX_ABLATED_TARGETS = 2048
"""Maximum number of targets whose losses are computed at once, over examples and ablated heads."""
HEAD_AXES = {
    name: axes.names.index("heads")
    for name, axes in ((name, ParameterAxes.parse(text)) for name, text in AXES.items())
    if "heads" in axes.names
}
"""Axis of the heads in all parameters that have one."""
PerHead = OrderedDict[str, jax.Array]
"""One value per head, `(H,)`, by the name of the layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of the heads of one layer, each `(H,)` float32: means over the rows of an example to which a statistic
    applies, in `head_statistics` also over examples with such rows; NaN if there are none."""

    entropy: jax.Array
    """Entropy of a row in nats; see `ops.attention.row_entropy`."""
    normalized_entropy: jax.Array
    """Entropy as a fraction of its maximum, log t for t visible positions; over rows with more than one."""
    distance: jax.Array
    """Distance between a query and its keys in positions, weighted by attention."""
    first: jax.Array
    """Weight on the first position; over all rows but the first."""
    previous: jax.Array
    """Previous-token score: weight on the preceding position; over all rows but the first."""
    duplicate: jax.Array
    """Weight on earlier positions with the same token; over rows that have one."""
    induction: jax.Array
    """Induction score: weight on the token after an earlier occurrence of the same token; over rows that have one (the
    prefix-matching score of Olsson et al. 2022)."""

    def __repr__(self) -> str:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        if any(isinstance(x, jax.core.Tracer) or np.ndim(x) != 1 for x in columns.values()):
            return object.__repr__(self)  # within a transformation
        rows = [(str(h), *(f"{x:.3f}" for x in row)) for h, row in enumerate(zip(*columns.values(), strict=True))]
        return "\n" + first_rows(("head", *columns), rows, ">" * (len(columns) + 1))

    def without_positions(self) -> HeadStatistics:
        """Return the statistics with NaN for those that compare positions; for cross-attention."""
        nan = self.entropy * jnp.nan
        return replace(self, distance=nan, first=nan, previous=nan)


ByLayer = dict[str, HeadStatistics]


def layer_statistics(
    weights_HTS: jax.Array, visible_TS: jax.Array, tokens_T: jax.Array | None = None, valid_T: jax.Array | None = None
) -> HeadStatistics:
    """Return the statistics of the heads of one layer for one example.

    Args:
      weights_HTS: attention map, from a sequence to itself (S = T) or to another; see `without_positions`.
      visible_TS: attention mask.
      tokens_T: tokens of the sequence; `duplicate` and `induction` are NaN without them.
      valid_T: False for rows of padding.
    """
    _, T, S = weights_HTS.shape
    query_T1, key_1S = jnp.arange(T)[:, None], jnp.arange(S)[None]
    valid_T = jnp.ones(T, bool) if valid_T is None else valid_T
    n_visible_T = jnp.sum(visible_TS, axis=-1)
    later_T = valid_T & (jnp.arange(T) > 0)

    def mean(value_HT: jax.Array, rows_T: jax.Array) -> jax.Array:
        return jnp.mean(value_HT, axis=-1, where=jnp.broadcast_to(rows_T, value_HT.shape))

    def weight_on(keys_TS: jax.Array, rows_T: jax.Array) -> jax.Array:
        on_HT = jnp.sum(weights_HTS * keys_TS[None].astype(weights_HTS.dtype), axis=-1)
        return mean(on_HT, rows_T & keys_TS.any(axis=-1))

    entropy_HT, distance_TS = row_entropy(weights_HTS), jnp.abs(query_T1 - key_1S)
    same_TS = (
        jnp.zeros((T, S), bool) if tokens_T is None else (tokens_T[:, None] == tokens_T[None]) & (key_1S < query_T1)
    )
    return HeadStatistics(
        entropy=mean(entropy_HT, valid_T),
        normalized_entropy=mean(entropy_HT / jnp.log(jnp.maximum(n_visible_T, 2))[None], valid_T & (n_visible_T > 1)),
        distance=mean(jnp.sum(weights_HTS * distance_TS[None].astype(weights_HTS.dtype), axis=-1), valid_T),
        first=weight_on(jnp.broadcast_to(key_1S == 0, (T, S)), later_T),
        previous=weight_on(key_1S == query_T1 - 1, later_T),
        duplicate=weight_on(same_TS, valid_T),
        induction=weight_on(jnp.pad(same_TS, ((0, 0), (1, 0)))[:, :S], valid_T),
    )


@of_run
def head_statistics(
    model: nn.Module, params: Params, *inputs_B: ArrayLike | None, target_mask_BT: ArrayLike | None = None
) -> ByLayer:
    """Return the statistics of all heads by layer: means over several examples, without rows of padding.

    Statistics of tokens apply to self-attention over text; statistics of positions apply to self-attention only.

    Args:
      model: any model; `{}` is returned for one without attention.
      inputs_B: inputs of the model, for several examples.
      target_mask_BT: True where a target is not padding.
    """
    with jax.debug_nans(False):  # NaN is no fault here
        groups = jax.device_get(_head_statistics(model, params, inputs_B, target_mask_BT))
    at = {layer: jax.tree.map(lambda x, n=n: x[n], x) for group, x in groups.items() for n, layer in enumerate(group)}
    return {layer: x.without_positions() if CROSS in layer else x for (_, layer), x in sorted(at.items())}


@partial(jax.jit, static_argnames="model")
def _head_statistics(
    model: nn.Module, params: Params, inputs_B: Inputs, target_mask_BT: ArrayLike | None
) -> dict[tuple[tuple[int, str], ...], HeadStatistics]:
    """Return the statistics of layers whose maps have one shape, `(L, H)`, by their numbers and names: XLA takes
    several times as long to compile them layer by layer."""

    def example_statistics(example: tuple[Inputs, jax.Array | None]) -> dict:
        inputs, mask_T = example
        names = ("*attention.pattern", "*attention.mask")
        captured = capture(model, params, *inputs, names=names, missing_ok=True)
        layers = [name.removesuffix(".pattern") for name in captured if name.endswith(".pattern")]
        groups = defaultdict[str, dict](dict)
        for layer_index, layer in enumerate(layers):
            maps = captured[f"{layer}.pattern"], captured[f"{layer}.mask"]
            arguments = *maps, *row_tokens_and_mask(model, layer, inputs, mask_T)
            groups[str(jax.tree.map(jnp.shape, arguments))][layer_index, layer] = arguments
        stacked = {tuple(group): jax.tree.map(lambda *x: jnp.stack(x), *group.values()) for group in groups.values()}
        return {group: jax.vmap(layer_statistics)(*arguments) for group, arguments in stacked.items()}

    # One example at a time: the size of attention maps is quadratic in the sequence length.
    statistics_B = jax.lax.map(example_statistics, (inputs_B, target_mask_BT))
    return jax.tree.map(lambda x_BLH: jnp.nanmean(x_BLH, axis=0), statistics_B)


def target_mask(batch: Batch) -> np.ndarray | None:
    """Return a mask, `(B, T)` bool, of targets that are not padding; None without weights or without a target axis."""
    return None if batch.weights is None or batch.weights.ndim != 2 else batch.weights > 0


@dataclass(frozen=True)
class Ablation:
    """Increase of a batch's mean loss, in nats, if the output of one head is replaced; `(H,)` by layer."""

    loss: float
    """Mean loss with all heads, in nats."""
    zero: PerHead
    """Zero ablation: the head's output is replaced by 0."""
    mean: PerHead
    """Mean ablation: the head's output is replaced by its mean over positions and examples, which removes only what
    varies between them."""
    zero_estimate: PerHead
    """First-order estimate of `zero`, for all heads from one gradient (attribution patching; Michel et al. 2019,
    equation 3, with its sign)."""
    mean_estimate: PerHead
    """First-order estimate of `mean`."""

    def __repr__(self) -> str:
        kinds = ("mean", "mean_estimate", "zero", "zero_estimate")
        heads = [(layer, h) for layer, rises_H in self.mean.items() for h in range(len(rises_H))]
        heads.sort(key=lambda head: -self.mean[head[0]][head[1]])
        rows = [
            (f"{layer}, head {h}", *(f"{getattr(self, kind)[layer][h]:+.4f}" for kind in kinds)) for layer, h in heads
        ]
        heading = (f"rise of the loss of {self.loss:.4f}", *(kind.replace("_", " ") for kind in kinds))
        return first_rows(heading, rows, "<>>>>")


@of_run
def ablate_heads(
    model: nn.Module, params: Params, batch: Batch, progress: Callable[[str], object] = lambda _: None
) -> Ablation:
    """Ablate each head of every attention layer, one at a time.

    The heads of a layer are ablated together, as a batch.

    Args:
      batch: examples; see `mean_loss`.
      progress: called with the name of each layer before its heads are ablated.
    """
    batch, means, scales = _ablation_inputs(model, params, batch)
    estimates: dict[str, PerHead] = {}
    rises: dict[str, PerHead] = {"zero": OrderedDict(), "mean": OrderedDict()}
    replacements = {"zero": jax.tree.map(jnp.zeros_like, means), "mean": means}
    for kind, replacement in replacements.items():
        loss, slopes = _loss_and_slopes(model, params, batch, scales, replacement)
        estimates[f"{kind}_estimate"] = jax.tree.map(jnp.negative, slopes)
    for layer, scale_H in scales.items():
        progress(layer)
        H = len(scale_H)
        scales_H = OrderedDict((name, jnp.broadcast_to(x, (H, *x.shape))) for name, x in scales.items())
        scales_H[layer] = 1 - jnp.eye(H)
        for kind, replacement in replacements.items():
            rises[kind][layer] = _losses(model, params, batch, scales_H, replacement) - loss
    return Ablation(float(loss), **jax.device_get(rises | estimates))


@of_run
def ablation_loss(model: nn.Module, params: Params, batch: Batch, heads: Iterable[tuple[str, int]]) -> float:
    """Return the mean loss in nats with several heads mean-ablated together. Unlike single ablations, this shows
    redundant heads, which compensate for each other.

    Args:
      batch: examples; see `mean_loss`.
      heads: pairs of a layer's name and a head's index, from the end if it is negative.

    Raises:
      KeyError: the model has no such layer.
      IndexError: the layer has no such head.
    """
    batch, means, scales = _ablation_inputs(model, params, batch)
    for layer, head in heads:
        if layer not in scales:
            raise unknown_name(layer, scales, "attention layer")
        scales[layer] = scales[layer].at[check_index(head, len(scales[layer]), "head", layer)].set(0)
    return float(_loss(model, params, batch, scales, means))


def _ablation_inputs(model: nn.Module, params: Params, batch: Batch) -> tuple[Batch, Activations, PerHead]:
    """Return the batch as arrays, the results of `_mean_outputs`, and scales of 1 for all heads."""
    batch = jax.tree.map(jnp.asarray, batch)
    means = _mean_outputs(model, params, batch.inputs, target_mask(batch))
    return batch, means, OrderedDict((layer, jnp.ones(len(x_HK))) for layer, x_HK in means.items())


@partial(jax.jit, static_argnames="model")
def _mean_outputs(model: nn.Module, params: Params, inputs_B: Inputs, target_mask_BT: ArrayLike | None) -> Activations:
    """Return the mean output of each head over examples and positions, without padding, `(H, K)` by layer."""

    def example_sums(example: tuple[Inputs, jax.Array | None]) -> OrderedDict[str, Any]:
        inputs, mask_T = example
        sums = OrderedDict[str, Any]()
        for name, x_HTK in capture(model, params, *inputs, names="*attention.z", missing_ok=True).items():
            valid_T = row_tokens_and_mask(model, name, inputs, mask_T)[1]
            valid_T = jnp.ones(x_HTK.shape[1]) if valid_T is None else valid_T.astype(jnp.float32)
            sums[name.removesuffix(".z")] = jnp.einsum("htk,t->hk", x_HTK, valid_T), valid_T.sum()
        return sums

    sums_B = jax.lax.map(example_sums, (inputs_B, target_mask_BT))
    return OrderedDict((layer, sums_BHK.sum(axis=0) / n_B.sum()) for layer, (sums_BHK, n_B) in sums_B.items())


def _interpolated_heads(scales: PerHead, replacements: Activations) -> AbstractContextManager[None]:
    """Interpolate the outputs of heads: scale 1 is the head's own, 0 its replacement `(K,)`."""

    def interpolate(name: str, value_HTK: jax.Array) -> jax.Array:
        layer = name.removesuffix(".z")
        scale_H11, replacement_H1K = scales[layer][:, None, None], replacements[layer][:, None]
        return (scale_H11 * value_HTK + (1 - scale_H11) * replacement_H1K).astype(value_HTK.dtype)

    names = [f"{layer}.z" for layer in scales]
    return intervene(names, interpolate, missing_ok=True)  # without jit, blocks that are skipped are not traced either


@partial(jax.jit, static_argnames="model")
def _loss(model: nn.Module, params: Params, batch: Batch, scales: PerHead, replacements: Activations) -> jax.Array:
    """Return the mean loss with interpolated head outputs."""
    with _interpolated_heads(scales, replacements):
        return mean_loss(model, params, batch)


_loss_and_slopes = jax.jit(jax.value_and_grad(_loss, argnums=3), static_argnums=0)


@partial(jax.jit, static_argnames="model")
def _losses(model: nn.Module, params: Params, batch: Batch, scales_N: PerHead, replacements: Activations) -> jax.Array:
    """Return the mean loss for each of N sets of scales, `(N,)`."""

    def of_example(example: Batch) -> jax.Array:
        def loss(scales: PerHead) -> jax.Array:
            with _interpolated_heads(scales, replacements):
                return objective_of(model).example_loss(model, params, example)

        return jax.vmap(loss)(scales_N)

    if contract_of(model).task is Task.CONTRASTIVE:  # examples are each other's negatives
        return jax.lax.map(lambda scales: _loss(model, params, batch, scales, replacements), scales_N)
    chunk = max(1, MAX_ABLATED_TARGETS // (len(jax.tree.leaves(scales_N)[0]) * batch.targets[0].size))
    nats_BN = jax.lax.map(of_example, batch, batch_size=min(chunk, len(batch.targets)))
    return nats_BN.mean(axis=0) if batch.weights is None else nats_BN.sum(axis=0) / jnp.sum(batch.weights)


@jax.jit
def singular_values(attention: Params) -> tuple[jax.Array, jax.Array]:
    """Return the singular values of W_QK = W_Q W_Kᵀ and of W_OV = W_V W_O (Elhage et al. 2021) of each head, each
    `(H, K)` float32 in descending order. Biases, norms, gains and rotations are not part of these products; projections
    to latents are.

    Args:
      attention: parameters of an attention layer; without a `W_O`, W_OV is W_V.
    """
    attention = _without_latents(jax.tree.map(upcast, attention))  # XLA has no decomposition of bfloat16
    W_Q_HDK, W_K_HDK, W_V_HDK = (jnp.moveaxis(attention[name], 1, 0) for name in ("W_Q", "W_K", "W_V"))
    W_K_HDK, W_V_HDK = (jnp.repeat(W, len(W_Q_HDK) // len(W), axis=0) for W in (W_K_HDK, W_V_HDK))
    R = partial(jnp.linalg.qr, mode="r")  # A Bᵀ has the singular values of R_A R_Bᵀ, which is small
    values = lambda A, B: jnp.linalg.svd(A @ jnp.swapaxes(B, 1, 2), compute_uv=False)  # noqa: E731
    if "W_O" not in attention:
        return values(R(W_Q_HDK), R(W_K_HDK)), jnp.linalg.svd(W_V_HDK, compute_uv=False)
    return values(R(W_Q_HDK), R(W_K_HDK)), values(R(W_V_HDK), R(jnp.swapaxes(attention["W_O"], 1, 2)))


def _without_latents(attention: Params) -> Params:
    """Return parameters in which the W_Q, W_K and W_V of `nn.LatentAttention` are the products with their projections
    to latents, `(D, H, K)`; W_K ends in the rotated features that heads share."""
    W = dict(attention)
    for name, down in (("W_Q", "W_DQ"), ("W_K", "W_DKV"), ("W_V", "W_DKV")):
        if down in W:
            W[name] = jnp.tensordot(W[down], W[name], 1)
    if "W_KR" in W:
        W_KR_DHR = jnp.repeat(W["W_KR"][:, None], W["W_K"].shape[1], axis=1)
        W["W_K"] = jnp.concatenate([W["W_K"], W_KR_DHR], axis=-1)
    return W


def patched_back(params: Params, earlier: Params, layer: str, head: int | jax.Array) -> Params:
    """Return parameters in which one head is as it was: its parts of W_Q, W_K, W_V and W_O, and its biases, are those
    of `earlier`. Heads that share keys and values share this change of them.

    Args:
      layer: name of an attention layer, such as `blocks.0.attention`.
      head: index of the head, from the end if it is negative; not checked if it is traced.

    Raises:
      KeyError: there is no such layer.
      IndexError: the layer has no such head.
    """
    H = attention_parameters(params, layer)["W_Q"].shape[HEAD_AXES["W_Q"]]
    if not isinstance(head, jax.core.Tracer):
        head = check_index(head, H, "head", layer)

    def patch(path: Sequence[Any], now: jax.Array, then: jax.Array) -> jax.Array:
        parent, _, name = dotted(path).rpartition(".")
        if parent != layer or name not in HEAD_AXES:
            return now
        axis = HEAD_AXES[name]
        at = (slice(None),) * axis + (head * now.shape[axis] // H,)
        return now.at[at].set(then[at])

    return jax.tree_util.tree_map_with_path(patch, params, earlier)


def attention_parameters(params: Params, layer: str) -> dict[str, jax.Array]:
    """Return the parameters of an attention layer by name. Raises `KeyError` for a layer without any."""
    layers: dict[str, dict[str, jax.Array]] = defaultdict(dict)
    for path, x in flatten_dict(params).items():
        parent, _, name = dotted(path).rpartition(".")
        layers[parent][name] = x
    if "W_Q" not in layers.get(layer, ()):
        raise unknown_name(layer, [name for name in layers if "W_Q" in layers[name]], "attention layer")
    return layers[layer]
