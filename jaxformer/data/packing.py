"""Examples of various lengths, packed into rows of one length by grain's first-fit packing.

A batch of packed examples is `Batch((tokens_BT, None, segments_BT), targets_BT, weights_BT)`; None is the prefix, which
such models do not have. All arrays are padded with 0 on the right.

- `tokens_BT`, int32: the inputs of a row's examples, concatenated.
- `segments_BT`, int32: the number of the example that a token belongs to, counted from 1; 0 for padding. A model whose
  contract has `has_segments` attends within each segment, and its positions restart at 0 in each
  (`ops.positions.positions_in_segments`).
- `targets_BT`, int32: the token that follows each input in its own example.
- `weights_BT`, float32: the loss weight of each target, 0 for padding. In training they sum to 1 over the batch.

`PackedExamples` makes such batches from any examples, given their concatenated tokens and, if the loss does not cover
all tokens (such as in a conversation, where only the answers count), one weight per token. A token of weight 0 adds
nothing to the loss, and its gradient is exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxformer.data.dataset import Batch, batch_error, batch_indices, evenly_spaced, padded_batches

LENGTH_MULTIPLE = 128
"""Divisor of the lengths of short rows; that of the blocks of fused attention."""
ROWS_AT_ONCE = 64
"""Number of open rows in first-fit packing: more leave less padding, but take longer."""


def pack(lengths_N: np.ndarray, length: int) -> list[np.ndarray]:
    """Return the indices of the examples in each row of `length` tokens, in the order of the examples. `lengths_N` has
    the tokens per example, at least 1 and at most `length`."""
    import grain  # slow to import

    content = np.zeros(length, bool)  # dummy tokens, since only the assignment to rows is needed
    lengths = grain.MapDataset.range(len(lengths_N))
    examples = lengths.map(lambda i: {"tokens": content[: lengths_N[i]], "index": i})
    rows = grain.experimental.FirstFitPackIterDataset(
        examples.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"tokens": length}, num_packing_bins=ROWS_AT_ONCE, shuffle_bins=False, meta_features=("index",),
    )  # fmt: skip
    return [np.array(row["index"]) for row in rows]


def fitting_length(n: int, length: int) -> int:
    """Return the length of rows for n inputs that fit in a row of `length`: n, rounded up so that fused attention
    supports it; and otherwise `length`."""
    return min(length, -(-n // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)


def split_long(starts_N: np.ndarray, lengths_N: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and lengths of examples after splitting those with more than `length` tokens; empty examples
    are left out."""
    n_parts_N = -(-lengths_N // length)
    first_N = np.cumsum(n_parts_N) - n_parts_N
    offsets_M = (np.arange(n_parts_N.sum()) - np.repeat(first_N, n_parts_N)) * length
    return np.repeat(starts_N, n_parts_N) + offsets_M, np.minimum(np.repeat(lengths_N, n_parts_N) - offsets_M, length)


@dataclass(frozen=True, eq=False)
class PackedExamples:
    """Examples of at most `length` inputs, packed into rows; see the module's docstring. Raises `UserError` if there
    are fewer rows than a batch needs."""

    tokens: np.ndarray
    """All examples, `(n,)` of any integer dtype."""
    starts_N: np.ndarray
    """Index of each example's first input in `tokens`."""
    lengths_N: np.ndarray
    """Inputs per example. Each input predicts the token after it, so n inputs span n + 1 tokens."""
    length: int
    """Inputs per row, T."""
    batch_size: int
    seed: int
    weights: np.ndarray | None = None
    """Loss weight of each token as a target, `(n,)`; None for 1."""
    token_lengths: np.ndarray | None = None
    """Bytes per token, `(V,)`; None if bits per byte are not defined."""

    def __post_init__(self) -> None:
        if len(self.rows) < self.batch_size:
            rows = f"row(s) of `model.context_length` {self.length} tokens"
            raise batch_error("the packed training text", len(self.rows), rows, self.batch_size)

    @cached_property
    def rows(self) -> list[np.ndarray]:
        """Indices of the examples in each row."""
        return pack(self.lengths_N, self.length)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches per epoch."""
        return len(self.rows) // self.batch_size

    @property
    def per_step(self) -> float:
        """Inputs per batch, averaged over an epoch."""
        return float(self.lengths_N.sum()) / len(self.rows) * self.batch_size

    def gather(self, rows_B: np.ndarray) -> Batch:
        """Return the rows at the given indices, with unnormalised weights."""
        B, T = len(rows_B), self.length
        tokens_BT, segments_BT, targets_BT = np.zeros((3, B, T), np.int32)
        weights_BT = np.zeros((B, T), np.float32)
        for b, row in enumerate(rows_B):
            stop = 0
            for segment, i in enumerate(self.rows[row], start=1):
                start, n = self.starts_N[i], self.lengths_N[i]
                span, stop = (b, slice(stop, stop + n)), stop + n
                example = self.tokens[start : start + n + 1]
                tokens_BT[span], targets_BT[span] = example[:-1], example[1:]
                segments_BT[span] = segment
                weights_BT[span] = 1 if self.weights is None else self.weights[start + 1 : start + n + 1]
        return Batch((tokens_BT, None, segments_BT), targets_BT, weights_BT)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Return rows of the batch at a step, as `Dataset.batch` does."""
        _, rows_B = batch_indices(len(self.rows), self.batch_size, self.seed, step)
        batch = self.gather(rows_B)
        total = max(batch.weights.sum(dtype=np.float64), np.finfo(np.float32).tiny)  # the sum is 0 if no target counts
        (tokens_BT, _, segments_BT), weights_BT = batch.inputs, (batch.weights / total).astype(np.float32)
        return Batch((tokens_BT[rows], None, segments_BT[rows]), batch.targets[rows], weights_BT[rows])

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        """Yield all rows, or about `n` evenly spaced ones, as `Dataset.val_batches` does."""
        for rows_B, counts_B in padded_batches(evenly_spaced(len(self.rows), n), batch_size):
            batch = self.gather(rows_B)
            yield batch._replace(weights=batch.weights * counts_B[:, None])
