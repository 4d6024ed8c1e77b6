"""Decoding of images and IDX files."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from jaxformer.config import Resizing
from jaxformer.data.dataset import evenly_spaced
from jaxformer.data.text import open_decompressed
from jaxformer.errors import UserError, import_extra

if TYPE_CHECKING:
    from PIL import Image

READING = "reading images"
IMAGE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".pbm", ".pgm", ".ppm",
)  # fmt: skip
"""Suffixes of images, which do not depend on the formats that the installed version of Pillow knows."""
MAX_RESIZED_PIXELS = 2**27
"""Maximum number of pixels after resizing; a narrow image whose shorter side is enlarged may have more."""
MODES = {1: "L", 3: "RGB"}
"""Pillow's mode by number of channels."""
GRAYSCALE_MODES = ("1", "L", "LA", "La")
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error)
"""Exceptions that Pillow raises for a corrupt image."""
IDX_UINT8 = 8
"""Type code of bytes in an IDX file."""
ORIENTATION, FIRST_TRANSPOSED = 0x0112, 5
"""Exif tag of the camera's orientation, and the first of its values that swap width and height."""


def read_idx(file: Path, axes: int) -> np.ndarray:
    """Return the uint8 array of `axes` axes in an IDX file (LeCun et al., the format of MNIST), gzipped if its name
    ends with .gz. Raises `UserError` if it cannot be read, is not such a file, or is truncated."""
    with open_decompressed(file) as opened:
        content = opened.read()
    start = 4 + 4 * axes
    try:
        if content[:4] != bytes([0, 0, IDX_UINT8, axes]):
            raise ValueError(f"it begins with {content[:4].hex(' ')}, not with 00 00 08 {axes:02x}")
        shape = np.frombuffer(content, ">u4", axes, offset=4)
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
    except ValueError as error:
        raise UserError(f"{file} is no IDX file of bytes with {axes} axes ({error}); download it again.") from error


def read_image(
    file: Path | IO[bytes], name: str, channels: int, size: tuple[int, ...] | None = None,
    resizing: Resizing | None = None,
) -> np.ndarray:  # fmt: skip
    """Return an image file as `(height, width, C)` uint8, converted to grayscale (C = 1) or RGB (C = 3) on white,
    and resized to `size`, (height, width), unless it is None; with `resizing`, by that and by cropping its centre to
    `size`. Raises `UserError` with its name if it cannot be read, has more than 8 bits per channel or too many pixels
    after resizing, or C is neither 1 nor 3."""
    with _open_image(file, name, channels) as image:
        return _pixels(image, name, channels, size, resizing)


def read_image_shape(file: Path | IO[bytes], name: str) -> tuple[int, int, int]:
    """Return the height, width and channels (1 or 3) of an image file, without decoding its pixels. Raises
    `UserError` if it cannot be read."""
    with _open_image(file, name, 3) as image:
        width, height = image.size
        if image.getexif().get(ORIENTATION, 1) >= FIRST_TRANSPOSED:
            width, height = height, width
        return height, width, 1 if image.mode in GRAYSCALE_MODES else 3


def resize_images(
    images: np.ndarray, size: tuple[int, ...], channels: int, resizing: Resizing | None = None
) -> np.ndarray:
    """Return images `(n, H, W, C)` uint8 resized to `size`, (height, width), and converted, as `read_image` does."""
    if images.shape[1:] == (*size, channels) and resizing is None:
        return images
    Image = import_extra("PIL.Image", READING)
    flat = images.squeeze(3) if images.shape[3] == 1 else images
    return np.stack([_pixels(Image.fromarray(pixels), "the image", channels, size, resizing) for pixels in flat])


def describe_sizes(sizes: Collection[tuple[int, ...]]) -> str:
    """Return a description such as "4 x 6 pixels", or the number and range if there are several (height, width)."""
    smallest, largest = (f"{height} x {width}" for height, width in (min(sizes), max(sizes)))
    return f"{smallest} pixels" if len(sizes) == 1 else f"{len(sizes)} sizes ({smallest} to {largest} pixels)"


def describe_resizing(path: str, sizes: Collection[tuple[int, ...]], size: tuple[int, ...]) -> tuple[str, ...]:
    """Return a note about images that are resized to `size`, or none."""
    if list(sizes) == [size]:
        return ()
    return (f"the images in {path} are resized from {describe_sizes(sizes)} to {describe_sizes([size])}",)


def read_model_input(file: str, shape: tuple[int, ...], resizing: Resizing | None = None) -> np.ndarray:
    """Return a file as a model's input, uint8 of `shape`: an image `(height, width, C)`, or evenly spaced frames
    `(frames, height, width, C)` of a video (an animated GIF, PNG or WebP), resized as by `read_image`. Raises
    `UserError` if it has fewer frames, and as `read_image` does."""
    *frames, height, width, channels = shape
    with _open_image(file, file, channels) as image:
        if not frames:
            return _pixels(image, file, channels, (height, width), resizing)
        n_frames, needed = getattr(image, "n_frames", 1), frames[0]
        if n_frames < needed:
            remedy = "give an animated GIF with more"
            raise UserError(f"{file} has {n_frames} frame(s), but the model needs {needed}; {remedy}.")
        pixels = []
        for frame in evenly_spaced(n_frames, needed):
            image.seek(int(frame))
            pixels.append(_pixels(image, file, channels, (height, width), resizing))
        return np.stack(pixels)


@contextmanager
def _open_image(file: str | Path | IO[bytes], name: str, channels: int) -> Iterator[Image.Image]:
    """Open an image. Raises `UserError` with its name for decoding errors."""
    if channels not in MODES:
        raise UserError(f"`model.channels` is {channels}; set it to 1, for grey images, or 3, for colour.")
    Image = import_extra("PIL.Image", READING)
    try:
        with Image.open(file) as image:
            yield image
    except (*DECODE_ERRORS, Image.DecompressionBombError) as error:
        raise UserError(f"{name} cannot be read as an image ({error}); remove it, or give another.") from error


def _pixels(
    image: Image.Image, name: str, channels: int, size: tuple[int, ...] | None = None, resizing: Resizing | None = None
) -> np.ndarray:
    """Return the pixels, `(height, width, C)` uint8, resized as by `read_image`."""
    Image, ImageOps = import_extra("PIL.Image", READING), import_extra("PIL.ImageOps", READING)
    if image.mode.startswith(("I", "F")):  # Pillow would clip values above 255 to white
        raise UserError(f"{name} has more than 8 bits per channel; convert it to 8.")
    image = ImageOps.exif_transpose(image)
    image = image.convert("RGBA" if image.has_transparency_data else MODES[channels])
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert(MODES[channels])
    if size is None:
        pass
    elif resizing is not None:
        image = _resized(image, name, resizing)
        left, top = (image.width - size[1]) // 2, (image.height - size[0]) // 2
        image = image.crop((left, top, left + size[1], top + size[0]))  # with black outside of the image
    elif size != image.size[::-1]:
        image = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(image.height, image.width, channels)


def _resized(image: Image.Image, name: str, resizing: Resizing) -> Image.Image:
    """Return the image before its centre is cropped. Raises `UserError` if it has too many pixels."""
    Image = import_extra("PIL.Image", READING)
    height, width = resizing.scaled(image.height, image.width)
    if height * width > MAX_RESIZED_PIXELS:
        problem = f"{name} has {image.height} x {image.width} pixels, and {height} x {width} after resizing"
        raise UserError(f"{problem}; the limit is {MAX_RESIZED_PIXELS:,} in all: crop it first.")
    return image.resize((width, height), Image.Resampling[resizing.resampling.upper()])
