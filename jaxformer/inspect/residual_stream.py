"""Residual stream of a decoder: logit lens and direct logit attribution."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxformer.contract import contract_of
from jaxformer.inspect.activations import Activations, Inputs, capture
from jaxformer.inspect.of_run import of_run
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.inputs import check_example
from jaxformer.models.objective import Params
from jaxformer.nn.embedding import check_tokens
from jaxformer.nn.norms import epsilon
from jaxformer.ops.precision import upcast

STREAM = ("blocks.0.resid_pre", "blocks.*.resid_post")
"""The residual stream after the embedding and after each block."""
KNOWN_NORMS = ("rmsnorm", "layernorm", "layernorm_no_bias", "layernorm_no_parameters")
"""Norms that logits are attributed through."""


@of_run
def logit_lens(model: nn.Module, params: Params, *inputs: ArrayLike | None) -> Activations:
    """Return the logits, `(T, V)`, of the residual stream after the embedding and after each block, unembedded as if it
    were the final one (nostalgebraist 2020); the last entry has the model's own logits.

    Args:
      inputs: inputs of the model: tokens, and the prefix length for a model with a prefix.

    Raises:
      ValueError: the model has no residual stream, or normalises the stream after each part.
    """
    check_stream(model)
    check_example(model, *inputs)
    return _lens(model, params, *inputs)


@partial(jax.jit, static_argnames="model")
def _lens(model: nn.Module, params: Params, *inputs: ArrayLike | None) -> Activations:
    stream = capture(model, params, *inputs, names=STREAM)
    unembed: Callable[..., Any] = partial(model.apply, {"params": params}, method="unembed")
    return OrderedDict((name, unembed(x_TD)) for name, x_TD in stream.items())


@of_run
def logit_attribution(
    model: nn.Module,
    params: Params,
    *inputs: ArrayLike | None,
    target_T: ArrayLike | None = None,
    baseline_T: ArrayLike | None = None,
) -> Activations:
    """Return the contribution of each part to the logit of a token at each position, `(T,)` by name, `(H, T)` for
    heads: direct logit attribution (Elhage et al. 2021). The contributions sum to the logit before a soft cap.

    The final norm and the norms of the parts' outputs are linearized by holding their scale fixed.

    Args:
      inputs: inputs of the model.
      target_T: one token per position, or a token for all; by default, those that the model finds most likely.
      baseline_T: one token per position, or a token for all, whose logit is subtracted.

    Raises:
      ValueError: the model has no residual stream, or normalises the stream after each part; a token is not in the
        vocabulary, or there is not one per position.
    """
    check_stream(model)
    check_example(model, *inputs)
    target_T, baseline_T = (None if x is None else jnp.asarray(x) for x in (target_T, baseline_T))
    for chosen in (target_T, baseline_T):
        if chosen is None:
            continue
        tokens = jnp.atleast_1d(chosen)
        check_tokens(tokens, model.config.vocab_size)
        if jnp.ndim(chosen) and len(tokens) != (T := len(jnp.asarray(inputs[0]))):
            raise ValueError(f"{len(tokens)} tokens for {T} positions; give one per position, or one for all.")
    return _attribute(model, params, inputs, target_T, baseline_T)


@partial(jax.jit, static_argnames="model")
def _attribute(
    model: nn.Module, params: Params, inputs: Inputs, target_T: jax.Array | None, baseline_T: jax.Array | None
) -> Activations:
    c = model.config
    values = capture(model, params, *inputs)
    last_TD = values[f"blocks.{c.n_blocks - 1}.resid_post"]
    out_VD = params["embedding"]["W_E"] if c.unembedding == "tied" else params["W_out"].T
    likeliest_T = values["logits"].argmax(axis=-1)
    direction_TD = out_VD[likeliest_T if target_T is None else jnp.broadcast_to(target_T, likeliest_T.shape)]
    if baseline_T is not None:
        direction_TD -= out_VD[jnp.broadcast_to(baseline_T, likeliest_T.shape)]
    direction_TD *= c.logit_scale
    biases: dict[str, jax.Array] = {}
    if c.final_norm:
        direction_TD, biases = _through_norm(c, "final_norm", params.get("final_norm", {}), last_TD, direction_TD)
    project = lambda x_TD, direction_TD: jnp.sum(x_TD * direction_TD, axis=-1)  # noqa: E731
    if c.unembedding_bias:
        b_V = params["b_out"]
        bias_T = b_V[likeliest_T if target_T is None else target_T] - (0 if baseline_T is None else b_V[baseline_T])
        biases["b_out"] = jnp.broadcast_to(bias_T, likeliest_T.shape)
    embeddings, first_TD = [name for name in ("embed", "pos_embed") if name in values], direction_TD
    if c.embedding_norm:
        x_TD = jnp.sum(jnp.stack([values[name] for name in embeddings]), axis=0)
        first_TD, bias = _through_norm(c, "embedding_norm", params.get("embedding_norm", {}), x_TD, direction_TD)
        biases |= bias
    parts = OrderedDict((name, project(values[name], first_TD)) for name in embeddings)
    for i in range(c.n_blocks):
        block = params[f"blocks_{i}"]
        before_TD = dict.fromkeys(("attention", "mlp"), c.residual_scale * direction_TD)
        if c.norm != "none" and c.norm_placement in ("both", "output"):
            for part in before_TD:
                name, norm = f"blocks.{i}.{part}", f"{part}_post_norm"
                before_TD[part], bias = _through_norm(
                    c, f"blocks.{i}.{norm}", block.get(norm, {}), values[name], before_TD[part]
                )
                biases |= bias
        layer, weights = f"blocks.{i}.attention", block["attention"]
        heads_HTK = values[f"{layer}.z"]
        if "W_O" in weights:
            parts[f"{layer}.z"] = jnp.einsum("htk,hkd,td->ht", heads_HTK, weights["W_O"], before_TD["attention"])
        else:
            H, T, K = heads_HTK.shape
            direction_THK = before_TD["attention"].reshape(T, -1, K)  # summed heads share one direction
            direction_THK = jnp.broadcast_to(direction_THK, (T, H, K))
            parts[f"{layer}.z"] = jnp.einsum("htk,thk->ht", heads_HTK, direction_THK)
        if "b_O" in weights:
            parts[f"{layer}.b_O"] = before_TD["attention"] @ weights["b_O"]
        parts[f"blocks.{i}.mlp_out"] = project(values[f"blocks.{i}.mlp"], before_TD["mlp"])
    return parts | biases


def _through_norm(
    c: DecoderConfig, name: str, norm: Params, x_TD: jax.Array, direction_TD: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Map a direction after a norm of `x_TD` to the corresponding direction before it; also return the contribution of
    the norm's bias, by name. Raises `ValueError` for a norm of one's own."""
    if c.norm not in KNOWN_NORMS:
        raise ValueError(f"logits are not attributed through the norm {c.norm}; use rmsnorm or layernorm")
    is_layernorm, upcast_TD = c.norm != "rmsnorm", upcast(x_TD)
    if is_layernorm:
        upcast_TD -= upcast_TD.mean(axis=-1, keepdims=True)
    scale_T1 = jax.lax.rsqrt(jnp.mean(jnp.square(upcast_TD), axis=-1, keepdims=True) + epsilon(c.norm, c.norm_eps))
    before_TD = direction_TD * norm.get("gamma", jnp.ones(1))[None] * scale_T1
    if is_layernorm:  # centring is symmetric: (x - mean x) · d = x · (d - mean d)
        before_TD -= before_TD.mean(axis=-1, keepdims=True)
    return before_TD, {f"{name}.beta": direction_TD @ norm["beta"]} if "beta" in norm else {}


def check_stream(model: nn.Module) -> None:
    """Raise `ValueError` unless blocks add to a residual stream that becomes the logits."""
    if not contract_of(model).has_residual_stream:
        raise ValueError(f"this {type(model).__name__} has no residual stream that becomes logits")
    if model.config.norm != "none" and model.config.norm_placement == "post":
        raise ValueError("post-norm normalises the whole residual stream, which is therefore no sum of parts")
