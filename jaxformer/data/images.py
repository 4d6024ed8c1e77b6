"""Images with labels, from IDX files or folders of PNG and JPEG files."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from jaxformer.config import DataConfig, ImageModelConfig, ModelConfig
from jaxformer.data.dataset import Batch, Dataset, epoch_permutation, evenly_spaced, step_rng
from jaxformer.data.image_folder import ImageFolder, ImageSplits, open_image_folder
from jaxformer.data.image_io import describe_sizes
from jaxformer.data.infer_config import ALL, describe_changes, infer_image_size
from jaxformer.errors import UserError
from jaxformer.fields import at_least


@dataclass(frozen=True)
class ImageFolderConfig(DataConfig):
    """Which images, and which of them to measure on."""

    path: str = ""
    """A folder with IDX files as MNIST and Fashion-MNIST have them (train-images-idx3-ubyte, train-labels-idx1-ubyte
    and the same with t10k, to measure on; .gz or not), or with train/LABEL/*.png (or .jpg) and val/LABEL/*.png."""
    val_fraction: float = 0.1
    """About which share of the images to hold out where there are none to measure on; their content decides which."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction is {self.val_fraction}; it must lie between 0 and 1, such as 0.1.")


@dataclass(frozen=True)
class ImagesConfig(ImageFolderConfig):
    """Which images, and how those for training are varied."""

    flip: bool = False
    """Mirror half of them, others in each epoch; not where left and right matter, as in writing."""
    shift: int = 0
    """Move each by up to so many pixels in both directions, elsewhere in each epoch; what comes in is black."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "shift")

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Any = None,
        fixed: Container[str] | None = None,
    ) -> Dataset:  # fmt: skip
        """See `DataConfig`; images are resized to what the model reads where they do not fit it, nor it them."""
        model_input_shape(model)
        assert isinstance(model, ImageModelConfig)
        folder = open_image_folder(self.path)
        fitted = infer_image_config(model, folder, ALL if fixed is None else fixed)
        if fitted.n_classes != len(folder.names):
            raise UserError(f"{class_count_error(fitted, len(folder.names), self.path)}.")
        stills = folder.read(self.val_fraction, fitted.image_size, fitted.channels)
        data = ImageDataset(self, fitted, stills, batch_size, seed)
        why = f"{self.path} has images of {_sized(folder.sizes, folder.channels)}"
        resizing = folder.describe_resizing(fitted.image_size)
        data.notes = (*describe_changes(model, fitted, why), *resizing, *folder.notes)
        return data


def infer_image_config(model: ImageModelConfig, folder: ImageFolder, fixed: Container[str]) -> ImageModelConfig:
    """Return the model's config for the size, channels and classes of the images in a folder; see `infer_image_size`.

    Args:
      fixed: names of fields to leave as they are.
    """
    patch = getattr(model, "patch_size", None)
    size, new_patch = infer_image_size(
        model.image_size, patch or (1, 1), folder.size, "image_size" in fixed, patch is None or "patch_size" in fixed
    )
    changes: dict[str, Any] = {"image_size": size} | ({} if patch is None else {"patch_size": new_patch})
    if "n_classes" not in fixed:
        changes["n_classes"] = len(folder.names)
    return infer_channels(model, folder.channels, fixed, changes)


def infer_channels(
    model: ImageModelConfig, channels: int, fixed: Container[str], changes: dict[str, Any]
) -> ImageModelConfig:
    """Return the model's config with so many channels, and with other changes; statistics of each channel that are of
    other channels become their mean."""
    if "channels" not in fixed:
        changes["channels"] = channels
        for name in ("mean", "std"):
            if name not in fixed and len(values := getattr(model, name, ())) not in (0, 1, channels):
                changes[name] = (sum(values) / len(values),)
    return replace(model, **changes)


def model_input_shape(model: ModelConfig, axes: int = 3) -> tuple[int, ...]:
    """The shape of what the model takes: height, width and channels, with the frames before them for a video.

    Raises:
      UserError: it takes something else.
    """
    shape = model.example()[0].shape if isinstance(model, ImageModelConfig) else ()
    if len(shape) != axes:
        what = {3: "images", 4: "videos"}[axes]
        raise UserError(f"the data is {what}, but {type(model).__name__} describes no model of {what}; change one.")
    return shape


def class_count_error(model: ImageModelConfig, n_classes: int, path: str) -> str:
    """Return the sentence for a model that has other than so many classes, without its full stop."""
    return (
        f"what {path} shows is of {n_classes} classes, but model.n_classes is {model.n_classes}; set "
        f"--model.n-classes {n_classes}"
    )


class PixelDataset(Dataset):
    """What images and videos made of images share: every example is of one still image."""

    def __init__(
        self,
        stills: ImageSplits,
        path: str,
        model: ImageModelConfig,
        batch_size: int,
        seed: int,
        settings: Sequence[Any],
    ) -> None:
        """`settings` is all else that shapes an example. Raises `UserError` where there are too few images."""
        n = len(stills.train.images)
        if n < batch_size:
            raise UserError(f"{path} has {n} training images, fewer than train.batch_size {batch_size}; lower it.")
        self.stills, self.path, self.model, self.batch_size, self.seed = stills, path, model, batch_size, seed
        self.classes = stills.names
        self.per_step, self.steps_per_epoch = batch_size, n // batch_size
        digest = hashlib.sha256(repr((stills.names, *settings)).encode())
        for part in (*stills.train, *stills.val):
            digest.update(repr(part.shape).encode() + part.tobytes())
        self.fingerprint = digest.hexdigest()

    @abstractmethod
    def train_examples(self, numbers: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels and labels of training examples, as an epoch sees them."""

    @abstractmethod
    def val_examples(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pixels and labels of held-out examples."""

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        numbers = epoch_permutation(len(self.stills.train.images), self.seed, epoch)[place * self.batch_size :][
            : self.batch_size
        ]
        pixels, labels = self.train_examples(numbers[rows], epoch)
        return Batch((pixels,), labels)

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        chosen = evenly_spaced(len(self.stills.val.images), n)
        for first in range(0, len(chosen), batch_size):
            numbers = chosen[first : first + batch_size]
            pixels, labels = self.val_examples(numbers)
            missing = batch_size - len(numbers)
            weights = np.pad(np.ones(len(numbers), np.float32), (0, missing))
            pixels = np.pad(pixels, [(0, missing)] + [(0, 0)] * (pixels.ndim - 1))
            yield Batch((pixels,), np.pad(labels, (0, missing)), weights)


class ImageDataset(PixelDataset):
    """What each image shows is to be told."""

    def __init__(
        self, config: ImagesConfig, model: ImageModelConfig, stills: ImageSplits, batch_size: int, seed: int
    ) -> None:
        super().__init__(stills, config.path, model, batch_size, seed, [config.flip, config.shift])
        self.config = config

    def train_examples(self, numbers: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        images, labels = (part[numbers] for part in self.stills.train)
        if self.config.flip or self.config.shift:
            drawn = epoch_uniforms(len(self.stills.train.images), 3, self.seed, epoch)[numbers]
            if self.config.flip:
                images = np.where(drawn[:, :1, None, None] < 0.5, images, images[:, :, ::-1])
            moves = np.floor(drawn[:, 1:] * (2 * self.config.shift + 1)).astype(np.int64) - self.config.shift
            images = shift_images(images, moves)
        return images, labels

    def val_examples(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.stills.val.images[numbers], self.stills.val.labels[numbers]

    def describe(self) -> str:
        train, val, names = self.stills.train.images, self.stills.val.images, self.classes
        _, *size, channels = train.shape
        return (
            f"{self.path}: {len(train):,} images of {_sized([tuple(size)], channels)} in {len(names)} classes "
            f"({', '.join(names[:12])}{', …' if len(names) > 12 else ''}); held out: {len(val):,} images"
        )


def shift_images(images: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Each image moved down and to the right, with black where nothing was.

    Args:
      images: `(n, height, width, C)`.
      moves: `(n, 2)` whole pixels, negative for up and to the left.
    """
    n, height, width, _ = images.shape
    room = int(np.abs(moves).max(initial=0))
    padded = np.pad(images, ((0, 0), (room, room), (room, room), (0, 0)))
    rows, columns = (room - moves[:, i, None] + np.arange(size) for i, size in enumerate((height, width)))
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


@lru_cache(maxsize=2)
def epoch_uniforms(n: int, k: int, seed: int, epoch: int) -> np.ndarray:
    """`(n, k)` numbers from 0 to below 1: what an epoch draws for each of n examples, apart from their order."""
    return step_rng(seed, epoch).random((n, k))


def _sized(sizes: Collection[tuple[int, ...]], channels: int) -> str:
    return f"{describe_sizes(sizes)} with {channels} channel{'' if channels == 1 else 's'}"
