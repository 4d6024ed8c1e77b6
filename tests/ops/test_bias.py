from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.ops.attention import attention
from jaxformer.ops.bias import ALiBi, RelativePositionBias, alibi_slopes, relative_position_buckets
from jaxformer.ops.blockwise import blockwise_attention
from tests.arrays import normal

H, T, S, K = 2, 3, 5, 4


def test_alibi_is_minus_slope_times_distance() -> None:
    """By hand: 8 heads halve from 1/2 on; 6 have the slopes of 4, 1/4 to 1/256, and every other one of 8."""
    np.testing.assert_array_equal(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_array_equal(alibi_slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])
    alibi = ALiBi((1.0, 0.5))
    distances = [[0, -1, -2], [-1, 0, -1]]
    np.testing.assert_array_equal(alibi(np.arange(2), np.arange(3)), [distances, np.multiply(0.5, distances)])
    np.testing.assert_array_equal(alibi(np.array([7]), np.array([9, -1]))[0], [[-2, -8]])  # a cache: slots in any order
    assert hash(alibi) == hash(ALiBi((1.0, 0.5))) and not jax.tree.leaves(alibi)


def test_relative_positions_share_buckets_as_in_t5() -> None:
    """By hand, 32 buckets up to distance 128: 16 for each direction, 8 for one distance each, 8 that widen by a factor
    of 16^(1/8) = 1.41 from 8 on, to 11.3, 16, 22.6, 32, 45.3, 64, 90.5."""
    before = -np.array([0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 127, 128, 999])
    wanted = np.array([0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15, 15])
    np.testing.assert_array_equal(relative_position_buckets(before, 32), wanted)
    np.testing.assert_array_equal(relative_position_buckets(-before, 32), wanted + 16 * (before < 0))
    one_sided = relative_position_buckets(np.array([5, 0, -1, -15, -16, -999]), 32, bidirectional=False)
    np.testing.assert_array_equal(one_sided, [0, 0, 1, 15, 16, 31])
    for n_buckets, max_distance in ((3, 128), (32, 8)):
        with pytest.raises(ValueError, match=f"{n_buckets} buckets have . for one distance each in a direction"):
            relative_position_buckets(before, n_buckets, max_distance=max_distance)
    table_NH = normal(8, H)
    bias = RelativePositionBias(table_NH, max_distance=20)
    bias_HTS = jax.jit(lambda bias, *positions: bias(*positions))(bias, np.arange(50, 53), np.arange(40, 80))
    for t, s in ((0, 0), (2, 12), (1, 39)):  # 10 positions before, none, and 28 after
        (bucket,) = relative_position_buckets(np.array([40 + s - 50 - t]), 8, max_distance=20)
        np.testing.assert_array_equal(bias_HTS[:, t, s], table_NH[bucket])


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (64, 128), (32, 300), (8, 20)])
def test_buckets_are_those_of_transformers(n_buckets: int, max_distance: int, bidirectional: bool) -> None:
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = np.arange(-1000, 1001)
    wanted = t5._relative_position_bucket(torch.tensor(distance), bidirectional, n_buckets, max_distance)
    np.testing.assert_array_equal(relative_position_buckets(distance, n_buckets, bidirectional, max_distance), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 20, 32, 71])
def test_slopes_are_those_of_transformers(n_heads: int) -> None:
    torch = pytest.importorskip("torch")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    wanted = bloom.build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), n_heads, torch.float64)[:, 0, 1]
    np.testing.assert_allclose(alibi_slopes(n_heads), wanted, rtol=1e-6)  # theirs are float32


WRONG: dict[str, tuple[dict[str, Any], type, str]] = {
    "a mask": ({"bias": np.ones((T, S), bool)}, TypeError, "the bias is bool; .*; a bool array is a mask"),
    "integers": ({"bias": np.ones((T, S), int)}, TypeError, "the bias is int64; give a floating-point array"),
    "a class": ({"bias": ALiBi}, TypeError, "the bias is the class ALiBi; give an instance"),
    "of keys": ({"bias": np.ones(S)}, ValueError, r"expected a bias of shape \(3, 5\) or \(2, 3, 5\), got \(5,\)"),
    "of other heads": ({"bias": ALiBi((1.0,))}, ValueError, "the bias is for 1 heads, the queries have 2"),
    "a cap of 0": ({"soft_cap": 0.0}, ValueError, "soft_cap is 0.0; it must be positive"),
    "one sink": ({"sinks": np.ones(1)}, ValueError, r"expected one sink per query head, \(2,\), got \(1,\)"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("attend", [attention, blockwise_attention], ids=["whole", "tiled"])
def test_terms_of_scores_that_would_be_misread_are_refused(name: str, attend: Any) -> None:
    terms, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        attend(*(np.ones((H, n, K), np.float32) for n in (T, S, S)), **terms)
