"""A divergence is told from a spike."""

import json
from dataclasses import replace
from math import exp, inf, log, nan
from pathlib import Path

import numpy as np
import pytest

from jaxformer.config import Config, OptimizerConfig
from jaxformer.data.windows import TextConfig
from jaxformer.models.clip import CLIPConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.train.divergence import (
    LOST_STEPS,
    MAX_LOST,
    MEAN_STEPS,
    Divergence,
    DivergenceMonitor,
    chance_loss,
)
from jaxformer.train.hints import hint_text, hints
from tests.arrays import plain_decoder

CHANCE = log(2048)
FALLING = [CHANCE + 0.1 - 0.03 * step for step in range(80)]
"""To 5.35 nats, at step 80."""
MINIMUM = FALLING[-1]
FEWEST_STEPS = int(LOST_STEPS / MAX_LOST**2)
"""Steps to notice the largest losses."""
TRACES = json.loads((Path(__file__).parents[1] / "fixtures/divergence.json").read_text())
"""Loss and gradient norm of each step of runs that `studies/divergence.py` trained, rounded."""


def watch(losses: list[float], grad_norms: list[float] | None = None, chance: float = CHANCE) -> list[Divergence]:
    monitor = DivergenceMonitor(chance)
    pairs = enumerate(zip(losses, grad_norms or [1.0] * len(losses), strict=True), start=1)
    updates = [monitor.update(step, loss, norm) for step, (loss, norm) in pairs]
    return [divergence for divergence in updates if divergence is not None]


def noisy(losses: list[float], deviation: float, seed: int = 0) -> list[float]:
    return (np.array(losses) + np.random.default_rng(seed).normal(0, deviation, len(losses))).tolist()


def falling_to(end: float, steps: int, first: float = 8.13) -> list[float]:
    return [end + (first - end) * exp(-step / 100) for step in range(steps)]


@pytest.mark.parametrize(
    ("after", "steps"),
    [(100.0, FEWEST_STEPS), (1e11, FEWEST_STEPS), (CHANCE + 0.8, 13), (CHANCE - 0.05, 26), (6.8, 64)],
)
def test_larger_losses_are_noticed_sooner(after, steps):
    (divergence,) = watch(FALLING + [after] * 150)
    assert (divergence.began, divergence.step) == (81, 80 + steps)
    assert (divergence.loss, divergence.minimum_step) == (after, 80)
    np.testing.assert_allclose(divergence.minimum, np.mean(FALLING[-MEAN_STEPS:]))
    assert str(divergence) == (
        f"the loss has been diverging since step 81: {after:.4g} at step {80 + steps}, after a minimum of 5.49 (mean "
        f"of up to 10 steps) at step 80; it is {after - divergence.minimum:.3g} above that, and the larger of its "
        "first value and the chance loss is 7.72"
    )
    assert watch(FALLING + [after] * (steps - 1) + [MINIMUM] * 20) == []


@pytest.mark.parametrize("deviation", [0.0, 0.15, 0.25, 0.35])
@pytest.mark.parametrize(("before", "after"), [(5.3, 6.65), (4.5, 6.0)])
def test_persistent_collapse_is_noticed_despite_noise(before, after, deviation):
    (divergence, *_) = watch(noisy(falling_to(before, 600) + [after] * 250, deviation))
    assert 598 <= divergence.began <= 601 and divergence.step <= 600 + 210
    assert watch(noisy(falling_to(before, 600) + [after] * 60 + [before] * 300, deviation)) == []


def test_a_collapse_of_two_classes_to_guessing_is_noticed():
    (divergence,) = watch(falling_to(0.02, 300, first=log(2)) + [log(2)] * 50, chance=log(2))
    assert (divergence.began, divergence.step) == (301, 300 + LOST_STEPS)


@pytest.mark.parametrize("deviation", [0.15, 0.25, 0.35])
def test_a_noisy_run_is_healthy(deviation):
    monitor, healthy = DivergenceMonitor(CHANCE), []
    for step, loss in enumerate(noisy(falling_to(3.9, 1200), deviation), start=1):
        assert monitor.update(step, loss, 1.0) is None
        healthy.append(monitor.healthy)
    assert sum(healthy) >= 0.9 * len(healthy)


@pytest.mark.parametrize("first", [7.7, 8.13, 9.0])
def test_return_to_chance_after_an_explosion_is_noticed(first):
    (divergence,) = watch([first, *FALLING[1:], 152.0, 1e6] + [CHANCE] * 40)
    assert (divergence.began, divergence.step) == (81, 98)  # the two of the explosion count 4 each


def test_gradient_of_exactly_0_is_noticed_at_any_loss():
    dead = [0.0] * 40
    (divergence,) = watch(FALLING + [MINIMUM] * 40, [1.0] * 80 + dead)
    assert (divergence.began, divergence.step) == (81, 80 + FEWEST_STEPS) and "is exactly 0" in divergence.reason
    (divergence,) = watch([CHANCE] * 40, dead)  # from the first step on
    assert divergence.step == FEWEST_STEPS
    assert watch(FALLING + [0.0] * 40, [1.0] * 80 + dead) == []  # nothing is left to learn


@pytest.mark.parametrize(
    "losses",
    [
        FALLING + [MINIMUM + 0.4] * 300,
        FALLING + [MINIMUM + 1.6] * 30 + [MINIMUM] * 50,
        FALLING + [1e6] + [MINIMUM] * 50,
        [CHANCE, 12.0, 15.0, 11.0, 9.0, 8.5, 8.2, 8.0, *FALLING],
        [CHANCE + 0.3] * 200,
        [0.69 + 0.1 * (step % 3) for step in range(300)],
        FALLING + [nan] * 20 + [MINIMUM],
        [0.0] * 30,
    ],
    ids=["noise", "a spike that heals", "one broken batch", "an overshoot of the first steps", "nothing learned",
         "a small loss", "steps left out", "no loss at all"],
)  # fmt: skip
def test_spikes_that_recover_and_flat_losses_are_not_noticed(losses):
    assert watch(losses) == []


def test_a_first_loss_far_above_chance_is_the_ceiling():
    assert watch([300.0, 250.0, 310.0] * 40) == []
    assert watch([300.0] + [4000.0] * 10)[0].step == 1 + FEWEST_STEPS


def test_a_divergence_is_returned_once_until_the_loss_returns():
    again = [CHANCE + 1] * 50
    assert [each.began for each in watch(FALLING + again + [MINIMUM] * 3 + again)] == [81]
    assert [each.began for each in watch(FALLING + again + [MINIMUM] * 10 + again)] == [81, 141]


def test_restored_monitor_decides_as_one_that_never_stopped():
    losses, uninterrupted = FALLING + [CHANCE + 1] * 30, DivergenceMonitor(CHANCE)
    stopped = uninterrupted
    for step, loss in enumerate(losses, start=1):
        stopped = DivergenceMonitor.restore(json.loads(json.dumps(stopped.as_dict())), CHANCE, stops=True)
        divergence = uninterrupted.update(step, loss, 1.0)
        assert stopped.update(step, loss, 1.0) == divergence
        assert uninterrupted.healthy == (step <= 82)
        if divergence:
            break
    assert step == divergence.step == 92


def test_ignored_divergence_stops_a_run_resumed_with_stop():
    monitor = DivergenceMonitor(CHANCE)
    for step, loss in enumerate(FALLING + [CHANCE + 1] * 30, start=1):
        monitor.update(step, loss, 1.0)
    assert monitor.noticed

    def after(stops: bool) -> list[int]:
        restored = DivergenceMonitor.restore(monitor.as_dict(), CHANCE, stops)
        assert not restored.healthy
        return [step for step in range(111, 150) if restored.update(step, CHANCE + 1, 1.0)]

    assert after(stops=True) == [119] and after(stops=False) == []


def test_monitor_of_an_earlier_version_keeps_its_minimum_and_a_missing_one_is_fresh():
    assert DivergenceMonitor.restore(None, CHANCE, stops=True) == DivergenceMonitor(CHANCE)
    stored = {
        "ceiling": 8.1, "recent": [5.5], "minimum": 5.49, "minimum_step": 80, "began": 81, "sank": 0,
        "noticed": False, "in_a_row": {"high": 1, "above": 1},
    }  # fmt: skip
    monitor = DivergenceMonitor.restore(stored, CHANCE, stops=True)
    assert (monitor.minimum, monitor.ceiling, monitor.began, monitor.healthy) == (5.49, 8.1, 81, True)
    updates = [monitor.update(step, 20.0, 1.0) for step in range(82, 82 + FEWEST_STEPS)]
    assert updates[:-1] == [None] * (FEWEST_STEPS - 1) and updates[-1].began == 81


@pytest.mark.parametrize("name", TRACES)
def test_recorded_runs_are_classified_correctly(name):
    """Of runs that diverge the loss leaves its minimum for good; noticed within 20 steps of that."""
    recorded = TRACES[name]
    norms = [inf if norm is None else norm for norm in recorded["grad_norm"]]
    divergences = watch([inf if loss is None else loss for loss in recorded["loss"]], norms, recorded["chance"])
    if recorded["began"] is None:
        assert divergences == []
    else:  # the mean loss is a little higher than the lowest, and the loss above it a step later
        assert recorded["began"] <= divergences[0].began <= recorded["began"] + 1
        assert divergences[0].began <= divergences[0].step <= recorded["began"] + 20


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (plain_decoder(vocab_size=2048), CHANCE), (ViTConfig(n_classes=10), log(10)), (CLIPConfig(), -inf),
    ],
)  # fmt: skip
def test_chance_loss_is_that_of_a_uniform_prediction(model, loss):
    assert chance_loss(model) == loss


CONFIG = Config("test", plain_decoder(norm="rmsnorm"), TextConfig(), 10, optimizer=OptimizerConfig(learning_rate=1.0))


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        (OptimizerConfig(learning_rate=1.0), ["`optimizer.clip_norm=1`", "`optimizer.learning_rate=0.25`"]),
        (OptimizerConfig(learning_rate=1.0, clip_norm=1.0), ["`optimizer.learning_rate=0.25`"]),
        (OptimizerConfig("adamw", 100.0), ["`optimizer.learning_rate=0.003`", "`optimizer.clip_norm=1`"]),
        (OptimizerConfig("lion", 1e30), ["`optimizer.learning_rate=0.0003`", "`optimizer.clip_norm=1`"]),
    ],
)
def test_remedies_have_usable_values(optimizer, fields):
    config = replace(CONFIG, optimizer=optimizer)
    assert [field for _, field in hints(config)] == [*fields, "`optimizer.warmup_steps=100`"]
    assert all(field in hint_text(config) for field in [*fields, "`optimizer.warmup_steps=100`"])
    assert "model.norm" not in hint_text(config)
    assert hint_text(replace(config, model=plain_decoder(norm="none"))).startswith("a norm before every layer")
