"""Translation with any sequence-to-sequence model, by greedy decoding or beam search, and its metrics.

A model has three methods (see `models.encoder_decoder.EncoderDecoder`), each on one example: `start(source_S, valid_S,
n_slots, dtype)` returns a cache that holds the source, and `extend` and `unembed` are those of `decode.generation` for
the target, which begins with the end-of-text token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.data.pairs import PairDataset
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.batches import batch_by_length, left_aligned, length_bucket, placement
from jaxformer.decode.beam import Extend, search
from jaxformer.decode.checks import check_context, check_rows
from jaxformer.decode.completion import CompletionOptions, fitting_memory
from jaxformer.decode.programs import Cache, call, decode_step
from jaxformer.decode.prompts import Encoded, Prompt
from jaxformer.errors import UserError, import_extra
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


def translate_prompts(
    run: Run, prompts: list[Encoded], options: CompletionOptions, max_new_tokens: int | None
) -> Iterator[Encoded]:
    """Yield each prompt with the tokens of its translation, batch by batch.

    Args:
      prompts: each with the tokens of its source.
      max_new_tokens: as for `translate_tokens`, instead of the option.

    Raises:
      UserError: a batch does not fit into memory, or as for `translate_tokens`.
    """
    model, tokenizer = run.text_model()
    for first in range(0, len(prompts), options.batch_size):
        batch, sources = zip(*prompts[first : first + options.batch_size], strict=True)
        with fitting_memory(len(batch)):
            targets = translate_tokens(
                run.model, run.params, sources, end_of_text=tokenizer.end_of_text, context_length=model.context_length,
                max_new_tokens=max_new_tokens, n_beams=options.num_beams, length_penalty=options.length_penalty,
                batch_size=options.batch_size, cache_dtype=options.cache_dtype,
            )  # fmt: skip
        yield from zip(batch, targets, strict=True)


def translate_validation(run: Run, params: Params, data: PairDataset, batch_size: int) -> tuple[list[str], list[str]]:
    """Return greedy translations of the held-out sources, truncated to the context, and their references."""
    model, tokenizer = run.text_model()
    sources, references = zip(*data.val, strict=True)
    end, length = tokenizer.end_of_text, model.context_length
    truncated = [tokens[:length] for tokens in tokenizer.encode_batch(sources)]
    targets = translate_tokens(
        run.model, params, truncated, end_of_text=end, context_length=length, batch_size=batch_size
    )
    return [tokenizer.decode(target) for target in targets], list(references)


def translate(
    model: nn.Module, params: Params, tokenizer: Tokenizer, texts: Sequence[str], *, context_length: int, **options: Any
) -> list[str]:
    """Return the translation of each text.

    Args:
      options: see `translate_tokens`.

    Raises:
      UserError: as for `translate_tokens`.
    """
    sources, end = tokenizer.encode_batch(texts), tokenizer.end_of_text
    targets = translate_tokens(model, params, sources, end_of_text=end, context_length=context_length, **options)
    return [tokenizer.decode(target) for target in targets]


def translate_tokens(
    model: nn.Module, params: Params, sources: Sequence[Sequence[int]], *, end_of_text: int, context_length: int,
    max_new_tokens: int | None = None, n_beams: int = 1, length_penalty: float = 1.0, batch_size: int = 64,
    cache_dtype: DTypeLike = jnp.float32,
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
      UserError: `max_new_tokens` is out of range.
      ValueError: `n_beams` is out of range, a source is empty, too long or has a token outside the vocabulary, or the
        context is longer than the model's learned positions.
    """
    limit = context_length if max_new_tokens is None else max_new_tokens
    if not 1 <= limit <= context_length:
        at_most = f"it must be at least 1 and at most the context's {context_length}"
        raise UserError(f"max_new_tokens is {limit}; {at_most}.")
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


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Compute the fraction of hypotheses that equal their reference, from 0 to 1.

    Raises:
      ValueError: there is not one reference for each hypothesis.
    """
    return sum(text == reference for text, reference in zip(hypotheses, references, strict=True)) / len(references)


def scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Compute corpus BLEU (Papineni et al. 2002) and chrF (Popović 2015) against one reference per hypothesis, from 0
    to 100, with sacrebleu's defaults (Post 2018): case-sensitive BLEU with mteval-v13a tokenization.

    Raises:
      UserError: sacrebleu is not installed.
      ValueError: there is not one reference for each hypothesis.
    """
    if len(hypotheses) != len(references):  # sacrebleu would ignore the rest
        raise ValueError(f"there are {len(hypotheses)} texts and {len(references)} references")
    sacrebleu = import_extra("sacrebleu", "computing BLEU and chrF")
    return {
        "bleu": sacrebleu.corpus_bleu(list(hypotheses), [list(references)]).score,
        "chrf": sacrebleu.corpus_chrf(list(hypotheses), [list(references)]).score,
    }


@partial(jax.jit, static_argnames=("model", "end", "limit", "dtype"))
def _greedy(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, end: int, limit: int, dtype: DTypeLike
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
    n_beams: int, end: int, limit: int, dtype: DTypeLike,
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
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, n_slots: int, dtype: DTypeLike
) -> tuple[Extend, Cache]:
    """Return the decode step and the cache of the sources."""

    def extend(i: jax.Array, token_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return jax.vmap(lambda token, cache: decode_step(model, params, token, i, cache, i))(token_B, cache)

    def start(source_S: jax.Array, valid_S: jax.Array) -> Cache:
        return call(model, params, "start", source_S, valid_S, n_slots, dtype)

    return extend, jax.vmap(start)(source_BS, valid_BS)
