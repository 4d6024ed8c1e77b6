"""Pixels as the tokens of a transformer."""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp


def standardised(pixels: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """(x - mean) / std, float32, where x is uint8 pixels over 255, or floats as they are.

    Args:
      pixels: `(…, C)`.
      mean, std: of the training set, in parts of white; one for all channels, or one for each.
    """
    x = pixels / 255 if pixels.dtype == jnp.uint8 else pixels
    return (x.astype(jnp.float32) - jnp.asarray(mean, jnp.float32)) / jnp.asarray(std, jnp.float32)


def patchify(pixels: jax.Array, size: Sequence[int]) -> jax.Array:
    """An image `(height, width, C)` cut into patches, or a video `(frames, height, width, C)` into tubelets
    (Dosovitskiy et al. 2021, section 3.1; Arnab et al. 2021, section 3.2).

    Args:
      size: of a patch along each axis but the channels; it must divide them.

    Returns:
      `(N, P)`, a patch a row, in the order of the axes, the last quickest; and so are a patch's P pixels.
    """
    *lengths, channels = pixels.shape
    n = len(size)
    # Of each axis, which patch and where in it; then all of the one before all of the other.
    apart = [part for length, s in zip(lengths, size, strict=True) for part in (length // s, s)]
    blocks = pixels.reshape(*apart, channels).transpose(*range(0, 2 * n, 2), *range(1, 2 * n, 2), 2 * n)
    return blocks.reshape(-1, prod(size) * channels)
