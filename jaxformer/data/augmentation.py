"""Data augmentation of images: shift, scale, rotation, horizontal flip and colour jitter."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log1p, radians
from typing import NamedTuple

import numpy as np

from jaxformer.data.dataset import epoch_uniforms
from jaxformer.errors import import_extra

HALF_RANGE = 127.5
"""Half the range of pixel values, which is also their midpoint."""


class Augmentations(NamedTuple):
    """Augmentation parameters for n images, each array with leading axis n."""

    affine: np.ndarray
    """`(n, 2, 3)`: maps `(x, y, 1)` of the output to x and y of the input, in pixels from the image's centre."""
    contrast: np.ndarray
    """`(n, C)`: factor on the distance from mid-grey, per channel."""
    brightness: np.ndarray
    """`(n, C)`: offset in units of `HALF_RANGE`, per channel, added after the contrast."""


@lru_cache(maxsize=2)
def draw_augmentations(
    n: int, channels: int, seed: int, epoch: int, shift: int, scale: float, rotate: float, flip: bool, jitter: float
) -> Augmentations:
    """Sample the augmentations of n images for an epoch: a shift, then a rotation and scaling about the centre, then a
    flip, and colour jitter. Parameters are uniform, factors on a logarithmic scale.

    Args:
      shift: maximum shift in whole pixels, vertical and horizontal.
      scale: images are scaled by a factor from 1 / (1 + scale) to 1 + scale.
      rotate: maximum rotation in degrees, in both directions.
      flip: flip half of the images horizontally.
      jitter: each channel's contrast is scaled by a factor from 1 / (1 + jitter) to 1 + jitter, and its brightness
        changes by up to this fraction of `HALF_RANGE`.
    """
    draws_kn = epoch_uniforms(n, 5 + 2 * channels, seed, epoch).T
    left_n, up_n = np.floor(draws_kn[:2] * (2 * shift + 1)) - shift
    mirror_n = np.where(flip & (draws_kn[2] < 0.5), -1, 1)
    angle_n, log_scale_n, *colors_kn = 2 * draws_kn[3:] - 1
    # The map goes from output to input: enlarging the image shrinks its coordinates.
    factor_n, angle_n = np.exp(-log1p(scale) * log_scale_n), radians(rotate) * angle_n
    cos_n, sin_n = factor_n * np.cos(angle_n), factor_n * np.sin(angle_n)
    affine = ((mirror_n * cos_n, -sin_n, left_n), (mirror_n * sin_n, cos_n, up_n))
    log_contrast_nC, brightness_nC = np.split(np.transpose(colors_kn), 2, axis=1)
    contrast_nC = np.exp(log1p(jitter) * log_contrast_nC)
    return Augmentations(np.transpose(affine, (2, 0, 1)), contrast_nC, jitter * brightness_nC)


def augment(
    image_HWC: np.ndarray, affine_23: np.ndarray, contrast_C: np.ndarray, brightness_C: np.ndarray
) -> np.ndarray:
    """Return an augmented image, uint8 of the same shape, with bilinear interpolation, rounded down, and edge padding;
    see `Augmentations`."""
    Image = import_extra("PIL.Image", "data augmentation")
    height, width, _ = image_HWC.shape
    middle_2 = np.array([width, height]) / 2
    corners_34 = np.array([[x, y, 1] for x in (-middle_2[0], middle_2[0]) for y in (-middle_2[1], middle_2[1])]).T
    padding = max(0, ceil((np.abs(affine_23 @ corners_34) - middle_2[:, None]).max()))
    padded = np.pad(image_HWC, ((padding, padding), (padding, padding), (0, 0)), mode="edge")
    # Pillow's coordinates start at the corner.
    offset_2 = affine_23[:, 2] + middle_2 + padding - affine_23[:, :2] @ middle_2
    matrix = np.concatenate([affine_23[:, :2], offset_2[:, None]], axis=1).reshape(-1)
    image = Image.fromarray(padded.squeeze(2) if padded.shape[2] == 1 else padded)
    image = image.transform((width, height), Image.Transform.AFFINE, tuple(matrix), Image.Resampling.BILINEAR)
    pixels_HWC = np.asarray(image).reshape(image_HWC.shape)
    colored_HWC = (pixels_HWC - HALF_RANGE) * contrast_C + HALF_RANGE * (1 + brightness_C)
    return np.clip(np.rint(colored_HWC), 0, 255).astype(np.uint8)
