"""Images with labels, from IDX files or folders of PNG and JPEG files."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxformer.config import DataConfig, ImageModelConfig, ModelConfig, at_least
from jaxformer.data.dataset import Batch, Dataset, drawing, evenly, order
from jaxformer.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

IDX = ("train", "t10k")
"""How the names of the files begin for training and to measure on; the latter may be missing."""
PICTURES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}
"""What Pillow calls images of so many channels."""
BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error)
"""What reading a damaged picture may raise."""
UBYTE = 8
"""The type of an IDX file's numbers: bytes."""


class Labelled(NamedTuple):
    """Images and what they show."""

    images: np.ndarray
    """`(n, height, width, C)` uint8."""
    labels: np.ndarray
    """`(n,)` int32, places in the names of the classes."""


@dataclass(frozen=True, eq=False)
class Stills:
    """What a folder of images has."""

    train: Labelled
    val: Labelled
    names: tuple[str, ...]
    """Of the classes: of folders, in alphabetical order, or the numbers in IDX files."""


@dataclass(frozen=True)
class StillsConfig(DataConfig):
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
class ImagesConfig(StillsConfig):
    """Which images, and how those for training are varied."""

    flip: bool = False
    """Mirror half of them, others in each epoch; not where left and right matter, as in writing."""
    shift: int = 0
    """Move each by up to so many pixels in both directions, elsewhere in each epoch; what comes in is black."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "shift")

    def load(self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Any = None) -> Dataset:
        """See `DataConfig`; the model must take images of just this size, with as many channels and classes."""
        shape = pixels_of(model)
        stills = read_stills(self.path, self.val_fraction, shape[-1])
        found = stills.train.images.shape[1:]
        if found != shape:
            height, width, channels = found
            raise UserError(
                f"the images in {self.path} are {_sized(found)}, but the model takes {_sized(shape)}; set "
                f"--model.image-size {height} {width} --model.channels {channels}, or resize them."
            )
        check_classes(model, len(stills.names), self.path)
        return Images(self, stills, batch_size, seed)


def pixels_of(model: ModelConfig, axes: int = 3) -> tuple[int, ...]:
    """The shape of what the model takes: height, width and channels, with the frames before them for a video.

    Raises:
      UserError: it takes something else.
    """
    shape = model.example()[0].shape if isinstance(model, ImageModelConfig) else ()
    if len(shape) != axes:
        what = {3: "images", 4: "videos"}[axes]
        raise UserError(f"the data is {what}, but {type(model).__name__} describes no model of {what}; change one.")
    return shape


def check_classes(model: ModelConfig, n_classes: int, path: str) -> None:
    """Raise `UserError` where the model has other than so many classes."""
    assert isinstance(model, ImageModelConfig)
    if model.n_classes != n_classes:
        raise UserError(
            f"what {path} shows is of {n_classes} classes, but model.n_classes is {model.n_classes}; set "
            f"--model.n-classes {n_classes}."
        )


class PixelDataset(Dataset):
    """What images and videos made of images share: every example is of one still image."""

    def __init__(self, stills: Stills, path: str, batch_size: int, seed: int, settings: Sequence[Any]) -> None:
        """`settings` is all else that shapes an example. Raises `UserError` where there are too few images."""
        n = len(stills.train.images)
        if n < batch_size:
            raise UserError(f"{path} has {n} training images, fewer than train.batch_size {batch_size}; lower it.")
        self.stills, self.path, self.batch_size, self.seed = stills, path, batch_size, seed
        self.classes = stills.names
        self.per_step, self.steps_per_epoch = batch_size, n // batch_size
        digest = hashlib.sha256(repr((stills.names, *settings)).encode())
        for part in (*stills.train, *stills.val):
            digest.update(repr(part.shape).encode() + part.tobytes())
        self.fingerprint = digest.hexdigest()

    @abstractmethod
    def varied(self, numbers: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels and labels of training examples, as an epoch sees them."""

    @abstractmethod
    def measured(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pixels and labels of held-out examples."""

    def rows(self, step: int, which: slice | np.ndarray = slice(None)) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        numbers = order(len(self.stills.train.images), self.seed, epoch)[place * self.batch_size :][: self.batch_size]
        pixels, labels = self.varied(numbers[which], epoch)
        return Batch((pixels,), labels)

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        chosen = evenly(len(self.stills.val.images), n)
        for first in range(0, len(chosen), batch_size):
            numbers = chosen[first : first + batch_size]
            pixels, labels = self.measured(numbers)
            missing = batch_size - len(numbers)
            weights = np.pad(np.ones(len(numbers), np.float32), (0, missing))
            pixels = np.pad(pixels, [(0, missing)] + [(0, 0)] * (pixels.ndim - 1))
            yield Batch((pixels,), np.pad(labels, (0, missing)), weights)


class Images(PixelDataset):
    """What each image shows is to be told."""

    def __init__(self, config: ImagesConfig, stills: Stills, batch_size: int, seed: int) -> None:
        super().__init__(stills, config.path, batch_size, seed, [config.flip, config.shift])
        self.config = config

    def varied(self, numbers: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        images, labels = (part[numbers] for part in self.stills.train)
        if self.config.flip or self.config.shift:
            drawn = uniforms(len(self.stills.train.images), 3, self.seed, epoch)[numbers]
            if self.config.flip:
                images = np.where(drawn[:, :1, None, None] < 0.5, images, images[:, :, ::-1])
            moves = np.floor(drawn[:, 1:] * (2 * self.config.shift + 1)).astype(np.int64) - self.config.shift
            images = shifted(images, moves)
        return images, labels

    def measured(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.stills.val.images[numbers], self.stills.val.labels[numbers]

    def describe(self) -> str:
        train, val, names = self.stills.train.images, self.stills.val.images, self.classes
        return (
            f"{self.path}: {len(train):,} images of {_sized(train.shape[1:])} in {len(names)} classes "
            f"({', '.join(names[:12])}{', …' if len(names) > 12 else ''}); held out: {len(val):,} images"
        )


def shifted(images: np.ndarray, moves: np.ndarray) -> np.ndarray:
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
def uniforms(n: int, k: int, seed: int, epoch: int) -> np.ndarray:
    """`(n, k)` numbers from 0 to below 1: what an epoch draws for each of n examples, apart from their order."""
    return drawing(seed, epoch).random((n, k))


def read_stills(path: str, val_fraction: float, channels: int) -> Stills:
    """All images of a folder; see `StillsConfig`.

    Args:
      val_fraction: see `StillsConfig`.
      channels: PNG and JPEG files become grey (1) or colour (3), whatever they were; see `read_picture`.

    Raises:
      UserError: no such folder, nothing in it, a broken file, or images of several sizes.
    """
    if not path:
        raise UserError(
            "data.path is empty; give a folder of images with --data.path, such as one with the four files of "
            "Fashion-MNIST or with train/LABEL/*.png in it."
        )
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.path is {path}, but there is no such folder; give one with images.")
    if _idx_file(folder, IDX[0], "images"):
        train, val = (_read_idx_pair(folder, part) for part in IDX)
        largest = max(int(part.labels.max(initial=0)) for part in (train, val) if part is not None)
        names = tuple(map(str, range(largest + 1)))
    elif (folder / "train").is_dir():
        names = tuple(sorted(place.name for place in (folder / "train").iterdir() if place.is_dir()))
        train, val = (_read_folders(folder / part, names, channels) for part in ("train", "val"))
    else:
        raise UserError(f"{path} has neither {IDX[0]}-images-idx3-ubyte nor a folder train; give a folder with one.")
    if train is None:
        raise UserError(f"there are no images in {folder / 'train'}; put them into train/LABEL/ as PNG or JPEG files.")
    if val is None:
        train, val = hold_out(train, val_fraction)
    if train.images.shape[1:] != val.images.shape[1:]:
        raise UserError(
            f"the images to train on in {path} are {_sized(train.images.shape[1:])}, those to measure on "
            f"{_sized(val.images.shape[1:])}; all must have one size."
        )
    return Stills(train, val, names)


def hold_out(images: Labelled, fraction: float) -> tuple[Labelled, Labelled]:
    """What to train on, and about this share of the images to measure on: those with the smallest SHA-256, so that two
    of one content are never on both sides.

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
    train, val = (Labelled(images.images[at], images.labels[at]) for at in (~held, held))
    return train, val


def _idx_file(folder: Path, part: str, what: str) -> Path | None:
    """The file of one part's images or labels, packed or not."""
    name = f"{part}-{what}-idx{3 if what == 'images' else 1}-ubyte"
    return next((file for file in (folder / name, folder / f"{name}.gz") if file.is_file()), None)


def _read_idx_pair(folder: Path, part: str) -> Labelled | None:
    """The images and labels of one part; None where it has neither."""
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
    return Labelled(images[..., None], labels.astype(np.int32))


def read_idx(file: Path, axes: int) -> np.ndarray:
    """The bytes of an IDX file (LeCun et al., the format of MNIST), as an array with so many axes.

    Raises:
      UserError: it is none, has other axes, or its end is missing.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{file} cannot be unpacked: {error}; get it anew.") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    if content[:4] != bytes([0, 0, UBYTE, axes]):
        raise UserError(
            f"{file} begins with {content[:4].hex(' ') or 'nothing'}, but an IDX file of bytes with {axes} "
            f"{'axis' if axes == 1 else 'axes'} begins with 00 00 08 {axes:02x}; get it anew."
        )
    start = 4 + 4 * axes
    shape = tuple(int(n) for n in np.frombuffer(content[4:start].ljust(4 * axes, b"\0"), ">u4"))
    if len(content) != start + prod(shape):
        raise UserError(
            f"{file} has {len(content):,} bytes, but by its header it should have {start + prod(shape):,}; get it anew."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _read_folders(folder: Path, names: Sequence[str], channels: int) -> Labelled | None:
    """The images in the folder of each class; None where there is no such folder, or none in it."""
    if not folder.is_dir():
        return None
    if unknown := sorted({place.name for place in folder.iterdir() if place.is_dir()} - set(names)):
        raise UserError(
            f"{folder} has a class {unknown[0]!r} that train has not; remove it, or give images to train on."
        )
    files = [
        (file, label)
        for label, name in enumerate(names)
        if (folder / name).is_dir()
        for file in sorted((folder / name).iterdir())
        if file.suffix.lower() in PICTURES
    ]
    if not files:
        return None
    images: list[np.ndarray] = []
    for file, _ in files:
        image = read_picture(file, str(file), channels)
        if images and image.shape != images[0].shape:
            raise UserError(
                f"{file} is {_sized(image.shape)}, but {files[0][0]} is {_sized(images[0].shape)}; resize it, for all "
                "must have one size."
            )
        images.append(image)
    return Labelled(np.stack(images), np.array([label for _, label in files], np.int32))


def read_picture(file: Path | IO[bytes], name: str, channels: int) -> np.ndarray:
    """A PNG or JPEG file as `(height, width, C)` uint8, made grey or coloured; what is transparent is white.

    Raises:
      UserError: it cannot be read, has more than 8 bits a channel, or C is neither 1 nor 3.
    """
    with _opened(file, name, channels) as picture:
        return _pixels(picture, name, channels)


def read_fitted(file: str, shape: tuple[int, ...]) -> np.ndarray:
    """A picture as a model takes it, uint8, resized to `shape`: height, width and channels, with the frames before them
    for a video, which is an animated GIF, PNG or WebP file; as many of its frames are taken, evenly spread.

    Raises:
      UserError: see `read_picture`; or it has fewer frames.
    """
    *frames, height, width, channels = shape
    with _opened(file, file, channels) as picture:
        if not frames:
            return _pixels(picture, file, channels, (width, height))
        there, wanted = getattr(picture, "n_frames", 1), frames[0]
        if there < wanted:
            raise UserError(f"{file} has {there} frame(s), but the model takes {wanted}; give an animated GIF of more.")
        pixels = np.empty(shape, np.uint8)
        for frame, number in enumerate(evenly(there, wanted)):
            picture.seek(int(number))
            pixels[frame] = _pixels(picture, file, channels, (width, height))
        return pixels


@contextmanager
def _opened(file: str | Path | IO[bytes], name: str, channels: int) -> Iterator[Image.Image]:
    """A picture; what goes wrong in reading it is said of `name`."""
    from PIL import Image  # it takes a moment

    if channels not in MODES:
        raise UserError(f"model.channels is {channels}, but pictures can be read as 1 (grey) or 3 (colour); set one.")
    try:
        with Image.open(file) as picture:
            yield picture
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist; name a picture that does.") from error
    except BROKEN as error:  # a damaged GIF makes Pillow raise any of them
        raise UserError(f"{name} cannot be read as a picture: {error}; remove it, or get it anew.") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{name} is too large a picture: {error}; make it smaller.") from error


def _pixels(picture: Image.Image, name: str, channels: int, size: tuple[int, int] | None = None) -> np.ndarray:
    """`(height, width, C)` uint8, resized where a width and a height are given."""
    from PIL import Image, ImageOps

    if picture.mode.startswith(("I", "F")):  # Pillow would make white of all above 255
        raise UserError(f"{name} has more than 8 bits a channel; convert it to 8.")
    picture = ImageOps.exif_transpose(picture)  # as a camera was held
    plain = picture.convert("RGBA" if picture.has_transparency_data else MODES[channels])
    if plain.mode == "RGBA":
        plain = Image.alpha_composite(Image.new("RGBA", plain.size, "white"), plain)
    plain = plain.convert(MODES[channels])
    pixels = np.asarray(plain if size in (None, plain.size) else plain.resize(size, Image.Resampling.BICUBIC))
    return pixels.reshape(*pixels.shape[:2], channels)


def _sized(shape: Sequence[int]) -> str:
    height, width, channels = shape
    return f"{height} x {width} pixels with {channels} channel{'' if channels == 1 else 's'}"
