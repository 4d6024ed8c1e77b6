"""Speculative decoding: a cheap draft proposes tokens, and the model verifies all of them in one pass.

The distribution of the text is the model's own, whatever the draft proposes. Greedy decoding gives the same text in
float32; in bfloat16, a pass over several tokens rounds differently from a pass over one, which can change the choice
between two almost equally likely tokens. A token x that was proposed with probability q(x) is accepted with probability
min(1, p(x)/q(x)); the first rejected token is sampled anew in proportion to max(0, p - q) (Leviathan et al. 2023,
algorithm 1; Chen et al. 2023). Each pass thus yields between one token and one more than were proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.contract import contract_of
from jaxformer.decode.batches import doubled, left_aligned, length_bucket, read_slots
from jaxformer.decode.checks import check_context, check_prompts, has_state, seeds_of_rows, vocab_size
from jaxformer.decode.generation import TokenStream
from jaxformer.decode.programs import Cache, call, decode_step, first_parts, put_first_slots
from jaxformer.decode.samplers import (
    History,
    Samples,
    Sampling,
    distribution,
    draw,
    init_history,
    update_history,
    with_logprobs,
)
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

TOKENS_PER_CALL = 16
"""Minimum new tokens per call, unless the text ends."""

PASS_COST = {"cpu": 0.4}
OTHER_PASS_COST = 0.05
"""Time that one more token in a pass takes, as a fraction of a pass over one token, by platform: on a CPU as measured
for SmolLM2-135M, and on others, where a pass mainly waits for the weights."""

BothParams = tuple[Params, Params]
"""Parameters of the model and of the draft."""


class Draft(Protocol):
    """A source of proposals; hashable, so that jitted functions take it as a static argument."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V, equal to the model's."""

    def init(self, params: Params, tokens_P: jax.Array, length: jax.Array, n_slots: int) -> Cache:
        """Return the draft's state, any pytree, for a text of the first `length` tokens."""

    def propose(
        self, params: Params, text: SpeculativeState, n: int, sampling: Sampling, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Return the next n tokens `(n,)`, their distributions `(n, V)`, and the draft's new state."""


@dataclass(frozen=True)
class PromptLookup:
    """A draft without a model: the tokens that followed an earlier occurrence of the text's last tokens (Saxena 2023).

    Attributes:
      longest: maximum number of last tokens to look up; the longest match counts, down to one token.
    """

    vocab_size: int
    longest: int = 3

    def init(self, params: Params, tokens_P: jax.Array, length: jax.Array, n_slots: int) -> Cache:
        """Return the state, which is empty."""
        return ()

    def propose(
        self, params: Params, text: SpeculativeState, n: int, sampling: Sampling, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Return n tokens `(n,)`, one-hot probabilities `(n, V)`, and the state."""
        text_S, length = text.text_S, text.length
        index_S = jnp.arange(len(text_S))
        n_equal_S = jnp.zeros(len(text_S), jnp.int32)  # length of the match that ends at this index
        equal_S = index_S < length - 1
        for back in range(self.longest):
            equal_S &= (index_S >= back) & (jnp.roll(text_S, back) == text_S[jnp.maximum(length - 1 - back, 0)])
            n_equal_S += equal_S
        # The longest match, and the last among equals.
        match = jnp.argmax(jnp.where(n_equal_S > 0, n_equal_S * len(text_S) + index_S, 0))
        tokens_N = text_S[jnp.minimum(match + 1 + jnp.arange(n), length - 1)]
        return tokens_N, jax.nn.one_hot(tokens_N, self.vocab_size), text.draft


@dataclass(frozen=True)
class DraftModel:
    """A draft that is a smaller model with the same vocabulary.

    Attributes:
      context_length: longest training sequence of the draft, in tokens; None for the model's.
    """

    model: nn.Module
    context_length: int | None = None

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V."""
        return vocab_size(self.model)

    def init(self, params: Params, tokens_P: jax.Array, length: jax.Array, n_slots: int) -> Cache:
        """Return the draft's float32 cache of all tokens but the last."""
        return prefill(self.model, params, tokens_P, length, n_slots, jnp.float32)

    def propose(
        self, params: Params, text: SpeculativeState, n: int, sampling: Sampling, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Return n tokens `(n,)` sampled from the draft, their distributions `(n, V)`, and the extended cache, which is
        not extended for no tokens."""
        if not n:
            return jnp.zeros(0, jnp.int32), jnp.zeros((0, self.vocab_size)), text.draft

        def step(carry: tuple[jax.Array, Cache, History], i: jax.Array) -> tuple[tuple, tuple]:
            token, cache, history = carry
            position = text.length - 1 + i
            logits_V, cache = decode_step(self.model, params, token, position, cache, position)
            probs_V = distribution(logits_V, history, sampling)
            token = draw(jnp.log(probs_V), jax.random.fold_in(key, i))
            return (token, cache, update_history(history, token, sampling)), (token, probs_V)

        # One extra step: if all tokens are accepted, the cache must hold the last one, too.
        initial = text.text_S[text.length - 1], text.draft, text.history
        (_, state, _), (tokens, probs) = jax.lax.scan(step, initial, jnp.arange(n + 1))
        return tokens[:n], probs[:n], state


class SpeculativeState(NamedTuple):
    """The state of a text; the caches of model and draft hold all of it but the last token.

    They may also hold rejected tokens, which the next ones overwrite before any query attends to them.
    """

    cache: Cache
    """KV cache of the model."""
    draft: Cache
    """State of the draft."""
    history: History
    """The text so far, as far as the sampling reads it."""
    text_S: jax.Array
    """Tokens of the prompt and the completion, of which the first `length` are valid; int32."""
    length: jax.Array
    done: jax.Array
    """True once the text has ended, `()` bool."""


class Speculation(TokenStream):
    """The new tokens of a batch, like `generation.Generation`, whose rows are generated one after another.

    Attributes:
      n_passes: model passes over proposals so far.
      n_tokens: new tokens so far.
    """

    def __init__(self, n_rows: int, rows: Iterable[Iterator[tuple[int, Samples]]]) -> None:
        self.n_passes = self.n_tokens = 0
        super().__init__(n_rows, self._generate(rows))

    def _generate(self, rows: Iterable[Iterator[tuple[int, Samples]]]) -> Iterator[Samples]:
        B = len(self.ended_B)
        for number, outputs in enumerate(rows):
            while not self.ended_B[number] and (output := next(outputs, None)):
                n_passes, samples = output
                self.n_passes += n_passes
                self.n_tokens += samples.tokens.shape[1]
                samples = jax.tree.map(lambda x: np.repeat(x, B, axis=0), samples)
                samples.tokens[np.arange(B) != number] = EMPTY
                yield samples


def speculate(
    model: nn.Module, params: Params, draft: Draft, draft_params: Params, prompts: Sequence[Sequence[int]],
    sampling: Sampling, seeds: Sequence[int], *, max_new_tokens: int, context_length: int, n_samples: int = 1,
    n_proposed: int = 4, cache_dtype: DTypeLike = jnp.float32,
) -> Speculation:  # fmt: skip
    """Complete prompts as `generate_tokens` does, in fewer model passes, but one prompt after another.

    The prefill of a prompt is one pass, whatever its length, and its samples share it. A text whose first
    `TOKENS_PER_CALL` tokens show that its proposals do not pay is continued without them.

    Args:
      model: model with the methods that `generate_tokens` needs; its cache must hold keys and values, not a state.
      draft: `PromptLookup(vocab_size)`, whose parameters are None, or `DraftModel(model, context_length)`.
      n_proposed: tokens that the draft proposes at a time.

    Raises:
      UserError: the model or the draft has no cache from which tokens can be removed.
      ValueError: as for `generate_tokens`; or the draft has another vocabulary, the model's contract has `has_prefix`,
        or a text would outgrow the context of the model or the draft.
      OverflowError: as for `generate_tokens`.
    """
    counts = {"max_new_tokens": max_new_tokens, "n_samples": n_samples, "n_proposed": n_proposed}
    check_prompts(model, prompts, context_length, **counts)
    seeds_R = seeds_of_rows(seeds, len(prompts), n_samples)
    if draft.vocab_size != vocab_size(model):
        raise ValueError(f"the draft's vocabulary has {draft.vocab_size} tokens, the model's {vocab_size(model)}")
    if contract_of(model).has_prefix:
        raise ValueError("the model reads its prompt with bidirectional attention, which excludes a draft")
    models = [("model", model, context_length)]
    if isinstance(draft, DraftModel):
        models.append(("draft", draft.model, draft.context_length or context_length))
    longest = max(map(len, prompts))
    for name, m, length in models:
        check_context(m, length)
        if not contract_of(m).has_cache or has_state(m):
            raise UserError(f"the {name} has no cache from which rejected tokens can be removed; omit the draft.")
        if not contract_of(m).extrapolates and longest + max_new_tokens - 1 > length:
            problem = f"{longest} tokens and {max_new_tokens} new ones are more than the context of {length}"
            raise ValueError(f"{problem}, which a draft cannot exceed")
    decoder = _Decoder(model, draft, n_proposed, jnp.dtype(cache_dtype))
    both_params = params, draft_params

    def rows() -> Iterator[Iterator[tuple[int, Samples]]]:
        for number, prompt in enumerate(prompts):
            n_slots = doubled(512, len(prompt) + max_new_tokens + n_proposed)
            tokens_P = left_aligned([list(prompt)], length_bucket(len(prompt)))[0]
            init = cache(partial(_init, decoder, sampling, both_params, tokens_P, np.int32(len(prompt)), n_slots))
            for seed in seeds_R[number * n_samples : (number + 1) * n_samples]:
                # Samples share the state, and `_decode` donates its buffers: copy it.
                start = init if n_samples == 1 else lambda init=init: jax.tree.map(jnp.copy, init())
                yield _passes(decoder, sampling, both_params, start, len(prompt), seed, max_new_tokens)

    return Speculation(len(seeds_R), rows())


@dataclass(frozen=True)
class _Decoder:
    """The static part of the compiled programs."""

    model: nn.Module
    draft: Draft
    n_proposed: int
    dtype: DTypeLike


def _passes(
    decoder: _Decoder, sampling: Sampling, params: BothParams, init: Callable[[], SpeculativeState], n_prompt: int,
    seed: int, limit: int,
) -> Iterator[tuple[int, Samples]]:  # fmt: skip
    """Yield, per call, the number of model passes and their tokens, at most `limit` in all."""
    state = init()
    n_new, all_passes, done, min_per_pass = 0, 0, False, _min_tokens_per_pass(decoder, params)
    while not done:
        n_read = read_slots(n_prompt + n_new + TOKENS_PER_CALL + 2 * decoder.n_proposed, len(state.text_S))
        numbers = np.uint32(seed), np.int32(limit), n_read
        state, n_passes, n, drawn = _decode(decoder, sampling, params, state, *numbers)
        n_passes, n, drawn, done = jax.device_get((n_passes, n, drawn, state.done))
        n_new, all_passes = n_new + int(n), all_passes + int(n_passes)
        if decoder.n_proposed and n_new < min_per_pass * all_passes:
            decoder = replace(decoder, n_proposed=0)
        yield int(n_passes), Samples(*(x[None, :n] for x in drawn))


def _min_tokens_per_pass(decoder: _Decoder, params: BothParams) -> float:
    """Return the new tokens per pass from which proposals pay. It reads no clock, so that a seed gives one text."""
    leaves, of_draft = map(jax.tree.leaves, params)
    cost = PASS_COST.get(next(iter(leaves[0].devices())).platform, OTHER_PASS_COST)
    share = sum(x.nbytes for x in of_draft) / sum(x.nbytes for x in leaves)
    return 1 + decoder.n_proposed * (cost + share)


@partial(jax.jit, static_argnames=("d", "n_slots"))
def _init(
    d: _Decoder, sampling: Sampling, params: BothParams, tokens_P: jax.Array, length: jax.Array, n_slots: int
) -> SpeculativeState:
    """Prefill the prompt without its last token."""
    return SpeculativeState(
        prefill(d.model, params[0], tokens_P, length, n_slots, d.dtype),
        d.draft.init(params[1], tokens_P, length, n_slots),
        init_history(sampling, d.draft.vocab_size, tokens_P, length),
        jnp.zeros(n_slots, jnp.int32).at[: len(tokens_P)].set(tokens_P), length, jnp.bool_(False),
    )  # fmt: skip


def prefill(
    model: nn.Module, params: Params, tokens_P: jax.Array, length: jax.Array, n_slots: int, dtype: DTypeLike
) -> Cache:
    """Return a cache with the first `length - 1` tokens."""
    index_P = jnp.arange(len(tokens_P))
    positions_P = jnp.where(index_P < length - 1, index_P, EMPTY)
    # The prompt attends only to itself, so prefill a cache of its length and copy it.
    _, used = call(model, params, "extend", tokens_P, positions_P, model.init_cache(len(tokens_P), dtype), 0)
    return put_first_slots(model.init_cache(n_slots, dtype), used)


@partial(jax.jit, static_argnames=("decoder", "n_read"), donate_argnames="state")
def _decode(
    decoder: _Decoder, sampling: Sampling, params: BothParams, state: SpeculativeState, seed: jax.Array,
    limit: jax.Array, n_read: int,
) -> tuple[SpeculativeState, jax.Array, jax.Array, Samples]:  # fmt: skip
    """Run passes until there are at least `TOKENS_PER_CALL` new tokens, or the text is done; return the state, the
    number of passes, the number of new tokens, and the tokens."""
    full = state
    shapes = jax.eval_shape(partial(_init, decoder, sampling, n_slots=n_read), params, state.text_S[:1], state.length)
    state = first_parts(full, shapes)
    verify = partial(_verify, decoder, sampling, params, seed, limit)

    def unfinished(carry: tuple[SpeculativeState, jax.Array, jax.Array, Samples]) -> jax.Array:
        state, _, n_new, _ = carry
        return (n_new < TOKENS_PER_CALL) & ~state.done

    def step(carry: tuple[SpeculativeState, jax.Array, jax.Array, Samples]) -> tuple:
        state, n_passes, n_new, drawn_C = carry
        before = state.length
        state, drawn_N = verify(state)
        store = partial(jax.lax.dynamic_update_slice_in_dim, start_index=n_new, axis=0)
        drawn_C = jax.tree.map(store, drawn_C, drawn_N)
        return state, n_passes + 1, n_new + state.length - before, drawn_C

    drawn_N = jax.eval_shape(verify, state)[1]
    size = TOKENS_PER_CALL + decoder.n_proposed
    empty_C = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), drawn_N)
    initial = state, jnp.int32(0), jnp.int32(0), empty_C
    state, n_passes, n_new, drawn_C = jax.lax.while_loop(unfinished, step, initial)
    return put_first_slots(full, state), n_passes, n_new, drawn_C


def _verify(
    decoder: _Decoder, sampling: Sampling, params: BothParams, seed: jax.Array, limit: jax.Array,
    state: SpeculativeState,
) -> tuple[SpeculativeState, Samples]:  # fmt: skip
    """Run one model pass over the draft's proposals; return the state and the tokens, `(n_proposed + 1,)`, of which the
    increase in the text's length gives the number of valid ones."""
    cache, _, history, text_S, length, _ = state
    n_proposed = decoder.n_proposed
    key = jax.random.fold_in(jax.random.key(seed), history.n_new)
    draft_key = jax.random.fold_in(key, 0)
    proposed_N, q_NV, draft_state = decoder.draft.propose(params[1], state, n_proposed, sampling, draft_key)
    inputs = jnp.append(text_S[length - 1], proposed_N)
    positions = length - 1 + jnp.arange(n_proposed + 1)
    x, cache = call(decoder.model, params[0], "extend", inputs, positions, cache, length - 1)
    logits = jax.vmap(partial(call, decoder.model, params[0], "unembed"))(x)

    def check(carry: tuple[History, jax.Array, jax.Array], inputs: tuple) -> tuple[tuple, Samples]:
        history, all_accepted, done = carry
        i, logits_V, token, q_V = inputs
        p_V = distribution(logits_V, history, sampling)
        accept_key, draw_key = jax.random.split(jax.random.fold_in(key, i + 1))
        accepted = jax.random.uniform(accept_key) * q_V[token] < p_V[token]
        accepted &= i < n_proposed  # the token after the proposals comes from the model alone
        rest_V = jnp.maximum(p_V - q_V, 0)
        rest_V = jnp.where(jnp.any(rest_V > 0), rest_V, p_V)  # p and q are equal up to rounding
        token = jnp.where(accepted, token, draw(jnp.log(rest_V), draw_key))
        longer = update_history(history, token, sampling)
        history = jax.tree.map(lambda new, old: jnp.where(all_accepted, new, old), longer, history)
        stops = jnp.isin(token, jnp.array(sampling.stop_tokens, jnp.int32)) | (history.n_new >= limit)
        carry = history, all_accepted & accepted & ~stops, done | (all_accepted & stops)
        return carry, with_logprobs(logits_V, token, sampling)

    one_more = lambda x: jnp.concatenate([x, jnp.zeros((1, *x.shape[1:]), x.dtype)])  # noqa: E731
    steps = jnp.arange(n_proposed + 1), logits, one_more(proposed_N), one_more(q_NV)
    (longer, _, done), drawn = jax.lax.scan(check, (history, jnp.bool_(True), jnp.bool_(False)), steps)
    text_S = jax.lax.dynamic_update_slice_in_dim(text_S, drawn.tokens, length, 0)
    return SpeculativeState(cache, draft_state, longer, text_S, length + longer.n_new - history.n_new, done), drawn
