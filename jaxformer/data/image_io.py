"""Reading pixels: PNG, JPEG and IDX files."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from jaxformer.data.dataset import evenly_spaced
from jaxformer.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
MODES = {1: "L", 3: "RGB"}
"""Pillow's modes by the number of channels."""
GREY = ("1", "L", "LA", "La")
"""Pillow's modes without colours."""
BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error)
"""Exceptions that reading a damaged picture may raise."""
UBYTE = 8
"""The type of an IDX file's numbers: bytes."""
ORIENTATION, SIDEWAYS = 0x0112, 5
"""The Exif tag that says how a camera was held, and the first of its values that exchange width and height."""


def read_idx(file: Path, axes: int) -> np.ndarray:
    """Return the bytes of an IDX file (LeCun et al., the format of MNIST), as an array with so many axes.

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


def read_image(file: Path | IO[bytes], name: str, channels: int, size: tuple[int, ...] | None = None) -> np.ndarray:
    """Return a PNG or JPEG file as `(height, width, C)` uint8, made grey or coloured; what is transparent is white.

    Args:
      size: height and width to resize it to; without it, it keeps its own.

    Raises:
      UserError: it cannot be read, has more than 8 bits a channel, or C is neither 1 nor 3.
    """
    with _opened(file, name, channels) as picture:
        return _pixels(picture, name, channels, None if size is None else (size[1], size[0]))


def read_image_shape(file: Path | IO[bytes], name: str) -> tuple[int, int, int]:
    """Return height, width and channels of a PNG or JPEG file, 1 or 3, without reading its pixels.

    Raises:
      UserError: it cannot be read.
    """
    with _opened(file, name, 3) as picture:
        width, height = picture.size
        if picture.getexif().get(ORIENTATION, 1) >= SIDEWAYS:
            width, height = height, width
        return height, width, 1 if picture.mode in GREY else 3


def resize_images(images: np.ndarray, size: tuple[int, ...], channels: int) -> np.ndarray:
    """Return images `(n, H, W, C)` of another size, and made grey or coloured, as `read_image` does."""
    from PIL import Image

    if images.shape[1:] == (*size, channels):
        return images
    new = np.empty((len(images), *size, channels), np.uint8)
    for to, image in zip(new, images, strict=True):
        picture = Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
        to[:] = _pixels(picture, "", channels, (size[1], size[0]))
    return new


def describe_sizes(sizes: Collection[tuple[int, ...]]) -> str:
    """Return a height and width for people, such as 4 x 6 pixels, or how many there are and from which to which."""
    smallest, largest = (f"{height} x {width}" for height, width in (min(sizes), max(sizes)))
    return f"{smallest} pixels" if len(sizes) == 1 else f"{len(sizes)} sizes ({smallest} to {largest} pixels)"


def describe_resizing(path: str, sizes: Collection[tuple[int, ...]], size: tuple[int, ...]) -> tuple[str, ...]:
    """Return a sentence where images have other sizes than the one to which they are resized."""
    if list(sizes) == [size]:
        return ()
    return (f"the images in {path} are resized from {describe_sizes(sizes)} to {describe_sizes([size])}",)


def read_model_input(file: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a picture as a model reads it, uint8, resized to `shape`: height, width and channels.

    With frames before them it is a video, an animated GIF, PNG or WebP file; as many of its frames are read, evenly
    spread.

    Raises:
      UserError: see `read_image`; or it has fewer frames.
    """
    *frames, height, width, channels = shape
    with _opened(file, file, channels) as picture:
        if not frames:
            return _pixels(picture, file, channels, (width, height))
        n_frames, needed = getattr(picture, "n_frames", 1), frames[0]
        if n_frames < needed:
            raise UserError(
                f"{file} has {n_frames} frame(s), but the model takes {needed}; give an animated GIF of more."
            )
        pixels = np.empty(shape, np.uint8)
        for frame, number in enumerate(evenly_spaced(n_frames, needed)):
            picture.seek(int(number))
            pixels[frame] = _pixels(picture, file, channels, (width, height))
        return pixels


@contextmanager
def _opened(file: str | Path | IO[bytes], name: str, channels: int) -> Iterator[Image.Image]:
    """Open a picture; messages about errors in reading it name `name`."""
    from PIL import Image, UnidentifiedImageError  # it takes a moment

    if channels not in MODES:
        raise UserError(f"model.channels is {channels}, but pictures can be read as 1 (grey) or 3 (colour); set one.")
    try:
        with Image.open(file) as picture:
            yield picture
    except FileNotFoundError as error:
        raise UserError(f"{name} does not exist; name a picture that does.") from error
    except BROKEN as error:  # a damaged GIF makes Pillow raise any of them
        what = "" if isinstance(error, UnidentifiedImageError) else f": {error}"  # of the file's name, and no more
        raise UserError(f"{name} cannot be read as a picture{what}; leave it out, or get it anew.") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"{name} is too large a picture: {error}; make it smaller.") from error


def _pixels(picture: Image.Image, name: str, channels: int, size: tuple[int, int] | None = None) -> np.ndarray:
    """Return `(height, width, C)` uint8, resized where a width and a height are given."""
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
