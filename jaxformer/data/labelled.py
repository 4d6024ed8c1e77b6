"""Labelled texts for text classification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from jaxformer.config import DataConfig, Fixed, ModelConfig, TokenModelConfig
from jaxformer.config.fields import Fraction
from jaxformer.contract import Task
from jaxformer.data.dataset import Batch, Dataset, batch_error, batch_indices, evenly_spaced, padded_batches, task_error
from jaxformer.data.infer_config import describe_changes, describe_tokenizer_sample, infer_n_classes, infer_vocab_size
from jaxformer.data.pairs import Pair, Splits, fingerprint, read_splits
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError

FORMAT = 2
"""Version of the batches; increase it when the same texts and settings yield other batches."""


@dataclass(frozen=True)
class LabelledTextConfig(DataConfig):
    """Labelled texts. A text with more tokens than the model's context is truncated; a token that ends every text, such
    as BERT's [SEP], then ends what is left."""

    path: str = ""
    """Files of lines TEXT<TAB>LABEL, UTF-8: a folder with train.tsv and val.tsv; a prefix such as 'data/reviews' for
    data/reviews.train.tsv and data/reviews.val.tsv; or one file, with val_path."""
    val_path: str | None = None
    """File of the validation texts, if path does not give it."""
    drop_tokens: Fraction = 0.0
    """Fraction of the tokens randomly dropped from training texts at each step (word dropout, Iyyer et al. 2015)."""

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> LabelledTextDataset:
        if not isinstance(model, TokenModelConfig) or model.contract.task is not Task.TEXT_CLASSIFICATION:
            raise task_error(model, "texts with labels", "a text classifier")
        splits = read_splits(self.path, self.val_path, ("text", "label"))
        classes = find_classes(self.path, *splits)
        inferred = infer_n_classes(model, len(classes), self.path, fixed)
        if tokenizer is None:
            tokenizer = Tokenizer.train((text for text, _ in splits[0]), model.vocab_size)
            inferred = infer_vocab_size(inferred, tokenizer)
        data = LabelledTextDataset(self.path, splits, tokenizer, inferred, batch_size, seed, self.drop_tokens)
        reason = f"{self.path} has {len(classes)} labels and supports {tokenizer.vocab_size:,} tokens"
        data.notes = (*describe_changes(model, inferred, reason), *describe_tokenizer_sample(tokenizer, self.path))
        return data


def find_classes(name: str, train: Sequence[Pair], val: Sequence[Pair]) -> tuple[str, ...]:
    """Return the labels of the training texts, sorted. Raises `UserError` if a held-out text has an unknown label."""
    classes = sorted({label for _, label in train})
    if unknown := sorted({label for _, label in val} - {*classes}):
        raise UserError(f"{name} has held-out texts of {unknown[0]!r}, which no training text has; remove them.")
    return tuple(classes)


def tokens_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a text, as `tokenize_text` adds them."""
    before, after = tokenizer.before_text, tokenizer.after_text
    return before if before or after else [tokenizer.end_of_text], after


def tokenize_text(text: str, tokenizer: Tokenizer, limit: int | None = None) -> list[int]:
    """Return the tokens of a text as a classifier or sentence encoder reads it: with the tokens that a published
    tokenizer puts around it, such as BERT's [CLS] and [SEP]; without any, after an end-of-text token, whose features
    represent the text unless all features are pooled. A text of more than `limit` tokens is truncated before those
    after it, as by sentence-transformers."""
    before, after = tokens_around(tokenizer)
    tokens = [*before, *tokenizer.encode(text)]
    return [*tokens[: None if limit is None else limit - len(after)], *after]


def pad_texts(texts: Sequence[Sequence[int]], length: int, n_last: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens, int32, and their mask, bool, both `(B, length)`; longer texts are truncated before their `n_last`
    last tokens."""
    tokens_BT = np.zeros((len(texts), length), np.int32)
    lengths_B = np.array([min(len(tokens), length) for tokens in texts], int)
    for row_T, tokens, n in zip(tokens_BT, texts, lengths_B, strict=True):
        row_T[:n] = *tokens[: n - n_last], *tokens[len(tokens) - n_last :]
    return tokens_BT, np.arange(length) < lengths_B[:, None]


class LabelledTextDataset(Dataset):
    """Texts as tokens `(B, T)`, padded on the right, with their mask, and labels `(B,)` as targets."""

    tokenizer: Tokenizer
    model: TokenModelConfig

    def __init__(
        self,
        name: str,
        splits: Splits,
        tokenizer: Tokenizer,
        model: TokenModelConfig,
        batch_size: int,
        seed: int,
        drop_tokens: float = 0.0,
    ) -> None:
        """Tokenize the texts; `drop_tokens` is that of the config. Raises `UserError` if there are fewer than a batch
        needs, or a label is unknown."""
        if (n := len(splits[0])) < batch_size:
            raise batch_error(name, n, "training texts", batch_size)
        self.name, self.model, self.tokenizer, self.classes = name, model, tokenizer, find_classes(name, *splits)
        self.per_step, self.steps_per_epoch = batch_size, n // batch_size
        self._batch_size, self._seed, self._drop_tokens = batch_size, seed, drop_tokens
        self._n_last = len(tokenizer.after_text)
        self._train, self._val = (self._encode(split) for split in splits)
        dropped = f" drops {drop_tokens}" if drop_tokens else ""
        self.fingerprint = fingerprint(
            f"labelled {FORMAT} {tokenizer.vocab_size} {model.context_length}{dropped}", splits
        )

    def _encode(self, split: Sequence[Pair]) -> tuple[list[list[int]], np.ndarray]:
        """Return the tokens of each text, and the indices of their labels, `(N,)`."""
        number = {label: i for i, label in enumerate(self.classes)}
        texts = [tokenize_text(text, self.tokenizer) for text, _ in split]
        return texts, np.array([number[label] for _, label in split], np.int32)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        texts, labels_N = self._train
        _, indices_B = batch_indices(len(texts), self._batch_size, self._seed, step)
        chosen = [texts[i] for i in indices_B]
        if self._drop_tokens:  # for the whole batch, so that each process draws the same
            rng = np.random.Generator(np.random.Philox(key=[self._seed, step]).jumped(2))
            chosen = [self._drop(text, rng) for text in chosen]
        tokens_BT, valid_BT = pad_texts(chosen, self.model.context_length, self._n_last)
        return Batch((tokens_BT[rows], valid_BT[rows]), labels_N[indices_B[rows]])

    def _drop(self, text: list[int], rng: np.random.Generator) -> list[int]:
        """Return a text without some of its tokens; those that begin and end every text stay."""
        is_kept = rng.random(len(text)) >= self._drop_tokens
        is_kept[[0, -self._n_last]] = True
        return list(compress(text, is_kept))

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        texts, labels_N = self._val
        for indices_B, weights_B in padded_batches(evenly_spaced(len(texts), n), batch_size):
            yield self._pad(texts, labels_N, indices_B)._replace(weights=weights_B)

    def _pad(self, texts: Sequence[list[int]], labels_N: np.ndarray, indices_B: np.ndarray) -> Batch:
        inputs = pad_texts([texts[i] for i in indices_B], self.model.context_length, self._n_last)
        return Batch(inputs, labels_N[indices_B])

    def describe(self) -> str:
        (train, _), (val, labels_N) = self._train, self._val
        n_cut = sum(len(text) > self.model.context_length for text in (*train, *val))
        ((majority, count),) = Counter(labels_N.tolist()).most_common(1)
        return (
            f"{self.name}: {len(train):,} texts of {len(self.classes)} labels; held out: {len(val):,} texts, "
            f"{count / len(val):.1%} of them {self.classes[majority]!r}"
            + (f"; {n_cut:,} are truncated to {self.model.context_length} tokens" if n_cut else "")
        )
