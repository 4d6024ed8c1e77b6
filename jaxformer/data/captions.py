"""Images with captions: pairs to learn from, read into memory."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxformer.config import DataConfig, ModelConfig, TokenModelConfig
from jaxformer.data.augmentation import augment, draw_augmentations
from jaxformer.data.dataset import Batch, Dataset, epoch_permutation, evenly_spaced
from jaxformer.data.image_io import MODES, describe_resizing, describe_sizes, read_image, read_image_shape
from jaxformer.data.infer_config import ALL, describe_changes, infer_image_size, infer_vocab_size
from jaxformer.data.text import read_text
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.fields import at_least

IMAGES, CAPTIONS = "images.zip", "captions.tsv"
COLUMNS, SPLITS = ("file", "caption", "split"), ("train", "val")


@dataclass(frozen=True)
class CaptionsConfig(DataConfig):
    """Which images and captions, and how images are varied in training."""

    path: str = ""
    """A folder with images.zip, and captions.tsv: file, caption and split (train or val) of each, under these words."""
    shift: int = 0
    """Whole pixels by which an image is moved at most, down or up and to a side, anew in each epoch; its edge is
    repeated. Then it is scaled and turned about its middle, and then mirrored."""
    scale: float = 0.0
    """By which share an image is enlarged at most, or made smaller: 0.25 is 0.8 to 1.25 of its size."""
    rotate: float = 0.0
    """Degrees by which it is turned at most, to either side."""
    flip: bool = False
    """Mirror half of the images, others in each epoch; not where captions tell left from right."""
    jitter: float = 0.0
    """How far the brightness and the contrast of each channel vary, so that colours do: by this share of half the range
    of a pixel, and by a factor as `scale` has it."""
    drop_words: float = 0.0
    """Share of the words that are left out of captions in training, others in each epoch; one is always kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "shift")
        for name, limit in (("scale", 1), ("rotate", 180), ("jitter", 1)):
            if not 0 <= getattr(self, name) <= limit:
                raise UserError(f"data.{name} is {getattr(self, name)}; it must be from 0 to {limit}.")
        if not 0 <= self.drop_words < 1:
            raise UserError(f"data.drop_words is {self.drop_words}; it must be at least 0 and below 1.")

    @property
    def variation(self) -> dict[str, Any]:
        """How images are varied: options of `draw_augmentations`."""
        return {name: getattr(self, name) for name in ("shift", "scale", "rotate", "flip", "jitter")}

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None,
        fixed: Container[str] | None = None,
    ) -> Dataset:  # fmt: skip
        if not isinstance(model, ImageTextModelConfig):
            raise UserError(
                f"the data is images with captions, but {type(model).__name__} does not describe a model of both; "
                "change one."
            )
        return CaptionDataset(self, model, batch_size, seed, tokenizer, ALL if fixed is None else fixed)


@runtime_checkable
class ImageTextModelConfig(Protocol):
    """Config of a model of images and texts, a dataclass."""

    @property
    def vision(self) -> Any:
        """Of the images: a dataclass with `image_size` and `patch_size`, heights and widths."""

    @property
    def text(self) -> TokenModelConfig:
        """Of the texts."""

    def example(self) -> tuple[np.ndarray, ...]:
        """An image `(H, W, C)`, tokens `(T,)`, and where these are tokens."""


class Pair(NamedTuple):
    """A line of the captions."""

    file: str
    caption: str
    split: str


class CaptionDataset(Dataset):
    """Pairs of an image and its caption: one of them is to be told from others by the other.

    Inputs are images, `(B, H, W, C)` uint8, tokens, `(B, T)` int32, with an end-of-text token at their start and at
    their end, padded on the right, and where there are tokens, `(B, T)`. Targets, `(B,)` int32, are numbers of
    captions, equal where these are. Each epoch takes the pairs in another order, without replacement; those that do
    not fill a last batch are left for the next epoch's draw.
    """

    tokenizer: Tokenizer

    def __init__(
        self, config: CaptionsConfig, model: Any, batch_size: int, seed: int, tokenizer: Tokenizer | None = None,
        fixed: Container[str] = ALL,
    ) -> None:  # fmt: skip
        """Read everything. Images of another size than the model's are resized, unless the model is fitted to them.

        Args:
          model: config of `ImageTextModelConfig`.
          fixed: see `DataConfig.load`; `vision.image_size` and `vision.patch_size` are looked at.

        Raises:
          UserError: a file is missing or cannot be read, an image has no caption or a caption no image, an image would
            be moved out of sight, or there are fewer pairs for training than in a batch.
        """
        self.config, self.batch_size, self.seed = config, batch_size, seed
        length = model.text.context_length
        if length < 3:
            raise UserError(f"model.text.context_length is {length}; a token between start and end needs at least 3.")
        if not config.path.strip():
            raise UserError(f"data.path is empty; give a folder with {IMAGES} and {CAPTIONS}.")
        folder = Path(config.path).expanduser()
        pairs = read_pairs(folder / CAPTIONS)
        names = [pair.file for pair in pairs]
        sizes = sorted(read_image_sizes(folder / IMAGES, names))
        size, patch = infer_image_size(
            model.vision.image_size, model.vision.patch_size, sizes[0] if len(sizes) == 1 else None,
            "vision.image_size" in fixed, "vision.patch_size" in fixed,
        )  # fmt: skip
        given, model = model, replace(model, vision=replace(model.vision, image_size=size, patch_size=patch))
        shape = model.example()[0].shape
        if config.shift >= max(shape[:2]):
            raise UserError(
                f"data.shift is {config.shift}, but images have {shape[0]} x {shape[1]} pixels; move them by fewer."
            )
        self.images = read_images(folder / IMAGES, names, shape)
        is_train = np.array([pair.split == "train" for pair in pairs])
        self.train, self.val = np.flatnonzero(is_train), np.flatnonzero(~is_train)
        if len(self.train) < batch_size:
            raise UserError(
                f"{folder / CAPTIONS} has {len(self.train)} pair(s) for training, fewer than train.batch_size "
                f"{batch_size}; lower it."
            )
        self.texts = texts = [pair.caption for pair in pairs]
        self.tokenizer = tokenizer or Tokenizer.train([texts[i] for i in self.train], model.text.vocab_size)
        if tokenizer is None:
            model = replace(model, text=infer_vocab_size(model.text, self.tokenizer))
        self.model = model
        why = f"{config.path} has images of {describe_sizes(sizes)} and supports {self.tokenizer.vocab_size:,} tokens"
        self.notes = (*describe_changes(given, model, why), *describe_resizing(config.path, sizes, size))
        self.tokens, self.valid, self.n_shortened = tokenize_captions(texts, self.tokenizer, length)
        self.numbers = np.unique(self.tokens, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)
        self.per_step, self.steps_per_epoch = batch_size, len(self.train) // batch_size
        # As numbers of one kind: a config that was read again has 10.0 where 10 was written.
        variation = [float(x) for x in (*config.variation.values(), config.drop_words)]
        settings = (length, model.text.vocab_size, shape, variation)
        digest = hashlib.sha256(repr((settings, pairs)).encode())
        digest.update(self.images.tobytes())
        self.fingerprint = digest.hexdigest()

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        n, first = len(self.train), place * self.batch_size
        numbers = epoch_permutation(n, self.seed, epoch)[first : first + self.batch_size][rows].astype(np.int64)
        chosen = self.train[numbers]
        images, variation = self.images[chosen], self.config.variation
        if any(variation.values()):
            views = draw_augmentations(n, images.shape[-1], self.seed, epoch, **variation)
            images = np.stack([augment(*one) for one in zip(images, *(of_n[numbers] for of_n in views), strict=True)])
        batch = self._batch(chosen, images)
        if not self.config.drop_words:
            return batch
        kept = draw_word_masks(n, self.seed, epoch, self.config.drop_words)[numbers]
        texts = [select_words(self.texts[i], words) for i, words in zip(chosen, kept, strict=True)]
        tokens, valid, _ = tokenize_captions(texts, self.tokenizer, self.tokens.shape[1])
        return batch._replace(inputs=(batch.inputs[0], tokens, valid))

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        chosen = self.val[evenly_spaced(len(self.val), n)]
        for first in range(0, len(chosen), batch_size):
            part = chosen[first : first + batch_size]
            filled = np.concatenate([part, np.repeat(part[:1], batch_size - len(part))])
            weights = (np.arange(batch_size) < len(part)).astype(np.float32)
            yield self._batch(filled, self.images[filled], weights)

    def describe(self) -> str:
        H, W, _ = self.images.shape[1:]
        abbreviate = f", {self.n_shortened:,} shortened" if self.n_shortened else ""
        return (
            f"{self.config.path}: {len(self.train):,} images of {H} x {W} pixels with captions, "
            f"{self.valid.sum(1).mean():.1f} tokens each{abbreviate}; held out: {len(self.val):,}"
        )

    def _batch(self, chosen: np.ndarray, images: np.ndarray, weights: np.ndarray | None = None) -> Batch:
        return Batch((images, self.tokens[chosen], self.valid[chosen]), self.numbers[chosen], weights)


def read_pairs(path: Path) -> list[Pair]:
    """The lines of a file of captions, in its order.

    Raises:
      UserError: it is missing or no UTF-8 text, its first line does not name the columns, a line has other columns, an
        empty caption or another split, an image has two captions, or a split has none.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a folder with {IMAGES} and {CAPTIONS} as data.path.")
    header, *lines = read_text(path).removesuffix("\n").split("\n")
    if tuple(header.split("\t")) != COLUMNS:
        raise UserError(f"the first line of {path} is {header!r}; it must be the words {', '.join(COLUMNS)} with tabs.")
    pairs: dict[str, Pair] = {}
    for number, line in enumerate(lines, 2):
        columns = line.split("\t")
        if len(columns) != len(COLUMNS) or not all(column.strip() for column in columns):
            raise UserError(f"line {number} of {path} is {line!r}; it must have a {', a '.join(COLUMNS)} with tabs.")
        pair = Pair(*columns)
        if pair.split not in SPLITS:
            raise UserError(f"line {number} of {path} has the split {pair.split!r}; it must be {' or '.join(SPLITS)}.")
        if pair.file in pairs:
            raise UserError(f"line {number} of {path} is a second caption for {pair.file}; keep one of them.")
        pairs[pair.file] = pair
    for split in SPLITS:
        if all(pair.split != split for pair in pairs.values()):
            raise UserError(f"{path} has no line of the split {split}; both train and val are needed.")
    return list(pairs.values())


def read_image_sizes(path: Path, names: list[str]) -> set[tuple[int, int]]:
    """Return the heights and widths of the images of a zip file; raises as `read_images` does."""
    with _opened(path, names) as file:
        return {read_image_shape(io.BytesIO(file.read(name)), f"{name} in {path}")[:2] for name in names}


def read_images(path: Path, names: list[str], shape: tuple[int, ...]) -> np.ndarray:
    """Return images of a zip file by their names, `(N, H, W, C)` uint8; see `read_image`.

    Args:
      shape: `(H, W, C)`, to which all are resized; C is 1 for grey and 3 for colours.

    Raises:
      UserError: the file is missing or no zip file; an image is missing in it, is there without a name, or cannot be
        read.
    """
    if shape[2] not in MODES:
        raise UserError(f"the model reads images of {shape[2]} channels; from {path} it can have 1 or 3.")
    images = np.empty((len(names), *shape), np.uint8)
    with _opened(path, names) as file:
        for image, name in zip(images, names, strict=True):
            image[:] = read_image(io.BytesIO(file.read(name)), f"{name} in {path}", shape[2], shape[:2])
    return images


@contextmanager
def _opened(path: Path, names: list[str]) -> Iterator[zipfile.ZipFile]:
    """Open a zip file that holds images of these names alone."""
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a folder with {IMAGES} and {CAPTIONS} as data.path.")
    try:
        with zipfile.ZipFile(path) as file:
            there = {name for name in file.namelist() if not name.endswith("/")}
            if missing := [name for name in names if name not in there]:
                raise UserError(f"{path} has no {missing[0]}, which a caption is for; add it, or remove its line.")
            if unknown := sorted(there.difference(names)):
                raise UserError(f"{unknown[0]} in {path} has no caption; add a line to {CAPTIONS}, or remove it.")
            yield file
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{path} cannot be read as a zip file: {error}; make it anew.") from error


def tokenize_captions(texts: list[str], tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Texts between two end-of-text tokens, `(N, length)` int32 and padded with 0; where there are tokens, as booleans;
    and how many texts were too long, and lost their end."""
    tokens, valid = np.zeros((len(texts), length), np.int32), np.zeros((len(texts), length), bool)
    encoded = tokenizer.encode_batch(texts)
    for i, inner in enumerate(encoded):
        row = [tokenizer.end_of_text, *inner[: length - 2], tokenizer.end_of_text]
        tokens[i, : len(row)], valid[i, : len(row)] = row, True
    return tokens, valid, sum(len(inner) > length - 2 for inner in encoded)


@lru_cache(maxsize=2)
def draw_word_masks(n: int, seed: int, epoch: int, dropped: float) -> np.ndarray:
    """Which words of n captions are kept in an epoch, `(n, 64)`; the same again for every 64 words."""
    draw = np.random.Generator(np.random.Philox(key=[seed, epoch]).jumped(2))
    return draw.random((n, 64)) >= dropped


def select_words(text: str, kept: np.ndarray) -> str:
    """Some of a text's words, in their order; the first alone, where none is kept."""
    words = text.split()
    return " ".join([word for i, word in enumerate(words) if kept[i % len(kept)]] or words[:1])
