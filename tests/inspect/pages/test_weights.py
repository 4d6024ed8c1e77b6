"""Parameters in 8 bits: their error, and that they are stored once."""

import numpy as np

from jaxformer.inspect.pages.weights import GROUP, pack_params, quantize, round_params

N = 5 * GROUP + 7  # an incomplete group at the end


def test_error_is_half_a_scale_and_zeros_remain():
    x_N = np.random.default_rng(0).standard_normal(N).astype(np.float32) * np.logspace(-30, 30, N, dtype=np.float32)
    x_N[:GROUP] = 0
    values_N, scales = quantize(x_N)
    scale_N = np.repeat(scales, GROUP)[:N]
    error_N = np.abs(x_N - values_N * scale_N)
    assert (values_N[:GROUP] == 0).all() and (scales[1:] > 0).all()
    assert (error_N <= 0.5 * scale_N * 1.5).all()  # the largest may exceed 127 scales by what rounding a scale takes
    np.testing.assert_allclose(
        scales[1:-1], np.abs(x_N[GROUP : 5 * GROUP]).reshape(4, -1).max(axis=1) / 127, rtol=2**-8
    )


def test_rounded_parameters_are_stored_exactly():
    x = np.random.default_rng(1).standard_normal((6, 11)).astype(np.float32)
    params = {"attention": {"W_Q": x.reshape(6, 1, 11), "W_O": x.reshape(1, 6, 11), "b_O": x[0]}, "W_E": x}
    rounded = round_params(params, 8)
    assert pack_params(rounded, 8) == pack_params(params, 8) != b""
    np.testing.assert_array_equal(rounded["attention"]["b_O"], x[0])
    for leaf in (
        rounded["attention"]["W_Q"].reshape(6, 11),
        rounded["attention"]["W_O"].reshape(6, 11),
        rounded["W_E"],
    ):
        assert 0 < np.abs(leaf - x).max() < np.abs(x).max() / 250
    groups = 3 * -(-x.size // GROUP)
    assert len(pack_params(params, 8)) == 4 * 11 + 2 * groups + 3 * x.size
