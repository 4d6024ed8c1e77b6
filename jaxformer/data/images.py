"""Labelled images from IDX files or folders of image files."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from jaxformer.config import DataConfig, Fixed, ImageModelConfig, ModelConfig
from jaxformer.config.fields import MAX_SIDE, NonNegative, Range, ValFraction
from jaxformer.data.dataset import (
    Batch,
    Dataset,
    batch_error,
    batch_indices,
    epoch_uniforms,
    evenly_spaced,
    padded_batches,
    task_error,
)
from jaxformer.data.image_folder import ImageSplits, open_image_folder
from jaxformer.data.image_io import describe_resizing, describe_sizes
from jaxformer.data.infer_config import describe_changes, infer_image_size, infer_n_classes, is_fixed
from jaxformer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class ImageFolderConfig(DataConfig):
    """A folder of labelled images and its validation split."""

    path: str = ""
    """A folder with IDX files like those of MNIST and Fashion-MNIST (train-images-idx3-ubyte, train-labels-idx1-ubyte,
    and t10k files for validation; .gz or not), or with images (.png, .jpg, .webp and others) in train/LABEL/ and
    val/LABEL/."""
    val_fraction: ValFraction = 0.1
    """Approximate fraction of the images to hold out, chosen by their content, if there is no validation split."""


@dataclass(frozen=True)
class ImagesConfig(ImageFolderConfig):
    """Labelled images and their augmentation in training."""

    flip: bool = False
    """Random horizontal flip of half of the images in each epoch; not for images such as text."""
    shift: Annotated[NonNegative, Range(most=MAX_SIDE)] = 0
    """Maximum random shift in pixels, vertical and horizontal, sampled anew in each epoch; the border is black."""

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> ImageDataset:
        """Return the data as `DataConfig.load` does; images of another size than the model's are resized."""
        model_input_shape(model)
        assert isinstance(model, ImageModelConfig)
        folder = open_image_folder(self.path)
        inferred = infer_n_classes(model, len(folder.classes), self.path, fixed)
        inferred = infer_channels(infer_image_size(inferred, folder.size, fixed), folder.channels, fixed)
        splits = folder.read(self.val_fraction, inferred.image_size, inferred.channels, inferred.contract.resizing)
        data = ImageDataset(self, inferred, splits, batch_size, seed)
        reason = f"{self.path} has images of {describe_sizes(folder.sizes)} {_describe_channels(folder.channels)}"
        resizing = describe_resizing(self.path, folder.sizes, inferred.image_size)
        data.notes = (*describe_changes(model, inferred, reason), *resizing, *folder.notes)
        return data


def infer_channels(model: ImageModelConfig, channels: int, fixed: Fixed) -> ImageModelConfig:
    """Return the config with `channels` channels; `mean` and `std` for another number of channels are replaced by
    their average over the channels."""
    if is_fixed("channels", fixed):
        return model
    given = {name: getattr(model, name, ()) for name in ("mean", "std") if not is_fixed(name, fixed)}
    averages: dict[str, Any] = {name: (sum(x) / len(x),) for name, x in given.items() if len(x) not in (0, 1, channels)}
    return replace(model, channels=channels, **averages)


def model_input_shape(model: ModelConfig, axes: int = 3) -> tuple[int, ...]:
    """Return the shape of the model's input: `(height, width, C)` for 3 axes, `(frames, height, width, C)` for 4,
    videos. Raises `UserError` if the model has other inputs."""
    shape = model.example()[0].shape if isinstance(model, ImageModelConfig) else ()
    if len(shape) != axes:
        kind = {3: "images", 4: "videos"}[axes]
        raise task_error(model, kind, f"a model of {kind}")
    return shape


class PixelDataset(Dataset):
    """Base class of datasets in which each example is made from one labelled image."""

    n_draws: ClassVar[int]
    """Uniform random numbers per example and epoch."""

    def __init__(
        self, config: ImageFolderConfig, model: ImageModelConfig, splits: ImageSplits, batch_size: int, seed: int
    ) -> None:
        """Fingerprint the images and the settings. Raises `UserError` if there are fewer training images than a batch
        needs."""
        n = len(splits.train.images)
        if n < batch_size:
            raise batch_error(config.path, n, "training images", batch_size)
        self.config, self.model, self.splits, self.batch_size, self.seed = config, model, splits, batch_size, seed
        self.classes = splits.classes
        self.per_step, self.steps_per_epoch = batch_size, n // batch_size
        digest = hashlib.sha256(repr((splits.classes, *self.settings)).encode())
        for array in (*splits.train, *splits.val):
            digest.update(repr(array.shape).encode() + array.tobytes())
        self.fingerprint = digest.hexdigest()

    @property
    @abstractmethod
    def settings(self) -> tuple[object, ...]:
        """Everything but the images that the examples depend on."""

    @abstractmethod
    def transform(self, images: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels and labels of training examples, given random numbers `(n, n_draws)` in [0, 1)."""

    def train_examples(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pixels and labels of training examples, transformed for an epoch."""
        draws = epoch_uniforms(len(self.splits.train.images), self.n_draws, self.seed, epoch)[indices]
        return self.transform(self.splits.train.images[indices], self.splits.train.labels[indices], draws)

    def val_examples(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pixels and labels of validation examples."""
        return self.splits.val.images[indices], self.splits.val.labels[indices]

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        epoch, indices = batch_indices(len(self.splits.train.images), self.batch_size, self.seed, step)
        pixels, labels = self.train_examples(indices[rows], epoch)
        return Batch((pixels,), labels)

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        for indices, weights in padded_batches(evenly_spaced(len(self.splits.val.images), n), batch_size):
            pixels, labels = self.val_examples(indices)
            pixels[weights == 0], labels[weights == 0] = 0, 0
            yield Batch((pixels,), labels, weights)

    def describe_classes(self) -> str:
        """Return the names of the first classes and the size of the validation split."""
        names = f"{', '.join(self.classes[:12])}{', …' if len(self.classes) > 12 else ''}"
        return f"({names}); held out: {len(self.splits.val.images):,} images"


class ImageDataset(PixelDataset):
    """Image classification."""

    n_draws = 3
    config: ImagesConfig

    @property
    def settings(self) -> tuple[object, ...]:
        return self.config.flip, self.config.shift

    def transform(self, images: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.config.flip:
            images = np.where(draws[:, :1, None, None] < 0.5, images, images[:, :, ::-1])
        if self.config.shift:
            shifts = np.floor(draws[:, 1:] * (2 * self.config.shift + 1)).astype(np.int64) - self.config.shift
            images = shift_images(images, shifts)
        return images, labels

    def describe(self) -> str:
        n, *size, channels = self.splits.train.images.shape
        return (
            f"{self.config.path}: {n:,} images of {describe_sizes([tuple(size)])} {_describe_channels(channels)} in "
            f"{len(self.classes)} classes {self.describe_classes()}"
        )


def shift_images(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Return images `(n, height, width, C)`, each shifted down and to the right by `shifts`, `(n, 2)` whole pixels,
    negative for up and to the left, with a black border."""
    n, height, width, _ = images.shape
    padding = int(np.abs(shifts).max(initial=0))
    padded = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, columns = (padding - shifts[:, i, None] + np.arange(size) for i, size in enumerate((height, width)))
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _describe_channels(channels: int) -> str:
    return f"with {channels} channel{'' if channels == 1 else 's'}"
