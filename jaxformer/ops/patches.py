"""Images in pieces."""

import jax


def patches(image_HWC: jax.Array, size: int) -> jax.Array:
    """Squares of `size` by `size` pixels, row by row, each flat: `(H·W / size², size²·C)` (Dosovitskiy et al. 2021,
    section 3.1).

    Raises:
      ValueError: the sides are no multiples of the size.
    """
    H, W, C = image_HWC.shape
    if H % size or W % size:
        raise ValueError(f"an image of {H} by {W} pixels does not fall into squares of {size} by {size}")
    grid = image_HWC.reshape(H // size, size, W // size, size, C).swapaxes(1, 2)
    return grid.reshape(-1, size * size * C)
