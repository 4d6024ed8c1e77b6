"""A divergence is told from a spike, and what moved first is named."""

import json
from dataclasses import replace
from math import inf, log, nan
from pathlib import Path

import numpy as np
import pytest

from jaxformer.config import Config, OptimizerConfig
from jaxformer.data.corpus import TextConfig
from jaxformer.models.clip import CLIPConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.train.divergence import (
    ABOVE_STEPS,
    ENORMOUS_STEPS,
    FLAT_STEPS,
    HALF_LOST_STEPS,
    LOST_STEPS,
    Divergence,
    DivergenceMonitor,
    chance_loss,
    first_to_move,
)
from jaxformer.train.remedies import optimizer_remedies, remedies

CHANCE = log(2048)
FALLING = [CHANCE + 0.1 - 0.03 * step for step in range(80)]
"""To 5.35 nats, at step 80."""
MINIMUM = FALLING[-1]
TRACES = json.loads((Path(__file__).parents[1] / "fixtures/divergence.json").read_text())
"""Loss and gradient norm of each step of runs that `benchmarks/divergence.py` trained, rounded."""


def watch(losses: list[float], grad_norms: list[float] | None = None) -> list[Divergence]:
    monitor = DivergenceMonitor(ceiling=CHANCE)
    pairs = enumerate(zip(losses, grad_norms or [1.0] * len(losses), strict=True), start=1)
    return [found for step, (loss, norm) in pairs if (found := monitor.update(step, loss, norm))]


@pytest.mark.parametrize(
    ("after", "steps", "reason"),
    [
        (100.0, ENORMOUS_STEPS, "more than 10 times its first value"),
        (1e11, ENORMOUS_STEPS, "more than 10 times its first value"),
        (CHANCE + 0.8, ABOVE_STEPS, "knows nothing"),
        (CHANCE - 0.05, LOST_STEPS, "most of what was learned"),
        (6.7, HALF_LOST_STEPS, "half of what was learned"),
    ],
)
def test_the_further_a_loss_has_gone_the_sooner_it_is_noticed(after, steps, reason):
    (found,) = watch(FALLING + [after] * 150)
    assert (found.began, found.step) == (81, 80 + steps)
    assert (found.loss, found.minimum, found.minimum_step) == (after, MINIMUM, 80)
    assert reason in found.reason
    assert str(found).startswith(f"the loss has been diverging since step 81: {after:.4g} at step {80 + steps}, after")
    assert watch(FALLING + [after] * (steps - 1) + [MINIMUM] * 20) == []


def test_a_network_that_exploded_and_came_back_to_chance_is_noticed():
    (found,) = watch(FALLING + [152.0, 1e6] + [CHANCE] * 40)
    assert (found.began, found.step) == (81, 82 + LOST_STEPS - 2)


def test_a_gradient_of_exactly_0_is_noticed_wherever_the_loss_is():
    dead = [0.0] * 40
    (found,) = watch(FALLING + [MINIMUM] * 40, [1.0] * 80 + dead)
    assert (found.began, found.step) == (81, 80 + FLAT_STEPS) and "exactly 0" in found.reason
    (found,) = watch([CHANCE] * 40, dead)  # from the first step on
    assert found.step == FLAT_STEPS
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
    ],
    ids=["noise", "a spike that heals", "one broken batch", "an overshoot of the first steps", "nothing learned",
         "a small loss", "steps left out"],
)  # fmt: skip
def test_what_heals_or_never_fell_is_left_alone(losses):
    assert watch(losses) == []


def test_a_first_loss_far_above_chance_is_the_ceiling():
    assert watch([300.0, 250.0, 310.0] * 40) == []
    assert watch([300.0] + [4000.0] * 10)[0].step == 4


def test_it_is_told_once_until_the_loss_returns():
    again = [CHANCE + 1] * 50
    assert [found.began for found in watch(FALLING + again + [MINIMUM] * 3 + again)] == [81, 134]


def test_a_monitor_that_was_stored_decides_as_one_that_never_stopped():
    losses, whole = FALLING + [CHANCE + 1] * 30, DivergenceMonitor(ceiling=CHANCE)
    stopped = whole
    for step, loss in enumerate(losses, start=1):
        stopped = DivergenceMonitor(**json.loads(json.dumps(stopped.as_dict())))
        found = whole.update(step, loss, 1.0)
        assert stopped.update(step, loss, 1.0) == found
        assert whole.healthy == (step <= 80)
        if found:
            break
    assert step == 80 + ABOVE_STEPS


@pytest.mark.parametrize("name", TRACES)
def test_recorded_runs_are_judged_rightly(name):
    """Of runs that diverge the loss leaves its minimum for good; noticed within 20 steps of that."""
    recorded = TRACES[name]
    norms = [inf if norm is None else norm for norm in recorded["grad_norm"]]
    found = watch([inf if loss is None else loss for loss in recorded["loss"]], norms)
    if recorded["began"] is None:
        assert found == []
    else:
        assert found[0].step <= recorded["began"] + 20


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (DecoderConfig(vocab_size=2048), CHANCE), (ViTConfig(n_classes=10), log(10)), (CLIPConfig(), -inf),
    ],
)  # fmt: skip
def test_chance_is_that_of_all_classes_alike(model, loss):
    assert chance_loss(model) == loss


def steps_of(updates_SR: np.ndarray) -> list[tuple[int, np.ndarray]]:
    return list(enumerate(updates_SR, start=1))


def test_the_parameter_whose_updates_left_their_usual_size_first_is_named():
    updates_SR = np.tile([0.02, 0.2, 0.002], (60, 1))
    updates_SR[52:, 2] = 0.1  # at step 53, 50 times what was usual
    updates_SR[54:, 0] = 9.0
    updates_SR[58:] = nan, inf, 1.0
    mover = first_to_move(["a", "b", "c"], steps_of(updates_SR), 57, lambda step: 1.0)
    assert str(mover) == "c at step 53, by an update of norm 0.1, 50 times what was usual"


def test_updates_that_grow_with_the_learning_rate_are_usual():
    updates_SR = np.arange(1.0, 61.0)[:, None] * [0.02, 0.2]  # a warm-up, 60 times as high at its end
    updates_SR[55, 0] *= 6
    mover = first_to_move(["a", "b"], steps_of(updates_SR), 58, lambda step: (step + 1) / 60)
    assert (mover.name, mover.step) == ("a", 56)
    np.testing.assert_allclose(mover.update / mover.usual, 6)


def test_of_a_run_that_diverges_as_it_begins_the_largest_update_is_named():
    mover = first_to_move(
        ["a", "b"], steps_of(np.array([[4.0, 8.0], [6.0, 5.0], [1.0, 1.0]])), began=3, schedule=lambda step: 1.0
    )
    assert str(mover) == "a at step 2, by an update of norm 6"
    assert first_to_move(["a"], [], 1, lambda step: 1.0) is None


CONFIG = Config("test", DecoderConfig(norm="rmsnorm"), TextConfig(), 10, optimizer=OptimizerConfig(learning_rate=1.0))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (OptimizerConfig(learning_rate=1.0), ["--optimizer.clip-norm 1", "--optimizer.learning-rate 0.25"]),
        (OptimizerConfig(learning_rate=1.0, clip_norm=1.0), ["--optimizer.learning-rate 0.25"]),
        (OptimizerConfig("adamw", 100.0), ["--optimizer.learning-rate 0.003", "--optimizer.clip-norm 1"]),
        (OptimizerConfig("lion", 1e30), ["--optimizer.learning-rate 0.0003", "--optimizer.clip-norm 1"]),
    ],
)
def test_remedies_have_values_that_are_fit_to_use(optimizer, options):
    config = replace(CONFIG, optimizer=optimizer)
    assert [option for _, option in optimizer_remedies(config)] == options
    assert all(option in remedies(config) for option in [*options, "--optimizer.warmup-steps 100"])
    assert "--model.norm" not in remedies(config)
    assert remedies(replace(config, model=DecoderConfig(norm="none"))).startswith("a norm before every layer")
