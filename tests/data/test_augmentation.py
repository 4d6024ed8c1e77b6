"""Image augmentation, compared with hand-computed pixels and with scipy's interpolation."""

from dataclasses import dataclass

import numpy as np
import pytest
from scipy.ndimage import map_coordinates

from jaxformer.data.augmentation import Augmentations, augment, draw_augmentations

PLAIN = {"shift": 0, "scale": 0.0, "rotate": 0.0, "flip": False, "jitter": 0.0}


def draw(n: int = 1000, epoch: int = 0, channels: int = 3, seed: int = 0, **options) -> Augmentations:
    return draw_augmentations(n, channels, seed, epoch, **PLAIN | options)


@dataclass(frozen=True)
class Shifted:
    """A shift in pixels, then a horizontal flip."""

    right: int = 0
    down: int = 0
    mirrored: bool = False

    def of(self, image: np.ndarray) -> list:
        affine = np.array([[-1 if self.mirrored else 1, 0, -self.right], [0, 1, -self.down]], float)
        return augment(image, affine, np.ones(1), np.zeros(1))[..., 0].tolist()


def test_shift_and_flip_match_hand_computed_pixels() -> None:
    """Shift a 3 x 3 image, repeating its edge, and flip it."""
    image = np.arange(9, dtype=np.uint8).reshape(3, 3, 1)
    assert Shifted().of(image) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert Shifted(right=1, down=1).of(image) == [[0, 0, 1], [0, 0, 1], [3, 3, 4]]
    assert Shifted(down=-1).of(image) == [[3, 4, 5], [6, 7, 8], [6, 7, 8]]
    assert Shifted(mirrored=True).of(image) == [[2, 1, 0], [5, 4, 3], [8, 7, 6]]
    assert Shifted(right=-1, mirrored=True).of(image) == [[2, 2, 1], [5, 5, 4], [8, 8, 7]]


def test_quarter_turn_equals_rot90() -> None:
    image = np.random.default_rng(0).integers(0, 256, (6, 6, 3), np.uint8)
    quarter = np.array([[0, -1, 0], [1, 0, 0]], float)
    np.testing.assert_array_equal(augment(image, quarter, np.ones(3), np.zeros(3)), np.rot90(image))


@pytest.mark.parametrize("shape", [(16, 16, 3), (12, 20, 3), (9, 7, 1)])
def test_interpolation_matches_scipy(shape: tuple[int, int, int]) -> None:
    """Rotate, scale, shift and flip at once; Pillow rounds down, so that values differ by less than one."""
    image = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    rows, columns = np.indices(shape[:2]) - (np.array(shape[:2])[:, None, None] - 1) / 2
    views = draw(20, channels=shape[2], shift=3, scale=1.0, rotate=180.0, flip=True)
    for affine, contrast, brightness in zip(*views, strict=True):
        x, y = np.tensordot(affine, np.stack([columns, rows, np.ones_like(rows)]), 1)
        places = [y + (shape[0] - 1) / 2, x + (shape[1] - 1) / 2]
        expected = [
            map_coordinates(channel.astype(float), places, order=1, mode="nearest")
            for channel in image.transpose(2, 0, 1)
        ]
        actual = augment(image, affine, contrast, brightness).transpose(2, 0, 1)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1)


def test_color_jitter_matches_hand_computed_values() -> None:
    """Halve and double the distance from 127.5, then add 0.2 and -1 times 127.5."""
    image = np.array([[[100, 100, 100], [255, 140, 0]]], np.uint8)
    actual = augment(image, np.eye(3)[:2], np.array([0.5, 2.0, 1.0]), np.array([0.2, 0.0, -1.0]))
    assert actual.tolist() == [[[139, 72, 0], [217, 152, 0]]]


def test_augmentation_without_options_is_identity() -> None:
    image = np.random.default_rng(2).integers(0, 256, (5, 8, 3), np.uint8)
    for one in zip(*draw(4), strict=True):
        np.testing.assert_array_equal(augment(image, *one), image)


def test_draws_span_their_ranges_and_are_uncorrelated() -> None:
    """Check extremes and correlations of 1,000 draws: the former are within 2% of the limits but for one time in e^20,
    the latter have a standard deviation of 0.032."""
    affine, contrast, brightness = draw(shift=2, scale=0.25, rotate=10.0, flip=True, jitter=0.5)
    turned = affine[:, :, :2]
    size = np.hypot(affine[:, 0, 1], affine[:, 1, 1])
    square = np.eye(2) * size[:, None, None] ** 2
    np.testing.assert_allclose(turned.mT @ turned, square, rtol=0, atol=1e-12)  # nothing is sheared
    angle = np.degrees(np.arctan2(-affine[:, 0, 1], affine[:, 1, 1]))
    for drawn, low, high in (
        (np.log(size), np.log(0.8), np.log(1.25)), (angle, -10, 10), (brightness, -0.5, 0.5),
        (np.log(contrast), -np.log(1.5), np.log(1.5)),
    ):  # fmt: skip
        assert low <= drawn.min() < low + 0.02 * (high - low) and high - 0.02 * (high - low) < drawn.max() <= high
    for moved in (affine[:, 0, 2], affine[:, 1, 2]):
        assert set(moved.tolist()) == {-2, -1, 0, 1, 2}
    mirrored = np.linalg.det(turned) < 0
    assert abs(mirrored.mean() - 0.5) < 0.064  # four times √(0.25/1000)
    drawn = [*affine[:, :, 2].T, mirrored, np.log(size), angle, *np.log(contrast).T, *brightness.T]
    assert np.abs(np.corrcoef(drawn) - np.eye(11)).max() < 0.126


def test_draws_depend_on_seed_epoch_and_image() -> None:
    options = {"shift": 5, "scale": 0.2, "rotate": 20.0, "jitter": 0.2}
    first, again, later, other = (draw(**drawn, **options) for drawn in ({}, {}, {"epoch": 1}, {"seed": 1}))
    for a, b, c, d in zip(first, again, later, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any() and (a != d).any() and (a[0] != a[1]).any()
    assert (first.contrast[:, 0] != first.contrast[:, 1]).any()
