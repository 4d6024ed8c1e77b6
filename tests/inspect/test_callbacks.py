"""Callbacks of training."""

from dataclasses import asdict

import jax
import numpy as np
import pytest

from jaxformer.config import Config, TrainConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.windows import TextConfig
from jaxformer.inspect import sharpness
from jaxformer.inspect.callbacks import _full_rows, _unpadded_examples, make_callbacks, make_printer, probe_lines
from jaxformer.nn.parameter_norms import Row
from jaxformer.parallel.mesh import make_mesh
from jaxformer.train.setup import TrainSetup
from tests.arrays import plain_decoder

CONTRACT = plain_decoder(24, 7, 8, n_blocks=1, n_heads=2).contract


def test_disabled_reports_and_evaluations_have_no_callbacks(tmp_path):
    config = Config(
        "test",
        plain_decoder(24, 7, 8, n_blocks=1, n_heads=2),
        TextConfig(),
        100,
        train=TrainConfig(eval_every=0, report_every=0),
    )
    assert make_callbacks(TrainSetup(config, make_mesh("", jax.devices()[:1])), None, tmp_path) == []


def test_update_ratios_are_printed_with_the_first_samples(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxformer.inspect.callbacks._print_samples", lambda *_: "samples")
    monkeypatch.setattr("jaxformer.inspect.callbacks._print_update_ratios", lambda *_: "update ratios")
    config = Config(
        "test", plain_decoder(24, 7, 8, n_blocks=1, n_heads=2), TextConfig(), 150, train=TrainConfig(eval_every=0)
    )
    callbacks = make_callbacks(TrainSetup(config, make_mesh("", jax.devices()[:1])), None, tmp_path)
    due = [callback.call(100, None, None, {}) for callback in callbacks if callback.is_due(100)]
    assert due == ["update ratios", "samples"]


@pytest.mark.parametrize(("learning_rate", "is_printed"), [(0.05, True), (1e-8, False)])
def test_update_ratios_are_not_printed_once_the_learning_rate_has_decayed(tmp_path, capsys, learning_rate, is_printed):
    model = plain_decoder(24, 7, 8, n_blocks=1, n_heads=2)
    config = Config("test", model, TextConfig(), 150, train=TrainConfig(eval_every=0, report_every=50))
    setup = TrainSetup(config, make_mesh("", jax.devices()[:1]))
    rows = [asdict(Row(name, 1.0, 2.0, 0.1, 0.3)) for name in setup.parameter_order]
    _, ratios, _ = make_callbacks(setup, None, tmp_path)
    ratios.call(150, None, None, {"lr": learning_rate, "gradients": rows})
    assert ("W_out" in capsys.readouterr().out) == is_printed


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, np.nan])
def test_sharpness_is_logged_beside_its_limit_and_ends_no_training(tmp_path, scale):
    model = plain_decoder(5, 4, 4, n_blocks=1, d_ff=(6,), activation="gelu")
    train = TrainConfig(batch_size=2, eval_every=0, report_every=0, sharpness_every=50)
    config = Config("test", model, TextConfig(), 150, train=train)
    setup = TrainSetup(config, make_mesh("", jax.devices()[:1]))

    class Data:
        def batch(self, step, rows):
            tokens_BT = np.random.default_rng(step).integers(0, 5, (len(rows), 5))
            return Batch((tokens_BT[:, :-1],), tokens_BT[:, 1:])

    [callback] = make_callbacks(setup, Data(), tmp_path)
    state = setup.init_state()
    state = state._replace(params=jax.tree.map(lambda x: scale * x, state.params))
    row = callback.call(50, state, None, {"lr": 0.1})
    assert row["sharpness_limit"] == pytest.approx(2 * 1.9 / 2.8 / 0.1)
    assert [step for step in range(101) if callback.is_due(step)] == [0, 50, 100]
    if np.isnan(scale):
        assert np.isnan(row["sharpness"])
    else:
        expected, _ = sharpness(setup.model, setup.model_params(state), Data().batch(0, np.arange(2)))
        assert row["sharpness"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("has_mask", "weights_BN", "expected"),
    [
        # Pairs, one of them as long as the batch: padded ones are probed with their mask.
        (True, [[1, 1, 1], [1, 0, 0], [0, 0, 0]], [True, True, False]),
        # Windows, the last one padded without a mask; and prefixes, which have no targets.
        (False, [[1, 1, 1], [1, 1, 0], [0, 0, 0]], [True, False, False]),
        (False, [[1, 1, 1], [0, 0, 1], [0, 1, 0]], [True, True, False]),
        # A short text alone is probed.
        (False, [[1, 1, 0], [0, 0, 0]], [True, False]),
    ],
)
def test_padding_is_not_probed(has_mask, weights_BN, expected):
    weights_BN = np.array(weights_BN, np.float32)
    inputs = (weights_BN.astype(np.int32), *([weights_BN > 0] if has_mask else []))
    batch = Batch(inputs, weights_BN.astype(np.int32), weights_BN)
    assert _unpadded_examples(CONTRACT, batch).tolist() == expected


def test_packed_rows_are_probed_without_their_padding():
    """Their segments say where it is; a row of only padding fills the batch."""
    segments_BT = np.array([[1, 1, 2, 0], [1, 0, 0, 0], [1, 1, 1, 1]], np.int32)
    tokens_BT, weights_BT = 10 * segments_BT + np.arange(4, dtype=np.int32), np.zeros((3, 4), np.float32)
    weights_BT[[0, 1], 0] = 1
    batch = Batch((tokens_BT, None, segments_BT), tokens_BT, weights_BT)
    assert _unpadded_examples(CONTRACT, batch).tolist() == [True, True, False]
    assert _full_rows(CONTRACT, batch).tolist() == [[10, 11, 22, 10], [10, 11, 12, 13]]
    short = jax.tree.map(lambda x: x[1:2], batch)
    assert _full_rows(CONTRACT, short).tolist() == [[10]]


def test_probes_are_printed_below_an_evaluation_entropies_only_on_request(capsys):
    share = {"blocks.0.mlp": {"share": [0.5, 0.2, 0.3]}, "blocks.1.mlp": {"share": [0.1, 0.3, 0.6]}}
    row = {"step": 8, "val_loss": 2.0, "router": share, "entropy": [[1.0, None], [1.234] * 64]}
    make_printer(False)(row)
    assert capsys.readouterr().out == "     tokens per expert 10.0 to 60.0 %\n"
    make_printer(True)(row)
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("     entropy (nats) of heads per block  0: 1.00 nan")
    assert "\n".join(lines).count("1.23") == 64 and probe_lines({"step": 8, "val_loss": 1.0}, True) == []
    make_printer(True)({"step": 9, "loss": 2.0, "entropy": [[1.0]]})
    assert capsys.readouterr().out == ""
