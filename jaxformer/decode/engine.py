"""The compiled programs of one model, as a generation calls them: a prefill in chunks, with a cache that grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxformer.contract import contract_of
from jaxformer.decode import programs
from jaxformer.decode.batches import doubled, length_bucket, placement, read_slots
from jaxformer.decode.programs import Cache
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY
from jaxformer.parallel.mesh import abstract

MIN_SLOTS = 1024
"""Minimum limit to which a cache may grow, in slots, unless the context or the attention window is smaller; compiled
programs depend on the limit."""


class SlotCache(NamedTuple):
    """The cache of a batch, None for an empty one, its size in slots and in layers that are rings (see `ring_sizes`),
    and an upper bound on the slots written so far."""

    arrays: Cache | None = None
    n_slots: int = 0
    rings: tuple[int, ...] = ()
    n_written: int = 0


def ring_sizes(windows: Sequence[int], chunk: int, n_slots: int) -> tuple[int, ...]:
    """Return the slots of each layer that needs fewer than `n_slots` for its attention window, 0 for the others; empty
    if all need as many.

    A prompt chunk is written before it is read, so it must not overwrite the window of its first token. Sizes are
    multiples of the chunk, so that no chunk wraps around, and divide `n_slots`, so that a ring begins where the cache
    does.
    """
    sizes = [doubled(chunk, window + chunk - 1) for window in windows]
    rings = tuple(size if size < n_slots and n_slots % size == 0 else 0 for size in sizes)
    return rings if any(rings) else ()


def run_program(program: Callable[..., Any], *args: Any, **static: Any) -> Any:
    """Return the result of a jitted function."""
    return program(*args, **static)


def compile_program(program: jax.stages.Wrapped, *args: Any, **static: Any) -> Any:
    """Compile a jitted function for arguments of which some may be shapes; return the shapes of its result."""
    lowered = program.lower(*args, **static)
    return abstract(lowered.out_info, lowered.compile().output_shardings)


@dataclass(frozen=True, eq=False)
class Engine:
    """A model with the arguments that all calls of its programs share."""

    model: nn.Module
    params: Params = field(repr=False)
    context_length: int
    """Longest training sequence of the model, in tokens."""
    dtype: DTypeLike
    """Dtype of the cache."""
    chunk: int
    """Prompt tokens per prefill pass."""
    mesh: Mesh | None
    """Mesh over whose data-parallel devices the rows are split; see `programs.decode`."""
    keep_programs: bool
    """Keep compiled programs that this engine no longer needs, for others."""
    run: Callable[..., Any] = run_program
    """Function that runs a program, given the program and its arguments."""

    def put(self, rows: np.ndarray) -> Any:
        """Return an array of rows on the devices; see `batches.placement`."""
        return placement(self.params)(rows)

    def plan(self, longest: int, steps: int) -> tuple[int, int]:
        """Return the number of decode steps that follow the first new token of rows of up to `longest` tokens, at most
        `steps`, and the slots to which the cache may grow; fewer than tokens are a ring."""
        contract = contract_of(self.model)
        attention_window = contract.attention_window
        if not contract.extrapolates or attention_window is None:
            attention_window = self.context_length
            steps = min(steps, attention_window - longest)
        # A prompt chunk is written before it is read, so in a ring buffer it must not overwrite the attention window of
        # its first token. Chunks begin at multiples of their size, so that none wraps around the end of the ring.
        in_ring = max(attention_window, min(longest, attention_window + self.chunk - 1))
        # Rings of layers are multiples of the chunk as well.
        smallest = self.chunk if longest > self.chunk or contract.layer_windows else length_bucket(1)
        usual = min(self.context_length, attention_window, MIN_SLOTS)
        return steps, doubled(smallest, max(usual, min(longest + steps, in_ring)))

    def prefill(
        self, prompts: Sequence[Sequence[int]], n_samples: int, cache: SlotCache, n_cached: int, n_slots: int
    ) -> tuple[jax.Array, SlotCache]:
        """Return the logits `(R, V)` after each prompt, and the cache of its tokens, for R = B · `n_samples` rows.

        Args:
          cache: the cache of the first `n_cached` tokens of a single row, each in the slot of its position, or an empty
            one. The programs reuse its memory.
          n_slots: slots to which the cache may grow, as a ring.
        """
        longest, mesh = max(map(len, prompts)), self.mesh if n_samples == 1 else None
        starts, width = self.chunks(longest, n_cached)
        tokens_BT = np.zeros((len(prompts), width), np.int32)
        positions_BT = np.full((len(prompts), width), EMPTY, np.int32)
        for i, prompt in enumerate(prompts):
            tokens_BT[i, longest - len(prompt) : longest] = prompt
            positions_BT[i, longest - len(prompt) : longest] = np.arange(len(prompt))
        for first in starts:
            end = min(first + self.chunk, width)
            cache = self.enlarge(cache, read_slots(end, n_slots))
            logits_BV, arrays = self.run(
                programs.prefill, self.model, self.params, cache.arrays, self.put(tokens_BT[:, first:end]),
                self.put(positions_BT[:, first:end]), np.int32(first % n_slots),
                np.int32(longest - 1 - first) if end == width else None, n_slots=cache.n_slots, dtype=self.dtype,
                rings=cache.rings, mesh=mesh,
            )  # fmt: skip
            cache = cache._replace(arrays=arrays, n_written=max(cache.n_written, width))
        if n_samples == 1:
            return logits_BV, cache
        logits_RV, arrays = self.run(programs.repeat_rows, (logits_BV, cache.arrays), n=n_samples, mesh=self.mesh)
        return logits_RV, cache._replace(arrays=arrays)

    def rings(self, n_slots: int) -> tuple[int, ...]:
        """Return the `ring_sizes` of the model in a cache that may grow to `n_slots` slots."""
        return ring_sizes(contract_of(self.model).layer_windows, self.chunk, n_slots)

    def chunks(self, longest: int, n_cached: int) -> tuple[range, int]:
        """Return the first token of each chunk of a prefill, and the end of the last chunk, with its padding."""
        starts = range(n_cached, longest, self.chunk)
        return starts, starts[-1] + min(length_bucket(longest - starts[-1]), self.chunk)

    def enlarge(self, cache: SlotCache, n_slots: int) -> SlotCache:
        """Return the cache with at least `n_slots` slots."""
        if n_slots <= cache.n_slots:
            return cache
        cache = cache._replace(n_slots=n_slots)
        if cache.arrays is None:
            return cache
        shape = {"n_slots": n_slots, "dtype": self.dtype, "rings": cache.rings}
        arrays = self.run(programs.enlarge, self.model, cache.arrays, **shape)
        self.release(programs.decode)
        return cache._replace(arrays=arrays)

    def release(self, *unneeded: Any) -> None:
        """Release the memory of compiled programs unless they are kept."""
        for program in unneeded if not self.keep_programs else ():
            program.clear_cache()
