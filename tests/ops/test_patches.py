"""Pixels as tokens."""

import numpy as np
import pytest

from jaxformer.ops.patches import patchify, resize_grid, standardize
from tests.arrays import assert_close


@pytest.mark.parametrize(("shape", "size"), [((6, 4, 3), (3, 2)), ((4, 6, 4, 1), (2, 3, 2)), ((2, 3, 5, 2), (1, 3, 5))])
def test_patches_are_those_of_a_loop(shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Every pixel has its own number."""
    pixels = np.arange(np.prod(shape)).reshape(shape)
    grid = [n // s for n, s in zip(shape, size, strict=False)]
    wanted = []
    for corner in np.ndindex(*grid):
        patch = []
        for inside in np.ndindex(*size, shape[-1]):
            at = [c * s + i for c, s, i in zip(corner, size, inside, strict=False)]
            patch.append(pixels[(*at, inside[-1])])
        wanted.append(patch)
    np.testing.assert_array_equal(patchify(pixels, size), wanted)


def test_a_size_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"of shape \(5, 4, 1\) cannot be split into patches of size \(2, 2\)"):
        patchify(np.zeros((5, 4, 1)), (2, 2))


def test_bytes_are_parts_of_white_and_floats_are_as_they_are() -> None:
    """255 is 1: (1 - 0.5) / 0.25 = 2. Channels have their own mean and spread."""
    assert_close(standardize(np.uint8([[0], [255]]), (0.5,), (0.25,)), [[-2], [2]])
    assert_close(standardize(np.float32([[0], [1]]), (0.5,), (0.25,)), [[-2], [2]])
    assert_close(standardize(np.float32([[1, 1]]), (0.0, 0.5), (1.0, 0.1)), [[1, 5]])


def test_pixels_of_another_layout_or_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 8, 8\) cannot be split into patches of size \(4, 4\), channels last"):
        patchify(np.zeros((3, 8, 8)), (4, 4))
    with pytest.raises(ValueError, match=r"use jax.vmap for a batch"):
        patchify(np.zeros((2, 8, 8, 3)), (4, 4))
    with pytest.raises(TypeError, match="pixels are int32; give uint8, or floating-point numbers with white at 1"):
        standardize(np.zeros((8, 8, 3), np.int32), (0.5,), (0.5,))


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [((3, 5), (4, 2)), ((2, 2), (7, 3)), ((5, 4), (5, 4))])
def test_a_grid_is_interpolated_as_by_torch(old: tuple[int, int], new: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    x_ND = np.random.default_rng(0).normal(size=(old[0] * old[1], 3)).astype(np.float32)
    grid = torch.tensor(x_ND.T.reshape(1, 3, *old))
    wanted = torch.nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    assert_close(resize_grid(x_ND, old, new), wanted[0].numpy().reshape(3, -1).T)
