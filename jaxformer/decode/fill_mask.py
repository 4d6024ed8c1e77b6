"""Fill the gaps of a text with a masked language model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.models.encoder import MaskedLanguageModel
from jaxformer.models.objective import Params


class Gap(NamedTuple):
    """A place that was filled."""

    place: int
    """In the text, in tokens."""
    candidates: list[tuple[int, float]]
    """Tokens and their probabilities, the likeliest first, which is the one that fills it."""


def fill(model: MaskedLanguageModel, params: Params, tokens: Sequence[int], n_candidates: int) -> list[Gap]:
    """What stands in the gaps of a text, in their order.

    They are filled one after the other, first the one whose likeliest token is the most probable, and what fills it is
    seen by the next. Probabilities are those among all tokens but the mask.

    Args:
      tokens: of the text, the vocabulary's last where there is a gap, which is at least once.
      n_candidates: how many to name for each gap.

    Raises:
      ValueError: the text is longer than the context, or the vocabulary has not so many candidates.
    """
    length, mask = model.config.context_length, model.config.vocab_size - 1
    text_T = np.zeros(length, np.int32)
    text_T[: len(tokens)] = tokens
    valid_T = np.arange(length) < len(tokens)
    open_T, gaps = valid_T & (text_T == mask), []
    while open_T.any():
        found = _likeliest(model, params, text_T, valid_T, n_candidates)
        probabilities, candidates = jax.device_get(found)
        place = int(np.argmax(np.where(open_T, probabilities[:, 0], -1)))
        text_T[place], open_T[place] = candidates[place, 0], False
        gaps.append(Gap(place, list(zip(candidates[place].tolist(), probabilities[place].tolist(), strict=True))))
    return sorted(gaps)


@partial(jax.jit, static_argnames=("model", "n"))
def _likeliest(
    model: MaskedLanguageModel, params: Params, tokens_T: jax.Array, valid_T: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
    """Probabilities and tokens, `(T, n)`."""
    logits_TV = model.apply({"params": params}, tokens_T, valid_T)
    assert isinstance(logits_TV, jax.Array)
    probabilities, candidates = jax.lax.top_k(jax.nn.softmax(logits_TV[:, :-1].astype(jnp.float32)), n)
    return probabilities, candidates
