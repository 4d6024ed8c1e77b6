"""Continue prompts with any model, a few tokens at a time.

A model whose contract has `has_cache` offers three methods (see `models.decoder.Decoder`), each on one sequence:

- `init_cache(n_slots, dtype)`: an empty cache, any pytree. What does not depend on `n_slots` is a state.
- `extend(tokens_T, positions_T, cache, slot)`: the features `(T, D)` of tokens that follow what the cache holds, and
  the cache with them added at `slot`, … A place whose position is `masks.EMPTY` is padding, not to be seen.
- `unembed(x_D)`: features to logits `(V,)`.
Unless its contract has `extrapolates`, a text that reaches the end of the context is continued from its last half. With
`has_prefix`, `extend` gets a prompt in one call, and its length as last argument. A model without a cache is run on a
sliding window of its context instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxformer.contract import contract_of
from jaxformer.decode import programs
from jaxformer.decode.programs import CHUNK, DecodeOutput
from jaxformer.decode.samplers import Sampling
from jaxformer.errors import UserError
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY
from jaxformer.sharding import batch_shards, batch_split, replicated

LEAST_PORTION = 8
"""Tokens that a call makes, however slow: fewer calls are faster, but someone may be reading along."""
A_MOMENT = 0.1
"""Seconds that a call may take if it makes more."""
NO_WAIT = 1e-3
"""Seconds within which what is there is fetched."""
LEAST_READ = 128
"""Slots: reading fewer saves no time that one would notice."""
FEW_SLOTS = 1024
"""Up to so many there are at once as many as may ever be used: programs are compiled for their number."""


class Piece(NamedTuple):
    """The next N tokens of each of B rows, 1 or more, with the n likeliest that were asked for."""

    tokens_BN: np.ndarray
    """int32, `masks.EMPTY` after a row's end."""
    logprobs_BN: np.ndarray
    top_tokens_BNn: np.ndarray
    top_logprobs_BNn: np.ndarray


def generate(
    model: nn.Module,
    params: Params,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    context_length: int,
    n_samples: int = 1,
    cache_dtype: Any = jnp.float32,
    prefill_chunk: int = 512,
    fill_token: int = 0,
) -> Generation:
    """Continue prompts of any lengths as one batch.

    What a row draws depends on its seed and on nothing else in the batch.

    Args:
      prompts: tokens of each, 1 to `context_length` of them.
      seeds: one for each row. Rows are `n_samples` continuations of the first prompt, then of the second, …
      max_new_tokens: the most to make for each row.
      context_length: the longest sequence the model was made for.
      cache_dtype: what keys and values are kept in: float32, bfloat16 or int8.
      prefill_chunk: prompts are read this many tokens at a time; at once, where the model says that they are a prefix.
      fill_token: for models without a cache: what stands in a window where no token is yet.

    Raises:
      UserError: there is no prompt, one is empty, too long or holds what is not in the vocabulary, a number is below 1,
        or one does not fit 32 bits.
    """
    check_prompts(
        model, prompts, context_length, max_new_tokens=max_new_tokens, n_samples=n_samples, prefill_chunk=prefill_chunk
    )
    check_seeds(seeds, len(prompts), n_samples)
    whole = prompt_bucket(context_length)
    run = _Run(
        model, params, [list(prompt) for prompt in prompts], sampling, np.array(seeds, np.uint32), max_new_tokens,
        context_length, n_samples, jnp.dtype(cache_dtype),
        whole if contract_of(model).has_prefix else min(prefill_chunk, whole), fill_token,
    )  # fmt: skip
    return Generation(run)


def check_prompts(model: nn.Module, prompts: Sequence[Sequence[int]], context_length: int, **counts: int) -> None:
    """Raise `UserError` if there is no prompt, one is empty, too long or holds what is not in the vocabulary, or one of
    the named numbers is out of range."""
    for name, value in counts.items():
        if not 1 <= value < 2**31:
            raise UserError(f"{name} is {value}; it must be at least 1 and below 2**31.")
    if not prompts:
        raise UserError("there is no prompt to continue; give at least 1.")
    last = vocab_size(model, context_length) - 1
    for number, prompt in enumerate(prompts, start=1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not 1 <= len(prompt) <= context_length:
            raise UserError(
                f"{which} has {len(prompt)} tokens; it must have at least 1 and at most the context's {context_length}."
            )
        if min(prompt) < 0 or max(prompt) > last:
            wrong = next(token for token in prompt if not 0 <= token <= last)
            raise UserError(f"{which} has a token {wrong}; it must be from 0 to {last}, the vocabulary's last.")


@lru_cache
def vocab_size(model: nn.Module, context_length: int) -> int:
    """How many tokens a model knows, from the shape of its logits."""

    def logits(model: Any) -> jax.Array:
        if not contract_of(model).has_cache:
            return model(jnp.zeros(context_length, jnp.int32))
        x_1D, _ = model.extend(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), model.init_cache(1, jnp.float32), 0)
        return model.unembed(x_1D[0])

    return jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), method=logits)[0]).shape[-1]


def check_seeds(seeds: Sequence[int], n_prompts: int, n_samples: int) -> None:
    """Raise `UserError` if a seed does not fit 32 bits, `ValueError` if they are not one for each row."""
    if len(seeds) != n_prompts * n_samples:
        raise ValueError(f"{len(seeds)} seeds for {n_prompts} prompts of {n_samples} rows each")
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise UserError(f"seed is {seed}; it must be at least 0 and below 2**32.")


class Generation:
    """An iterator over the pieces of a batch; the first is the first token of each row.

    It ends when all rows are done, by a stop token or by `end`, or have as many tokens as asked for. While a piece is
    looked at, the next is made.
    """

    def __init__(self, run: _Run) -> None:
        self._ended_B = run.ended_B
        self._pieces = run.with_cache() if contract_of(run.model).has_cache else run.with_window()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def end(self, row: int) -> None:
        """Deliver no more tokens of a row."""
        self._ended_B[row] = True


@dataclass
class _Run:
    """One call of `generate`."""

    model: Any
    params: Params
    rows: list[list[int]]
    """Tokens so far: of the prompts, and when these are read, of all rows."""
    sampling: Sampling
    seeds_R: np.ndarray
    max_new_tokens: int
    context_length: int
    n_samples: int
    dtype: Any
    chunk: int
    fill_token: int
    made: int = 0
    history: Any = None
    pace: float = inf
    """Seconds a token, as the last call took; at most, where it was not waited for."""
    since: float = 0.0
    """When the call before was done."""

    def __post_init__(self) -> None:
        self.ended_B = np.zeros(len(self.seeds_R), bool)
        self.place = placement(self.params)

    @property
    def extrapolates(self) -> bool:
        return self.made < self.max_new_tokens and not self.ended_B.all()

    @property
    def portion(self) -> int:
        """Tokens that the next call makes."""
        return int(min(max(LEAST_PORTION, A_MOMENT / self.pace), CHUNK))

    def with_cache(self) -> Iterator[Piece]:
        """The pieces, with a cache; where positions end, begun anew from the last half of the context."""
        while self.extrapolates:
            yield from self._deliver(self._continue())
            # Rows that have outgrown the context are cut; the others are not, so that no row feels its neighbours.
            # Nobody reads on in those that have ended, which must not keep the others at the context's end.
            half = max(1, self.context_length // 2)
            for row, ended in zip(self.rows, self.ended_B, strict=True):
                del row[: -1 if ended else -half if len(row) > self.context_length else 0]

    def _continue(self) -> Iterator[DecodeOutput]:
        """Read the rows, and go on with them until enough is made or positions end."""
        made_before, n_samples = self.made, self.n_samples if self.made == 0 else 1
        lengths_B = np.array([len(row) for row in self.rows], np.int32)
        longest = int(lengths_B.max())
        contract, steps = contract_of(self.model), self.max_new_tokens - self.made - 1
        attention_window = contract.attention_window
        if not contract.extrapolates or attention_window is None:
            attention_window = self.context_length
            steps = min(steps, attention_window - longest)
        # A chunk of a prompt is written before it is read: in a ring, it must not reach what its first token sees.
        in_ring = max(attention_window, min(longest, attention_window + self.chunk - 1))
        # Parts of a prompt begin at multiples of the chunk, so that none is cut by the ring's end.
        least = self.chunk if longest > self.chunk else prompt_bucket(1)
        few = min(self.context_length, attention_window, FEW_SLOTS)
        n_slots = doubled(least, max(few, min(longest + steps, in_ring)))
        rows, made = self._read(lengths_B, n_samples, n_slots)
        yield made
        offset_R = self.place(np.repeat(longest - lengths_B, n_samples))
        seeds_R = self.place(self.seeds_R)
        done = 0
        while done < steps:
            counter = longest + done
            limit = min(self.portion, steps - done)
            if (read := read_slots(counter + 1, n_slots)) < n_slots:
                limit = min(limit, read - counter)  # nothing is read before it is in use
            rows, made = programs.decode(
                self.model, self.sampling, self.params, rows, offset_R, seeds_R, self.place(self.ended_B.copy()),
                np.int32(counter), np.int32(made_before + 1 + done), np.int32(limit), np.int32(n_slots),
                n_read=read_slots(counter + limit, n_slots), dtype=self.dtype,
            )  # fmt: skip
            yield made
            done += limit
        self.history = rows.history

    def _read(self, lengths_B: np.ndarray, n_samples: int, n_slots: int) -> tuple[programs.DecodeState, DecodeOutput]:
        """The rows into caches, chunk by chunk, and the first new tokens."""
        texts = self.rows
        longest = int(lengths_B.max())
        starts = range(0, longest, self.chunk)
        width = starts[-1] + min(prompt_bucket(longest - starts[-1]), self.chunk)
        tokens_BT = np.full((len(texts), width), self.fill_token, np.int32)
        positions_BT = np.full((len(texts), width), EMPTY, np.int32)
        for i, (text, length) in enumerate(zip(texts, lengths_B.tolist(), strict=True)):
            tokens_BT[i, longest - length : longest] = text
            positions_BT[i, longest - length : longest] = np.arange(length)
        cache = None
        for at in starts:
            part = slice(at, min(at + self.chunk, width))
            inputs = cache, self.place(tokens_BT[:, part]), self.place(positions_BT[:, part]), np.int32(at % n_slots)
            sizes = {"n_slots": n_slots, "n_read": read_slots(part.stop, n_slots), "dtype": self.dtype}
            if at != starts[-1]:
                cache = programs.read(self.model, self.params, *inputs, **sizes)
        prompts_BP = left_aligned(texts, width if len(starts) == 1 else doubled(self.chunk, longest))
        start = programs.start if n_samples == 1 else programs.start_samples
        return start(
            self.model, self.sampling, self.params, *inputs, np.int32(longest - 1 - starts[-1]),
            (self.place(prompts_BP), self.place(lengths_B)), self.history, self.place(self.seeds_R),
            self.place(self.ended_B.copy()), np.int32(self.made), n_samples=n_samples, **sizes,
        )  # fmt: skip

    def with_window(self) -> Iterator[Piece]:
        """The pieces, by full passes over the last `context_length` tokens, filled up on the left."""
        yield from self._deliver(self._slide())

    def _slide(self) -> Iterator[DecodeOutput]:
        rows = [row for row in self.rows for _ in range(self.n_samples)]
        window_BT = np.full((len(rows), self.context_length), self.fill_token, np.int32)
        for i, row in enumerate(rows):
            window_BT[i, -len(row) :] = row
        lengths_B = self.place(np.array([len(row) for row in rows], np.int32))
        prompts = self.place(left_aligned(rows, self.context_length)), lengths_B
        state = programs.begin_windows(self.model, self.sampling, self.params, self.place(window_BT), prompts)
        seeds_R, done = self.place(self.seeds_R), 0
        while done < self.max_new_tokens:
            limit = min(LEAST_PORTION, self.max_new_tokens - done) if done else 1
            state, made = programs.decode_windows(
                self.model, self.sampling, self.params, state, seeds_R, self.place(self.ended_B.copy()),
                np.int32(done), np.int32(limit),
            )  # fmt: skip
            done += limit
            yield made

    def _deliver(self, calls: Iterator[DecodeOutput]) -> Iterator[Piece]:
        """What the calls made, each once the next is under way."""
        waiting = next(calls)
        for call in calls:
            yield from self._piece(waiting)
            if self.ended_B.all():
                return
            waiting = call
        yield from self._piece(waiting)

    def _piece(self, made: DecodeOutput) -> Iterator[Piece]:
        """What a call made, if that is anything."""
        asked = time.perf_counter()
        n, drawn_CB, done_B = jax.device_get(made)
        # A call that is waited for began when the one before was done. One that is not was done at some time before
        # this: the rest was compiling, or is our reader's.
        now = time.perf_counter()
        if n > 1:  # one of the loop
            pace = (now - self.since) / int(n)
            self.pace = pace if now - asked > NO_WAIT else min(self.pace, pace)
        self.since = now
        if self.made == 0 and self.n_samples > 1:
            self.rows = [list(row) for row in self.rows for _ in range(self.n_samples)]
        piece = Piece(*(x[:n].swapaxes(0, 1) for x in drawn_CB))
        tokens_BN = np.where(self.ended_B[:, None], EMPTY, piece.tokens_BN)
        for row, tokens in zip(self.rows, tokens_BN, strict=True):
            row.extend(tokens[tokens != EMPTY].tolist())
        self.ended_B |= done_B
        self.made += int(n)
        if (tokens_BN != EMPTY).any():
            yield piece._replace(tokens_BN=tokens_BN)


def placement(params: Params) -> Callable[[np.ndarray], Any]:
    """How an array of rows comes to the devices that hold the parameters: split, if the rows can be shared evenly."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return lambda rows: rows
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    even = lambda rows: len(rows) % batch_shards(mesh) == 0  # noqa: E731
    return lambda rows: jax.device_put(rows, batch_split(mesh) if even(rows) else replicated(mesh))


def left_aligned(texts: list[list[int]], width: int) -> np.ndarray:
    """Rows of tokens, filled up on the right with zeros."""
    tokens_BP = np.zeros((len(texts), width), np.int32)
    for i, text in enumerate(texts):
        tokens_BP[i, : len(text)] = text
    return tokens_BP


def prompt_bucket(n: int) -> int:
    """The places that n tokens are read in: a power of two from 8, and from 128 on three quarters of one too."""
    size = doubled(8, n)
    return size * 3 // 4 if size >= 256 and n <= size * 3 // 4 else size


def read_slots(n: int, n_slots: int) -> int:
    """How many slots attention looks at when n are in use."""
    return min(doubled(LEAST_READ, n), n_slots)


def doubled(size: int, n: int) -> int:
    """`size`, doubled until it is at least n."""
    while size < n:
        size *= 2
    return size
