"""Translation with any sequence-to-sequence model, by greedy decoding, sampling or beam search, and its metrics.

A model has three methods (see `models.encoder_decoder.EncoderDecoder`), each on one example: `start(source_S, valid_S,
n_slots, dtype)` returns a cache that holds the source, and `extend` and `unembed` are those of `decode.generation` for
the target, which begins with the end-of-text token, or that of `TargetTokens`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.data.pairs import PairDataset, TargetTokens, encode_sources
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode.batches import batch_by_length, left_aligned, length_bucket, placement
from jaxformer.decode.beam import Extend, search
from jaxformer.decode.checks import check_context, check_rows, seeds_of_rows, vocab_size
from jaxformer.decode.completion import CompletionOptions, fitting_memory
from jaxformer.decode.programs import Cache, call, decode_step, sample_rows
from jaxformer.decode.prompts import Encoded, Prompt
from jaxformer.decode.samplers import Sampling, init_history
from jaxformer.errors import UserError, import_extra
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

if TYPE_CHECKING:
    from jaxformer.runs.run import Run

GREEDY = Sampling(temperature=0)
"""Options of greedy translations."""
PLAIN = TargetTokens()
"""No tokens besides end-of-text, as of models that were trained here."""


def encode_source(prompt: Prompt, run: Run, samples: bool = False) -> list[int]:
    """Return the tokens of a prompt to translate. Raises `UserError` if it has more tokens than the context, or a seed
    though nothing is sampled."""
    if not samples:
        prompt.check_no_seed("translation does not sample")
    model, tokenizer = run.text_model()
    [tokens] = encode_sources([prompt.text], tokenizer)
    prompt.check_length(len(tokens), model.context_length, f"the context's {model.context_length}")
    return tokens


def translate_prompts(
    run: Run, prompts: list[Encoded], options: CompletionOptions, max_new_tokens: int | None,
    sampling: Sampling = GREEDY,
) -> Iterator[Encoded]:  # fmt: skip
    """Yield each prompt with the tokens of its translation, batch by batch.

    Args:
      prompts: each with the tokens of its source.
      max_new_tokens: as for `translate_tokens`, instead of the option.
      sampling: as for `translate_tokens`; the seeds are those of the prompts and the option.

    Raises:
      UserError: a batch does not fit into memory, or as for `translate_tokens`.
    """
    model, tokenizer = run.text_model()
    for first in range(0, len(prompts), options.batch_size):
        batch, sources = zip(*prompts[first : first + options.batch_size], strict=True)
        n_tokens = tokenizer.vocab_size if tokenizer.vocab_size < model.vocab_size else None
        stops = (*tokenizer.ends_of_text, *sampling.stop_tokens)
        seeds = [options.seed if prompt.seed is None else prompt.seed for prompt in batch]
        with fitting_memory(len(batch)):
            targets = translate_tokens(
                run.model, run.params, sources, end_of_text=tokenizer.end_of_text, context_length=model.context_length,
                max_new_tokens=max_new_tokens, n_beams=options.num_beams, length_penalty=options.length_penalty,
                batch_size=options.batch_size, cache_dtype=options.cache_dtype, special=TargetTokens.of(tokenizer),
                sampling=replace(sampling, stop_tokens=stops, n_tokens=n_tokens), seeds=seeds,
            )  # fmt: skip
        yield from zip(batch, targets, strict=True)


def translate_validation(run: Run, params: Params, data: PairDataset, batch_size: int) -> tuple[list[str], list[str]]:
    """Return greedy translations of the held-out sources, truncated to the context, and their references."""
    model, tokenizer = run.text_model()
    sources, references = zip(*data.val, strict=True)
    end, length = tokenizer.end_of_text, model.context_length
    targets = translate_tokens(
        run.model, params, encode_sources(sources, tokenizer, length), end_of_text=end, context_length=length,
        batch_size=batch_size, special=TargetTokens.of(tokenizer),
    )  # fmt: skip
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
    sources, end = encode_sources(texts, tokenizer), tokenizer.end_of_text
    options = {"special": TargetTokens.of(tokenizer)} | options
    targets = translate_tokens(model, params, sources, end_of_text=end, context_length=context_length, **options)
    return [tokenizer.decode(target) for target in targets]


def translate_tokens(
    model: nn.Module, params: Params, sources: Sequence[Sequence[int]], *, end_of_text: int, context_length: int,
    max_new_tokens: int | None = None, n_beams: int = 1, length_penalty: float = 1.0, batch_size: int = 64,
    cache_dtype: DTypeLike = jnp.float32, special: TargetTokens = PLAIN, sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Return the tokens of each target, without the end-of-text token.

    Args:
      sources: tokens of each source, 1 to `context_length` of them.
      end_of_text: last token of a target and, unless `special` has another, the decoder's first input.
      max_new_tokens: maximum tokens per target, including its end; None for the context length.
      n_beams: 1 for greedy decoding; more for a beam search with as many beams, which returns the best target.
      length_penalty: see `decode.beam`; for a beam search only.
      batch_size: sources per batch, which affects speed but, up to rounding, not the targets.
      cache_dtype: dtype of the cache of sources and targets.
      special: further tokens that a published model names.
      sampling: options for a token, greedy by default; of these, a beam search reads the stop tokens, which also end a
        target.
      seeds: random seed of each source, for sampling; None for 0, 1, 2, …

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
    seeds_N = seeds_of_rows(range(len(sources)) if seeds is None else seeds, len(sources), 1)
    stops = tuple(dict.fromkeys((end_of_text, *sampling.stop_tokens)))
    start = end_of_text if special.start is None else special.start
    same = {"start": start, "special": special, "limit": limit, "dtype": jnp.dtype(cache_dtype)}
    if n_beams == 1:
        decode = partial(_sample, model, params, sampling=replace(sampling, stop_tokens=stops), **same)
    else:
        penalty = np.float32(length_penalty)
        decode = partial(_beam, model, params, length_penalty=penalty, n_beams=n_beams, stop_tokens=stops, **same)
    targets: dict[int, list[int]] = {}
    size, put = min(batch_size, len(sources)), placement(params)
    for batch in batch_by_length([len(source) for source in sources], batch_size):
        # Pad the last batch, so that no program is compiled just for it.
        padded = np.resize(batch, size)
        rows, of_rows = [list(sources[i]) for i in padded], () if n_beams > 1 else (put(seeds_N[padded]),)
        lengths_B = np.array([len(row) for row in rows])
        S = min(length_bucket(int(lengths_B.max())), context_length)
        targets_BT = decode(put(left_aligned(rows, S)), put(np.arange(S) < lengths_B[:, None]), *of_rows)
        for i, target_T in zip(batch, np.asarray(targets_BT), strict=False):
            ended_T = np.isin(target_T, (*stops, EMPTY))
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


@partial(jax.jit, static_argnames=("model", "start", "special", "limit", "dtype"))
def _sample(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, seeds_B: jax.Array, *, start: int,
    special: TargetTokens, limit: int, dtype: DTypeLike, sampling: Sampling,
) -> jax.Array:  # fmt: skip
    """Return sampled targets, or greedy ones, `(B, limit)` int32, `EMPTY` after the end."""
    extend, cache = _begin(model, params, source_BS, valid_BS, special, limit, dtype)
    B = len(source_BS)
    start_B1 = jnp.full((B, 1), start, jnp.int32)
    history_B = jax.vmap(lambda start_1: init_history(sampling, vocab_size(model), start_1, 1))(start_B1)

    def unfinished(carry: tuple) -> jax.Array:
        i, _, done_B, *_ = carry
        return (i < limit) & ~done_B.all()

    def step(carry: tuple) -> tuple:
        i, last_B, done_B, target_BT, history_B, cache = carry
        logits_BV, cache = extend(i, last_B, cache)
        samples_B, history_B, done_B = sample_rows(sampling, logits_BV, history_B, seeds_B, done_B)
        target_BT = jax.lax.dynamic_update_index_in_dim(target_BT, samples_B.tokens, i, axis=1)
        return i + 1, samples_B.tokens, done_B, target_BT, history_B, cache

    empty_BT = jnp.full((B, limit), EMPTY, jnp.int32)
    initial = jnp.int32(0), start_B1[:, 0], jnp.zeros(B, bool), empty_BT, history_B, cache
    return jax.lax.while_loop(unfinished, step, initial)[3]


@partial(jax.jit, static_argnames=("model", "n_beams", "start", "stop_tokens", "special", "limit", "dtype"))
def _beam(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, *, length_penalty: jax.Array,
    n_beams: int, start: int, stop_tokens: tuple[int, ...], special: TargetTokens, limit: int, dtype: DTypeLike,
) -> jax.Array:  # fmt: skip
    """Return the best target of each beam search, `(B, limit)` int32, `EMPTY` after the end."""
    extend, cache = _begin(model, params, source_BS, valid_BS, special, limit, dtype)
    logits_BV, cache = extend(jnp.int32(0), jnp.full(len(source_BS), start, jnp.int32), cache)
    beams = search(
        lambda i, tokens_R, cache: extend(i + 1, tokens_R, cache), cache, logits_BV, length_penalty, n_beams=n_beams,
        max_new_tokens=limit, stop_tokens=stop_tokens,
    )  # fmt: skip
    return beams.tokens_PNT[:, 0]


def _begin(
    model: nn.Module, params: Params, source_BS: jax.Array, valid_BS: jax.Array, special: TargetTokens, limit: int,
    dtype: DTypeLike,
) -> tuple[Extend, Cache]:  # fmt: skip
    """Return the decode step and the cache of the sources."""

    def extend(i: jax.Array, token_B: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        logits_BV, cache = jax.vmap(lambda token, cache: decode_step(model, params, token, i, cache, i))(token_B, cache)
        return constrain(logits_BV, i, limit, special), cache

    def start(source_S: jax.Array, valid_S: jax.Array) -> Cache:
        return call(model, params, "start", source_S, valid_S, limit, dtype)

    return extend, jax.vmap(start)(source_BS, valid_BS)


def constrain(logits_BV: jax.Array, i: jax.Array, limit: int, special: TargetTokens) -> jax.Array:
    """Return the logits of the i-th token of targets of at most `limit` tokens, of which -inf excludes those that a
    model's `TargetTokens` do not permit there."""
    if special.banned:
        logits_BV = logits_BV.at[:, np.array(special.banned)].set(-jnp.inf)
    for token, position in ((special.first, 0), (special.last, limit - 1)):
        if token is not None:
            only_V = jnp.full(logits_BV.shape[1], -jnp.inf, logits_BV.dtype).at[token].set(0)
            logits_BV = jnp.where(i == position, only_V[None], logits_BV)
    return logits_BV
