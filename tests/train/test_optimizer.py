"""Schedules and optimizers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxformer.config import OptimizerConfig
from jaxformer.contract import ParameterAxes
from jaxformer.models.objective import next_token_nll
from jaxformer.nn.parameters import parameter_axes
from jaxformer.runs.run import abstract_params
from jaxformer.train.optimizer import (
    eval_point,
    is_decayed,
    make_optimizer,
    make_schedule,
    muon_or_adamw,
    updates_taken,
)
from tests.arrays import first_params, normal, plain_decoder, random_tokens
from tests.inspect.test_activations import MODELS

TORCH = Path(__file__).parents[1] / "fixtures/optimizers_torch.npz"
CONFIGS = {
    "nesterov_sgd": OptimizerConfig("nesterov_sgd", learning_rate=0.1),
    "adamw": OptimizerConfig("adamw", learning_rate=0.01, weight_decay=0.5),
    "muon": OptimizerConfig("muon", learning_rate=0.01, weight_decay=0.5, momentum=0.95),
    "lion": OptimizerConfig("lion", learning_rate=0.003, weight_decay=0.5, b2=0.99),
    "schedule_free": OptimizerConfig("schedule_free", learning_rate=0.01, weight_decay=0.5),
}
each_optimizer = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def test_warmup_rises_to_the_peak_and_cosine_falls_to_the_final_share():
    config = OptimizerConfig(learning_rate=2.0, schedule="cosine", warmup_steps=4, final_fraction=0.1)
    schedule = make_schedule(config, 104)
    np.testing.assert_allclose([schedule(k) for k in range(5)], [0.5, 1.0, 1.5, 2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(schedule(54), 2.0 * (0.1 + 0.9 / 2), rtol=1e-6)  # half way: cos(π/2) = 0
    np.testing.assert_allclose(schedule(104), 0.2, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 4])
def test_linear_is_a_straight_line_from_the_peak_to_the_final_share(warmup):
    config = OptimizerConfig(learning_rate=2.0, schedule="linear", warmup_steps=warmup, final_fraction=0.1)
    schedule = make_schedule(config, 20 + warmup)
    rise = [0.5, 1.0, 1.5, 2.0][:warmup]
    np.testing.assert_allclose([schedule(k) for k in range(warmup)], rise, rtol=1e-6)
    np.testing.assert_allclose([schedule(warmup + k) for k in (0, 5, 10, 20)], [2.0, 1.55, 1.1, 0.2], rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 4])
def test_wsd_is_constant_and_then_a_straight_line(warmup):
    config = OptimizerConfig(
        learning_rate=2.0, schedule="wsd", warmup_steps=warmup, decay_fraction=0.25, final_fraction=0.1
    )
    schedule = make_schedule(config, 20)  # falls over the last 5 steps, by 1.8 in all
    rise = [0.5, 1.0, 1.5, 2.0] if warmup else [2.0] * 4
    np.testing.assert_allclose([schedule(k) for k in range(4)], rise, rtol=1e-6)
    np.testing.assert_allclose([schedule(k) for k in (4, 14, 15)], 2.0, rtol=1e-6)
    np.testing.assert_allclose([schedule(k) for k in (16, 19, 20)], [1.64, 0.56, 0.2], rtol=1e-5)


def test_wsd_decays_over_the_last_fifth_by_default():
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, schedule="wsd"), 100)
    np.testing.assert_allclose([schedule(k) for k in (0, 80, 90, 99)], [1.0, 1.0, 0.5, 0.05], rtol=1e-5)


def test_inverse_sqrt_is_the_formula_of_the_paper():
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, schedule="inverse_sqrt", warmup_steps=4), 100)
    # min(step / 4, √(4 / step)) of the peak, with steps from 1
    expected = [0.5, 2.0, 2 * (4 / 5) ** 0.5, 1.0, 0.5]
    np.testing.assert_allclose([schedule(k) for k in (0, 3, 4, 15, 63)], expected, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_constant_schedule_stays_at_the_peak(warmup):
    schedule = make_schedule(OptimizerConfig(learning_rate=0.3, warmup_steps=warmup), 10)
    np.testing.assert_allclose([schedule(k) for k in (warmup, 9, 1000)], 0.3, rtol=1e-6)


def test_nesterov_follows_its_formula():
    config = OptimizerConfig("nesterov_sgd", learning_rate=0.1, momentum=0.9)
    optimizer = make_optimizer(config, make_schedule(config, 10), AXES)
    w, v = np.array([1.0, -2.0]), np.zeros(2)
    params = jnp.array(w)
    state, take = optimizer.init(params), step_of(optimizer)
    for _ in range(3):
        params, state = take(params, state, params)  # the gradient of w²/2 is w
        v = 0.9 * v + w
        w = w - 0.1 * (w + 0.9 * v)
    np.testing.assert_allclose(params, w, rtol=1e-6)


AXES = {
    name: ParameterAxes.parse(axes)
    for axes, names in {
        "embed -> hidden": ("W", "W_1", "blocks_0.mlp.W_1"),
        "embed -> heads head_dim": ("W_Q", "W_K", "W_V"),
        "heads head_dim -> embed": ("W_O",),
        "heads 1 head_dim": ("b_Q",),
        "vocab -> embed": ("W_E", "embedding.W_E"),
        "positions -> embed": ("W_pos", "embedding.W_pos"),
        "segments -> embed": ("W_segment",),
        "embed -> vocab": ("W_out",),
        "hidden": ("b_1", "blocks_0.mlp.b_1"),
        "embed": ("gamma", "blocks_0.mlp_norm.gamma"),
    }.items()
    for name in names
}
"""Axes of all parameters of these tests; a leading axis counts matrices apart."""


def step_of(optimizer: optax.GradientTransformation) -> Callable:
    """A compiled step `(gradients, state, params)` to parameters and state."""

    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def follow(config: OptimizerConfig, params: dict, gradients: list[dict], width: int | None = None) -> list[dict]:
    """The parameters after each step of given gradients."""
    optimizer, after = make_optimizer(config, make_schedule(config, len(gradients)), AXES, width), []
    state, take = jax.jit(optimizer.init)(params), step_of(optimizer)
    for grads in gradients:
        params, state = take(grads, state, params)
        after.append(params)
    return after


def torch_run(name: str) -> tuple[dict, list[dict], list[dict]]:
    """Parameters, gradients, and the parameters after each step as torch has them."""
    with np.load(TORCH) as stored:
        arrays = dict(stored)
    names = [key.removeprefix("before.") for key in arrays if key.startswith("before.")]
    steps = range(len(arrays[f"gradients.{names[0]}"]))
    gradients, after = ([{n: arrays[f"{what}.{n}"][k] for n in names} for k in steps] for what in ("gradients", name))
    return {n: jnp.array(arrays[f"before.{n}"]) for n in names}, gradients, after


@pytest.mark.parametrize("name", ["nesterov_sgd", "adamw"])
def test_five_steps_are_those_of_torch(name):
    params, gradients, expected = torch_run(name)
    decay = 0.1 if name == "adamw" else 0.0
    after = follow(OptimizerConfig(name, learning_rate=0.01, weight_decay=decay), params, gradients)
    for params, reference in zip(after, expected, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), params, reference)


def test_the_first_step_of_muon_is_that_of_torch():
    """And no more than the first: torch does not correct the bias of the momentum. It iterates in bfloat16, whose
    epsilon is 0.8 %, five times."""
    params, gradients, expected = torch_run("muon")
    config = OptimizerConfig("muon", learning_rate=0.01, weight_decay=0.1, momentum=0.95)
    after = follow(config, params, gradients[:1])[0]
    for name in ("W_Q", "W_O"):
        moved, reference = (np.asarray(x[name] - params[name]) for x in (after, expected[0]))
        assert np.linalg.norm(moved - reference) <= 0.04 * np.linalg.norm(reference)
    np.testing.assert_allclose(after["gamma"], expected[0]["gamma"], atol=1e-6)


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Five rounds of the quintic iteration of Jordan et al. 2024, in float64."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.slow
def test_muon_follows_its_formula():
    shapes = {"W_Q": (6, 2, 5), "W_O": (2, 5, 6), "W_1": (1, 6, 4)}  # heads together; experts apart
    flat = {"W_Q": (6, 10), "W_O": (10, 6), "W_1": (6, 4)}
    before = {name: normal(*shape, seed=1) for name, shape in shapes.items()}
    gradients = [{n: normal(*shape, seed=k) for n, shape in shapes.items()} for k in (2, 3, 4)]
    after = follow(OptimizerConfig("muon", learning_rate=0.1, weight_decay=0.3, momentum=0.9), before, gradients)
    for name, shape in flat.items():
        w, m = np.asarray(before[name], np.float64).reshape(shape), np.zeros(shape)
        for t, grads in enumerate(gradients, start=1):
            g = np.asarray(grads[name], np.float64).reshape(shape)
            m = 0.9 * m + 0.1 * g
            ahead = 0.9 * m / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t)
            w = w - 0.1 * (0.2 * max(shape) ** 0.5 * newton_schulz(ahead) + 0.3 * w)
        np.testing.assert_allclose(after[-1][name], w.reshape(shapes[name]), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_muon_updates_other_parameters_by_adamw():
    params = {
        "embedding": {"W_E": normal(5, 4), "W_pos": normal(3, 4)},
        "W_segment": normal(2, 4),
        "blocks_0": {"mlp": {"W_1": normal(4, 6), "b_1": normal(6)}, "mlp_norm": {"gamma": normal(4)}},
        "W_out": normal(4, 5),
    }
    gradients = [jax.tree.map(lambda x, k=k: normal(*x.shape, seed=k), params) for k in (1, 2)]
    config = OptimizerConfig("muon", learning_rate=0.1, weight_decay=0.5)
    muon, adamw = (follow(replace(config, name=name), params, gradients)[-1] for name in ("muon", "adamw"))
    hidden = [tree["blocks_0"]["mlp"].pop("W_1") for tree in (muon, adamw)]
    jax.tree.map(np.testing.assert_array_equal, muon, adamw)
    assert np.abs(hidden[0] - hidden[1]).max() > 0.01


def test_lion_follows_its_formula():
    before, gradients = normal(3, 4, seed=1), [normal(3, 4, seed=k) for k in (2, 3, 4)]
    config = OptimizerConfig("lion", learning_rate=0.1, b1=0.9, b2=0.99, weight_decay=0.3)
    after = follow(config, {"W": before}, [{"W": g} for g in gradients])[-1]["W"]
    w, m = np.asarray(before, np.float64), np.zeros((3, 4))
    for g in np.asarray(gradients, np.float64):
        w = w - 0.1 * (np.sign(0.9 * m + 0.1 * g) + 0.3 * w)
        m = 0.99 * m + 0.01 * g
    np.testing.assert_allclose(after, w, rtol=0, atol=1e-6)


CURVE = normal(6, 4, seed=7) ** 2
"""Second derivatives of a bowl, Σ CURVE · W² / 2."""


def schedule_free_run(config: OptimizerConfig, steps: int) -> list[np.ndarray]:
    """Down the bowl: the parameters after each step."""
    optimizer = make_optimizer(config, make_schedule(config, steps), AXES)
    params = {"W": jnp.ones((6, 4))}
    state, after = jax.jit(optimizer.init)(params), []

    @jax.jit
    def take(params: dict, state: Any) -> tuple[dict, Any]:
        grads = {"W": CURVE * eval_point(config, params, state)["W"]}
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = take(params, state)
        after.append(np.asarray(params["W"]))
    return after


def test_schedule_free_follows_its_formula():
    config = OptimizerConfig("schedule_free", learning_rate=0.05, warmup_steps=3, weight_decay=0.1, clip_norm=0.5)
    after = schedule_free_run(config, 6)
    x = z = np.ones((6, 4))
    v, weights = np.zeros((6, 4)), 0.0
    for t in range(1, 7):
        y = 0.1 * z + 0.9 * x
        g = np.asarray(CURVE, np.float64) * y
        g = g * min(1.0, 0.5 / np.linalg.norm(g))
        rate = 0.05 * min(1.0, t / 3)
        v = 0.95 * v + 0.05 * g * g
        z = z - rate * (g / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + 0.1 * y)
        weights += rate**2
        x = x + rate**2 / weights * (z - x)
        np.testing.assert_allclose(after[t - 1], x, rtol=0, atol=2e-6)


@each_optimizer
def test_only_schedule_free_needs_the_gradient_at_another_point(config):
    params = {"W": normal(3, 2)}
    state = make_optimizer(config, make_schedule(config, 10), AXES).init(params)
    assert (eval_point(config, params, state) is params) == (config.name != "schedule_free")


@each_optimizer
def test_updates_are_counted_by_the_optimizer(config):
    optimizer = make_optimizer(config, make_schedule(config, 10), AXES)
    params = {"W_1": normal(3, 5), "gamma": jnp.ones(3)}
    state, take = jax.jit(optimizer.init)(params), step_of(optimizer)
    for count in range(3):
        assert updates_taken(state) == count
        _, state = take(params, state, params)


@pytest.mark.parametrize("config", [c for c in CONFIGS.values() if c.weight_decay], ids=lambda c: c.name)
def test_weight_decay_applies_to_matrices_and_embeddings_only(config):
    shapes = dict.fromkeys(("W_E", "W_1", "W_pos"), (3, 2)) | {"gamma": 3, "b_1": 3, "b_Q": (3, 1, 2)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    zero = jax.tree.map(np.zeros_like, params)
    optimizer = make_optimizer(config, make_schedule(config, 10), AXES)
    updates, _ = jax.jit(lambda zero, params: optimizer.update(zero, optimizer.init(params), params))(zero, params)
    for name in ("W_E", "W_1"):
        np.testing.assert_allclose(updates[name], -config.learning_rate * config.weight_decay, rtol=1e-4)
    for name in ("W_pos", "gamma", "b_1", "b_Q"):
        np.testing.assert_array_equal(updates[name], 0.0)


SHAPES = {
    "W_E": (5, 4), "W_pos": (3, 4), "W_Q": (4, 2, 2), "W_O": (2, 2, 4), "W_1": (4, 6), "b_1": 6, "gamma": 4,
    "W_out": (4, 5),
}  # fmt: skip
SCALED = ("W_Q", "W_O", "W_1", "W_out")


@pytest.mark.slow
def test_base_width_scales_learning_rates_of_matrices_but_not_their_weight_decay():
    """At 9 times the base width, by 1/9; where Muon updates them, by 1/3."""
    config = CONFIGS["muon"]
    params = {name: normal(*np.atleast_1d(shape), seed=1) for name, shape in SHAPES.items()}
    grads = {name: normal(*np.atleast_1d(shape), seed=2) for name, shape in SHAPES.items()}
    plain, wide = (follow(replace(config, base_width=base), params, [grads], width=72)[0] for base in (None, 8))
    for name in SHAPES:
        factor = (1 / 3 if name in ("W_Q", "W_O", "W_1") else 1 / 9) if name in SCALED else 1.0
        decay = config.learning_rate * config.weight_decay * params[name] * (name in (*SCALED, "W_E"))
        expected = factor * (plain[name] - params[name] + decay) - decay
        np.testing.assert_allclose(wide[name] - params[name], expected, rtol=2e-4, atol=2e-6, err_msg=name)


def test_first_step_of_adamw_is_the_scaled_learning_rate():
    config = OptimizerConfig("adamw", learning_rate=0.01, base_width=64)
    zeros = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    after = follow(config, zeros, [jax.tree.map(jnp.ones_like, zeros)], width=256)[0]
    for name in SHAPES:
        np.testing.assert_allclose(after[name], -0.0025 if name in SCALED else -0.01, rtol=1e-5)


def test_base_width_changes_no_bit_at_that_width_and_no_state():
    params = {name: normal(*np.atleast_1d(shape), seed=1) for name, shape in SHAPES.items()}
    config = CONFIGS["adamw"]
    plain, same = (follow(c, params, [params] * 2, 8)[-1] for c in (config, replace(config, base_width=8)))
    jax.tree.map(np.testing.assert_array_equal, plain, same)
    for config in CONFIGS.values():
        base = None if config.name == "nesterov_sgd" else 4
        states = [
            jax.eval_shape(make_optimizer(c, make_schedule(c, 10), AXES, 8).init, params)
            for c in (config, replace(config, base_width=base))
        ]
        assert states[0] == states[1] and jax.tree.structure(states[0]) == jax.tree.structure(states[1])


def changes(config: OptimizerConfig, width: int) -> tuple[float, float]:
    """Root mean square of what four steps change in the residual stream and in the logits of a decoder, whose W_out is
    drawn as muP has it."""
    model = plain_decoder(
        29, 8, width, n_heads=width // 16, d_ff=(2 * width,), norm="rmsnorm", positions="none",
        bias=False, unembedding_std=8 / width,
    ).build()  # fmt: skip
    tokens_T = random_tokens(29, 9)
    optimizer = make_optimizer(config, make_schedule(config, 4), parameter_axes(model), width)
    params = first_params(model, tokens_T[:-1])
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        def loss(params):
            x_TD = model.apply({"params": params}, tokens_T[:-1], method="features")
            logits_TV = model.apply({"params": params}, x_TD, method="unembed")
            return optax.softmax_cross_entropy_with_integer_labels(logits_TV, tokens_T[1:]).mean(), (x_TD, logits_TV)

        grads, outputs = jax.grad(loss, has_aux=True)(eval_point(config, params, state))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, outputs

    outputs = []
    for _ in range(5):
        params, state, output = step(params, state)
        outputs.append(output)
    return tuple(float(jnp.sqrt(jnp.mean((a - b) ** 2))) for a, b in zip(outputs[0], outputs[4], strict=True))


@pytest.mark.slow
def test_changes_of_activations_grow_with_the_width_only_without_base_width():
    """The coordinate check of Yang et al. 2022, appendix D.1."""
    config = OptimizerConfig("adamw", learning_rate=0.003)
    narrow, wide = changes(config, 64), changes(config, 256)
    scaled = changes(replace(config, base_width=64), 256)
    for at_64, at_256, at_256_scaled in zip(narrow, wide, scaled, strict=True):
        assert at_256 > 1.5 * at_64
        assert 0.8 * at_64 < at_256_scaled < 1.25 * at_64


@pytest.mark.slow
def test_training_lowers_the_loss_and_resumes_bit_identically(tmp_path):
    """Compiled, with donated state, and clipped, so that a chain of states is saved."""
    config = replace(CONFIGS["schedule_free"], clip_norm=1.0, warmup_steps=2)  # of which most is saved
    model = plain_decoder(23, 7, 12, n_blocks=1, n_heads=2, d_ff=(16,), norm="rmsnorm", qk_norm=True).build()
    batch = random_tokens(23, 4, 8)
    optimizer = make_optimizer(config, make_schedule(config, 20), parameter_axes(model))

    def loss(params):
        return jnp.mean(jax.vmap(lambda tokens: next_token_nll(model, params, tokens))(batch))

    def step(params, state):
        grads = jax.grad(loss)(eval_point(config, params, state))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    params = first_params(model, batch[0, :7])
    loss_of = jax.jit(loss)
    first, state = loss_of(params), jax.jit(optimizer.init)(params)
    for _ in range(20):
        params, state = step(params, state)
    assert loss_of(params) < first - 0.1

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), jax.eval_shape(optimizer.init, params)
    )
    with ocp.StandardCheckpointer() as disk:
        disk.save(tmp_path / "state", state)
        disk.wait_until_finished()
        restored = disk.restore(tmp_path / "state", like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    copy = jax.device_get(params)
    jax.tree.map(np.testing.assert_array_equal, step(copy, restored), step(params, state))


def test_gradients_are_clipped_to_the_global_norm():
    config = OptimizerConfig(learning_rate=1.0, momentum=0.0, clip_norm=1.0)
    optimizer = make_optimizer(config, make_schedule(config, 10), AXES)
    params = {"W": jnp.zeros(2)}
    updates, _ = optimizer.update({"W": jnp.array([30.0, 40.0])}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["W"], [-0.6, -0.8], rtol=1e-6)


@pytest.mark.slow
def test_declared_axes_decide_weight_decay_and_muon():
    """In every model. A new name is to be listed here: whether it decays, and whether Muon may have it."""
    groups: dict[str, set[str]] = {"muon": set(), "adamw": set(), "not decayed": set()}
    scaled = set()
    for config in MODELS.values():
        model = config.build()
        params, axes = abstract_params(model), parameter_axes(model)
        labels, matrices = jax.tree_util.tree_leaves_with_path(muon_or_adamw(axes, params)), is_decayed(axes, params)
        for (path, label), decayed in zip(labels, jax.tree.leaves(matrices), strict=True):
            groups[label if decayed else "not decayed"].add(path[-1].key)
        scaled |= {name.rpartition(".")[2] for name, sides in axes.items() if sides.sums_over_width}
    attention, mlp = {"W_Q", "W_K", "W_V", "W_O"}, {"W_1", "W_2", "W_3", "W_gate_1", "W_router"}
    recurrent = {"W", "U", "C", "W_a", "U_a", "v_a", "W_s_0", "W_s_1", "W_o"}
    assert groups["muon"] == attention | mlp | recurrent | {"W_patch", "W_i", "W_t"}
    assert groups["adamw"] == {"W_E", "W_out"}
    assert scaled == groups["muon"] - {"W_patch"} | {"W_out"}
    vectors = {"b_1", "b_2", "b_3", "b_Q", "b_K", "b_V", "b_O", "b_W", "b_U", "b_o", "b_out", "b_patch"}
    gains = {"gamma", "gamma_Q", "gamma_K", "beta"}
    assert groups["not decayed"] == vectors | gains | {"W_pos", "x_class", "t"}
