"""What a language model is trained on."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

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
    return negative_log_likelihood(logits, tokens_T[1:][-logits.shape[0] :])


def batch_nll(model: nn.Module, params: Params, batch_BT: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
    """`next_token_nll` of each sequence of a batch, `(B, T - 1)`, with about `LOGITS_AT_ONCE` logits at a time.

    For that the model must have `features` and `unembed`, as `Decoder`.
    """
    B, T = batch_BT.shape[0], batch_BT.shape[1] - 1
    pieces = pieces_of(B * T, model.config.vocab_size) if hasattr(model, "features") else 1
    if pieces == 1:
        return jax.vmap(lambda tokens_T, key: next_token_nll(model, params, tokens_T, key))(batch_BT, keys_B)

    def features(tokens_T: jax.Array, key: jax.Array | None) -> Any:
        return model.apply({"params": params}, tokens_T, method="features", rngs=_rngs(key))

    # From here on each token is for itself, whatever sequence it is of.
    x_ND = jax.vmap(features)(batch_BT[:, :-1], keys_B).reshape(B * T, -1)
    targets_N = batch_BT[:, 1:].reshape(-1)
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
    return nll_N.reshape(-1)[: B * T].reshape(B, T)


def pieces_of(n_tokens: int, vocab_size: int) -> int:
    """Into how many pieces tokens are cut so that the logits of each stay at about `LOGITS_AT_ONCE`."""
    return min(n_tokens, -(-n_tokens * vocab_size // LOGITS_AT_ONCE))


def _rngs(dropout_key: jax.Array | None) -> dict[str, jax.Array] | None:
    return None if dropout_key is None else {"dropout": dropout_key}
