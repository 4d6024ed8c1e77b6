"""The residual stream of a decoder: what it would say after each block, who wrote into it, and what depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.errors import UserError
from jaxformer.inspect.trace import editing, trace, trace_names
from jaxformer.models.decoder import Decoder
from jaxformer.models.inputs import check_example
from jaxformer.models.objective import Params
from jaxformer.nn.norms import epsilon
from jaxformer.ops.precision import widened

STREAM = ("embedding", "blocks.*.after")
AFTER_HEADS = (".queries", ".keys", ".values", ".scores", ".weights", ".heads")
"""What has an axis of heads before that of places."""


def logit_lens(model: Decoder, params: Params, *inputs: Any) -> dict[str, jax.Array]:
    """The logits `(T, V)` that the stream would give at each point, were it the last (nostalgebraist 2020): after the
    embedding and after each block, by the names of `trace`; the last are the model's own.

    Args:
      inputs: what the model is called with: tokens, and the length of a prefix where it has one.
    """
    _check(model)
    check_example(model, *inputs)
    found = _lens(model, params, *inputs)
    return {name: found[name] for name in trace_names(model, params, *inputs, names=STREAM)}


@partial(jax.jit, static_argnames="model")
def _lens(model: Decoder, params: Params, *inputs: Any) -> dict[str, jax.Array]:
    unembed: Callable[..., Any] = partial(model.apply, {"params": params}, method="unembed")
    return {name: unembed(x_TD) for name, x_TD in trace(model, params, *inputs, names=STREAM).items()}


def logit_attribution(
    model: Decoder, params: Params, *inputs: Any, wanted_T: jax.Array, other_T: jax.Array | None = None
) -> dict[str, jax.Array]:
    """What each part wrote into the stream in favour of a token: direct logit attribution (Elhage et al. 2021), `(T,)`
    by name, for heads `(H, T)`. All of them add up to the logit of the last stream.

    A norm before the logits is taken with the scale that it has for the whole stream, and is then linear.

    Args:
      inputs: what the model is called with.
      wanted_T: whose logit, at each place.
      other_T: whose logit is taken off; without it, none.

    Raises:
      UserError: the parts of its blocks are not added up (no residual, or norms after them).
    """
    _check(model)
    check_example(model, *inputs)
    found = _attribute(model, params, inputs, wanted_T, other_T)
    blocks = range(model.config.n_blocks)
    parts = [f"blocks.{i}.{part}" for i in blocks for part in ("attention.heads", "attention.b_O", "mlp")]
    return {name: found[name] for name in ("embedding", *parts, "final_norm.beta") if name in found}


@partial(jax.jit, static_argnames="model")
def _attribute(
    model: Decoder, params: Params, inputs: tuple[Any, ...], wanted_T: jax.Array, other_T: jax.Array | None
) -> dict[str, jax.Array]:
    c = model.config
    found = trace(model, params, *inputs)
    last_TD = found[f"blocks.{c.n_blocks - 1}.after"]
    out_DV = params["embedding"]["W_E"].T if c.unembedding == "tied" else params["W_out"]
    direction_TD = out_DV.T[wanted_T]
    if other_T is not None:
        direction_TD -= out_DV.T[other_T]
    constant: dict[str, jax.Array] = {}
    if c.final_norm:
        direction_TD, constant = _before_norm(model, params, last_TD, direction_TD)
    along = lambda x_TD: jnp.sum(x_TD * direction_TD, axis=-1)  # noqa: E731
    parts = {"embedding": along(found["embedding"])}
    for i in range(c.n_blocks):
        attention = f"blocks.{i}.attention"
        weights = params[f"blocks_{i}"]["attention"]
        heads_HTK = found[f"{attention}.heads"]
        if c.output_projection:
            of_heads = jnp.einsum("htk,hkd,td->ht", heads_HTK, weights["W_O"], direction_TD)
        else:
            H, T, K = heads_HTK.shape
            of_heads = jnp.einsum("htk,thk->ht", heads_HTK, direction_TD.reshape(T, H, K))
        parts[f"{attention}.heads"] = of_heads
        if "b_O" in weights:
            parts[f"{attention}.b_O"] = along(jnp.broadcast_to(weights["b_O"], last_TD.shape))
        parts[f"blocks.{i}.mlp"] = along(found[f"blocks.{i}.mlp"])
    return parts | constant


def _before_norm(
    model: Decoder, params: Params, x_TD: jax.Array, direction_TD: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The direction before the last norm that is a given one after it, for a stream of which it is known; and what the
    norm adds by itself."""
    centres = model.config.norm == "layernorm"
    norm, wide_TD = params["final_norm"], widened(x_TD)
    if centres:
        wide_TD -= wide_TD.mean(axis=-1, keepdims=True)
    eps = epsilon(model.config.norm, model.config.norm_eps)
    scale_T1 = jax.lax.rsqrt(jnp.mean(jnp.square(wide_TD), axis=-1, keepdims=True) + eps)
    before_TD = direction_TD * norm["gamma"] * scale_T1
    if not centres:
        return before_TD, {}
    # What centring takes off a part, it takes off its product with this.
    return before_TD - before_TD.mean(axis=-1, keepdims=True), {"final_norm.beta": direction_TD @ norm["beta"]}


def patch(
    model: nn.Module, params: Params, run: Sequence[jax.Array], source: Sequence[jax.Array], names: str | Sequence[str],
    metric: Callable[[jax.Array], jax.Array],
) -> dict[str, jax.Array]:  # fmt: skip
    """Activation patching: what a metric of the logits becomes where, at one place of a text, one thing is put in that
    the model computed of another text (Meng et al. 2022, section 2); `(T,)` by name, a number a place.

    Args:
      run: inputs of the model, whose logits are measured.
      source: inputs of the same shapes, which what is put in comes from.
      names: patterns of what is put in, as of `trace`: whose first axis is the text's, such as `blocks.*.before`; or
        the second, after the heads.
      metric: of the logits, to a scalar: the difference of two tokens' at the last place, say. One function for many
        calls: each new one is compiled again.
    """
    for inputs in (run, source):
        check_example(model, *inputs)
    patterns = (names,) if isinstance(names, str) else tuple(names)
    found = _patch(model, params, tuple(run), tuple(source), patterns, metric)
    return {name: found[name] for name in trace_names(model, params, *run, names=patterns)}


@partial(jax.jit, static_argnames=("model", "names", "metric"))
def _patch(
    model: nn.Module, params: Params, run: tuple, source: tuple, names: tuple[str, ...], metric: Callable
) -> dict[str, jax.Array]:
    theirs = trace(model, params, *source, names=names)

    def with_one(which: str) -> jax.Array:
        axis = int(which.endswith(AFTER_HEADS))
        T = theirs[which].shape[axis]

        def at(place: jax.Array) -> jax.Array:
            def put(name: str, value: jax.Array) -> jax.Array:
                if name != which:
                    return value
                here = jnp.arange(T) == place
                return jnp.where(
                    jnp.expand_dims(here, [a for a in range(value.ndim) if a != axis]), theirs[name], value
                )

            with editing(put):
                return metric(model.apply({"params": params}, *run))

        return jax.lax.map(at, jnp.arange(T))

    return {name: with_one(name) for name in theirs}


def _check(model: nn.Module) -> None:
    """Raise `UserError` where blocks do not add to a stream that becomes logits at the end."""
    if not isinstance(model, Decoder) or not model.config.residual:
        raise UserError(
            f"this {type(model).__name__} has no residual stream that becomes logits; there is none to read."
        )
    if model.config.norm != "none" and model.config.norm_placement == "post":
        raise UserError("norms after a block's parts change what was written before them; only pre-norm adds up.")
