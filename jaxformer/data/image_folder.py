"""Folders of images with labels: what is in them, and their pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.data.image_io import (
    IMAGE_SUFFIXES,
    describe_resizing,
    read_idx,
    read_image,
    read_image_shape,
    resize_images,
)
from jaxformer.errors import UserError

IDX = ("train", "t10k")
"""Prefixes of the names of files for training and to measure on; the latter may be missing."""


class LabelledImages(NamedTuple):
    """Images and their labels."""

    images: np.ndarray
    """`(n, height, width, C)` uint8."""
    labels: np.ndarray
    """`(n,)` int32, indices into the names of the classes."""


@dataclass(frozen=True, eq=False)
class ImageSplits:
    """Images of a folder, with their pixels."""

    train: LabelledImages
    val: LabelledImages
    names: tuple[str, ...]
    """Of the classes: of folders, in alphabetical order, or the numbers in IDX files."""


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """A folder of images, before the pixels of its pictures are read."""

    path: str
    names: tuple[str, ...]
    """Of the classes."""
    shapes: tuple[tuple[int, int, int], ...]
    """Heights, widths and channels that images have, each once."""
    train: LabelledImages | list[tuple[Path, int]]
    """Images, or the files of pictures with their labels."""
    val: LabelledImages | list[tuple[Path, int]] | None
    """To measure on; None where some are to be held out."""
    notes: tuple[str, ...] = ()
    """Sentences about folders that are not read."""

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Heights and widths that images have."""
        return {shape[:2] for shape in self.shapes}

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of all images; None where they have several."""
        return self.sizes.pop() if len(self.sizes) == 1 else None

    @property
    def channels(self) -> int:
        """1 where all are grey, else 3."""
        return max(shape[2] for shape in self.shapes)

    def read(self, val_fraction: float, size: tuple[int, ...], channels: int) -> ImageSplits:
        """Return all images in one size, grey (1) or coloured (3), whatever they were; see `pictures.read_image`.

        Raises:
          UserError: a broken file, or a part that would be empty.
        """
        train = _pixels(self.train, size, channels)
        if self.val is None:
            return ImageSplits(*hold_out(train, val_fraction), self.names)
        return ImageSplits(train, _pixels(self.val, size, channels), self.names)

    def describe_resizing(self, size: tuple[int, ...]) -> tuple[str, ...]:
        """Return a sentence where images have another size than this."""
        return describe_resizing(self.path, self.sizes, size)


def open_image_folder(path: str) -> ImageFolder:
    """Return what a folder of images holds; see `images.ImageFolderConfig`.

    Raises:
      UserError: no such folder, nothing in it, or a broken file.
    """
    if not path.strip():
        raise UserError(
            "data.path is empty; give a folder of images with --data.path, such as one with the four files of "
            "Fashion-MNIST or with train/LABEL/*.png in it."
        )
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.path is {path}, but there is no such folder; give one with images.")
    if _idx_file(folder, IDX[0], "images"):
        train, val = (_read_idx_pair(folder, part) for part in IDX)
        parts = [part for part in (train, val) if part is not None]
        largest = max(int(part.labels.max(initial=0)) for part in parts)
        shapes = dict.fromkeys(part.images.shape[1:] for part in parts)
        return ImageFolder(path, tuple(map(str, range(largest + 1))), tuple(shapes), parts[0], val)
    if not (folder / "train").is_dir():
        raise UserError(f"{path} has neither {IDX[0]}-images-idx3-ubyte nor a folder train; give a folder with one.")
    names = tuple(_subfolders(folder / "train"))
    files, held_out = (_list_files(folder / part, names) for part in ("train", "val"))
    if not files:
        raise UserError(f"there are no images in {folder / 'train'}; put them into train/LABEL/ as PNG or JPEG files.")
    shapes = dict.fromkeys(read_image_shape(file, str(file)) for file, _ in [*files, *held_out])
    val_examples = "those in val" if held_out else "some of train; call it val to take them from there"
    others = [name for name in _subfolders(folder) if name not in ("train", "val")]
    notes = tuple(f"the folder {folder / name} is not read: images to measure on are {val_examples}" for name in others)
    return ImageFolder(path, names, tuple(shapes), files, held_out or None, notes)


def hold_out(images: LabelledImages, fraction: float) -> tuple[LabelledImages, LabelledImages]:
    """Return images to train on, and about this share of them to measure on: those with the smallest SHA-256, so that
    two of one content are never on both sides.

    Raises:
      UserError: one side would be empty.
    """
    digests = [int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "big") for image in images.images]
    held = np.array(digests, np.uint64) < np.uint64(int(fraction * 2**64))
    if held.all() or not held.any():
        purpose = "train" if held.all() else "measure"
        raise UserError(
            f"data.val_fraction {fraction} of {len(held)} images leaves nothing to {purpose} on; change it, or give a "
            "folder val."
        )
    train, val = (LabelledImages(images.images[at], images.labels[at]) for at in (~held, held))
    return train, val


def _idx_file(folder: Path, part: str, what: str) -> Path | None:
    """Return the file of one part's images or labels, packed or not."""
    name = f"{part}-{what}-idx{3 if what == 'images' else 1}-ubyte"
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _read_idx_pair(folder: Path, part: str) -> LabelledImages | None:
    """Return the images and labels of one part; None where it has neither."""
    files = [_idx_file(folder, part, what) for what in ("images", "labels")]
    if files == [None, None]:
        return None
    for file, what in zip(files, ("images", "labels"), strict=True):
        if file is None:
            raise UserError(f"{folder} has no {part}-{what}-idx*-ubyte, with .gz or without; put it beside the others.")
    images, labels = (read_idx(file, axes) for file, axes in zip(files, (3, 1), strict=True) if file is not None)
    if len(images) != len(labels):
        raise UserError(
            f"{files[0]} has {len(images)} images, but {files[1]} has {len(labels)} labels; they are not of one set."
        )
    if not images.size:
        raise UserError(f"{files[0]} has no images; give a file with at least 1.")
    return LabelledImages(images[..., None], labels.astype(np.int32))


def _subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, in alphabetical order."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def _list_files(folder: Path, names: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the pictures in the folder of each class, with their labels."""
    if not folder.is_dir():
        return []
    if unknown := [name for name in _subfolders(folder) if name not in names]:
        raise UserError(
            f"{folder} has a class {unknown[0]!r} that train has not; remove it, or give images to train on."
        )
    return [
        (file, label)
        for label, name in enumerate(names)
        if (folder / name).is_dir()
        for file in sorted((folder / name).iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES
    ]


def _pixels(part: LabelledImages | list[tuple[Path, int]], size: tuple[int, ...], channels: int) -> LabelledImages:
    if isinstance(part, LabelledImages):
        return LabelledImages(resize_images(part.images, size, channels), part.labels)
    images = np.empty((len(part), *size, channels), np.uint8)
    for image, (file, _) in zip(images, part, strict=True):
        image[:] = read_image(file, str(file), channels, size)
    return LabelledImages(images, np.array([label for _, label in part], np.int32))
