"""What training reads: batches that are pure functions of (data, seed, step), whatever is in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.data.tokenizer import Tokenizer

HELD_OUT_SEED = 2**32
"""The seed of what is drawn for held-out batches, which no run has: all runs are measured on the same."""


class Batch(NamedTuple):
    """Examples side by side, each array with B first; or one example, without it."""

    inputs: tuple[Any, ...]
    """What the model is called with."""
    targets: Any = None
    """The classes that it is to predict, int32, `(B, T)`, or `(B,)` for one of each example; None where the inputs are
    all there is to learn from."""
    weights: Any = None
    """What each target counts, float32, of the targets' shape; None where all count the same. In training they add up
    to 1 over the whole batch, so that what its parts give can be added; in evaluation they are 0 or 1."""


class Dataset(ABC):
    """A training and a held-out part."""

    unit: ClassVar[Literal["tokens", "examples"]] = "examples"
    """What `per_step` counts."""
    per_step: float
    """How many of these a step takes, on average over an epoch."""
    steps_per_epoch: int
    """Whole batches."""
    fingerprint: str
    """SHA-256 over what was read, by which one sees that it has changed; how it is cut stands in the run's config."""
    model: ModelConfig
    """The model's config, fitted to what was read: the one to train."""
    notes: Sequence[str] = ()
    """Sentences about fields that were fitted and data that is resized or left out."""
    tokenizer: Tokenizer | None = None
    """Of the tokens in it, where there are any; a run keeps it."""
    classes: Sequence[str] = ()
    """Their names, where the targets are classes of other things than tokens; a run keeps them, too."""
    token_lengths: np.ndarray | None = None
    """Bytes of each class, `(V,)`, where the targets are a text's tokens and bits per byte mean something."""

    @abstractmethod
    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Some rows of the batch at a step, for any step from 0 on: what one of several processes needs of it.

        Weights are those of the whole batch, whatever `rows` is.
        """

    @abstractmethod
    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        """The held-out examples, or about `n` evenly spread ones, always in the same order and batches of one size.

        The last batch is filled up with examples of weight 0.
        """

    @abstractmethod
    def describe(self) -> str:
        """One line for people: what it is, and how much there is of it."""

    def stream(self, start: int, stop: int, rows: slice | np.ndarray = slice(None)) -> Iterator[Batch]:
        """`rows` of the steps start, …, stop - 1, made ahead of need by grain in the background."""
        import grain  # it takes a second

        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        steps = _Steps(lambda step: self.batch(step, rows), start, stop)
        return iter(grain.MapDataset.source(steps).to_iter_dataset(ahead))


@dataclass(frozen=True)
class _Steps:
    """A range of steps as what grain reads from: something with a length and items."""

    batch: Callable[[int], Batch]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, i: int) -> Batch:
        return self.batch(self.start + i)


@lru_cache(maxsize=2)
def epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers below n, as one epoch takes them."""
    numbers = np.arange(n, dtype=np.uint32 if n < 2**32 else np.uint64)
    np.random.Generator(np.random.Philox(key=[seed, epoch])).shuffle(numbers)
    return numbers


def step_rng(seed: int, when: int) -> np.random.Generator:
    """Return a generator for the draws of one step, or one epoch; independent of `epoch_permutation`."""
    return np.random.Generator(np.random.Philox(key=[seed, when], counter=[0, 0, 0, 1]))


def evenly_spaced(n: int, wanted: int | None) -> np.ndarray:
    """The numbers below n, or so many evenly spread ones."""
    return np.arange(n) if wanted is None or wanted >= n else np.linspace(0, n - 1, wanted).astype(np.int64)
