"""Pairs of a source and a target text, batched by length, for sequence-to-sequence models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.config import DataConfig, Fixed, ModelConfig, TokenModelConfig
from jaxformer.contract import Task
from jaxformer.data.dataset import Batch, Dataset, batch_error, epoch_permutation, evenly_spaced, task_error
from jaxformer.data.infer_config import describe_changes, describe_tokenizer_sample, infer_vocab_size
from jaxformer.data.text import locate, read_text
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, abbreviate
from jaxformer.files import expand_home

FORMAT = 1
"""Version of the batches; increase it when the same pairs and settings yield other batches."""
TARGET_TOKENS = "target_tokens"
"""Field that we add to a published tokenizer's config for its model's `TargetTokens`."""
N_BUCKETS = 4
"""Number of lengths that batches are padded to, each of which compiles its own program."""


class Pair(NamedTuple):
    """A source text and its target text."""

    source: str
    target: str


class TargetTokens(NamedTuple):
    """Tokens of targets besides those of their texts and end-of-text, as a published model names them."""

    start: int | None = None
    """First input of the decoder, which is no part of the target; None for end-of-text."""
    first: int | None = None
    """Token that each generated target begins with; None for any."""
    last: int | None = None
    """Token of a generated target at its maximum length; None for any."""
    banned: tuple[int, ...] = ()
    """Tokens that are never generated."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TargetTokens:
        """Return those in a tokenizer's config, under the name `TARGET_TOKENS`."""
        values = tokenizer.config.get(TARGET_TOKENS, {})
        return cls(**values | {"banned": tuple(values.get("banned", ()))})


def start_of_target(tokenizer: Tokenizer) -> int:
    """Return the first input of the decoder."""
    start = TargetTokens.of(tokenizer).start
    return tokenizer.end_of_text if start is None else start


def encode_sources(texts: Sequence[str], tokenizer: Tokenizer, limit: int | None = None) -> list[list[int]]:
    """Return the tokens of each source, at most `limit` of them, with those that a published tokenizer puts around a
    text; a longer source is truncated before those after it."""
    before, after = tokenizer.before_text, tokenizer.after_text
    n_last = None if limit is None else max(0, limit - len(after))
    return [[*[*before, *tokens][:n_last], *after] for tokens in tokenizer.encode_batch(texts)]


def encode_targets(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each target, without end-of-text, after the one that each begins with, such as a code
    of NLLB's for a language, or those that a published tokenizer puts before a text."""
    first = TargetTokens.of(tokenizer).first
    before = tokenizer.before_text if first is None else [first]
    return [[*before, *tokens] for tokens in tokenizer.of_targets.encode_batch(texts)]


Splits = tuple[list[Pair], list[Pair]]
"""Pairs of the training and the validation split."""


@dataclass(frozen=True)
class PairsConfig(DataConfig):
    """Pairs of texts. Training pairs with more than the model's context_length tokens on either side are left out."""

    path: str = ""
    """Files of lines SOURCE<TAB>TARGET, UTF-8: a folder with train.tsv and val.tsv; a prefix such as 'data/en-fr' for
    data/en-fr.train.tsv and data/en-fr.val.tsv; or one file, with val_path."""
    val_path: str | None = None
    """File of the validation pairs, if path does not give it."""
    reverse: bool = False
    """Swap of sources and targets: translation in the other direction."""

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> PairDataset:
        model = check_seq2seq(model)
        train, val = read_splits(self.path, self.val_path)
        if self.reverse:
            train, val = ([Pair(target, source) for source, target in pairs] for pairs in (train, val))
        inferred = model
        if tokenizer is None:
            tokenizer = Tokenizer.train([text for pair in train for text in pair], model.vocab_size)
            inferred = infer_vocab_size(model, tokenizer)
        data = PairDataset(self.path, (train, val), tokenizer, inferred, batch_size, seed)
        changes = describe_changes(model, inferred, f"{self.path} supports {tokenizer.vocab_size:,} tokens")
        data.notes = (*changes, *describe_tokenizer_sample(tokenizer, self.path))
        return data


def find_splits(folder: str, val_path: str | None) -> tuple[Path, Path]:
    """Return the files of the training and the held-out texts; see `PairsConfig`. Raises `UserError` if one is
    missing."""
    path = locate(folder, "a folder with train.tsv and val.tsv")
    names = ("train.tsv", "val.tsv")
    train, val = (path / x if path.is_dir() else path.with_name(f"{path.name}.{x}") for x in names)
    train = path if path.is_file() else train
    val = val if val_path is None else expand_home(val_path)
    for file, option in ((train, "data.path"), (val, "data.val_path")):
        if not file.is_file():
            raise UserError(f"there are no texts at {folder}: {file} is not a file; give {option}.")
    return train, val


def read_splits(path: str, val_path: str | None, names: Sequence[str] = Pair._fields) -> Splits:
    """Return the pairs of both splits; see `find_splits` and `read_pairs`."""
    train, val = find_splits(path, val_path)
    return read_pairs(train, names), read_pairs(val, names)


def check_seq2seq(model: ModelConfig) -> TokenModelConfig:
    """Return the config if it is for a sequence-to-sequence model; raise `UserError` for other models."""
    if not isinstance(model, TokenModelConfig) or model.contract.task is not Task.SEQUENCE_TO_SEQUENCE:
        raise task_error(model, "pairs of texts", "a sequence-to-sequence model")
    return model


def read_pairs(path: Path, names: Sequence[str]) -> list[Pair]:
    """Return the pairs of a file, one per line, without empty lines. `names` are the names of both sides in error
    messages. Raises `UserError` if the file cannot be read, has no pair, or has a line that is not a pair."""
    pairs, form = [], "<TAB>".join(names).upper()
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line:
            continue
        sides = line.split("\t")
        if len(sides) != 2 or not all(map(str.strip, sides)):
            raise UserError(f"{path}, line {number}, is {abbreviate(line)}; it must be {form}.")
        pairs.append(Pair(*sides))
    if not pairs:
        raise UserError(f"{path} holds no pairs; give it one per line, {form}.")
    return pairs


def fingerprint(settings: str, splits: Splits) -> str:
    """Return the SHA-256 of settings and pairs, in hexadecimal."""
    digest = hashlib.sha256(settings.encode())
    for split in splits:
        digest.update(f"split {len(split)}".encode())
        for text in (text for pair in split for text in pair):
            digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()


class PairDataset(Dataset):
    """Pairs of texts as tokens, in batches of similar length.

    Each epoch permutes the pairs, sorts them into `N_BUCKETS` buckets by the length of their longer side, cuts the
    sorted pairs into batches, and permutes the batches; pairs that do not fill a last batch are dropped for the epoch.
    All batches of a bucket have the same shape, as wide on either side as its longest pair.

    Inputs are `(source_BS, valid_BS, target_BT)`. The target input starts with the end-of-text token, or that of
    `TargetTokens`, and the target ends with end-of-text (teacher forcing). Padding, on the right, has weight 0.
    """

    unit = "tokens"
    """Target tokens, including end-of-text."""
    tokenizer: Tokenizer

    def __init__(
        self, name: str, splits: Splits, tokenizer: Tokenizer, model: TokenModelConfig, batch_size: int, seed: int
    ) -> None:
        """Tokenize the pairs. Raises `UserError` if fewer pairs than a batch needs are short enough for the model."""
        train, val = splits
        self.name, self.model, self.tokenizer, self.val = name, model, tokenizer, val
        self.context_length, self._batch_size, self._seed = model.context_length, batch_size, seed
        self._train, self._val = _TokenPairs.encode(train, tokenizer), _TokenPairs.encode(val, tokenizer)
        self._train = self._train.up_to(self.context_length)
        self._n_left_out = len(train) - len(self._train.sources)
        self._n_train = len(self._train.sources)
        if self._n_train < batch_size:
            raise batch_error(name, self._n_train, f"pairs of at most {self.context_length} tokens", batch_size)
        self._widths = self._bucket_widths()
        self._epoch = lru_cache(maxsize=2)(self._epoch_batches)
        self.steps_per_epoch = self._n_train // batch_size
        self.per_step = batch_size * float(self._train.lengths_N2[:, 1].mean())
        self.fingerprint = fingerprint(f"pairs {FORMAT} {model.vocab_size} {model.context_length}", splits)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        pairs_B = self._epoch(step // self.steps_per_epoch)[step % self.steps_per_epoch]
        batch = self._pad(self._train, pairs_B, pairs_B[rows])
        return batch._replace(weights=batch.weights / np.float32(self._train.lengths_N2[pairs_B, 1].sum()))

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        pairs = evenly_spaced(len(self.val), n)
        pairs = pairs[np.argsort(self._buckets(self._val.lengths_N2[pairs]), kind="stable")]
        for start in range(0, len(pairs), batch_size):
            part = pairs[start : start + batch_size]
            batch = self._pad(self._val, part, np.resize(part, batch_size))
            batch.weights[len(part) :] = 0
            yield batch

    def describe(self) -> str:
        n_cut = int((self._val.lengths_N2.max(axis=1) > self.context_length).sum())
        return (
            f"{self.name}: {self._n_train:,} pairs, {self.per_step / self._batch_size:.1f} tokens per target"
            + (f" ({self._n_left_out:,} more are longer than {self.context_length} tokens)" if self._n_left_out else "")
            + f"; held out: {len(self.val):,} pairs"
            + (f", {n_cut:,} of them truncated to {self.context_length} tokens" if n_cut else "")
        )

    def _epoch_batches(self, epoch: int) -> np.ndarray:
        """Return the indices of the pairs in each batch of an epoch, `(steps, B)`."""
        n = self.steps_per_epoch * self._batch_size
        pairs = epoch_permutation(self._n_train, self._seed, epoch)[:n]
        by_bucket = pairs[np.argsort(self._buckets(self._train.lengths_N2[pairs]), kind="stable")]
        return by_bucket.reshape(-1, self._batch_size)[epoch_permutation(self.steps_per_epoch, self._seed, epoch)]

    def _buckets(self, lengths_N2: np.ndarray) -> np.ndarray:
        """Return the bucket of each pair, `(N,)`, by the length of its longer side."""
        longer_N = np.minimum(lengths_N2.max(axis=1), self.context_length)
        return (longer_N - 1) * N_BUCKETS // self.context_length

    def _bucket_widths(self) -> np.ndarray:
        """Return the widths of each bucket's batches on both sides, `(N_BUCKETS, 2)`, at least those of smaller
        buckets, whose pairs may be in the same batch."""
        widths = np.ones((N_BUCKETS, 2), int)
        for lengths_N2 in (self._train.lengths_N2, self._val.lengths_N2):
            np.maximum.at(widths, self._buckets(lengths_N2), np.minimum(lengths_N2, self.context_length))
        return np.maximum.accumulate(widths)

    def _pad(self, tokens: _TokenPairs, pairs_B: np.ndarray, rows_B: np.ndarray) -> Batch:
        """Return the pairs `rows_B` of a batch, padded to the width for all its pairs `pairs_B`; weights are 0 or 1."""
        S, T = self._widths[self._buckets(tokens.lengths_N2[pairs_B]).max()]
        B = len(rows_B)
        source_BS = np.zeros((B, S), np.int32)
        target_BT = np.full((B, T + 1), self.tokenizer.end_of_text, np.int32)
        for i, pair in enumerate(rows_B):
            source, target = tokens.sources[pair][:S], tokens.targets[pair][:T]
            source_BS[i, : len(source)] = source
            target_BT[i, 1 : len(target) + 1] = target
        target_BT[:, 0] = start_of_target(self.tokenizer)
        lengths_B2 = tokens.lengths_N2[rows_B]
        valid_BS, counted_BT = (np.arange(n) < lengths_B2[:, [side]] for side, n in enumerate((S, T)))
        return Batch((source_BS, valid_BS, target_BT[:, :-1]), target_BT[:, 1:], counted_BT.astype(np.float32))


@dataclass(frozen=True, eq=False)
class _TokenPairs:
    """N tokenized pairs."""

    sources: list[list[int]]
    targets: list[list[int]]
    lengths_N2: np.ndarray
    """Numbers of tokens of the source, and of the target with its end-of-text."""

    @classmethod
    def encode(cls, pairs: Sequence[Pair], tokenizer: Tokenizer) -> _TokenPairs:
        sources = encode_sources([pair.source for pair in pairs], tokenizer)
        targets = encode_targets([pair.target for pair in pairs], tokenizer)
        lengths = [(len(source), len(target) + 1) for source, target in zip(sources, targets, strict=True)]
        return cls(sources, targets, np.array(lengths, int).reshape(-1, 2))

    def up_to(self, longest: int) -> _TokenPairs:
        """Return the pairs with at most `longest` tokens per side."""
        pairs = np.flatnonzero(self.lengths_N2.max(axis=1) <= longest)
        return _TokenPairs([self.sources[i] for i in pairs], [self.targets[i] for i in pairs], self.lengths_N2[pairs])
