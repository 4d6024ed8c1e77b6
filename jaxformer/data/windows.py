"""Batches of token windows. The batch at step k is a pure function of (tokens, seed, k)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.data.corpus import Corpus, TextConfig
from jaxformer.data.dataset import Batch, Dataset, epoch_permutation, evenly_spaced
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
                f"fewer than train.batch_size {self.batch_size}; take --train.batch-size {self.n_windows}, a shorter "
                "--model.context-length, or more text."
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
        return self.batch(step, slice(None))

    def batch(self, step: int, rows: slice | np.ndarray) -> np.ndarray:
        """Some rows of the batch at a step: what one of several processes needs of it."""
        epoch, place = divmod(step, self.steps_per_epoch)
        batch = epoch_permutation(self.n_windows, self.seed, epoch)[
            place * self.batch_size : (place + 1) * self.batch_size
        ]
        starts = batch[rows].astype(np.int64) * self.stride
        # One vectorised gather a batch; a record a window is fifty times slower.
        return np.lib.stride_tricks.sliding_window_view(self.tokens, self.length)[starts].astype(np.int32)


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
    chosen = evenly_spaced(n_all, n_windows)
    for first in range(0, len(chosen), batch_size):
        part = chosen[first : first + batch_size]
        at = part[:, None] * stride + np.arange(length)
        batch = np.zeros((batch_size, length), np.int32)
        weights = np.zeros((batch_size, n_predicted), np.float32)
        batch[: len(part)] = tokens[np.minimum(at, len(tokens) - 1)]
        counted_before = (part > 0)[:, None] & (np.arange(n_predicted) < n_predicted - stride)
        weights[: len(part)] = (at < len(tokens))[:, -n_predicted:] & ~counted_before
        yield batch, weights


def next_token_batch(windows_BT: np.ndarray, n_predicted: int = 0, weights: np.ndarray | None = None) -> Batch:
    """Windows as what is read of them, and their last tokens, or all that follow one, as what is predicted."""
    return Batch((windows_BT[:, :-1],), windows_BT[:, 1:][:, -n_predicted:], weights)


@dataclass(frozen=True, eq=False)
class HeldOutText:
    """A text that a model is measured on, each token of which is predicted once; see `eval_batches`.

    Raises:
      UserError: it is too short.
    """

    tokens: np.ndarray
    token_lengths: np.ndarray
    """Bytes of each token, `(V,)`."""
    context_length: int
    n_predicted: int
    """How many of its last tokens a window predicts."""
    stride: int | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) <= (before := self.context_length + 1 - self.n_predicted):
            raise UserError(
                f"the held-out text has {len(self.tokens)} tokens, too few to predict one, which takes {before} before "
                "it; give more text to measure on."
            )

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        """As of a `Dataset`."""
        length = self.context_length + 1
        for windows_BT, weights in eval_batches(
            self.tokens, length, self.n_predicted, batch_size, n, self.stride
        ):  # fmt: skip
            yield next_token_batch(windows_BT, self.n_predicted, weights)


class TextDataset(Dataset):
    """A corpus in windows of which every token is to be predicted from those before it."""

    unit = "tokens"
    model: TokenModelConfig

    def __init__(self, config: TextConfig, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> None:
        """Raises `UserError` where one of its parts is too short."""
        length, stride = model.context_length + 1, config.stride or model.context_length
        self.windows = Windows(corpus.train.tokens, length, stride, batch_size, seed)
        self.name, self.corpus, self.model = config.path, corpus, model
        self.per_step, self.steps_per_epoch = batch_size * model.context_length, self.windows.steps_per_epoch
        self.fingerprint, self.tokenizer = corpus.fingerprint, corpus.tokenizer
        self.token_lengths = corpus.tokenizer.token_lengths
        self.val = HeldOutText(corpus.val.tokens, self.token_lengths, model.context_length, model.n_predicted)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        return next_token_batch(self.windows.batch(step, rows), self.model.n_predicted)

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        return self.val.held_out(batch_size, n)

    def describe(self) -> str:
        train, val = self.corpus.train, self.corpus.val
        return (
            f"{self.name}: {train.documents:,} documents, {len(train.tokens):,} tokens, "
            f"{train.n_bytes / len(train.tokens):.2f} bytes per token; "
            f"held out: {val.documents:,} documents, {len(val.tokens):,} tokens"
        )
