"""Texts with a label for each word, such as the kinds of named entities, for token classification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxformer.config import DataConfig, Fixed, ModelConfig, TokenModelConfig
from jaxformer.contract import Task
from jaxformer.data.dataset import Batch, Dataset, batch_error, batch_indices, evenly_spaced, padded_batches, task_error
from jaxformer.data.infer_config import describe_changes, describe_tokenizer_sample, infer_n_classes, infer_vocab_size
from jaxformer.data.labelled import find_classes, pad_texts, tokens_around
from jaxformer.data.pairs import Pair, Splits, find_splits, fingerprint
from jaxformer.data.text import read_text
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, abbreviate

FORMAT = 1
"""Version of the batches; increase it when the same texts and settings yield other batches."""
NO_LABEL = -1
"""Label of a token that is not predicted: of a word's tokens after the first, and of those around a text."""


@dataclass(frozen=True)
class LabelledTokensConfig(DataConfig):
    """Texts with a label for each word, which is predicted at the first of its tokens. A text with more tokens than the
    model's context is truncated."""

    path: str = ""
    """Files with a word and its label per line, separated by white space, UTF-8, and an empty line after each text;
    columns between the two, as in CoNLL-2003, are ignored. A folder with train.tsv and val.tsv; a prefix such as
    'data/ner' for data/ner.train.tsv and data/ner.val.tsv; or one file, with val_path."""
    val_path: str | None = None
    """File of the validation texts, if path does not give it."""

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> LabelledTokensDataset:
        if not isinstance(model, TokenModelConfig) or model.contract.task is not Task.TOKEN_CLASSIFICATION:
            raise task_error(model, "texts with a label for each word", "a token classifier")
        splits = [read_words(file) for file in find_splits(self.path, self.val_path)]
        classes = find_classes(self.path, *([pair for text in texts for pair in text] for texts in splits))
        inferred = infer_n_classes(model, len(classes), self.path, fixed)
        if tokenizer is None:
            tokenizer = Tokenizer.train((" ".join(word for word, _ in text) for text in splits[0]), model.vocab_size)
            inferred = infer_vocab_size(inferred, tokenizer)
        data = LabelledTokensDataset(self.path, splits, classes, tokenizer, inferred, batch_size, seed)
        reason = f"{self.path} has {len(classes)} labels and supports {tokenizer.vocab_size:,} tokens"
        data.notes = (*describe_changes(model, inferred, reason), *describe_tokenizer_sample(tokenizer, self.path))
        return data


def read_words(path: Path) -> list[list[Pair]]:
    """Return the words of each text in a file with their labels; see `LabelledTokensConfig`. Raises `UserError` if the
    file cannot be read, has no text, or has a line without a label."""
    texts: list[list[Pair]] = [[]]
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        columns = line.split()
        if len(columns) == 1:
            raise UserError(f"{path}, line {number}, is {abbreviate(line)}; it must be a word and its label.")
        if columns:
            texts[-1].append(Pair(columns[0], columns[-1]))
        elif texts[-1]:
            texts.append([])
    if not texts[0]:
        raise UserError(
            f"{path} holds no texts; give a word and its label per line, and an empty line after each text."
        )
    return texts if texts[-1] else texts[:-1]


class LabelledTokensDataset(Dataset):
    """Texts as tokens `(B, T)`, padded on the right, with their mask, and the labels of tokens `(B, T)` as targets,
    which have weight 0 for tokens without a label."""

    tokenizer: Tokenizer
    model: TokenModelConfig

    def __init__(
        self,
        name: str,
        splits: Sequence[list[list[Pair]]],
        classes: tuple[str, ...],
        tokenizer: Tokenizer,
        model: TokenModelConfig,
        batch_size: int,
        seed: int,
    ) -> None:
        """Tokenize the texts. Raises `UserError` if there are fewer than a batch needs."""
        if (n := len(splits[0])) < batch_size:
            raise batch_error(name, n, "training texts", batch_size)
        self.name, self.model, self.tokenizer, self.classes = name, model, tokenizer, classes
        self.per_step, self.steps_per_epoch = batch_size, n // batch_size
        self._batch_size, self._seed = batch_size, seed
        self._train, self._val = ([self._encode(text) for text in texts] for texts in splits)
        pairs: Splits = tuple([pair for text in texts for pair in (*text, Pair("", ""))] for texts in splits)  # type: ignore[assignment]
        self.fingerprint = fingerprint(f"labelled tokens {FORMAT} {tokenizer.vocab_size} {model.context_length}", pairs)

    def _encode(self, words: Sequence[Pair]) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, with those around it, and the label of each."""
        before, after = tokens_around(self.tokenizer)
        tokens, offsets = self.tokenizer.encode_with_offsets(" ".join(word for word, _ in words))
        ends = np.cumsum([len(word) + 1 for word, _ in words]) - 1  # a space belongs to the word after it
        labels, labelled = [], -1
        for _, stop in offsets:
            word = int(np.searchsorted(ends, stop))
            labels.append(self.classes.index(words[word].target) if word > labelled else NO_LABEL)
            labelled = max(word, labelled)
        return [*before, *tokens, *after], [*[NO_LABEL] * len(before), *labels, *[NO_LABEL] * len(after)]

    def _pad(self, texts: Sequence[tuple[list[int], list[int]]]) -> tuple[Batch, np.ndarray]:
        """Return a batch without weights, and a mask of the tokens with a label, `(B, T)`."""
        T, n_last = self.model.context_length, len(self.tokenizer.after_text)
        tokens_BT, valid_BT = pad_texts([tokens for tokens, _ in texts], T, n_last)
        labels_BT, _ = pad_texts([labels for _, labels in texts], T, n_last)
        counts_BT = valid_BT & (labels_BT != NO_LABEL)
        return Batch((tokens_BT, valid_BT), np.where(counts_BT, labels_BT, 0)), counts_BT

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        _, indices_B = batch_indices(len(self._train), self._batch_size, self._seed, step)
        batch, counts_BT = self._pad([self._train[i] for i in indices_B])
        weights_BT = counts_BT / np.float32(max(1, counts_BT.sum()))
        inputs = (batch.inputs[0][rows], batch.inputs[1][rows])
        return Batch(inputs, batch.targets[rows], weights_BT[rows].astype(np.float32))

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        for indices_B, weights_B in padded_batches(evenly_spaced(len(self._val), n), batch_size):
            batch, counts_BT = self._pad([self._val[i] for i in indices_B])
            yield batch._replace(weights=(counts_BT * np.asarray(weights_B)[:, None]).astype(np.float32))

    def describe(self) -> str:
        n_cut = sum(len(tokens) > self.model.context_length for tokens, _ in (*self._train, *self._val))
        counts = Counter(label for _, labels in self._val for label in labels if label != NO_LABEL)
        ((majority, count),) = counts.most_common(1)
        truncated = f"; {n_cut:,} are truncated to {self.model.context_length} tokens" if n_cut else ""
        return (
            f"{self.name}: {len(self._train):,} texts with {len(self.classes)} labels of words; held out: "
            f"{len(self._val):,} texts of {counts.total():,} words, {count / counts.total():.1%} of them "
            f"{self.classes[majority]!r}{truncated}"
        )
