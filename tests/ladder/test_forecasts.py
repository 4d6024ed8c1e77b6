"""Forecasts of a run agree with values computed by hand, and with the mean of many initialisations."""

import json
from dataclasses import replace
from math import log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import ladder_small
from jaxformer.config import OptimizerConfig
from jaxformer.data.counts import count
from jaxformer.ladder.forecasts import Forecast, _table_loss, describe_forecast, forecast, score
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from tests.helpers import ROOT

V = 128
RNG = np.random.default_rng(0)
COUNTS = count(RNG.integers(V, size=4000), RNG.integers(V, size=500), V, 3)


def small(name: str, **model):
    config = getattr(ladder_small, name)
    return replace(config, model=replace(config.model, vocab_size=V, **model), steps=100)


def first_losses(model, n_seeds: int = 16) -> np.ndarray:
    """Return the mean loss at initialisation on random tokens for each of several seeds."""
    tokens_BT = jnp.asarray(np.random.default_rng(1).integers(V, size=(8, 33)))
    module = model.build()

    def loss(key):
        params = module.init(key, tokens_BT[0, :-1])["params"]
        logits = jax.vmap(lambda x: module.apply({"params": params}, x))(tokens_BT[:, :-1])
        targets = tokens_BT[:, 1:][:, -model.n_predicted :]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()

    return np.asarray(jax.jit(jax.vmap(loss))(jax.random.split(jax.random.key(7, impl="rbg"), n_seeds)))


@pytest.mark.slow
def test_loss_at_step_0_is_the_mean_over_initialisations():
    config = small("rmsnorm", n_blocks=1, final_norm=True, logit_soft_cap=2.0)
    low, high = forecast(config, COUNTS).first_loss
    losses = first_losses(config.model)
    assert low < losses.mean() < high
    assert high - low < max(0.5, losses.mean() - log(V)) * 2  # not so wide that everything is in it


def test_by_hand_without_attention():
    """Inputs of mean square 2, then (2 + 1/64) / 6, and so on, so that logits have a variance of 0.02: the loss is
    log V + 0.01."""
    made = forecast(small("mlp_rowwise"), COUNTS)
    square = ((2 / 3 + 1 / 192) / 2 / 3 + 1 / 768) / 2 / 3 + 1 / 768
    assert np.mean(made.first_loss) == pytest.approx(log(V) + square / 2, abs=0.003)
    assert made.entropy == () and made.non_finite is None and made.plateau == COUNTS.loss(1)


@pytest.mark.slow
def test_highest_final_loss_is_near_that_of_pairs_with_an_optimizer_that_learns_all():
    """Of tokens that follow one another in order."""
    ordered, config = count(np.arange(4000) % V, np.arange(500) % V, V, 3), small("residual")
    low, high = forecast(replace(config, optimizer=OptimizerConfig("adamw", 1e-3)), ordered).final_loss
    assert low == 0 and high == pytest.approx(0.9 * ordered.loss(2) + 0.1 * ordered.loss(1))


def test_a_model_may_end_below_all_counts():
    """It shares between contexts what counting keeps apart: 3.64 nats, as `quick:modern` reaches, score as forecast."""
    made = forecast(replace(small("mlp_rowwise"), steps=1), COUNTS)
    outcome, as_forecast = score(made, [{"step": 1, "val_loss": 0.8 * COUNTS.loss(1)}], None)["final_loss"]
    assert as_forecast and outcome < min(COUNTS.loss(order) for order in (1, 2, 3))


@pytest.mark.slow
def test_divergence_depends_on_the_learning_rate():
    config = small("residual")
    assert forecast(config, COUNTS).non_finite is None
    made = forecast(replace(config, optimizer=replace(config.optimizer, learning_rate=50.0)), COUNTS)
    assert made.non_finite == (1, 20) and made.final_loss is None


def test_table_is_trained_by_gradient_flow():
    """The reference takes 20,000 equal steps in float64. The 64 longer ones are within 2.5 % of it, even at pairs that
    never occur, whose logits fall without end."""
    rng, time = np.random.default_rng(3), 3000.0
    train_N, val_M = (rng.choice(5, n, p=[0.5, 0.2, 0.15, 0.1, 0.05]) for n in (300, 100))
    train_N[1::2] = (train_N[::2] + 1) % 5  # after half of the tokens, the next one
    counts, pairs_VV = count(train_N, val_M, 5), np.zeros((5, 5))
    np.add.at(pairs_VV, (train_N[:-1], train_N[1:]), 1)
    total_V1 = pairs_VV.sum(axis=1, keepdims=True)
    softmax = lambda z: np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)  # noqa: E731
    z_VV = np.tile(np.log(counts.frequency_V), (5, 1))
    for _ in range(20_000):
        z_VV += time / 20_000 * total_V1 / len(train_N) * (pairs_VV / total_V1 - softmax(z_VV))
    expected = -np.log(softmax(z_VV)[val_M[:-1], val_M[1:]]).mean()
    assert _table_loss(counts, time, 0.0) == pytest.approx(expected, rel=0.025)
    noise, at_first = (_table_loss(counts, t, 2.0) - _table_loss(counts, t, 0.0) for t in (time, 0.0))
    assert abs(noise) < 0.06 and at_first > 0.1  # it is unlearned


def test_some_rows_of_a_large_table_give_its_loss(monkeypatch):
    rng, p = np.random.default_rng(3), 1 / np.arange(1, 65)
    train_N, val_M = (rng.choice(64, n, p=p / p.sum()) for n in (4000, 1000))
    train_N[1::2], val_M[1::2] = (train_N[::2] * 7 + 3) % 64, (val_M[::2] * 7 + 3) % 64
    counts = count(train_N, val_M, 64)
    whole, start = _table_loss(counts, 2000.0, 0.0), _table_loss(counts, 0.0, 0.0)
    monkeypatch.setattr("jaxformer.ladder.forecasts.TABLE_SIZE", 32 * 64)
    assert _table_loss(counts, 2000.0, 0.0) == pytest.approx(whole, abs=0.1 * (start - whole))


def test_stored_plateaus_are_scored_by_the_rule_of_today():
    figures = json.loads((ROOT / "studies/results/forecast.json").read_text())["figures"]
    for entry in (entry for seeds in figures.values() for entry in seeds.values()):
        made, (passed, came) = Forecast(**entry["forecast"]), entry["score"]["plateau"]
        log = [{"step": 0, "val_loss": 2 * made.plateau}]
        log += [] if passed is None else [{"step": passed, "val_loss": made.plateau}]
        assert score(made, log, None)["plateau"] == (passed, came)


def test_other_models_are_refused():
    with pytest.raises(TypeError, match="RecurrentLMConfig"):
        forecast(replace(small("residual"), model=RecurrentLMConfig(V, 32, "gru")), COUNTS)


def test_scores_by_hand():
    made = Forecast((1.0,), (4.0, 5.0), None, 3.0, (1.0, 2.0))
    log = [{"step": 0, "val_loss": 4.5, "entropy": [[1.0, 1.4]]}, {"step": 5, "val_loss": 2.5}, {"step": 9, "loss": 1}]
    assert score(made, log, None) == {
        "first_loss": (4.5, True), "entropy": ((1.2,), False), "non_finite": (None, True), "plateau": (5, True),
        "final_loss": (2.5, False),
    }  # fmt: skip
    ended = score(replace(made, non_finite=(1, 20), final_loss=None), log[:1], 7)
    assert ended["non_finite"] == (7, True) and ended["plateau"] == (None, True) and "final_loss" not in ended
    assert score(made, log[:1], 7)["non_finite"] == (7, False)
    last = score(made, [{"step": 0, "val_loss": 4.5}, {"step": 9, "val_loss": None}], None)  # without entropies
    assert last["non_finite"] == (9, False) and last.keys() == {"first_loss", "non_finite", "plateau"}
    assert describe_forecast(made) == "entropy 1, loss at first 4 to 5, no divergence, plateau 3, at the end at most 2"
