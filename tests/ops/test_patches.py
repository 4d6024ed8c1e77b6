import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.patches import patches


def test_squares_row_by_row_and_pixels_row_by_row_in_them() -> None:
    """An image whose numbers are their places: 4 by 6 pixels, two channels, cut by hand."""
    image = jnp.arange(4 * 6 * 2).reshape(4, 6, 2)
    found = patches(image, 2)
    assert found.shape == (6, 8)
    np.testing.assert_array_equal(found[0], [0, 1, 2, 3, 12, 13, 14, 15])
    np.testing.assert_array_equal(found[2], [8, 9, 10, 11, 20, 21, 22, 23])
    np.testing.assert_array_equal(found[3], [24, 25, 26, 27, 36, 37, 38, 39])


@pytest.mark.parametrize("shape", [(5, 6, 1), (6, 5, 1)])
def test_sides_that_are_no_multiples_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"an image of {shape[0]} by {shape[1]} pixels does not fall"):
        patches(jnp.zeros(shape), 3)
