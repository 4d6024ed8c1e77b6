"""Batches of token windows. The batch at step k is a pure function of (tokens, seed, k)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import grain
import numpy as np

from jaxformer.errors import UserError


@dataclass(frozen=True, eq=False)
class Windows:
    """Every window of `length` tokens that starts at a multiple of `stride`, in batches.

    Each epoch takes the windows in another order, without replacement; those that do not fill a last batch
    are left for the next epoch's draw. `windows[k]` is the batch at step k, `(B, length)` int32, for any k.

    Raises:
      UserError: the text is shorter than one window, or has fewer windows than a batch.
    """

    tokens: np.ndarray
    length: int
    stride: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < self.length:
            raise UserError(
                f"the context needs windows of {self.length} tokens, but the training text has only "
                f"{len(self.tokens)}; shorten model.context_length or give more text."
            )
        if self.n_windows < self.batch_size:
            raise UserError(
                f"the training text has {self.n_windows} window(s) of {self.length} tokens at stride {self.stride}, "
                f"fewer than train.batch_size {self.batch_size}; lower one of them."
            )

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
        return (len(self.tokens) - self.length) // self.stride + 1

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return self.n_windows // self.batch_size

    def __getitem__(self, step: int) -> np.ndarray:
        return self.rows(step, slice(None))

    def rows(self, step: int, which: slice | np.ndarray) -> np.ndarray:
        """Some rows of the batch at a step: what one of several processes needs of it."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _order(self.n_windows, self.seed, epoch)
        batch = order[place * self.batch_size : (place + 1) * self.batch_size]
        starts = batch[which].astype(np.int64) * self.stride
        # One vectorised gather a batch; a record a window is fifty times slower.
        return np.lib.stride_tricks.sliding_window_view(self.tokens, self.length)[starts].astype(np.int32)

    def stream(self, start: int, stop: int, which: slice | np.ndarray = slice(None)) -> Iterator[np.ndarray]:
        """Rows of the batches start, …, stop - 1, made ahead of need by grain in the background."""
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        return iter(grain.MapDataset.source(_Steps(self, start, stop, which)).to_iter_dataset(ahead))


@lru_cache(maxsize=2)
def _order(n_windows: int, seed: int, epoch: int) -> np.ndarray:
    order = np.arange(n_windows, dtype=np.uint32 if n_windows < 2**32 else np.uint64)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(order)
    return order


@dataclass(frozen=True)
class _Steps:
    """A range of steps as what grain reads from: something with a length and items."""

    windows: Windows
    start: int
    stop: int
    which: slice | np.ndarray

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, i: int) -> np.ndarray:
        return self.windows.rows(self.start + i, self.which)


def eval_batches(
    tokens: np.ndarray, length: int, n_predicted: int, batch_size: int, n_windows: int | None = None,
    stride: int | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """A text cut so that each token after the first is predicted once.

    A window predicts its last `n_predicted` tokens, so windows start that far apart. With a stride they start so
    far apart, and a token counts in the first window that has it. The last batch is filled up with windows of
    weight 0, and the last window with tokens of weight 0: every batch has one shape.

    Args:
      tokens: `(n,)`.
      length: tokens in a window, T + 1.
      n_predicted: T, or 1 for a model that predicts only what follows a full window.
      batch_size: windows in a batch, B.
      n_windows: how many windows, evenly spread; None for all.
      stride: at most `n_predicted`, which None stands for.

    Yields:
      `(B, length)` int32 and the weights of the predicted tokens, `(B, n_predicted)` float32.
    """
    stride = stride or n_predicted
    n_all = max(1, -(-(len(tokens) - length) // stride) + 1)
    chosen = np.arange(n_all)
    if n_windows is not None and n_windows < n_all:
        chosen = np.linspace(0, n_all - 1, n_windows).astype(np.int64)
    for first in range(0, len(chosen), batch_size):
        part = chosen[first : first + batch_size]
        at = part[:, None] * stride + np.arange(length)
        batch = np.zeros((batch_size, length), np.int32)
        weights = np.zeros((batch_size, n_predicted), np.float32)
        batch[: len(part)] = tokens[np.minimum(at, len(tokens) - 1)]
        counted_before = (part > 0)[:, None] & (np.arange(n_predicted) < n_predicted - stride)
        weights[: len(part)] = (at < len(tokens))[:, -n_predicted:] & ~counted_before
        yield batch, weights
