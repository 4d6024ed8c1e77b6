"""Pairs of texts, a source and its target, in batches of like length: what sequence-to-sequence models learn from."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.config import DataConfig, ModelConfig, TokenModelConfig
from jaxformer.contract import Task
from jaxformer.data.dataset import Batch, Dataset, epoch_permutation, evenly_spaced
from jaxformer.data.infer_config import describe_changes, describe_tokenizer_sample, infer_vocab_size
from jaxformer.data.text import read_text
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError

FORMAT = 1
"""Raise it when the same pairs and settings are to give other batches."""
N_BUCKETS = 4
"""Lengths that batches are padded to; a program is compiled for each."""


class Pair(NamedTuple):
    """A text, and what is to be made of it."""

    source: str
    target: str


@dataclass(frozen=True)
class PairsConfig(DataConfig):
    """Which pairs. Those with a side of more than the model's context_length tokens are not trained on."""

    path: str = ""
    """Files of lines SOURCE<TAB>TARGET, UTF-8: a folder with train.tsv and val.tsv; the beginning of two names, such as
    'data/en-fr' for data/en-fr.train.tsv and data/en-fr.val.tsv; or one file, with val_path."""
    val_path: str | None = None
    """The file of held-out pairs, where path does not say it."""
    reverse: bool = False
    """Make sources of targets: translate the other way."""

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None,
        fixed: Container[str] | None = None,
    ) -> PairDataset:  # fmt: skip
        shape = check_seq2seq(model)
        train, val = (read_pairs(file) for file in self._files())
        if self.reverse:
            train, val = ([Pair(target, source) for source, target in pairs] for pairs in (train, val))
        texts = [text for pair in train for text in pair]
        return build_pair_dataset(self.path, train, val, texts, tokenizer, shape, batch_size, seed)

    def _files(self) -> tuple[Path, Path]:
        if not self.path:
            raise UserError("data.path is empty; give a folder with train.tsv and val.tsv, or see --help.")
        place = Path(self.path).expanduser()
        train, val = (
            place / f"{split}.tsv" if place.is_dir() else place.with_name(f"{place.name}.{split}.tsv")
            for split in ("train", "val")
        )
        if place.is_file():
            if self.val_path is None:
                raise UserError(f"data.path is the file {place}, and no pairs are held out; give data.val_path.")
            train = place
        elif not train.is_file():
            raise UserError(f"there are no pairs at {place}: neither it nor {train} is a file; give data.path.")
        held_out = val if self.val_path is None else Path(self.val_path).expanduser()
        if not held_out.is_file():
            raise UserError(f"there are no held-out pairs at {held_out}, which is no file; give data.val_path.")
        return train, held_out


def check_seq2seq(model: ModelConfig) -> TokenModelConfig:
    """The config of a model that takes a source, where it has tokens, and a target; `UserError` if it is another."""
    if not isinstance(model, TokenModelConfig) or model.contract.task is not Task.SEQUENCE_TO_SEQUENCE:
        raise UserError(
            f"the data is pairs of texts, but {type(model).__name__} describes no model that makes one text of another;"
            " change one."
        )
    return model


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file, one a line; empty lines are passed over.

    Raises:
      UserError: it cannot be read, has no pair, or a line that is none.
    """
    pairs = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line:
            continue
        sides = line.split("\t")
        if len(sides) != 2:
            raise UserError(f"{path}, line {number}, has {len(sides) - 1} tabs; it must be SOURCE<TAB>TARGET.")
        if empty := [name for name, side in zip(Pair._fields, sides, strict=True) if not side.strip()]:
            raise UserError(f"{path}, line {number}, has an empty {empty[0]}; leave the line out.")
        pairs.append(Pair(*sides))
    if not pairs:
        raise UserError(f"{path} holds no pairs; give it one a line, SOURCE<TAB>TARGET.")
    return pairs


def build_pair_dataset(
    name: str, train: Sequence[Pair], val: Sequence[Pair], texts: Iterable[str], tokenizer: Tokenizer | None,
    model: TokenModelConfig, batch_size: int, seed: int,
) -> PairDataset:  # fmt: skip
    """Return pairs as tokens; without a tokenizer, one learns from texts, and the model is fitted to it."""
    if tokenizer is not None:
        return PairDataset(name, train, val, tokenizer, model, batch_size, seed)
    tokenizer = Tokenizer.train(texts, model.vocab_size)
    data = PairDataset(name, train, val, tokenizer, fitted := infer_vocab_size(model, tokenizer), batch_size, seed)
    fit = describe_changes(model, fitted, f"{name} supports {tokenizer.vocab_size:,} tokens")
    data.notes = (*fit, *describe_tokenizer_sample(tokenizer, name))
    return data


class PairDataset(Dataset):
    """Pairs of texts as tokens, each batch of pairs of like length.

    An epoch takes the pairs in another order, without replacement, sorts them into `N_BUCKETS` by the length of their
    longer side, cuts that into batches, and takes these in a random order; what does not fill a last batch is left for
    the next epoch's draw. All batches of a bucket have one shape, as wide on either side as its longest pair.

    A batch's inputs are `(source_BS, valid_BS, target_BT)`: a target begins with the end-of-text token, and what is to
    be predicted is the rest of it and then that token once more. It counts where it stands, and not where padding does.
    """

    unit = "tokens"
    """Of targets, with their end."""
    tokenizer: Tokenizer

    def __init__(
        self, name: str, train: Sequence[Pair], val: Sequence[Pair], tokenizer: Tokenizer, model: TokenModelConfig,
        batch_size: int, seed: int,
    ) -> None:  # fmt: skip
        """Raises `UserError` where too few pairs fit the model."""
        self.name, self.model, self.tokenizer, self.val = name, model, tokenizer, val
        self._end = tokenizer.end_of_text
        self.fingerprint = _fingerprint(train, val, model)
        self.context_length, self._batch_size, self._seed = model.context_length, batch_size, seed
        self._train = _Tokens.of(train, tokenizer).not_above(self.context_length)
        self._val = _Tokens.of(val, tokenizer)
        self._n_left_out = len(train) - len(self._train)
        if len(self._train) < batch_size:
            raise UserError(
                f"of {len(train)} training pairs, {len(self._train)} have at most {self.context_length} tokens a side, "
                f"fewer than train.batch_size {batch_size}; lower it, raise model.context_length, or give more pairs."
            )
        self._widths = self._widths_of_buckets()
        self._epoch = lru_cache(maxsize=2)(self._plan)
        self.steps_per_epoch = len(self._train) // batch_size
        self.per_step = batch_size * float(self._train.lengths_N2[:, 1].mean())

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        pairs_B = self._epoch(step // self.steps_per_epoch)[step % self.steps_per_epoch]
        batch = self._batch(self._train, pairs_B, pairs_B[rows])
        return batch._replace(weights=batch.weights / np.float32(self._train.lengths_N2[pairs_B, 1].sum()))

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        chosen = evenly_spaced(len(self._val), n)
        chosen = chosen[np.argsort(self._buckets(self._val.lengths_N2[chosen]), kind="stable")]
        for first in range(0, len(chosen), batch_size):
            part = chosen[first : first + batch_size]
            batch = self._batch(self._val, part, np.resize(part, batch_size))
            batch.weights[len(part) :] = 0
            yield batch

    def describe(self) -> str:
        n_cut = int((self._val.lengths_N2.max(axis=1) > self.context_length).sum())
        return (
            f"{self.name}: {len(self._train):,} pairs, {self.per_step / self._batch_size:.1f} tokens per target"
            + (f" ({self._n_left_out:,} more are longer than {self.context_length} tokens)" if self._n_left_out else "")
            + f"; held out: {len(self._val):,} pairs"
            + (f", {n_cut:,} of them cut to {self.context_length} tokens" if n_cut else "")
        )

    def _plan(self, epoch: int) -> np.ndarray:
        """The pairs of each batch of an epoch, `(steps, B)`."""
        taken = epoch_permutation(len(self._train), self._seed, epoch)[: self.steps_per_epoch * self._batch_size]
        by_bucket = taken[np.argsort(self._buckets(self._train.lengths_N2[taken]), kind="stable")]
        return by_bucket.reshape(-1, self._batch_size)[epoch_permutation(self.steps_per_epoch, self._seed, epoch)]

    def _buckets(self, lengths_N2: np.ndarray) -> np.ndarray:
        """Of each pair: how many parts of the context its longer side takes beside one."""
        longer_N = np.minimum(lengths_N2.max(axis=1), self.context_length)
        return (longer_N - 1) * N_BUCKETS // self.context_length

    def _widths_of_buckets(self) -> np.ndarray:
        """How wide each bucket's batches are on either side, `(N_BUCKETS, 2)`: a batch may also hold shorter pairs."""
        widths = np.ones((N_BUCKETS, 2), int)
        for lengths_N2 in (self._train.lengths_N2, self._val.lengths_N2):
            np.maximum.at(widths, self._buckets(lengths_N2), np.minimum(lengths_N2, self.context_length))
        return np.maximum.accumulate(widths)

    def _batch(self, tokens: _Tokens, pairs_B: np.ndarray, rows_B: np.ndarray) -> Batch:
        """Some rows of a batch, as wide as all its pairs need; weights are 0 or 1."""
        S, T = self._widths[self._buckets(tokens.lengths_N2[pairs_B]).max()]
        B = len(rows_B)
        source_BS, target_BT = np.zeros((B, S), np.int32), np.full((B, T + 1), self._end, np.int32)
        for i, pair in enumerate(rows_B):
            source, target = tokens.sources[pair][:S], tokens.targets[pair][:T]
            source_BS[i, : len(source)] = source
            target_BT[i, 1 : len(target) + 1] = target
        length_B2 = tokens.lengths_N2[rows_B]
        stands_BS, counts_BT = (np.arange(n) < length_B2[:, [side]] for side, n in enumerate((S, T)))
        return Batch((source_BS, stands_BS, target_BT[:, :-1]), target_BT[:, 1:], counts_BT.astype(np.float32))


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokenized pairs."""

    sources: list[list[int]]
    targets: list[list[int]]
    lengths_N2: np.ndarray
    """Tokens of the source, and of the target with its end."""

    @classmethod
    def of(cls, pairs: Sequence[Pair], tokenizer: Tokenizer) -> _Tokens:
        sources, targets = (tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1))
        lengths = [(len(source), len(target) + 1) for source, target in zip(sources, targets, strict=True)]
        return cls(sources, targets, np.array(lengths, int).reshape(-1, 2))

    def __len__(self) -> int:
        return len(self.sources)

    def not_above(self, longest: int) -> _Tokens:
        """Those with no side longer than that."""
        kept = np.flatnonzero(self.lengths_N2.max(axis=1) <= longest)
        return _Tokens([self.sources[i] for i in kept], [self.targets[i] for i in kept], self.lengths_N2[kept])


def _fingerprint(train: Sequence[Pair], val: Sequence[Pair], model: TokenModelConfig) -> str:
    digest = hashlib.sha256(f"pairs {FORMAT} {model.vocab_size} {model.context_length}".encode())
    for split in (train, val):
        digest.update(f"split {len(split)}".encode())
        for text in (text for pair in split for text in pair):
            digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()
