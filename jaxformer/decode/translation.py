"""Translation with any sequence-to-sequence model, by greedy decoding or beam search.

A model has three methods (see `models.encoder_decoder.EncoderDecoder`), each on one example: `start(source_S, valid_S,
n_slots, dtype)` returns a cache that holds the source, and `extend` and `unembed` are those of `decode.generation` for
the target, which begins with the end-of-text token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.pairs import PairDataset
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.beam import check_length_penalty, search
from jaxformer.decode.generation import check_context, check_rows, left_aligned, length_bucket, placement
from jaxformer.decode.programs import call, decode_step
from jaxformer.decode.prompts import Prompt
from jaxformer.decode.streaming import batch_by_length
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

if TYPE_CHECKING:
    from jaxformer.runs.run import Run


def encode_source(prompt: Prompt, run: Run) -> list[int]:
    """Return the tokens of a prompt to translate. Raises `UserError` if the prompt has a seed, or more tokens than the
    context."""
    prompt.check_no_seed("translation does not sample")
    model, tokenizer = run.text_model()
    tokens = tokenizer.encode(prompt.text)
    prompt.check_length(len(tokens), model.context_length, f"the context's {model.context_length}")
    return tokens


def translate_held_out(run: Run, params: Params, data: PairDataset, batch_size: int) -> tuple[list[str], list[str]]:
    """Return greedy translations of the held-out sources, truncated to the context, and their references."""
    model, tokenizer = run.text_model()
    sources, references = zip(*data.val, strict=True)
    targets = translate_tokens(
        run.model, params, [tokens[: model.context_length] for tokens in tokenizer.encode_batch(sources)],
        end_of_text=tokenizer.end_of_text, context_length=model.context_length, batch_size=batch_size,
    )  # fmt: skip
    return [tokenizer.decode(target) for target in targets], list(references)


def translate(
    model: nn.Module, params: Params, tokenizer: Tokenizer, texts: Sequence[str], *, context_length: int, **options: Any
) -> list[str]:
    """Return the translation of each text.

    Args:
      options: see `translate_tokens`.

    Raises:
      UserError: a text is empty or has more than `context_length` tokens, or as for `translate_tokens`.
    """
    sources = tokenizer.encode_batch(texts)
    for number, source in enumerate(sources, start=1):
        if not 1 <= len(source) <= context_length:
            label = f"text {number}" if len(sources) > 1 else "the text"
            limit = f"it must have at least 1 and at most the context's {context_length}"
            raise UserError(f"{label} has {len(source)} tokens; {limit}.")
    end = tokenizer.end_of_text
    targets = translate_tokens(model, params, sources, end_of_text=end, context_length=context_length, **options)
    return [tokenizer.decode(target) for target in targets]


def translate_tokens(
    model: nn.Module, params: Params, sources: Sequence[Sequence[int]], *, end_of_text: int, context_length: int,
    max_new_tokens: int | None = None, n_beams: int = 1, length_penalty: float = 1.0, batch_size: int = 64,
    cache_dtype: Any = jnp.float32,
) -> list[list[int]]:  # fmt: skip
    """Return the tokens of each target, without the end-of-text token.

    Args:
      sources: tokens of each source, 1 to `context_length` of them.
      end_of_text: first and last token of a target.
      max_new_tokens: maximum tokens per target, including its end; None for the context length.
      n_beams: 1 for greedy decoding; more for a beam search with as many beams, which returns the best target.
      length_penalty: see `decode.beam`; for a beam search only.
      batch_size: sources per batch, which affects speed but, up to rounding, not the targets.
      cache_dtype: dtype of the cache of sources and targets.

    Raises:
      UserError: an argument is out of range, or as for `check_rows`.
    """
    limit = context_length if max_new_tokens is None else max_new_tokens
    for name, value in (("max_new_tokens", limit), ("n_beams", n_beams), ("batch_size", batch_size)):
        largest = context_length if name == "max_new_tokens" else value
        if not 1 <= value <= largest:
            at_most = f" and at most the context's {largest}" if name == "max_new_tokens" else ""
            raise UserError(f"{name} is {value}; it must be at least 1{at_most}.")
    check_length_penalty(length_penalty)
    check_context(model, context_length)
    check_rows(model, sources, context_length, "source")
    decode = partial(
        _greedy if n_beams == 1 else partial(_beam, length_penalty=np.float32(length_penalty), n_beams=n_beams),
        model, params, end=end_of_text, limit=limit, dtype=jnp.dtype(cache_dtype),
    )  # fmt: skip
    targets: dict[int, list[int]] = {}
    size, put = min(batch_size, len(sources)), placement(params)
    for batch in batch_by_length([len(source) for source in sources], batch_size):
        # Pad the last batch, so that no program is compiled just for it.
        rows = [list(sources[i]) for i in np.resize(batch, size)]
        lengths_B = np.array([len(row) for row in rows])
        S = min(length_bucket(int(lengths_B.max())), context_length)
        targets_BT = decode(put(left_aligned(rows, S)), put(np.arange(S) < lengths_B[:, None]))
        for i, target_T in zip(batch, np.asarray(targets_BT), strict=False):
            ended_T = np.isin(target_T, (end_of_text, EMPTY))
            targets[i] = target_T[: ended_T.argmax() if ended_T.any() else limit].tolist()
    return [targets[i] for i in range(len(sources))]


@partial(jax.jit, static_argnames=("model", "end", "limit", "dtype"))
def _greedy(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, *, end: int, limit: int, dtype: Any
) -> jax.Array:
    """Return greedy targets, `(B, limit)` int32, `EMPTY` after the end."""
    extend, cache = _begin(model, params, source_BS, valid_BS, limit, dtype)
    B = len(source_BS)

    def unfinished(carry: tuple) -> jax.Array:
        i, _, done_B, *_ = carry
        return (i < limit) & ~done_B.all()

    def step(carry: tuple) -> tuple:
        i, last_B, done_B, target_BT, cache = carry
        logits_BV, cache = extend(i, last_B, cache)
        token_B = jnp.where(done_B, EMPTY, logits_BV.argmax(axis=-1).astype(jnp.int32))
        target_BT = jax.lax.dynamic_update_index_in_dim(target_BT, token_B, i, axis=1)
        return i + 1, token_B, done_B | (token_B == end), target_BT, cache

    empty_BT = jnp.full((B, limit), EMPTY, jnp.int32)
    initial = jnp.int32(0), jnp.full(B, end, jnp.int32), jnp.zeros(B, bool), empty_BT, cache
    return jax.lax.while_loop(unfinished, step, initial)[3]


@partial(jax.jit, static_argnames=("model", "n_beams", "end", "limit", "dtype"))
def _beam(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, *, length_penalty: jax.Array,
    n_beams: int, end: int, limit: int, dtype: Any,
) -> jax.Array:  # fmt: skip
    """Return the best target of each beam search, `(B, limit)` int32, `EMPTY` after the end."""
    extend, cache = _begin(model, params, source_BS, valid_BS, limit, dtype)
    logits_BV, cache = extend(jnp.int32(0), jnp.full(len(source_BS), end, jnp.int32), cache)
    beams = search(
        lambda i, tokens_R, cache: extend(i + 1, tokens_R, cache), cache, logits_BV, length_penalty, n_beams=n_beams,
        max_new_tokens=limit, stop_tokens=(end,),
    )  # fmt: skip
    return beams.tokens_PNT[:, 0]


def _begin(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, n_slots: int, dtype: Any
) -> tuple[Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]], Any]:
    """Return the decode step and the cache of the sources. The step maps i, the i-th token of each target `(B,)` and
    the cache to the logits `(B, V)` of the next token and the extended cache."""

    def extend(i: jax.Array, token_B: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        return jax.vmap(lambda token, cache: decode_step(model, params, token, i, cache, i))(token_B, cache)

    def start(source_S: jax.Array, valid_S: jax.Array) -> Any:
        return call(model, params, "start", source_S, valid_S, n_slots, dtype)

    return extend, jax.vmap(start)(source_BS, valid_BS)
