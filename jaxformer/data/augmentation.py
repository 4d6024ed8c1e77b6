"""Other views of an image: moved, scaled, turned, mirrored, in other colours."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log1p, radians
from typing import NamedTuple

import numpy as np

from jaxformer.data.images import epoch_uniforms

MIDDLE = 127.5
"""Of the values of a pixel, and half their range."""


class Augmentations(NamedTuple):
    """How n images are varied, each array with n first."""

    affine: np.ndarray
    """`(n, 2, 3)`: x and y, in pixels from the middle of the image, of what is seen at `(x, y, 1)` of its view."""
    contrast: np.ndarray
    """`(n, C)`: by what the distance from middle grey is multiplied, in each channel."""
    brightness: np.ndarray
    """`(n, C)`: what is added to it then, in half ranges of a pixel."""


@lru_cache(maxsize=2)
def draw_augmentations(
    n: int, channels: int, seed: int, epoch: int, shift: int, scale: float, rotate: float, flip: bool, jitter: float
) -> Augmentations:
    """How an epoch varies each of n images: it is moved, then turned and scaled about its middle, then mirrored.

    All is drawn evenly, factors by their logarithm.

    Args:
      shift: whole pixels by which one is moved at most, down or up and to a side.
      scale: it is enlarged by a factor from 1 / (1 + scale) to 1 + scale.
      rotate: degrees by which it is turned at most, to either side.
      flip: half of them are mirrored, left for right.
      jitter: the contrast of each channel has a factor as `scale` has it, and its brightness changes by up to this
        share of half the range of a pixel.
    """
    drawn_kn = epoch_uniforms(n, 5 + 2 * channels, seed, epoch).T
    left_n, up_n = np.floor(drawn_kn[:2] * (2 * shift + 1)) - shift
    mirror_n = np.where(flip & (drawn_kn[2] < 0.5), -1, 1)
    angle_n, log_scale_n, *colours_kn = 2 * drawn_kn[3:] - 1
    # A view of an enlarged image shows less of it.
    reach_n, angle_n = np.exp(-log1p(scale) * log_scale_n), radians(rotate) * angle_n
    cos_n, sin_n = reach_n * np.cos(angle_n), reach_n * np.sin(angle_n)
    rows = ((mirror_n * cos_n, -sin_n, left_n), (mirror_n * sin_n, cos_n, up_n))
    log_contrast_nC, brightness_nC = np.split(np.transpose(colours_kn), 2, axis=1)
    return Augmentations(np.transpose(rows, (2, 0, 1)), np.exp(log1p(jitter) * log_contrast_nC), jitter * brightness_nC)


def augment(
    image_HWC: np.ndarray, affine_23: np.ndarray, contrast_C: np.ndarray, brightness_C: np.ndarray
) -> np.ndarray:
    """Return the transformed image, uint8, of the same shape: bilinear, rounded down, with its edge repeated."""
    from PIL import Image  # it takes a moment

    height, width, _ = image_HWC.shape
    middle_2 = np.array([width, height]) / 2
    corners_34 = np.array([[x, y, 1] for x in (-middle_2[0], middle_2[0]) for y in (-middle_2[1], middle_2[1])]).T
    beyond = max(0, ceil((np.abs(affine_23 @ corners_34) - middle_2[:, None]).max()))
    padded = np.pad(image_HWC, ((beyond, beyond), (beyond, beyond), (0, 0)), mode="edge")
    # Pillow counts from the corner.
    moved_2 = affine_23[:, 2] + middle_2 + beyond - affine_23[:, :2] @ middle_2
    matrix = np.concatenate([affine_23[:, :2], moved_2[:, None]], axis=1).reshape(-1)
    picture = Image.fromarray(padded.squeeze(2) if padded.shape[2] == 1 else padded)
    seen = picture.transform((width, height), Image.Transform.AFFINE, tuple(matrix), Image.Resampling.BILINEAR)
    pixels_HWC = np.asarray(seen).reshape(image_HWC.shape)
    coloured_HWC = (pixels_HWC - MIDDLE) * contrast_C + MIDDLE * (1 + brightness_C)
    return np.clip(np.rint(coloured_HWC), 0, 255).astype(np.uint8)
