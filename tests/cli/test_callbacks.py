"""What is looked at while training."""

import jax
import numpy as np
import pytest

from jaxformer.cli.callbacks import _whole, make_callbacks
from jaxformer.config import Config, TrainConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.windows import TextConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.sharding import make_mesh
from jaxformer.train.setup import TrainSetup


def test_reports_and_evaluations_that_are_switched_off_are_not_even_prepared(tmp_path):
    config = Config(
        "test",
        DecoderConfig(24, 7, 8, n_blocks=1, n_heads=2),
        TextConfig(),
        100,
        train=TrainConfig(eval_every=0, report_every=0),
    )
    assert make_callbacks(TrainSetup(config, make_mesh("", jax.devices()[:1])), None, tmp_path) == []


def test_update_ratios_are_shown_beside_the_first_samples(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxformer.cli.callbacks._samples", lambda *_: "samples")
    monkeypatch.setattr("jaxformer.cli.callbacks._update_ratios", lambda *_: "update ratios")
    monkeypatch.setattr("jaxformer.cli.callbacks._continuations", lambda *_: None)
    monkeypatch.setattr("jaxformer.cli.callbacks._init_check", lambda *_: None)
    config = Config(
        "test", DecoderConfig(24, 7, 8, n_blocks=1, n_heads=2), TextConfig(), 150, train=TrainConfig(eval_every=0)
    )
    callbacks = make_callbacks(TrainSetup(config, make_mesh("", jax.devices()[:1])), None, tmp_path)
    assert [callback.call for callback in callbacks if callback.is_due(100)] == ["update ratios", "samples"]


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
