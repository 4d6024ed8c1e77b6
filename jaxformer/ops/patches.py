"""Patches of images and videos."""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.errors import batch_hint
from jaxformer.ops.broadcasting import expand
from jaxformer.ops.explicit_axes import with_auto_axes


def standardize(pixels: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """Return (x - mean) / std in float32, where x is float pixels, or uint8 pixels divided by 255.

    Args:
      pixels: `(…, C)`.
      mean, std: statistics of the training set, with white at 1; one value for all channels, or one per channel.

    Raises:
      TypeError: the pixels are other integers.
    """
    if pixels.dtype != jnp.uint8 and not jnp.issubdtype(pixels.dtype, jnp.floating):
        raise TypeError(f"pixels are {pixels.dtype}; give uint8, or floating-point numbers with white at 1")
    x = pixels / 255 if pixels.dtype == jnp.uint8 else pixels
    mean_C, std_C = (expand(jnp.asarray(values, jnp.float32), x.ndim) for values in (mean, std))
    return (x.astype(jnp.float32) - mean_C) / std_C


@with_auto_axes
def patchify(pixels: jax.Array, size: Sequence[int]) -> jax.Array:
    """Return the patches of an image `(height, width, C)`, or the tubelets of a video `(frames, height, width, C)`
    (Dosovitskiy et al. 2021, section 3.1; Arnab et al. 2021, section 3.2).

    Args:
      size: patch size along each axis but the channels; it must divide the axis.

    Returns:
      `(N, P)`, one patch per row; patches, and the P pixels of each, are in row-major order, channels last.

    Raises:
      ValueError: the pixels have another number of axes, or the size does not divide an axis.
    """
    *lengths, channels = pixels.shape
    n = len(size)
    if len(lengths) != n or any(length % s for length, s in zip(lengths, size, strict=True)):
        hint = batch_hint(lengths, n) or ", channels last"
        raise ValueError(f"pixels of shape {pixels.shape} cannot be split into patches of size {tuple(size)}{hint}")
    # Each axis becomes a patch index and an index within the patch; then all patch indices go first.
    split = [part for length, s in zip(lengths, size, strict=True) for part in (length // s, s)]
    blocks = pixels.reshape(*split, channels).transpose(*range(0, 2 * n, 2), *range(1, 2 * n, 2), 2 * n)
    return blocks.reshape(-1, prod(size) * channels)


def resize_grid(x_ND: jax.Array, old: Sequence[int], new: Sequence[int]) -> jax.Array:
    """Return vectors of a grid in row-major order, `(N, D)`, interpolated to another number of rows and columns: by
    cubic convolution (Keys 1981) with a = -0.75, the border repeated, as in torch."""
    rows_YR, columns_XC = (_cubic_weights(*sizes).astype(x_ND.dtype) for sizes in zip(old, new, strict=True))
    grid_RCD = x_ND.reshape(*old, -1)
    precision = jax.lax.Precision.HIGHEST
    return jnp.einsum("YR,RCD,XC->YXD", rows_YR, grid_RCD, columns_XC, precision=precision).reshape(-1, x_ND.shape[-1])


def _cubic_weights(old: int, new: int, a: float = -0.75) -> np.ndarray:
    """Return the weights of `old` numbers in each of `new` interpolated ones, `(new, old)` float64."""
    centre = (np.arange(new) + 0.5) * old / new - 0.5
    weights = np.zeros((new, old))
    for offset in range(-1, 3):
        neighbour = np.floor(centre).astype(int) + offset
        d = np.abs(centre - neighbour)
        near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * (d**3 - 5 * d**2 + 8 * d - 4)
        np.add.at(weights, (np.arange(new), neighbour.clip(0, old - 1)), np.where(d <= 1, near, far))
    return weights
