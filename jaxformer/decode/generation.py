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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import index
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxformer.contract import contract_of
from jaxformer.decode import programs
from jaxformer.decode.programs import (
    MAX_TOKENS_PER_CALL,
    Cache,
    Chunk,
    DecodeOutput,
    DecodeState,
    Rows,
    SlidingWindow,
    Span,
)
from jaxformer.decode.samplers import History, Sampling
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY
from jaxformer.parallel.mesh import abstract, batch_sharding, batch_shards, make_mesh, replicated

MIN_TOKENS_PER_CALL = 8
"""Minimum decode steps per call, however slow: fewer calls are faster, but a user may be reading the output."""
MAX_CALL_SECONDS = 0.1
"""Target duration of a call with more decode steps than the minimum, in seconds."""
READY_SECONDS = 1e-3
"""Seconds within which a finished result is fetched."""
MIN_ROWS_PER_DEVICE = 8
"""Minimum rows per device of a CPU; with fewer, one device with all cores is as fast."""
MIN_SLOTS_READ = 128
"""Minimum slots that attention reads; fewer save no noticeable time."""
MIN_SLOTS = 1024
"""Minimum limit to which a cache may grow, in slots, unless the context or the attention window is smaller; compiled
programs depend on the limit."""


class Piece(NamedTuple):
    """The next N new tokens of each of B rows.

    Attributes:
      tokens_BN: int32, `masks.EMPTY` after a row's end.
      logprobs_BN: log-probability of each token; float32, undefined after a row's end.
      top_tokens_BNn: the `top_logprobs` most likely tokens; int32.
      top_logprobs_BNn: their log-probabilities; float32.
    """

    tokens_BN: np.ndarray
    logprobs_BN: np.ndarray
    top_tokens_BNn: np.ndarray
    top_logprobs_BNn: np.ndarray


def generate_tokens(
    model: nn.Module, params: Params, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], *,
    max_new_tokens: int, context_length: int, n_samples: int = 1, cache_dtype: DTypeLike = jnp.float32,
    prefill_chunk: int = 512, fill_token: int = 0, after: Generation | None = None,
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
    rows = [list(prompt) for prompt in prompts]
    generation = Generation(
        model, params, rows, sampling, seeds_R, max_new_tokens, context_length, n_samples, jnp.dtype(cache_dtype),
        chunk, fill_token,
    )  # fmt: skip
    if after is not None and len(seeds_R) == 1 and not (contract.has_prefix or has_state(generation.model)):
        generation.take_over(after)
    return generation


def check_prompts(model: nn.Module, prompts: Sequence[Sequence[int]], context_length: int, **counts: int) -> None:
    """Raise `ValueError` if `check_context` or `check_rows` does, or a named count is below 1 or has more than 31
    bits."""
    for name, value in counts.items():
        if not 1 <= index(value) < 2**31:
            raise ValueError(f"{name} is {value}; it must be at least 1 and below 2**31")
    check_context(model, context_length)
    check_rows(model, prompts, context_length, "prompt")


def has_state(model: nn.Module) -> bool:
    """Return True if an array of the model's cache does not depend on the number of slots."""
    small, large = (jax.eval_shape(lambda n=n: model.init_cache(n, jnp.float32)) for n in (8, 16))
    return any(x.shape == y.shape for x, y in zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True))


def check_context(model: nn.Module, context_length: int) -> None:
    """Raise `ValueError` for a context longer than the model's learned positions: JAX would repeat the last one."""
    limit = contract_of(model).max_tokens
    if limit is not None and context_length > limit:
        raise ValueError(f"context_length is {context_length}, but the model has {limit} learned positions")


def check_rows(model: nn.Module, rows: Sequence[Sequence[int]], context_length: int, name: str) -> None:
    """Raise `ValueError` if a row, which messages call `name`, does not have 1 to `context_length` tokens, or has one
    outside the vocabulary; `TypeError` if it is no sequence of integers."""
    last = vocab_size(model) - 1
    for number, row in enumerate(rows, start=1):
        label = f"{name} {number}" if len(rows) > 1 else f"the {name}"
        tokens_T = np.asarray(row)
        if tokens_T.ndim == 1 and not 1 <= len(row) <= context_length:
            limit = f"it must have at least 1 and at most the context's {context_length}"
            raise ValueError(f"{label} has {len(row)} tokens; {limit}.")
        if tokens_T.ndim != 1 or not np.issubdtype(tokens_T.dtype, np.integer):
            problem = f"{label} is {tokens_T.dtype} of shape {tokens_T.shape}"
            raise TypeError(f"{problem}; it must be a sequence of integers, such as int32.")
        if len(outside := tokens_T[(tokens_T < 0) | (tokens_T > last)]):
            raise ValueError(f"{label} has a token {outside[0]}; it must be from 0 to {last}, the vocabulary's last.")


def vocab_size(model: nn.Module) -> int:
    """Return the vocabulary size V that a language model declares."""
    size = contract_of(model).vocab_size
    if size is None:
        raise ValueError(f"the contract of {type(model).__name__} has no vocab_size")
    return size


def seeds_of_rows(seeds: Sequence[int], n_prompts: int, n_samples: int) -> np.ndarray:
    """Return the seeds as an array, uint32. Raises `TypeError` or `OverflowError` if one is not a whole number of 32
    bits, `ValueError` if there is not one per row."""
    if len(seeds) != n_prompts * n_samples:
        raise ValueError(f"{len(seeds)} seeds for {n_prompts} prompts of {n_samples} rows each")
    return np.array([index(seed) for seed in seeds], np.uint32)


class PieceIterator:
    """An iterator over the pieces of B rows, each of which can be ended."""

    def __init__(self, n_rows: int, pieces: Iterator[Piece]) -> None:
        self.ended_B = np.zeros(n_rows, bool)
        self._pieces = pieces

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def end(self, row: int) -> None:
        """Deliver no more tokens for a row."""
        self.ended_B[row] = True


def run_program(program: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Return the result of a jitted function."""
    return program(*args, **static)


def compile_program(program: jax.stages.Wrapped, *args: Any, **static: Any) -> Any:
    """Compile a jitted function for arguments of which some may be shapes; return the shapes of its result."""
    lowered = program.lower(*args, **static)
    return abstract(lowered.out_info, lowered.compile().output_shardings)


@dataclass(repr=False)
class Generation(PieceIterator):
    """An iterator over the pieces of a batch; the first piece has the first token of each row.

    It ends when every row is done, by a stop token or by `end`, or has `max_new_tokens`. The next piece is computed
    while the caller reads the current one.
    """

    model: nn.Module
    params: Params
    rows: list[list[int]]
    """Tokens so far: of each prompt before the prefill, of each row after it."""
    sampling: Sampling
    seeds_R: np.ndarray
    max_new_tokens: int
    context_length: int
    n_samples: int
    dtype: DTypeLike
    chunk: int
    fill_token: int
    n_new: int = 0
    history: History | None = None
    slots_held: int = 0
    """Current capacity of the cache, in slots."""
    seconds_per_token: float = inf
    """Seconds per token of the last call; an upper bound if its result was ready before it was fetched."""
    last_call_done: float = 0.0
    """Time at which the previous call was done."""
    cache: Cache | None = None
    """KV cache of one row with each token in the slot of its position; None before the prefill and for others."""
    n_cached: int = 0
    """First tokens of the one row that need no prefill, as the cache has them."""
    run: Callable[..., Any] = run_program
    """Function that runs a program of the prefill, given the program and its arguments."""
    keeps_programs: bool = True
    """Keep compiled programs that this generation no longer needs, for later ones."""

    def __post_init__(self) -> None:
        super().__init__(len(self.seeds_R), self._generate())
        self.put = placement(self.params)
        self.mesh = row_mesh(self.params, len(self.seeds_R))

    def take_over(self, before: Generation) -> None:
        """Take the cache of a generation of one row, which is then without it, and count the tokens to keep."""
        # The last token of the old row is not in the cache; that of the new one is prefilled, for the logits after it.
        new_T, old_T = np.array(self.rows[0][:-1]), np.array(before.rows[0][:-1])
        n = min(len(new_T), len(old_T))
        if before.cache is not None:
            self.n_cached = int(np.append(new_T[:n] == old_T[:n], False).argmin())
            self.cache, self.slots_held, before.cache = before.cache, before.slots_held, None

    def compile(self) -> None:
        """Compile the programs that compute the first tokens, for parameters that may be shapes only. A generation with
        the same arguments and parameters of these shapes then computes its first piece without compiling."""
        next(replace(self, run=compile_program)._call_programs())

    def _generate(self) -> Iterator[Piece]:
        """Yield the pieces; when a text reaches the end of the context, restart from the context's last half."""
        while self.n_new < self.max_new_tokens and not self.ended_B.all():
            yield from self._deliver(self._call_programs())
            # Only rows that have outgrown the context are cut, so that no row depends on another. Ended rows are cut to
            # one token, so that they do not trigger further restarts.
            half = max(1, self.context_length // 2)
            for row, ended in zip(self.rows, self.ended_B, strict=True):
                del row[: -1 if ended else -half if len(row) > self.context_length else 0]

    def _call_programs(self) -> Iterator[DecodeOutput]:
        """Prefill the rows and decode until all tokens are generated or a row reaches the end of the context."""
        n_new, n_samples = self.n_new, self.n_samples if self.n_new == 0 else 1
        lengths_B = np.array([len(row) for row in self.rows], np.int32)
        longest = int(lengths_B.max())
        contract, steps = contract_of(self.model), self.max_new_tokens - n_new - 1
        attention_window = contract.attention_window
        if not contract.extrapolates or attention_window is None:
            attention_window = self.context_length
            steps = min(steps, attention_window - longest)
        # A prompt chunk is written before it is read, so in a ring buffer it must not overwrite the attention window of
        # its first token. Chunks begin at multiples of their size, so that none wraps around the end of the ring.
        in_ring = max(attention_window, min(longest, attention_window + self.chunk - 1))
        smallest = self.chunk if longest > self.chunk else length_bucket(1)
        usual = min(self.context_length, attention_window, MIN_SLOTS)
        n_slots = doubled(smallest, max(usual, min(longest + steps, in_ring)))
        is_ring = longest + steps > n_slots
        if is_ring or max(self._chunks(longest)[1], self.slots_held) > n_slots:
            self.n_cached = 0
        state, output = self._prefill(lengths_B, n_samples, n_slots)
        # Slots of later tokens than those kept need no clearing: as their positions are later, too, they are masked
        # until they are overwritten.
        keeps, self.n_cached = len(self.seeds_R) == 1 and not is_ring, 0
        self.cache = state.cache if keeps else None
        yield output
        self._release(programs.start)
        offset_R, seeds_R = self.put(np.repeat(longest - lengths_B, n_samples)), self.put(self.seeds_R)
        done = 0
        while done < steps:
            counter = longest + done
            in_time = max(MIN_TOKENS_PER_CALL, MAX_CALL_SECONDS / self.seconds_per_token)
            limit = min(int(min(in_time, MAX_TOKENS_PER_CALL)), steps - done)
            if (read := read_slots(counter + 1, n_slots)) < n_slots:
                limit = min(limit, read - counter)  # attention reads no more slots until these are in use
            state = state._replace(cache=self._with_slots(state.cache, read_slots(counter + limit, n_slots)))
            rows = Rows(offset_R, seeds_R, self.put(self.ended_B.copy()))
            span = Span(*map(np.int32, (counter, n_new + 1 + done, limit, n_slots)))
            state, output = programs.decode(self.model, self.sampling, self.params, state, rows, span, self.mesh)
            self.cache = state.cache if keeps else None
            yield output
            done += limit
        self.history = state.history

    def _prefill(self, lengths_B: np.ndarray, n_samples: int, n_slots: int) -> tuple[DecodeState, DecodeOutput]:
        """Prefill the rows, chunk by chunk, and sample the first new tokens."""
        longest = int(lengths_B.max())
        starts, width = self._chunks(longest)
        tokens_BT = np.full((len(self.rows), width), self.fill_token, np.int32)
        positions_BT = np.full((len(self.rows), width), EMPTY, np.int32)
        for i, (row, length) in enumerate(zip(self.rows, lengths_B.tolist(), strict=True)):
            tokens_BT[i, longest - length : longest] = row
            positions_BT[i, longest - length : longest] = np.arange(length)
        cache, self.cache = self.cache if self.n_cached else None, None  # the programs reuse its memory
        for first in starts:
            end = min(first + self.chunk, width)
            slot = np.int32(first % n_slots)
            chunk = Chunk(self.put(tokens_BT[:, first:end]), self.put(positions_BT[:, first:end]), slot)
            cache = self._with_slots(cache, read_slots(end, n_slots))
            sizes = {"n_slots": self.slots_held, "dtype": self.dtype}
            if first != starts[-1]:
                cache = self.run(programs.prefill, self.model, self.params, cache, chunk, **sizes)
        is_one_pass = len(starts) == 1 and not self.n_cached
        prompts_BP = left_aligned(self.rows, width if is_one_pass else doubled(self.chunk, longest))
        start = programs.start if n_samples == 1 else programs.start_samples
        return self.run(
            start, self.model, self.sampling, self.params, cache, chunk, np.int32(longest - 1 - starts[-1]),
            (self.put(prompts_BP), self.put(lengths_B)), self.history, self.put(self.seeds_R),
            self.put(self.ended_B.copy()), np.int32(self.n_new), n_samples=n_samples,
            mesh=self.mesh, **sizes,
        )  # fmt: skip

    def _chunks(self, longest: int) -> tuple[range, int]:
        """Return the first token of each chunk of the prefill, and the end of the last chunk, with its padding."""
        starts = range(self.n_cached, longest, self.chunk)
        return starts, starts[-1] + min(length_bucket(longest - starts[-1]), self.chunk)

    def _with_slots(self, cache: Cache | None, n_slots: int) -> Cache | None:
        """Return the cache enlarged to n_slots if it has fewer; None, an empty cache, stays None."""
        if cache is None:
            self.slots_held = n_slots
        elif n_slots > self.slots_held:
            cache = self.run(programs.enlarge, self.model, cache, n_slots=n_slots, dtype=self.dtype)
            self.slots_held = n_slots
            self._release(programs.decode)
        return cache

    def _release(self, program: Any) -> None:
        """Release the memory of a jitted function's compiled programs unless they are kept."""
        if not self.keeps_programs:
            program.clear_cache()

    def _deliver(self, outputs: Iterator[DecodeOutput]) -> Iterator[Piece]:
        """Yield the first piece as soon as it is there, before the decode loop is compiled, and each other one once the
        next call is under way."""
        yield from self._piece(next(outputs))
        pending = None if self.ended_B.all() else next(outputs, None)
        self.last_call_done = time.perf_counter()  # compilation does not count as time of a token
        while pending is not None:
            output = next(outputs, None)
            yield from self._piece(pending)
            pending = None if self.ended_B.all() else output

    def _piece(self, output: DecodeOutput) -> Iterator[Piece]:
        """Yield the piece of an output if it has any tokens."""
        wait_start = time.perf_counter()
        n, drawn_CB, done_B = jax.device_get(output)
        # If we had to wait for this call, it began when the previous one ended. If not, it ended some time ago: the
        # interval includes compilation or time that the caller spent.
        now = time.perf_counter()
        if n > 1:  # from the decode loop
            seconds = (now - self.last_call_done) / int(n)
            waited = now - wait_start > READY_SECONDS
            self.seconds_per_token = seconds if waited else min(self.seconds_per_token, seconds)
        self.last_call_done = now
        if self.n_new == 0 and self.n_samples > 1:
            self.rows = [list(row) for row in self.rows for _ in range(self.n_samples)]
        piece = Piece(*(x[:n].swapaxes(0, 1) for x in drawn_CB))
        tokens_BN = np.where(self.ended_B[:, None], EMPTY, piece.tokens_BN)
        for row, tokens in zip(self.rows, tokens_BN, strict=True):
            row.extend(tokens[tokens != EMPTY].tolist())
        self.ended_B |= done_B
        self.n_new += int(n)
        if (tokens_BN != EMPTY).any():
            yield piece._replace(tokens_BN=tokens_BN)


def placement(params: Params) -> Callable[[np.ndarray], Any]:
    """Return a function that puts an array of rows on the parameters' devices, sharded if the rows divide evenly, else
    replicated."""
    if (mesh := _mesh_of(params)) is None:
        return lambda rows: rows
    even = lambda rows: len(rows) % batch_shards(mesh) == 0  # noqa: E731
    return lambda rows: jax.device_put(rows, batch_sharding(mesh) if even(rows) else replicated(mesh))


def row_mesh(params: Params, n_rows: int) -> Mesh | None:
    """Return the mesh of the parameters if only its `data` axis has several devices and the rows divide evenly among
    them; None otherwise."""
    mesh = _mesh_of(params)
    if mesh is None or not 1 < mesh.size == mesh.shape.get("data"):
        return None
    return mesh if n_rows % mesh.size == 0 else None


def _mesh_of(params: Params) -> Mesh | None:
    """Return the mesh that the parameters are on; None for a single device."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def spread_rows(params: Params, n_rows: int) -> Params:
    """Return parameters replicated from one CPU device to all, each of which then decodes its share of the rows;
    unchanged if the rows do not divide evenly, or into fewer than `MIN_ROWS_PER_DEVICE`.

    XLA runs attention and narrow matmuls of a decode step on one thread: two devices with one core each decode 64 rows
    in 0.65 of the time that one device with both cores takes.
    """
    n, first = jax.local_device_count(), jax.tree.leaves(params)[0]
    if jax.default_backend() != "cpu" or len(first.devices()) > 1:
        return params
    if n == 1 or n_rows % n or n_rows < n * MIN_ROWS_PER_DEVICE:
        return params
    return jax.device_put(params, replicated(make_mesh(devices=jax.local_devices())))


def left_aligned(rows: list[list[int]], width: int) -> np.ndarray:
    """Return rows of tokens as an array, `(B, width)` int32, padded on the right with zeros."""
    tokens_BP = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens_BP[i, : len(row)] = row
    return tokens_BP


def length_bucket(n: int) -> int:
    """Return n rounded up to a power of two from 8 on, or from 192 on three quarters of one: the padded length of a
    prompt, and the slots that attention reads. Finer steps would save work, but compile more programs."""
    size = doubled(8, n)
    return size * 3 // 4 if size >= 256 and n <= size * 3 // 4 else size


def read_slots(n: int, n_slots: int) -> int:
    """Return the number of slots that attention reads when n are in use."""
    return min(max(MIN_SLOTS_READ, length_bucket(n)), n_slots)


def doubled(size: int, n: int) -> int:
    """Return `size`, doubled until it is at least n."""
    while size < n:
        size *= 2
    return size
