"""Text generation with any causal language model, several tokens per call.

A model whose contract has `has_cache` offers three methods (see `models.decoder.Decoder`), each on one sequence:

- `init_cache(n_slots, dtype)`: an empty cache, any pytree. Arrays whose shape does not depend on `n_slots` are a state.
- `extend(tokens_T, positions_T, cache, slot)`: the features `(T, D)` of tokens that follow those in the cache, and
  the cache with them written from `slot` on. A token whose position is `masks.EMPTY` is padding, not attended to.
- `unembed(x_D)`: features to logits `(V,)`.

Unless the contract has `extrapolates`, a text that reaches the end of the context is continued from the context's last
half. With `has_prefix`, `extend` gets a prompt in one call, and its length as last argument. A model without a cache
runs on a sliding window of its context instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxformer.contract import contract_of
from jaxformer.decode import programs
from jaxformer.decode.batches import doubled, left_aligned, length_bucket, read_slots, row_mesh
from jaxformer.decode.checks import check_prompts, has_state, seeds_of_rows
from jaxformer.decode.engine import Engine, SlotCache, compile_program
from jaxformer.decode.programs import MAX_TOKENS_PER_CALL, SlidingWindow
from jaxformer.decode.samplers import History, Samples, Sampling
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

T = TypeVar("T")
MIN_TOKENS_PER_CALL = 8
"""Minimum decode steps per call, however slow: fewer calls are faster, but a user may be reading the output."""
MAX_CALL_SECONDS = 0.1
"""Target duration of a call with more decode steps than the minimum, in seconds."""
READY_SECONDS = 1e-3
"""Seconds within which a finished result is fetched."""


def generate_tokens(
    model: nn.Module, params: Params, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], *,
    max_new_tokens: int, context_length: int, n_samples: int = 1, cache_dtype: DTypeLike = jnp.float32,
    prefill_chunk: int = 512, fill_token: int = 0, after: Generation | None = None, keep_programs: bool = True,
) -> Generation:  # fmt: skip
    """Complete prompts of any length as one batch.

    The tokens sampled for a row depend on its own seed and on no other row of the batch.

    Args:
      prompts: tokens of each prompt, 1 to `context_length` of them.
      seeds: one per row. Rows are `n_samples` completions of the first prompt, then of the second, …
      max_new_tokens: maximum new tokens per row.
      context_length: longest training sequence of the model, in tokens.
      cache_dtype: dtype of keys and values: float32, bfloat16 or int8.
      prefill_chunk: prompt tokens per prefill pass; all of them if the contract has `has_prefix`.
      fill_token: for models without a cache, the token that pads the window before the text begins.
      after: an ended generation of one row with the same model, parameters and dtype, whose KV cache this generation
        takes over: of one prompt, only the tokens after their common beginning are prefilled. No effect with a prefix
        or a state, of which no beginning can be kept.
      keep_programs: keep compiled programs that this generation no longer needs, for later ones.

    Raises:
      ValueError: a prompt is empty, too long or has a token outside the vocabulary, the context is longer than the
        model's learned positions, a count is below 1 or has more than 31 bits, or there is not one seed per row.
      OverflowError: a seed has more than 32 bits.
    """
    counts = {"max_new_tokens": max_new_tokens, "n_samples": n_samples, "prefill_chunk": prefill_chunk}
    check_prompts(model, prompts, context_length, **counts)
    seeds_R = seeds_of_rows(seeds, len(prompts), n_samples)
    contract, chunk = contract_of(model), min(prefill_chunk, length_bucket(context_length))
    if contract.has_prefix or not contract.has_cache:
        chunk = length_bucket(context_length)
    if not contract.has_cache:
        model, params = SlidingWindow(model, context_length, fill_token), {"model": params}
    if len(seeds_R) > 1 or contract.has_prefix or has_state(model):
        after = None
    mesh = row_mesh(params, len(seeds_R))
    engine = Engine(model, params, context_length, jnp.dtype(cache_dtype), chunk, mesh, keep_programs)
    return Generation(engine, prompts, sampling, seeds_R, n_samples, max_new_tokens, after)


class TokenStream(Iterator[Samples]):
    """An iterator over the next tokens of B rows, `Samples` of shape `(B, N)`; each row can be ended."""

    def __init__(self, n_rows: int, samples: Iterator[Samples]) -> None:
        self.ended_B = np.zeros(n_rows, bool)
        self._samples = samples

    def __next__(self) -> Samples:
        return next(self._samples)

    def end(self, row: int) -> None:
        """Deliver no more tokens for a row."""
        self.ended_B[row] = True


@dataclass
class Pace:
    """The number of decode steps per call, from the time that the last call took."""

    seconds_per_token: float = inf
    """Seconds per token of the last call; an upper bound if its result was ready before it was fetched."""
    last_call_done: float = 0.0
    """Time at which the previous call was done."""

    def n_steps(self) -> int:
        """Return the number of steps for the next call."""
        in_time = max(MIN_TOKENS_PER_CALL, MAX_CALL_SECONDS / self.seconds_per_token)
        return int(min(in_time, MAX_TOKENS_PER_CALL))

    def fetch(self, samples_CB: Samples) -> Samples:
        """Return the samples `(B, N)` of a call's N steps, once it is done."""
        wait_start = time.perf_counter()
        samples_CB = jax.device_get(samples_CB)
        n = int((samples_CB.tokens != EMPTY).any(axis=1).sum())
        # If we had to wait for this call, it began when the previous one ended. If not, it ended some time ago: the
        # interval includes compilation or time that the caller spent.
        now = time.perf_counter()
        if n > 1:  # from the decode loop
            seconds = (now - self.last_call_done) / n
            waited = now - wait_start > READY_SECONDS
            self.seconds_per_token = seconds if waited else min(self.seconds_per_token, seconds)
        self.last_call_done = now
        return Samples(*(x[:n].swapaxes(0, 1) for x in samples_CB))


class Generation(TokenStream):
    """The new tokens of a batch; the first samples are one token of each row.

    It ends when every row is done, by a stop token or by `end`, or has `max_new_tokens`. The next call of the decode
    loop is computed while the caller reads the tokens of the last one.

    Attributes:
      rows: tokens of each row so far, its prompt included; the last ones if it has outgrown the context.
      kept: KV cache of a single row with each token in the slot of its position, for a generation after this one; None
        before the prefill and for others.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds_R: np.ndarray,
        n_samples: int, max_new_tokens: int, after: Generation | None = None,
    ) -> None:  # fmt: skip
        """Take over the cache of a generation of one row, which is then without it."""
        self.engine, self.sampling, self.seeds_R = engine, sampling, seeds_R
        self.n_samples, self.max_new_tokens = n_samples, max_new_tokens
        self.rows = [list(prompt) for prompt in prompts for _ in range(n_samples)]
        self.pace = Pace()
        self.kept: SlotCache | None = None
        cache, n_cached = SlotCache(), 0
        if after is not None and after.kept is not None:
            cache, after.kept = after.kept, None
            # The last token of the old row is not in the cache; that of the new one is prefilled, for the logits.
            new_T, old_T = np.array(self.rows[0][:-1]), np.array(after.rows[0][:-1])
            n = min(len(new_T), len(old_T))
            n_cached = int(np.append(new_T[:n] == old_T[:n], False).argmin())
        super().__init__(len(self.rows), self._generate(cache, n_cached))

    def compile(self) -> None:
        """Compile the programs that compute the first tokens, for parameters that may be shapes only. A generation with
        the same arguments and parameters of these shapes then computes its first samples without compiling."""
        compiling = copy(self)
        compiling.engine = replace(self.engine, run=compile_program)
        next(compiling._calls(0, None, SlotCache(), 0))

    def _generate(self, cache: SlotCache, n_cached: int) -> Iterator[Samples]:
        """Yield the samples; when a text reaches the end of the context, restart from the context's last half."""
        n_new, history, half = 0, None, max(1, self.engine.context_length // 2)
        while n_new < self.max_new_tokens and not self.ended_B.all():
            for latest, output in one_ahead(self._calls(n_new, history, cache, n_cached)):  # noqa: B007
                samples = self._receive(output)
                n_new += samples.tokens.shape[1]
                if (samples.tokens != EMPTY).any():
                    yield samples
                if self.ended_B.all():
                    return
            history, cache, n_cached = latest, SlotCache(), 0
            # Only rows that have outgrown the context are cut, so that no row depends on another. Ended rows are cut to
            # one token, so that they do not trigger further restarts.
            for row, ended in zip(self.rows, self.ended_B, strict=True):
                del row[: -1 if ended else -half if len(row) > self.engine.context_length else 0]

    def _calls(
        self, n_new: int, history: History | None, cache: SlotCache, n_cached: int
    ) -> Iterator[tuple[History, Samples]]:
        """Prefill the rows and decode until all tokens are generated or a row reaches the end of the context; yield the
        history after each call, which the next call donates, and the call's samples `(C, B)`."""
        engine, n_samples = self.engine, self.n_samples if n_new == 0 else 1
        lengths_R = np.array([len(row) for row in self.rows], np.int32)
        longest = int(lengths_R.max())
        steps, n_slots = engine.plan(longest, self.max_new_tokens - n_new - 1)
        is_ring, rings = longest + steps > n_slots, engine.rings(n_slots)
        if rings:
            # Chunks begin where those of the whole prompt would, and later tokens have overwritten no window's.
            n_cached -= n_cached % engine.chunk
            n_cached = n_cached if cache.n_written - n_cached <= engine.chunk else 0
        fits = max(engine.chunks(longest, n_cached)[1], cache.n_slots) <= n_slots and cache.rings == rings
        if not n_cached or is_ring or not fits:
            cache, n_cached = SlotCache(rings=rings), 0
        # Slots of later tokens than those kept need no clearing: as their positions are later, too, they are masked
        # until they are overwritten.
        logits_RV, cache = engine.prefill(self.rows[::n_samples], n_samples, cache, n_cached, n_slots)
        tokens_RP = left_aligned(self.rows, doubled(engine.chunk, longest))
        state, samples = engine.run(
            programs.start, self.sampling, logits_RV, engine.put(tokens_RP), engine.put(lengths_R), history,
            engine.put(self.seeds_R), engine.put(self.ended_B.copy()), mesh=engine.mesh,
        )  # fmt: skip
        keeps = len(self.rows) == 1 and not is_ring
        self.kept = cache if keeps else None
        yield state.history, samples
        engine.release(programs.prefill, programs.start)
        done = 0
        while done < steps:
            n_used, limit = longest + done, min(self.pace.n_steps(), steps - done)
            if (read := read_slots(n_used + 1, n_slots)) < n_slots:
                limit = min(limit, read - n_used)  # attention reads no more slots until these are in use
            cache = engine.enlarge(cache, read_slots(n_used + limit, n_slots))
            state = state._replace(cache=cache.arrays)
            state, samples = programs.decode(
                engine.model, self.sampling, engine.params, state, engine.put(self.ended_B.copy()),
                np.int32(n_used % n_slots), np.int32(limit), np.int32(n_slots), mesh=engine.mesh,
            )  # fmt: skip
            cache = cache._replace(arrays=state.cache, n_written=max(cache.n_written, n_used + limit))
            self.kept = cache if keeps else None
            if not done:
                self.pace.last_call_done = time.perf_counter()  # compilation does not count as time of a token
            yield state.history, samples
            done += limit

    def _receive(self, output: Samples) -> Samples:
        """Return the samples `(B, N)` of a call; append them to the rows, and end those with a stop token."""
        samples = self.pace.fetch(output)
        tokens_BN: Any = np.where(self.ended_B[:, None], EMPTY, samples.tokens)
        for row, tokens in zip(self.rows, tokens_BN, strict=True):
            row.extend(tokens[tokens != EMPTY].tolist())
        self.ended_B |= np.isin(tokens_BN, self.sampling.stop_tokens).any(axis=1)
        return samples._replace(tokens=tokens_BN)


def one_ahead(calls: Iterator[T]) -> Iterator[T]:
    """Yield the first call as soon as it is made, before the decode loop is compiled, and each other one once the next
    is under way."""
    yield next(calls)
    pending = next(calls, None)
    while pending is not None:
        following = next(calls, None)
        yield pending
        pending = following
