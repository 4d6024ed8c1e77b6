"""Captioned images for contrastive training, all in memory."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxformer.config import DataConfig, Fixed, ModelConfig, Resizing, TokenModelConfig
from jaxformer.config.fields import MAX_SIDE, Fraction, NonNegative, Range
from jaxformer.data.augmentation import augment, draw_augmentations
from jaxformer.data.dataset import Batch, Dataset, batch_error, batch_indices, evenly_spaced, padded_batches, task_error
from jaxformer.data.image_io import describe_resizing, describe_sizes, read_image, read_image_shape
from jaxformer.data.infer_config import describe_changes, infer_image_size, infer_vocab_size
from jaxformer.data.labelled import pad_texts
from jaxformer.data.text import locate, read_text
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, abbreviate

IMAGES, CAPTIONS = "images.zip", "captions.tsv"
COLUMNS, SPLITS = ("file", "caption", "split"), ("train", "val")
WORD_MASK_LENGTH = 64
"""Length of a caption's word mask; longer captions repeat it."""


@dataclass(frozen=True)
class CaptionsConfig(DataConfig):
    """Captioned images and their augmentation in training."""

    path: str = ""
    """A folder with images.zip and captions.tsv, whose columns file, caption and split (train or val) are named in its
    first line."""
    shift: Annotated[NonNegative, Range(most=MAX_SIDE)] = 0
    """Maximum random shift in whole pixels, vertical and horizontal, sampled anew in each epoch, with edge padding. It
    is followed by rotation and scaling about the centre, and by a flip."""
    scale: Annotated[float, Range(least=0, most=1)] = 0.0
    """Maximum random scaling: 0.25 scales by 0.8 to 1.25."""
    rotate: Annotated[float, Range(least=0, most=180)] = 0.0
    """Maximum random rotation in degrees, in both directions."""
    flip: bool = False
    """Random horizontal flip of half of the images in each epoch; not for captions that tell left from right."""
    jitter: Annotated[float, Range(least=0, most=1)] = 0.0
    """Colour jitter: maximum change of each channel's brightness, as a fraction of half the pixel range, and of its
    contrast, as a factor like that of scale."""
    drop_words: Fraction = 0.0
    """Fraction of the words randomly dropped from training captions in each epoch; at least one stays."""

    @property
    def augmentation(self) -> dict[str, Any]:
        """Options of `draw_augmentations`."""
        return {name: getattr(self, name) for name in ("shift", "scale", "rotate", "flip", "jitter")}

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> CaptionDataset:
        if not isinstance(model, ImageTextModelConfig):
            raise task_error(model, "images with captions", "a model of both")
        return CaptionDataset(self, model, batch_size, seed, tokenizer, fixed)


@runtime_checkable
class ImageTextModelConfig(Protocol):
    """Config, a dataclass, of a model with an image and a text tower."""

    @property
    def vision(self) -> Any:
        """Config of the image tower: a dataclass with `image_size` and `patch_size`, heights and widths in pixels."""

    @property
    def text(self) -> TokenModelConfig:
        """Config of the text tower."""

    def example(self) -> tuple[np.ndarray, ...]:
        """Return an example image `(H, W, C)`, tokens `(T,)` and token mask `(T,)`."""


class CaptionRow(NamedTuple):
    """A line of the captions file."""

    file: str
    caption: str
    split: str


class CaptionDataset(Dataset):
    """Pairs of an image and its caption, to be matched within a batch. Inputs are images, `(B, H, W, C)` uint8; tokens,
    `(B, T)` int32, between two end-of-text tokens and padded on the right; and the token mask, `(B, T)` bool. Targets,
    `(B,)` int32, are caption ids, equal for equal captions."""

    tokenizer: Tokenizer

    def __init__(
        self, config: CaptionsConfig, model: Any, batch_size: int, seed: int, tokenizer: Tokenizer | None, fixed: Fixed
    ) -> None:
        """Read all images and captions, and resize images to the size of the model, an `ImageTextModelConfig`. `fixed`
        is as in `DataConfig.load`; `vision.image_size` and `vision.patch_size` matter. Raises `UserError` if a file is
        missing or cannot be read, a caption has no image, or there are fewer training pairs than a batch needs."""
        self.config, self.batch_size, self.seed, length = config, batch_size, seed, model.text.context_length
        folder = locate(config.path, f"a folder with {IMAGES} and {CAPTIONS}")
        table = read_captions(folder / CAPTIONS)
        files = [row.file for row in table]
        with _open_zip(folder / IMAGES) as file:
            shapes = {read_image_shape(io.BytesIO(file.read(name)), f"{name} in {file.filename}") for name in files}
        sizes = sorted({shape[:2] for shape in shapes})
        vision = infer_image_size(model.vision, sizes[0] if len(sizes) == 1 else None, fixed, "vision.")
        original, model = model, replace(model, vision=vision)
        shape = model.example()[0].shape
        self.images = read_images(folder / IMAGES, files, shape, model.contract.resizing)
        is_train = np.array([row.split == "train" for row in table])
        self.train, self.val = np.flatnonzero(is_train), np.flatnonzero(~is_train)
        if (n := len(self.train)) < batch_size:
            raise batch_error(str(folder / CAPTIONS), n, "pair(s) for training", batch_size)
        self.captions = captions = [row.caption for row in table]
        if tokenizer is None:
            tokenizer = Tokenizer.train([captions[i] for i in self.train], model.text.vocab_size)
            model = replace(model, text=infer_vocab_size(model.text, tokenizer))
        self.model, self.tokenizer = model, tokenizer
        reason = f"{config.path} has images of {describe_sizes(sizes)} and supports {tokenizer.vocab_size:,} tokens"
        resizing = describe_resizing(config.path, sizes, vision.image_size)
        self.notes = (*describe_changes(original, model, reason), *resizing)
        self.tokens, self.valid, self.n_shortened = tokenize_captions(captions, self.tokenizer, length)
        self.caption_ids = np.unique(self.tokens, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)
        self.per_step, self.steps_per_epoch = batch_size, len(self.train) // batch_size
        # As floats: 10 in a config becomes 10.0 when it is stored and read.
        options = [float(x) for x in (*config.augmentation.values(), config.drop_words)]
        settings = (length, model.text.vocab_size, shape, options)
        digest = hashlib.sha256(repr((settings, [tuple(row) for row in table])).encode())
        digest.update(self.images.tobytes())
        self.fingerprint = digest.hexdigest()

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        n = len(self.train)
        epoch, indices = batch_indices(n, self.batch_size, self.seed, step)
        indices = indices[rows]
        pairs = self.train[indices]
        images, options = self.images[pairs], self.config.augmentation
        if any(options.values()):
            parameters = draw_augmentations(n, images.shape[-1], self.seed, epoch, **options)
            drawn = (array[indices] for array in parameters)
            images = np.stack([augment(*example) for example in zip(images, *drawn, strict=True)])
        batch = self._batch(pairs, images)
        if not self.config.drop_words:
            return batch
        masks = draw_word_masks(n, self.seed, epoch, self.config.drop_words)[indices]
        captions = [select_words(self.captions[i], mask) for i, mask in zip(pairs, masks, strict=True)]
        tokens, valid, _ = tokenize_captions(captions, self.tokenizer, self.tokens.shape[1])
        return batch._replace(inputs=(batch.inputs[0], tokens, valid))

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        for pairs, weights in padded_batches(self.val[evenly_spaced(len(self.val), n)], batch_size):
            yield self._batch(pairs, self.images[pairs], weights)

    def describe(self) -> str:
        H, W, _ = self.images.shape[1:]
        shortened = f", {self.n_shortened:,} shortened" if self.n_shortened else ""
        return (
            f"{self.config.path}: {len(self.train):,} images of {H} x {W} pixels with captions, "
            f"{self.valid.sum(1).mean():.1f} tokens each{shortened}; held out: {len(self.val):,}"
        )

    def _batch(self, pairs: np.ndarray, images: np.ndarray, weights: np.ndarray | None = None) -> Batch:
        return Batch((images, self.tokens[pairs], self.valid[pairs]), self.caption_ids[pairs], weights)


def read_captions(path: Path) -> list[CaptionRow]:
    """Return the rows of a captions file, in order. Raises `UserError` if it cannot be read, its first line does not
    name the columns, a row has other columns, an empty one or an unknown split, an image has two captions, or a split
    is empty."""
    header, *lines = read_text(path).removesuffix("\n").split("\n")
    if tuple(header.split("\t")) != COLUMNS:
        raise UserError(f"the first line of {path} is {header!r}; it must be {', '.join(COLUMNS)}, separated by tabs.")
    rows = []
    for number, line in enumerate(lines, 2):
        columns = line.split("\t")
        if len(columns) != len(COLUMNS) or not all(map(str.strip, columns)) or columns[2] not in SPLITS:
            form = f"a file, a caption, and {' or '.join(SPLITS)}, separated by tabs"
            raise UserError(f"line {number} of {path} is {abbreviate(line)}; it must be {form}.")
        rows.append(CaptionRow(*columns))
    if repeated := [file for file, n in Counter(row.file for row in rows).items() if n > 1]:  # maybe in both splits
        raise UserError(f"{path} has several captions for {repeated[0]}; keep one of them.")
    if missing := {*SPLITS} - {row.split for row in rows}:
        raise UserError(f"{path} has no line of the split {min(missing)}; both train and val are needed.")
    return rows


def read_images(path: Path, names: list[str], shape: tuple[int, ...], resizing: Resizing | None = None) -> np.ndarray:
    """Return the named images of a zip file, `(N, H, W, C)` uint8, resized to `shape`, `(H, W, C)`, where C is 1 for
    grayscale and 3 for RGB; see `read_image`. Raises `UserError` if the zip file or an image is missing or corrupt."""
    images = np.empty((len(names), *shape), np.uint8)
    with _open_zip(path) as file:
        for image, name in zip(images, names, strict=True):
            image[:] = read_image(io.BytesIO(file.read(name)), f"{name} in {path}", shape[2], shape[:2], resizing)
    return images


@contextmanager
def _open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file. Raises `UserError` if it cannot be read, or lacks a file that is read."""
    try:
        with zipfile.ZipFile(path) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a zip file of all images: {error}; create it again.") from error


def tokenize_captions(texts: list[str], tokenizer: Tokenizer, length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return tokens `(N, length)` int32, between those that a published tokenizer puts around a text, or else two
    end-of-text tokens, and padded with 0, their mask `(N, length)` bool, and the number of truncated texts."""
    encoded, end = tokenizer.encode_batch(texts), [tokenizer.end_of_text]
    before, after = tokenizer.before_text or end, tokenizer.after_text or end
    tokens, valid = pad_texts([[*before, *inner[: length - 2], *after] for inner in encoded], length)
    return tokens, valid, sum(len(inner) > length - 2 for inner in encoded)


@lru_cache(maxsize=2)
def draw_word_masks(n: int, seed: int, epoch: int, dropped: float) -> np.ndarray:
    """Sample masks of the words that n captions keep in an epoch, `(n, WORD_MASK_LENGTH)` bool, where `dropped` is the
    dropped fraction; longer captions repeat their mask."""
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]).jumped(2))
    return rng.random((n, WORD_MASK_LENGTH)) >= dropped


def select_words(text: str, mask: np.ndarray) -> str:
    """Return the words of a text that a mask keeps, in order; the first word if it keeps none."""
    words = text.split()
    return " ".join([word for i, word in enumerate(words) if mask[i % len(mask)]] or words[:1])
