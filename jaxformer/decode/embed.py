"""Vectors of texts, from a sentence encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import numpy as np

from jaxformer.data.labelled import pad_texts
from jaxformer.decode.batches import doubled
from jaxformer.decode.programs import call
from jaxformer.models.objective import Params

MIN_TOKENS = 16
"""Shortest length that texts are padded to, in tokens; longer ones are padded to a power of two times this."""


def embed(model: nn.Module, params: Params, texts: Sequence[Sequence[int]], batch_size: int = 32) -> np.ndarray:
    """Return the vectors of texts, `(N, D)` float32, each independent of the others but for rounding.

    Args:
      model: an `Embedder`.
      texts: tokens of each text, as from `data.labelled.tokenize_text`, whose limit is the model's context.
      batch_size: texts that are computed at once, of similar lengths.

    Raises:
      ValueError: a text has more tokens than the context.
    """
    if (longest := max(map(len, texts), default=0)) > (limit := model.config.context_length):
        raise ValueError(f"a text has {longest:,} tokens; the model reads at most {limit:,}: truncate it")
    vectors_ND = np.empty((len(texts), model.config.d_model), np.float32)
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(texts), batch_size):
        indices = by_length[start : start + batch_size]
        length = doubled(MIN_TOKENS, len(texts[indices[-1]]))
        rows = [texts[i] for i in indices] + [texts[indices[0]]] * (min(batch_size, len(texts)) - len(indices))
        inputs = pad_texts(rows, min(length, model.config.context_length))
        vectors_ND[indices] = _embed_batch(model, params, *inputs)[: len(indices)]
    return vectors_ND


@partial(jax.jit, static_argnames=("model",))
def _embed_batch(model: nn.Module, params: Params, tokens_BT: jax.Array, valid_BT: jax.Array) -> jax.Array:
    """Return the vectors of a batch of padded texts, `(B, D)` float32."""
    vectors_BD = jax.vmap(partial(call, model, params, "__call__"))(tokens_BT, valid_BT)
    return vectors_BD.astype("float32")


def cosines(vectors_ND: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of vectors, `(N, N)`."""
    unit_ND = vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)
    return unit_ND @ unit_ND.T
