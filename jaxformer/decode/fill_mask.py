"""Fill-mask: the most likely tokens for the masks in a text, from a masked language model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.masked import mask_token
from jaxformer.decode.batches import padded_length
from jaxformer.decode.programs import call
from jaxformer.decode.prompts import Prompt, Row
from jaxformer.errors import UserError
from jaxformer.models.objective import Params

if TYPE_CHECKING:
    from jaxformer.runs.run import Run

MASK = "[MASK]"
"""Marker of one masked token in a prompt. A space before it belongs to the masked token, as most tokens begin with one;
a published tokenizer decides about its own."""


class FilledMask(NamedTuple):
    """A mask with the candidate tokens for it."""

    position: int
    candidates: list[tuple[int, float]]
    """Tokens with their probabilities, most likely first; the first one fills the mask."""


def encode_masked(prompt: Prompt, run: Run) -> list[int]:
    """Return the tokens of a prompt, with the mask token for each `MASK` and for each mask as the published tokenizer
    writes it, such as <mask>. Raises `UserError` if the prompt has a seed, no mask, or more tokens than the context."""
    prompt.check_no_seed("fill-mask does not sample")
    config, tokenizer = run.text_model()
    mask = mask_token(config, tokenizer)
    if tokenizer.mask_token is None:
        *parts, last = prompt.text.split(MASK)
        encoded = [[*tokenizer.encode(part.removesuffix(" ")), mask] for part in parts]
        tokens = [*chain.from_iterable(encoded), *tokenizer.encode(last)]
    else:
        tokens = tokenizer.encode_masked(prompt.text.replace(MASK, tokenizer.special_tokens["mask_token"]))
    if mask not in tokens:
        raise UserError(f"{prompt.label} has no {MASK}, and the run fills masks; write one, as in 'The {MASK} of'.")
    tokens = [*tokenizer.before_text, *tokens, *tokenizer.after_text]
    prompt.check_length(len(tokens), config.context_length, f"the context's {config.context_length}")
    return tokens


def fill_prompt(run: Run, prompt: Prompt, tokens: Sequence[int], n_candidates: int) -> Row:
    """Return a JSON row with the filled text and, per mask, the most likely tokens as text with probabilities."""
    (config, tokenizer), filled = run.text_model(), list(tokens)
    masks = fill_masks(run.model, run.params, tokens, n_candidates, mask_token(config, tokenizer))
    for mask in masks:
        filled[mask.position] = mask.candidates[0][0]
    candidates = [[(tokenizer.decode([token]), float(f"{p:.4g}")) for token, p in mask.candidates] for mask in masks]
    return {**prompt.as_row(), "text": tokenizer.decode(filled), "masks": candidates}


def fill_masks(
    model: nn.Module, params: Params, tokens: Sequence[int], n_candidates: int, mask: int | None = None
) -> list[FilledMask]:
    """Return the filled masks of a text, in the order of their positions.

    Masks are filled one at a time, the one with the most probable token first; each filled mask is input for the next.
    Probabilities are over all tokens but the mask token.

    Args:
      model: a `MaskedLanguageModel`.
      tokens: `(T,)`, with the mask token for each mask.
      n_candidates: candidates per mask.
      mask: id of the mask token; None for the vocabulary's last.

    Raises:
      ValueError: the text is longer than the context, or the vocabulary has fewer candidates.
    """
    length = padded_length(len(tokens), model.config.context_length)
    mask = model.config.vocab_size - 1 if mask is None else mask
    tokens_T = np.zeros(length, np.int32)
    tokens_T[: len(tokens)] = tokens
    valid_T = np.arange(length) < len(tokens)
    masked_T, filled = valid_T & (tokens_T == mask), []
    while masked_T.any():
        probs_TN, candidates_TN = jax.device_get(_likeliest(model, params, tokens_T, valid_T, mask, n_candidates))
        t = int(np.argmax(np.where(masked_T, probs_TN[:, 0], -1)))
        tokens_T[t], masked_T[t] = candidates_TN[t, 0], False
        filled.append(FilledMask(t, list(zip(candidates_TN[t].tolist(), probs_TN[t].tolist(), strict=True))))
    return sorted(filled)


@partial(jax.jit, static_argnames=("model", "n"))
def _likeliest(
    model: nn.Module, params: Params, tokens_T: jax.Array, valid_T: jax.Array, mask: int, n: int
) -> tuple[jax.Array, jax.Array]:
    """Return the probabilities and the ids, each `(T, n)`, of the n most likely tokens at each position, other than the
    mask token."""
    logits_TV = call(model, params, "__call__", tokens_T, valid_T).astype(jnp.float32)
    probs_TN, candidates_TN = jax.lax.top_k(jax.nn.softmax(logits_TV.at[:, mask].set(-jnp.inf)), n)
    return probs_TN, candidates_TN
