"""What a language model is trained on."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.nn.execution import ROUTER
from jaxformer.nn.experts import routers
from jaxformer.ops.experts import balance_loss
from jaxformer.ops.losses import negative_log_likelihood

Params = Any
"""A pytree of arrays: what `model.init(…)["params"]` gives."""

LOGITS_AT_ONCE = 2**26
"""How many logits a device holds at once, 256 MiB in float32; of a batch with more they are made in pieces, and made
again for the gradient. Each piece adds to the gradient of the whole unembedding, which costs more than the products of
a piece of a few hundred tokens: with 128,256 tokens in the vocabulary a piece still has 523."""


def next_token_nll(
    model: nn.Module, params: Params, tokens_T: jax.Array, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Nats that each token of one sequence costs given those before it, `(T - 1,)` float32.

    A model that predicts only the end of the window (`mlp_concat`) gives that much: `(1,)`. Dropout is on
    where a key is given.
    """
    logits = model.apply({"params": params}, tokens_T[:-1], rngs=_rngs(dropout_key))
    assert isinstance(logits, jax.Array)
    return _nll_of_the_end(logits, tokens_T)


def batch_nll(model: nn.Module, params: Params, batch_BT: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
    """`next_token_nll` of each sequence of a batch, `(B, T - 1)`, with about `LOGITS_AT_ONCE` logits at a time.

    For that the model must have `features` and `unembed`, as `Decoder`.
    """
    return batch_nll_and_routing(model, params, batch_BT, keys_B)[0]


def batch_nll_and_routing(
    model: nn.Module, params: Params, batch_BT: jax.Array, keys_B: jax.Array | None = None
) -> tuple[jax.Array, Any]:
    """`batch_nll`, and of each sequence what `nn.experts` sows into the collection `ROUTER`, with B first; `{}` where
    there are no experts."""
    B, T = batch_BT.shape[0], batch_BT.shape[1] - 1
    pieces = pieces_of(B * T, model.config.vocab_size) if hasattr(model, "features") else 1
    call = partial(model.apply, {"params": params}, mutable=[ROUTER])

    def nll(tokens_T: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
        logits, sown = call(tokens_T[:-1], rngs=_rngs(key))
        return _nll_of_the_end(logits, tokens_T), sown.get(ROUTER, {})

    if pieces == 1:
        return jax.vmap(nll)(batch_BT, keys_B)

    def features(tokens_T: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
        x_TD, sown = call(tokens_T, method="features", rngs=_rngs(key))
        return x_TD, sown.get(ROUTER, {})

    # From here on each token is for itself, whatever sequence it is of.
    x_BTD, routing_B = jax.vmap(features)(batch_BT[:, :-1], keys_B)
    x_ND, targets_N = x_BTD.reshape(B * T, -1), batch_BT[:, 1:].reshape(-1)
    filling = -B * T % pieces  # what is predicted from it is cut off again
    x_ND, targets_N = jnp.pad(x_ND, ((0, filling), (0, 0))), jnp.pad(targets_N, (0, filling))
    # What the pieces add up to, the gradient of these parameters, is summed in float32.
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), params)

    @jax.checkpoint
    def one(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        narrow = jax.tree.map(lambda w, like: w.astype(like.dtype), wide, params)
        logits: Any = model.apply({"params": narrow}, piece[0], method="unembed")
        return negative_log_likelihood(logits, piece[1])

    nll_N = jax.lax.map(one, (x_ND.reshape(pieces, -1, x_ND.shape[-1]), targets_N.reshape(pieces, -1)))
    return nll_N.reshape(-1)[: B * T].reshape(B, T), routing_B


def pieces_of(n_tokens: int, vocab_size: int) -> int:
    """Into how many pieces tokens are cut so that the logits of each stay at about `LOGITS_AT_ONCE`."""
    return min(n_tokens, -(-n_tokens * vocab_size // LOGITS_AT_ONCE))


def auxiliary_loss(model: nn.Module, routing: Any) -> jax.Array:
    """What the routers of experts add to the loss, as its config weighs it; from statistics averaged over the batch."""
    c = model.config
    each = (c.balance_weight * balance_loss(found) + c.router_z_weight * found.z for found in routers(routing).values())
    return sum(each, start=jnp.float32(0))


def _nll_of_the_end(logits: jax.Array, tokens_T: jax.Array) -> jax.Array:
    """Of as many last tokens as there are logits."""
    return negative_log_likelihood(logits, tokens_T[1:][-logits.shape[0] :])


def _rngs(dropout_key: jax.Array | None) -> dict[str, jax.Array] | None:
    return None if dropout_key is None else {"dropout": dropout_key}
