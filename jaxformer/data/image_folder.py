"""Folders of labelled images: IDX files (MNIST) or one folder of image files per class."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.config import Resizing
from jaxformer.data.image_io import IMAGE_SUFFIXES, read_idx, read_image, read_image_shape, resize_images
from jaxformer.data.listing import Listing, is_hidden, list_files
from jaxformer.data.text import locate
from jaxformer.errors import UserError

IDX_SPLITS = ("train", "t10k")
"""Prefixes of the IDX files of the training split and of the optional validation split."""
LabelledFiles = list[tuple[Path, int]]


class LabelledImages(NamedTuple):
    """Images and their labels."""

    images: np.ndarray
    """`(n, height, width, C)` uint8."""
    labels: np.ndarray
    """`(n,)` int32, indices into the class names."""


class ImageSplits(NamedTuple):
    """The decoded images of a folder."""

    train: LabelledImages
    val: LabelledImages
    classes: tuple[str, ...]
    """Class names: the folders' names, sorted, or the labels of IDX files."""


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """A folder of images, with image files not yet decoded."""

    path: str
    classes: tuple[str, ...]
    """Class names."""
    shapes: tuple[tuple[int, int, int], ...]
    """Distinct (height, width, channels) of the images."""
    train: LabelledImages | LabelledFiles
    """Images, or image files and their labels."""
    val: LabelledImages | LabelledFiles | None
    """The validation split; None if it is to be held out from `train`."""
    notes: tuple[str, ...] = ()
    """Notes about files and folders that are not read."""

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Distinct (height, width) of the images."""
        return {shape[:2] for shape in self.shapes}

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of all images; None if they differ."""
        return self.sizes.pop() if len(self.sizes) == 1 else None

    @property
    def channels(self) -> int:
        """Channels of all images: 1 if all are grayscale, else 3."""
        return max(shape[2] for shape in self.shapes)

    def read(
        self, val_fraction: float, size: tuple[int, ...], channels: int, resizing: Resizing | None = None
    ) -> ImageSplits:
        """Return all images, resized to `size` and converted to `channels`, see `image_io.read_image`; `val_fraction`
        of them are held out if there is no validation split. Raises `UserError` if an image cannot be read, or a split
        would be empty."""
        train = _read_images(self.train, size, channels, resizing)
        if self.val is None:
            return ImageSplits(*hold_out(train, val_fraction), self.classes)
        return ImageSplits(train, _read_images(self.val, size, channels, resizing), self.classes)


def open_image_folder(path: str) -> ImageFolder:
    """Return the contents of a folder of images; see `images.ImageFolderConfig` for its layout. Raises `UserError` if
    the folder is missing or empty, or a file is corrupt."""
    folder = locate(path, "a folder of images, with the four files of Fashion-MNIST or train/LABEL/*.png in it")
    if _idx_file(folder, IDX_SPLITS[0], "images"):
        train, val = (_read_idx_split(folder, split) for split in IDX_SPLITS)
        splits = [split for split in (train, val) if split is not None]
        n_classes = 1 + max(int(split.labels.max(initial=0)) for split in splits)
        shapes = dict.fromkeys(split.images.shape[1:] for split in splits)
        return ImageFolder(path, tuple(map(str, range(n_classes))), tuple(shapes), splits[0], val)
    if not (folder / "train").is_dir():
        raise UserError(f"{path} is no folder with train-images-idx3-ubyte or with a folder train; give one.")
    (images, listing), (val_images, val_listing) = (_list_classes(folder / split) for split in ("train", "val"))
    classes = tuple(sorted(images))
    if not classes:
        problem = f"there are no images in {folder / 'train'}{listing.omission}"
        raise UserError(f"{problem}; put them into train/LABEL/ as PNG or JPEG files, for instance.")
    if unknown := sorted(val_images.keys() - images.keys()):
        remedy = "remove it, or give images to train on"
        raise UserError(f"{folder / 'val'} has a class {unknown[0]!r} that train lacks; {remedy}.")
    files, val_files = (
        [(file, label) for label, name in enumerate(classes) for file in split.get(name, [])]
        for split in (images, val_images)
    )
    shapes = dict.fromkeys(read_image_shape(file, str(file)) for file, _ in [*files, *val_files])
    notes = *listing.notes(str(folder / "train")), *val_listing.notes(str(folder / "val"))
    source = "those in val" if val_files else "some of train; name it val to evaluate on it"
    others = [folder / name for name in _subfolders(folder) if name not in ("train", "val")]
    notes += tuple(f"the folder {other} is not read: evaluation images are {source}" for other in others)
    return ImageFolder(path, classes, tuple(shapes), files, val_files or None, notes)


def hold_out(images: LabelledImages, fraction: float) -> tuple[LabelledImages, LabelledImages]:
    """Return a training split, and a validation split of about this fraction: the images with the smallest SHA-256, so
    that identical images are in the same split. Raises `UserError` if a split would be empty."""
    digests = [int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "big") for image in images.images]
    is_val_N = np.array(digests, np.uint64) < np.uint64(int(fraction * 2**64))
    if is_val_N.all() or not is_val_N.any():
        purpose = "train" if is_val_N.all() else "evaluate"
        problem = f"`data.val_fraction` {fraction} of {len(is_val_N)} images leaves nothing to {purpose} on"
        raise UserError(f"{problem}; change it, or give a folder val.")
    train, val = (LabelledImages(images.images[rows], images.labels[rows]) for rows in (~is_val_N, is_val_N))
    return train, val


def _idx_file(folder: Path, split: str, content: str) -> Path | None:
    """Return the IDX file with a split's images or labels, gzipped or not."""
    name = f"{split}-{content}-idx{3 if content == 'images' else 1}-ubyte"
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _read_idx_split(folder: Path, split: str) -> LabelledImages | None:
    """Return the images and labels of a split; None if it has neither."""
    image_file, label_file = (_idx_file(folder, split, content) for content in ("images", "labels"))
    if image_file is None and label_file is None:
        return None
    if image_file is None or label_file is None:
        raise UserError(f"{folder} has no {split}-{'labels' if image_file else 'images'}-idx*-ubyte; add it.")
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(images) != len(labels):
        raise UserError(f"{image_file} has {len(images)} images, but {label_file} {len(labels)} labels; give all.")
    return LabelledImages(images[..., None], labels.astype(np.int32))


def _subfolders(folder: Path) -> list[str]:
    """Return the sorted names of a folder's subfolders that are not hidden."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path))


def _list_classes(folder: Path) -> tuple[dict[str, list[Path]], Listing]:
    """Return the images of a split by class, the name of the folder that holds them at any depth, and their listing."""
    if not folder.is_dir():
        return {}, Listing([])
    listing = list_files(folder, lambda file: file.suffix.lower() in IMAGE_SUFFIXES)
    left_out, classes = listing.left_out, dict[str, list[Path]]()
    for file in listing.files:
        name, *below = file.relative_to(folder).parts
        if below:
            classes.setdefault(name, []).append(file)
        else:
            left_out["in no folder of a class"] += 1
    left_out["folder(s) without images"] = len({*_subfolders(folder)} - classes.keys())
    return classes, Listing([file for name in classes for file in classes[name]], +left_out)


def _read_images(
    split: LabelledImages | LabelledFiles, size: tuple[int, ...], channels: int, resizing: Resizing | None
) -> LabelledImages:
    if isinstance(split, LabelledImages):
        return LabelledImages(resize_images(split.images, size, channels, resizing), split.labels)
    images = np.empty((len(split), *size, channels), np.uint8)
    for image, (file, _) in zip(images, split, strict=True):
        image[:] = read_image(file, str(file), channels, size, resizing)
    return LabelledImages(images, np.array([label for _, label in split], np.int32))
