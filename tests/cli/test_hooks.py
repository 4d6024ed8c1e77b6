"""What is looked at while training."""

import numpy as np
import pytest

from jaxformer.cli.hooks import _whole
from jaxformer.data.dataset import Batch


@pytest.mark.parametrize(
    ("padding_is_told", "weights_BN", "kept"),
    [
        # Pairs, of which one is as long as its batch: padded ones are looked at beside it.
        (True, [[1, 1, 1], [1, 0, 0], [0, 0, 0]], [True, True, False]),
        # Windows, the last one filled up, which the model is not told; and a prefix, of which nothing is predicted.
        (False, [[1, 1, 1], [1, 1, 0], [0, 0, 0]], [True, False, False]),
        (False, [[1, 1, 1], [0, 0, 1], [0, 1, 0]], [True, True, False]),
        # One short text is better than nothing.
        (False, [[1, 1, 0], [0, 0, 0]], [True, False]),
    ],
)
def test_filling_is_not_looked_at(padding_is_told, weights_BN, kept):
    weights_BN = np.array(weights_BN, np.float32)
    inputs = (weights_BN.astype(np.int32), *([weights_BN > 0] if padding_is_told else []))
    assert _whole(Batch(inputs, weights_BN.astype(np.int32), weights_BN)).tolist() == kept
