"""Speculative decoding: a cheap draft proposes tokens, and the model checks all of them in one pass.

The text is distributed as without a draft, whatever the draft proposes. Greedily it is the same text in float32; in
bfloat16, a pass over several tokens rounds otherwise than a pass over one, which decides where two are about as likely.
A token x that was proposed with probability q(x) is taken with probability min(1, p(x)/q(x)); the first that is not is
drawn anew in proportion to max(0, p - q) (Leviathan et al. 2023, algorithm 1; Chen et al. 2023). One pass so gives from
one token to one more than were proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import contract_of
from jaxformer.decode.generate import (
    Piece,
    check_prompts,
    check_seeds,
    doubled,
    left_aligned,
    prompt_bucket,
    read_slots,
    vocab_size,
)
from jaxformer.decode.programs import call, first_parts, first_slots, put_first_slots
from jaxformer.decode.samplers import Drawn, History, Sampling, begin, distribution, draw, update, with_logprobs
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

MAX_DRAFT_TOKENS = 64
PORTION = 16
"""Tokens that one call makes, or a few more."""


class Draft(Protocol):
    """What proposes; hashable, so that jitted functions take it as a static argument."""

    @property
    def vocab_size(self) -> int:
        """V, the model's."""

    def begin(self, params: Params, tokens_P: jax.Array, length: jax.Array, n_slots: int) -> Any:
        """The state, any pytree, for a text whose first `length` tokens are known."""

    def propose(
        self, params: Params, state: Any, text_S: jax.Array, length: jax.Array, n: int, sampling: Sampling,
        history: History, key: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:  # fmt: skip
        """The next n tokens `(n,)`, the probabilities `(n, V)` that each was drawn from, and the state."""


@dataclass(frozen=True)
class PromptLookup:
    """Proposes what followed the text's last tokens when they stood there before (Saxena 2023); needs no model.

    Attributes:
      vocab_size: V.
      longest: so many last tokens are looked for at first, then fewer, down to one.
    """

    vocab_size: int
    longest: int = 3

    def begin(self, params: Params, tokens_P: jax.Array, length: jax.Array, n_slots: int) -> Any:
        return ()

    def propose(
        self, params: Params, state: Any, text_S: jax.Array, length: jax.Array, n: int, sampling: Sampling,
        history: History, key: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:  # fmt: skip
        place_S = jnp.arange(len(text_S))
        same_S = jnp.zeros(len(text_S), jnp.int32)  # how many tokens up to this place are as the last ones are
        running_S = place_S < length - 1
        for back in range(self.longest):
            running_S &= (place_S >= back) & (jnp.roll(text_S, back) == text_S[jnp.maximum(length - 1 - back, 0)])
            same_S += running_S
        # The longest that fits, and of equals the last.
        at = jnp.argmax(jnp.where(same_S > 0, same_S * len(text_S) + place_S, 0))
        tokens_N = text_S[jnp.minimum(at + 1 + jnp.arange(n), length - 1)]
        return tokens_N, jax.nn.one_hot(tokens_N, self.vocab_size), state


@dataclass(frozen=True)
class DraftModel:
    """Proposes what a smaller model with the same vocabulary draws.

    Attributes:
      context_length: the longest sequence that it was made for; None for as long as the model proposed to.
    """

    model: nn.Module
    context_length: int | None = None

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.model, 1)

    def begin(self, params: Params, tokens_P: jax.Array, length: jax.Array, n_slots: int) -> Any:
        return read_text(self.model, params, tokens_P, length, n_slots, jnp.float32)[0]

    def propose(
        self, params: Params, state: Any, text_S: jax.Array, length: jax.Array, n: int, sampling: Sampling,
        history: History, key: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Any]:  # fmt: skip
        def step(carry: tuple[jax.Array, Any, History], i: jax.Array) -> tuple[tuple, tuple]:
            token, cache, history = carry
            at = length - 1 + i
            x_1D, cache = call(self.model, params, "extend", token[None], at[None], cache, at)
            probs_V = distribution(call(self.model, params, "unembed", x_1D[0]), history, sampling)
            token = draw(jnp.log(probs_V), jax.random.fold_in(key, i))
            return (token, cache, update(history, token, sampling)), (token, probs_V)

        # One step more than is used: the last token proposed must be in the cache, too, if all are taken.
        (_, state, _), (tokens, probs) = jax.lax.scan(step, (text_S[length - 1], state, history), jnp.arange(n + 1))
        return tokens[:n], probs[:n], state


class State(NamedTuple):
    """Of a text; the caches of model and draft hold all of it but the last token.

    They may hold tokens that were not taken, too. These are written over by the next that are read, before any query
    comes to where it could see them.
    """

    cache: Any
    draft: Any
    history: History
    text_S: jax.Array
    length: jax.Array
    done: jax.Array


class Speculation:
    """An iterator over pieces, as `generate.Generation`; the rows are made one after another.

    Attributes:
      passes: passes of the model over proposals, so far.
      made: tokens made, so far.
    """

    def __init__(self, n_rows: int, rows: Iterable[Iterator[tuple[int, Piece]]]) -> None:
        self.passes = self.made = 0
        self._ended_B = np.zeros(n_rows, bool)
        self._pieces = self._one_after_another(rows)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def end(self, row: int) -> None:
        """Deliver no more tokens of a row."""
        self._ended_B[row] = True

    def _one_after_another(self, rows: Iterable[Iterator[tuple[int, Piece]]]) -> Iterator[Piece]:
        B = len(self._ended_B)
        for number, pieces in enumerate(rows):
            while not self._ended_B[number] and (found := next(pieces, None)):
                passes, piece = found
                self.passes += passes
                self.made += piece.tokens_BN.shape[1]
                piece = Piece(*(np.repeat(x, B, axis=0) for x in piece))
                piece.tokens_BN[np.arange(B) != number] = EMPTY
                yield piece


def speculate(
    model: nn.Module,
    params: Params,
    draft: Draft,
    draft_params: Params,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    context_length: int,
    n_samples: int = 1,
    n_proposed: int = 4,
    cache_dtype: Any = jnp.float32,
) -> Speculation:
    """Continue prompts as `generate` does, in fewer passes of the model, but one after another.

    A prompt is read once for all its samples, but, other than there, at once, however long.

    Args:
      model: with the methods that `generate` names; its cache must hold keys and values, not a state.
      draft: `PromptLookup(vocab_size)`, whose parameters are None, or `DraftModel(model, context_length)`.
      n_proposed: tokens that the draft proposes at a time, 1 to 64.

    Raises:
      UserError: as `generate`; or the draft has another vocabulary, a text would outgrow a context with an end, the
        model's or the draft's, or the model's prompts are prefixes.
    """
    if not 1 <= n_proposed <= MAX_DRAFT_TOKENS:
        raise UserError(f"the draft would propose {n_proposed} tokens at a time; it can be 1 to {MAX_DRAFT_TOKENS}.")
    check_prompts(model, prompts, context_length, max_new_tokens=max_new_tokens, n_samples=n_samples)
    check_seeds(seeds, len(prompts), n_samples)
    if draft.vocab_size != (known := vocab_size(model, context_length)):
        raise UserError(
            f"the draft knows {draft.vocab_size} tokens and the model {known}; use a draft of its vocabulary."
        )
    if contract_of(model).has_prefix:
        raise UserError("the model sees its prompt in both directions, which a draft is not made for; leave it out.")
    contexts = [(model, context_length)]
    if isinstance(draft, DraftModel):
        contexts.append((draft.model, draft.context_length or context_length))
    end = min((length for m, length in contexts if not contract_of(m).extrapolates), default=None)
    longest = max(map(len, prompts))
    if end is not None and longest + max_new_tokens - 1 > end:
        raise UserError(
            f"{longest} tokens and {max_new_tokens} new ones are more than the context of {end}, past which a draft "
            f"cannot go; ask for at most {max(0, end - longest + 1)} new ones, or leave out the draft."
        )
    dtype = jnp.dtype(cache_dtype)

    def rows() -> Iterator[Iterator[tuple[int, Piece]]]:
        for number, prompt in enumerate(prompts):
            n_slots = doubled(512, len(prompt) + max_new_tokens + n_proposed)
            tokens_P = left_aligned([list(prompt)], prompt_bucket(len(prompt)))[0]
            length = np.int32(len(prompt))
            read = partial(_begin, model, draft, sampling, params, draft_params, tokens_P, length, n_slots, dtype)
            begin = read if n_samples == 1 else partial(_copy_of, cache(read))
            for seed in seeds[number * n_samples : (number + 1) * n_samples]:
                yield _pieces(
                    model, params, draft, draft_params, begin, len(prompt), sampling, seed, max_new_tokens, n_proposed,
                    dtype,
                )  # fmt: skip

    return Speculation(len(seeds), rows())


def _copy_of(read: Callable[[], State]) -> State:
    """Of what is read once: `_go_on` writes over it."""
    return jax.tree.map(jnp.copy, read())


def _pieces(
    model: nn.Module, params: Params, draft: Draft, draft_params: Params, begin: Callable[[], State], n_prompt: int,
    sampling: Sampling, seed: int, max_new_tokens: int, n_proposed: int, dtype: Any,
) -> Iterator[tuple[int, Piece]]:  # fmt: skip
    """Passes of the model, and what they gave."""
    state = begin()
    made, done = 0, False
    while not done:
        n_read = read_slots(n_prompt + made + PORTION + 2 * n_proposed, len(state.text_S))
        state, passes, n, drawn = _go_on(
            model, draft, sampling, params, draft_params, state, np.uint32(seed), np.int32(max_new_tokens),
            n_proposed, n_read, dtype,
        )  # fmt: skip
        passes, n, drawn, done = jax.device_get((passes, n, drawn, state.done))
        made += int(n)
        yield int(passes), Piece(*(x[None, :n] for x in drawn))


@partial(jax.jit, static_argnames=("model", "draft", "sampling", "n_slots", "dtype"))
def _begin(
    model: nn.Module, draft: Draft, sampling: Sampling, params: Params, draft_params: Params, tokens_P: jax.Array,
    length: jax.Array, n_slots: int, dtype: Any,
) -> State:  # fmt: skip
    """Read the prompt but for its last token."""
    cache, V = read_text(model, params, tokens_P, length, n_slots, dtype)
    return State(
        cache, draft.begin(draft_params, tokens_P, length, n_slots), begin(sampling, V, tokens_P, length),
        jnp.zeros(n_slots, jnp.int32).at[: len(tokens_P)].set(tokens_P), length, jnp.bool_(False),
    )  # fmt: skip


def read_text(
    model: nn.Module, params: Params, tokens_P: jax.Array, length: jax.Array, n_slots: int, dtype: Any
) -> tuple[Any, int]:
    """A cache with the first `length - 1` tokens in it, and the size of the vocabulary."""
    place_P = jnp.arange(len(tokens_P))
    positions_P = jnp.where(place_P < length - 1, place_P, EMPTY)
    # Read by themselves, as nothing but empty slots comes after.
    x_PD, used = call(model, params, "extend", tokens_P, positions_P, model.init_cache(len(tokens_P), dtype), 0)
    logits_V = jax.eval_shape(partial(call, model, params, "unembed"), x_PD[0])
    return put_first_slots(model.init_cache(n_slots, dtype), used), logits_V.shape[-1]


@partial(
    jax.jit, static_argnames=("model", "draft", "sampling", "n_proposed", "n_read", "dtype"), donate_argnames="state"
)
def _go_on(
    model: nn.Module, draft: Draft, sampling: Sampling, params: Params, draft_params: Params, state: State,
    seed: jax.Array, limit: jax.Array, n_proposed: int, n_read: int, dtype: Any,
) -> tuple[State, jax.Array, jax.Array, Drawn]:  # fmt: skip
    """Passes until `PORTION` tokens or more are made, or the text is done: the state, how many passes there were, and
    the number of tokens and the tokens that they made."""
    whole = state
    begin_draft = partial(draft.begin, n_slots=n_read)
    drafted = jax.eval_shape(begin_draft, draft_params, state.text_S[:1], state.length)
    state = state._replace(
        cache=first_slots(model, whole.cache, n_read, dtype), draft=first_parts(whole.draft, drafted),
        text_S=whole.text_S[:n_read],
    )  # fmt: skip
    one_pass = partial(_pass, model, draft, sampling, params, draft_params, seed, limit, n_proposed)

    def more(carry: tuple[State, jax.Array, jax.Array, Drawn]) -> jax.Array:
        state, _, made, _ = carry
        return (made < PORTION) & ~state.done

    def step(carry: tuple[State, jax.Array, jax.Array, Drawn]) -> tuple[State, jax.Array, jax.Array, Drawn]:
        state, passes, made, drawn_C = carry
        before = state.length
        state, drawn_N = one_pass(state)
        drawn_C = jax.tree.map(
            lambda so_far, new: jax.lax.dynamic_update_slice_in_dim(so_far, new, made, 0), drawn_C, drawn_N
        )
        return state, passes + 1, made + state.length - before, drawn_C

    drawn_N = jax.eval_shape(one_pass, state)[1]
    none_C = jax.tree.map(lambda x: jnp.zeros((PORTION + n_proposed, *x.shape[1:]), x.dtype), drawn_N)
    state, passes, made, drawn_C = jax.lax.while_loop(more, step, (state, jnp.int32(0), jnp.int32(0), none_C))
    return put_first_slots(whole, state), passes, made, drawn_C


def _pass(
    model: nn.Module, draft: Draft, sampling: Sampling, params: Params, draft_params: Params, seed: jax.Array,
    limit: jax.Array, n_proposed: int, state: State,
) -> tuple[State, Drawn]:  # fmt: skip
    """One pass of the model over what the draft proposes; the tokens made, `(n_proposed + 1,)`, of which as many
    count as the text has become longer."""
    cache, drafted, history, text_S, length, _ = state
    key = jax.random.fold_in(jax.random.key(seed), history.made)
    proposed_N, q_NV, drafted = draft.propose(
        draft_params, drafted, text_S, length, n_proposed, sampling, history, jax.random.fold_in(key, 0)
    )
    fed = jnp.append(text_S[length - 1], proposed_N)
    at = length - 1 + jnp.arange(n_proposed + 1)
    x, cache = call(model, params, "extend", fed, at, cache, length - 1)
    logits = jax.vmap(partial(call, model, params, "unembed"))(x)

    def check(carry: tuple[History, jax.Array, jax.Array], inputs: tuple) -> tuple[tuple, Drawn]:
        history, goes_on, done = carry
        i, logits_V, token, q_V = inputs
        p_V = distribution(logits_V, history, sampling)
        take, again = jax.random.split(jax.random.fold_in(key, i + 1))
        taken = jax.random.uniform(take) * q_V[token] < p_V[token]
        taken &= i < n_proposed  # after them comes one more token, from the model alone
        rest_V = jnp.maximum(p_V - q_V, 0)
        rest_V = jnp.where(jnp.any(rest_V > 0), rest_V, p_V)  # p and q are equal but for rounding
        token = jnp.where(taken, token, draw(jnp.log(rest_V), again))
        longer = update(history, token, sampling)
        history = jax.tree.map(lambda new, old: jnp.where(goes_on, new, old), longer, history)
        stops = jnp.isin(token, jnp.array(sampling.stop_tokens, jnp.int32)) | (history.made >= limit)
        return (history, goes_on & taken & ~stops, done | (goes_on & stops)), with_logprobs(logits_V, token, sampling)

    one_more = lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])])  # noqa: E731
    inputs = jnp.arange(n_proposed + 1), logits, one_more(proposed_N), one_more(q_NV)
    (longer, _, done), drawn = jax.lax.scan(check, (history, jnp.bool_(True), jnp.bool_(False)), inputs)
    text_S = jax.lax.dynamic_update_slice_in_dim(text_S, drawn.token, length, 0)
    return State(cache, drafted, longer, text_S, length + longer.made - history.made, done), drawn
