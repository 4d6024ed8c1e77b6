"""Text in windows of tokens, for causal language models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from jaxformer.config import Fixed, ModelConfig, TokenModelConfig
from jaxformer.config.fields import Positive
from jaxformer.data.counts import Counts, count
from jaxformer.data.dataset import Batch, Dataset, batch_error, batch_indices, evenly_spaced, task_error
from jaxformer.data.infer_config import describe_changes, describe_tokenizer_sample, fit_vocab_size, infer_vocab_size
from jaxformer.data.packing import PackedExamples, fitting_length, split_long
from jaxformer.data.tokenizer import Tokenizer, find_tokenizer
from jaxformer.data.tokens import Corpus, CorpusConfig, load_corpus
from jaxformer.errors import UserError
from jaxformer.terminal import short_repr

MAX_COUNTED = 2**25
"""Maximum tokens counted before training: more would take longer than some seconds, and gigabytes."""


@dataclass(frozen=True)
class TextConfig(CorpusConfig):
    """Text, cut into windows in which every token is predicted from those before it."""

    n_extra_tokens: ClassVar[int] = 0
    """Number of tokens in the model's vocabulary but not in the text's."""
    stride: Positive | None = None
    """Tokens between the starts of consecutive windows; the context length by default."""
    packing: Literal["windows", "documents"] = "windows"
    """Form of the examples: windows of the text, in which tokens also attend to earlier documents; or whole documents,
    packed by first fit, each with its own attention, positions and loss. A document longer than the context is
    split."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride is not None and self.has_segments:
            raise UserError(f"`data.stride` is {self.stride}, but packed documents have no windows; omit it.")

    @property
    def has_segments(self) -> bool:
        return self.packing == "documents"

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> TextDataset:
        if not isinstance(model, TokenModelConfig):
            raise task_error(model, "text", "a model of tokens")
        inferred, extra = model, self.n_extra_tokens
        if tokenizer is None and self.tokenizer is not None:
            tokenizer = Tokenizer.load(find_tokenizer(self.tokenizer))
            inferred = fit_vocab_size(model, tokenizer, extra, fixed)
            reason = f"{self.tokenizer} has {tokenizer.vocab_size:,} tokens"
            corpus = load_corpus(self, tokenizer.vocab_size, tokenizer)
        else:
            corpus = load_corpus(self, model.vocab_size - extra, tokenizer)
            inferred = infer_vocab_size(model, corpus.tokenizer, extra) if tokenizer is None else model
            reason = f"{self.path} supports {corpus.tokenizer.vocab_size:,} tokens"
        data = self.build_dataset(inferred, corpus, batch_size, seed)
        changes = describe_changes(model, inferred, reason)
        data.notes = (*corpus.notes, *changes, *describe_tokenizer_sample(corpus.tokenizer, self.path))
        return data

    def build_dataset(self, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> TextDataset:
        """Return the corpus in batches."""
        return (PackedTextDataset if self.has_segments else TextDataset)(self, model, corpus, batch_size, seed)


@dataclass(frozen=True, eq=False)
class Windows:
    """Every window of `length` tokens that starts at a multiple of `stride`, in batches; see `batch_indices`. Raises
    `UserError` if the text has fewer windows than a batch."""

    tokens: np.ndarray
    """`(n,)`, of any integer dtype."""
    length: int
    """Tokens per window."""
    stride: int
    """Tokens between the starts of consecutive windows."""
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if (n := self.n_windows) < self.batch_size:
            windows = f"window(s) of `model.context_length` + 1 = {self.length} tokens at stride {self.stride}"
            raise batch_error(f"the training text of {len(self.tokens)} tokens", n, windows, self.batch_size)

    @property
    def n_windows(self) -> int:
        """Windows per epoch."""
        return max(0, len(self.tokens) - self.length + self.stride) // self.stride

    @property
    def steps_per_epoch(self) -> int:
        """Full batches per epoch."""
        return self.n_windows // self.batch_size

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Return rows of the batch at a step, `(n, length)` int32."""
        _, windows_B = batch_indices(self.n_windows, self.batch_size, self.seed, step)
        starts = windows_B[rows].astype(np.int64) * self.stride
        # One vectorised gather per batch; one record per window is fifty times slower.
        return np.lib.stride_tricks.sliding_window_view(self.tokens, self.length)[starts].astype(np.int32)


def eval_batches(
    tokens: np.ndarray, length: int, n_predicted: int, batch_size: int, n_windows: int | None = None,
    stride: int | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """Yield a text in windows that predict each token after the first once.

    A window predicts its last `n_predicted` tokens, and the next window starts `stride` tokens later; a token counts in
    the first window that predicts it. The last batch is padded with windows of weight 0, and the last window with
    tokens of weight 0, so that all batches have the same shape.

    Args:
      tokens: `(n,)`.
      length: tokens per window, T + 1.
      n_predicted: T, or 1 for a model that predicts only the token after a full window.
      batch_size: windows per batch, B.
      n_windows: number of evenly spaced windows; None for all.
      stride: tokens between the starts of consecutive windows, at most `n_predicted`, the default.

    Yields:
      `(B, length)` int32 and the weights of the predicted tokens, `(B, n_predicted)` float32.
    """
    stride = stride or n_predicted
    n_all = max(1, -(-(len(tokens) - length) // stride) + 1)
    windows = evenly_spaced(n_all, n_windows)
    for start in range(0, len(windows), batch_size):
        part = windows[start : start + batch_size]
        positions = part[:, None] * stride + np.arange(length)
        batch = np.zeros((batch_size, length), np.int32)
        weights = np.zeros((batch_size, n_predicted), np.float32)
        batch[: len(part)] = tokens[np.minimum(positions, len(tokens) - 1)]
        counted_before = (part > 0)[:, None] & (np.arange(n_predicted) < n_predicted - stride)
        weights[: len(part)] = (positions < len(tokens))[:, -n_predicted:] & ~counted_before
        yield batch, weights


def next_token_batch(windows_BT: np.ndarray, n_predicted: int = 0, weights: np.ndarray | None = None) -> Batch:
    """Return windows as inputs and targets; the targets are the last `n_predicted` tokens, or all after the first for
    0."""
    return Batch((windows_BT[:, :-1],), windows_BT[:, 1:][:, -n_predicted:], weights)


@dataclass(frozen=True, eq=False)
class ValidationText:
    """A validation text, each token of which is predicted once; see `eval_batches`. Raises `UserError` if it is too
    short."""

    tokens: np.ndarray
    """`(n,)`, of any integer dtype."""
    token_lengths: np.ndarray
    """Bytes per token, `(V,)`."""
    context_length: int
    """Input tokens per window, T."""
    n_predicted: int
    """Predicted tokens per window, the last ones."""
    stride: int | None = None
    """Tokens between the starts of consecutive windows; `n_predicted` by default."""

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        if (n := len(self.tokens)) <= (before := self.context_length + 1 - self.n_predicted):
            problem = f"the held-out text has {n} tokens, too few to predict one, which needs {before} before it"
            raise UserError(f"{problem}; give more text to evaluate on.")

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        """Yield batches as `Dataset.val_batches` does; the only window of a text shorter than the context is shorter,
        too, unless the model needs full ones."""
        length, n_predicted = self.context_length, self.n_predicted
        if n_predicted == length:
            length = n_predicted = fitting_length(len(self.tokens) - 1, length)
        for windows_BT, weights in eval_batches(self.tokens, length + 1, n_predicted, batch_size, n, self.stride):
            yield next_token_batch(windows_BT, n_predicted, weights)


class TextDataset(Dataset):
    """A corpus in windows in which every token is predicted from those before it."""

    unit = "tokens"
    has_bits_per_byte: ClassVar[bool] = True
    model: TokenModelConfig

    def __init__(self, config: Any, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> None:
        """Cut the corpus into windows. Raises `UserError` if a split is too short. `config` is a `TextConfig`."""
        self.name, self.config, self.corpus, self.model, self.seed = config.path, config, corpus, model, seed
        self.fingerprint, self.tokenizer = corpus.fingerprint, corpus.tokenizer
        self.token_lengths = corpus.token_lengths if self.has_bits_per_byte else None
        self._cut(batch_size)

    def _cut(self, batch_size: int) -> None:
        """Cut both splits into examples."""
        T, train, val = self.model.context_length, self.corpus.train.tokens, self.corpus.val.tokens
        self.windows = Windows(train, T + 1, self.config.stride or T, batch_size, self.seed)
        self.per_step, self.steps_per_epoch = batch_size * T, self.windows.steps_per_epoch
        self.val = ValidationText(val, self.corpus.token_lengths, T, self.model.n_predicted)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        return next_token_batch(self.windows.batch(step, rows), self.model.n_predicted)

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        return self.val.val_batches(batch_size, n)

    def counts(self, max_order: int = 2) -> Counts:
        """Return counts in at most `MAX_COUNTED` tokens from the beginning of each split."""
        train, val = (split.tokens[:MAX_COUNTED] for split in (self.corpus.train, self.corpus.val))
        return count(train, val, self.corpus.tokenizer.vocab_size, max_order)

    def count_losses(self) -> dict[str, float]:
        """Return the held-out loss in nats per token of counting tokens, and of counting pairs; see `counts`."""
        counts = self.counts()
        return {"tokens": counts.loss(1), "pairs": counts.loss(2)}

    def describe(self) -> str:
        splits = self.corpus.train, self.corpus.val
        numbers = [f"{x.documents:,} document{'s' if x.documents != 1 else ''}, {len(x.tokens):,}" for x in splits]
        per_token = f"{splits[0].n_bytes / len(splits[0].tokens):.2f} bytes per token"
        return f"{self.name}: {numbers[0]} tokens, {per_token}; held out: {numbers[1]} tokens"


class PackedTextDataset(TextDataset):
    """A corpus as packed documents, in which every token is predicted from those before it in its document."""

    def _cut(self, batch_size: int) -> None:
        T, corpus = self.model.context_length, self.corpus
        self.train = pack_documents(corpus.train.tokens, corpus.tokenizer, T, batch_size, self.seed)
        self.packed_val = pack_documents(corpus.val.tokens, corpus.tokenizer, T)
        self.per_step, self.steps_per_epoch = self.train.per_step, self.train.steps_per_epoch

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        return self.train.batch(step, rows)

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        return self.packed_val.val_batches(batch_size, n)

    def describe(self) -> str:
        filled = self.train.lengths_N.sum() / len(self.train.rows) / self.model.context_length
        return f"{super().describe()}; packed into {len(self.train.rows):,} rows, {filled:.0%} full"


def pack_documents(
    tokens: np.ndarray, tokenizer: Tokenizer, length: int, batch_size: int = 1, seed: int = 0
) -> PackedExamples:
    """Return the documents of a `Split` in rows of `length` inputs. A document's first input is the special token
    before it, its last target the end-of-text token after it."""
    begin = tokenizer.begin_of_text
    first, part = tokenizer.end_of_text if begin is None else begin, 2**22  # tokens in memory at once
    starts = np.concatenate([i + np.flatnonzero(tokens[i : i + part] == first) for i in range(0, len(tokens), part)])
    if begin is None:  # the last end-of-text token begins no document
        starts, lengths = starts[:-1], np.diff(starts)
    else:  # the end-of-text token before another document is no input
        lengths = np.diff(starts, append=len(tokens)) - 1
    return PackedExamples(tokens, *split_long(starts, lengths, length), length, batch_size, seed)
