"""What a language model is trained on."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.ops.losses import negative_log_likelihood

Params = Any
"""A pytree of arrays: what `model.init(…)["params"]` gives."""

LOGITS_AT_ONCE = 2**24
"""Of a longer sequence or a larger vocabulary, logits are made in pieces, and made again for the gradient."""


def next_token_nll(
    model: nn.Module, params: Params, tokens_T: jax.Array, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Nats that each token of one sequence costs given those before it, `(T - 1,)` float32.

    A model that predicts only the end of the window (`mlp_concat`) gives that much: `(1,)`. Dropout is on
    where a key is given.
    """
    rngs = None if dropout_key is None else {"dropout": dropout_key}

    def apply(*args: Any, method: str | None = None) -> Any:
        return model.apply({"params": params}, *args, method=method, rngs=rngs)

    inputs, targets = tokens_T[:-1], tokens_T[1:]
    if hasattr(model, "features"):
        pieces = pieces_of(len(inputs), model.config.vocab_size)
        if pieces > 1:
            x_TD, T = apply(inputs, method="features"), len(inputs)
            one = jax.checkpoint(lambda xy: negative_log_likelihood(apply(xy[0], method="unembed"), xy[1]))
            filling = -T % pieces  # what is predicted from it is cut off again
            x_TD, targets = jnp.pad(x_TD, ((0, filling), (0, 0))), jnp.pad(targets, (0, filling))
            split = (x_TD.reshape(pieces, -1, x_TD.shape[-1]), targets.reshape(pieces, -1))
            return jax.lax.map(one, split).reshape(-1)[:T]
    logits = apply(inputs)
    return negative_log_likelihood(logits, targets[-logits.shape[0] :])


def pieces_of(length: int, vocab_size: int) -> int:
    """Into how many pieces a sequence is cut so that the logits of each stay at about `LOGITS_AT_ONCE`."""
    return min(length, -(-length * vocab_size // LOGITS_AT_ONCE))
