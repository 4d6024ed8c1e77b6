"""What a language model is trained on."""

from typing import Any

import flax.linen as nn
import jax

from jaxformer.ops.losses import negative_log_likelihood

Params = Any
"""A pytree of arrays: what `model.init(…)["params"]` gives."""


def next_token_nll(
    model: nn.Module, params: Params, tokens_T: jax.Array, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Nats that each token of one sequence costs given those before it, `(T - 1,)` float32.

    A model that predicts only the end of the window (`mlp_concat`) gives that much: `(1,)`. Dropout is on
    where a key is given.
    """
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    logits: Any = model.apply({"params": params}, tokens_T[:-1], rngs=rngs)
    return negative_log_likelihood(logits, tokens_T[-logits.shape[0] :])
