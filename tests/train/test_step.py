"""The jitted steps: where, in how many parts and in what order things are computed changes no number."""

import re
from dataclasses import replace
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from jaxformer.config import ComputeConfig, Config, OptimizerConfig, TrainConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.windows import TextConfig, next_token_batch
from jaxformer.errors import UserError
from jaxformer.models import objective
from jaxformer.models.decoder import DecoderConfig, ExpertsConfig
from jaxformer.models.encoder import ClassifierConfig, EncoderConfig
from jaxformer.models.objective import CrossEntropy, Params, batched_apply, per_target
from jaxformer.nn.experts import routers
from jaxformer.nn.parameter_norms import row_names
from jaxformer.ops.linear_cross_entropy import rows_per_chunk
from jaxformer.ops.losses import negative_log_likelihood
from jaxformer.parallel import memory
from jaxformer.parallel.mesh import AXES, batch_sharding, global_device_put, make_mesh, parse_mesh
from jaxformer.runs.run import abstract_params
from jaxformer.train import kernels
from jaxformer.train.setup import TrainSetup, TrainState
from jaxformer.train.step import CompiledStep, make_eval_step, make_gradient, make_train_step
from tests.arrays import assert_close, plain_decoder

V, T, B = 40, 12, 16
MODEL = plain_decoder(V, T, 16, n_blocks=1, n_heads=4, d_ff=(24,), norm="rmsnorm")
CONFIG = Config(
    "test",
    MODEL,
    data=TextConfig(),
    steps=20,
    optimizer=OptimizerConfig(learning_rate=0.1),
    train=TrainConfig(batch_size=B),
)
TWO_BLOCKS = replace(CONFIG, model=replace(MODEL, n_blocks=2))
PACKED = {"packing": "documents"}
EXPERTS = replace(
    CONFIG,
    model=replace(
        MODEL,
        experts=ExpertsConfig(4, capacity_factor=1.0, shared_expert=True, balance_weight=2.0, router_z_weight=0.5),
    ),
)
TOKENS = np.random.default_rng(0).integers(0, V, (20, B, T + 1)).astype(np.int32)
BATCHES = [next_token_batch(tokens) for tokens in TOKENS]
CUBE = "data=2,fsdp=2,tensor=2"
HIGHER_RATES = {"adamw": 3e-3, "muon": 3e-3, "lion": 1e-3, "schedule_free": 3e-3, "nesterov_sgd": 0.1}


def mesh_of(text: str) -> jax.sharding.Mesh:
    """On as many devices as it names."""
    return make_mesh(text, jax.devices()[: prod(parse_mesh(text).values())])


def setup_of(mesh: str, config: Config = CONFIG) -> TrainSetup:
    return TrainSetup(config, mesh_of(mesh))


@lru_cache
def first_params(model: DecoderConfig = MODEL) -> Params:
    """What training starts from, on the host: made once, because compiling takes longer than twenty steps."""
    return jax.device_get(setup_of("data=1", replace(CONFIG, model=model)).init_state().params)


def state_on(setup: TrainSetup) -> TrainState:
    """The same first state on any mesh."""
    params = first_params(replace(setup.config.model, dropout=0.0))  # which has no parameters
    opt_state = jax.device_get(jax.jit(setup.optimizer.init)(params))  # resharding an array would compile a program
    return jax.device_put(TrainState(params, opt_state, np.int32(0)), setup.state_shardings)


def gradient_at(setup: TrainSetup, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
    """Loss and gradient of a batch, with the dropout of the first step."""
    return jax.jit(make_gradient(setup))(params, batch, setup.example_keys(0))


@lru_cache
def trained(mesh: str, config: Config = CONFIG) -> tuple[np.ndarray, TrainState]:
    """Losses of all steps, and the last state."""
    setup = setup_of(mesh, config)
    state, step, split = state_on(setup), make_train_step(setup), batch_sharding(setup.mesh)
    losses = []
    for k, batch in enumerate(BATCHES):
        state, metrics = step(state, global_device_put(batch, split), np.int32(k))
        losses.append(float(metrics.loss))
    return np.array(losses), state


def computed(config: Config, **fields: object) -> Config:
    """The same training, computed another way."""
    return replace(config, compute=ComputeConfig(**fields))


def assert_same_training(mesh: str, config: Config, other_mesh: str, other: Config) -> None:
    """Twenty losses within 1e-5 (84 float32 epsilons), and the parameters that came of them."""
    (losses, state), (expected, expected_state) = trained(mesh, config), trained(other_mesh, other)
    assert len(losses) == 20
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(assert_close, state.params, expected_state.params)


def test_training_is_the_same_on_a_mesh_of_every_axis():
    """Where every axis but that of experts splits something."""
    assert_same_training(CUBE, CONFIG, "data=1", CONFIG)
    losses = trained("data=1")[0]
    assert losses[-5:].mean() < losses[:5].mean() - 0.1  # it learned something: random tokens have frequencies


LENGTHS_B = np.array([T, 1, 3, T, 5, 2, 2, 7, 1, 1, T, 4, 9, T, 1, 6])
REAL_BT = np.arange(T) < LENGTHS_B[:, None]
PADDED = Batch(
    (TOKENS[0, :, :-1] * REAL_BT, None, REAL_BT.astype(np.int32)), TOKENS[0, :, 1:] * REAL_BT,
    (REAL_BT / REAL_BT.sum()).astype(np.float32),
)  # fmt: skip
"""Rows with padding, more on some devices and in some microbatches than in others."""


@lru_cache
def gradient_of_padded_rows(mesh: str, config: Config) -> tuple[jax.Array, Params]:
    setup = setup_of(mesh, config)
    params = first_params(replace(config.model, dropout=0.0))
    return jax.device_get(gradient_at(setup, params, PADDED))


@pytest.mark.slow
def test_routers_weigh_devices_by_their_tokens_and_dropout_is_independent_of_mesh_and_remat():
    """Balancing sees all that the devices take, not a part: its loss is no mean of its parts'."""
    config = replace(EXPERTS, model=replace(EXPERTS.model, n_blocks=2, dropout=0.3))
    expected = gradient_of_padded_rows("data=1", computed(config, scan_blocks=True))
    again = computed(config, remat="block", scan_blocks=True)
    jax.tree.map(assert_close, gradient_of_padded_rows("fsdp=2,expert=2,tensor=2", again), expected)


def test_gradients_are_the_same_on_a_mesh_and_in_microbatches():
    """With dropout, experts, and rows of which some devices and microbatches have more than others. Of the routers,
    only the z-loss, a mean over tokens, is that of the batch; balancing is a microbatch's own."""
    config = replace(
        CONFIG,
        model=replace(
            MODEL,
            dropout=0.3,
            n_heads=2,
            norm="none",
            experts=ExpertsConfig(2, balance_weight=0.0, router_z_weight=0.5),
        ),
    )
    expected = gradient_of_padded_rows("data=1", config)
    in_parts = computed(config, grad_accumulation_steps=2)
    jax.tree.map(assert_close, gradient_of_padded_rows("expert=2", in_parts), expected)


@pytest.mark.slow
def test_the_load_balancing_loss_is_minimised_and_not_reported():
    """The loss is that of the batch without it, and the gradient is that with it, of the whole batch at once."""
    model, params = EXPERTS.model.build(), first_params(EXPERTS.model)
    setup = setup_of("data=1", EXPERTS)
    keys = setup.example_keys(0)

    def both(params: Params) -> tuple[jax.Array, jax.Array]:
        outputs, sown = batched_apply(model, params)(*BATCHES[0].inputs, rngs={"dropout": keys})
        nll = per_target(negative_log_likelihood, outputs, BATCHES[0].targets)
        added = 0.0
        for layer in routers(sown["router"]).values():
            share_E, probability_E = layer.share_E.mean(0), layer.probability_E.mean(0)
            added += 2.0 * 4 * jnp.sum(share_E * probability_E) + 0.5 * layer.z.mean()
        return nll.mean() + added, nll.mean()

    expected, nll = jax.jit(jax.grad(both, has_aux=True))(params)
    loss, grads = gradient_at(setup, params, BATCHES[0])
    np.testing.assert_allclose(loss, nll, rtol=1e-6)
    jax.tree.map(assert_close, grads, expected)
    assert expected["blocks_0"]["mlp"]["W_router"].any()


def test_bfloat16_over_a_tensor_axis_of_cpus_is_refused():
    with pytest.raises(UserError, match=r"`compute\.precision` is bfloat16"):
        make_train_step(setup_of("tensor=2", computed(CONFIG, precision="bfloat16")))


def with_optimizer(name: str) -> Config:
    return replace(CONFIG, optimizer=OptimizerConfig(name=name, learning_rate=HIGHER_RATES[name], clip_norm=1.0))


@pytest.mark.slow
def test_updates_that_need_whole_matrices_are_computed_on_shards():
    assert_same_training("fsdp=2", with_optimizer("muon"), "data=1", with_optimizer("muon"))


@pytest.mark.parametrize("name", HIGHER_RATES)
def test_no_device_holds_a_whole_matrix_of_the_state(name):
    setup = setup_of("fsdp=8", with_optimizer(name))
    state, shardings = setup.abstract_state, setup.state_shardings
    for tree, where in ((state.params, shardings.params), (state.opt_state, shardings.opt_state)):
        split = [
            prod(sharding.shard_shape(x.shape)) * 8 == x.size
            for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(where), strict=True)
            if x.size >= 16 * 16  # all matrices have more numbers, no gain has
        ]
        assert split and all(split)


@pytest.mark.slow
def test_initial_state_is_the_same_on_every_mesh():
    one, cube = (setup_of(mesh).init_state() for mesh in ("data=1", CUBE))
    jax.tree.map(np.testing.assert_array_equal, one, cube)
    assert cube.params["W_out"].sharding.spec == P("fsdp", "tensor")
    assert cube.failures == 0


@pytest.mark.slow
def test_train_step_applies_optax_to_the_gradient_of_the_loss():
    setup, params = setup_of("data=2,fsdp=4"), first_params()
    optimizer = setup.optimizer

    @jax.jit
    def step_by_hand(params: Params) -> tuple[Params, Params, Params]:
        grads = jax.grad(lambda p: CrossEntropy().loss(MODEL.build(), p, BATCHES[0])[0])(params)
        updates = optimizer.update(grads, optimizer.init(params), params)[0]
        return grads, updates, optax.apply_updates(params, updates)

    grads, updates, expected = jax.device_get(step_by_hand(params))
    state, metrics = make_train_step(setup)(state_on(setup), BATCHES[0], 0)
    jax.tree.map(assert_close, state.params, expected)
    assert metrics.finite
    norm_of = lambda tree: np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))  # noqa: E731
    measured = metrics.grad_norm, metrics.update_norm, norm_of(params)
    for tree, norm, norms_R in zip((grads, updates, params), measured, np.asarray(metrics.norms_3R), strict=True):
        assert_allclose(norm, norm_of(tree), rtol=1e-5)
        rows = dict(zip(row_names(params), norms_R, strict=True))
        W_O = tree["blocks_0"]["attention"]["W_O"]
        assert_allclose(rows["blocks.0.attention.heads.3.W_O"], np.linalg.norm(W_O[3]), rtol=1e-5)


@pytest.mark.slow
def test_a_gradient_whose_sum_over_tokens_would_overflow_is_finite():
    """W_out's: with blocks that give nothing, the sum over 192 tokens of 3e37 times softmax less one-hot; float32 ends
    at 3.4e38."""
    config = computed(replace(CONFIG, model=replace(MODEL, norm="none")), grad_accumulation_steps=4)
    setup = setup_of("data=1", config)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), setup.abstract_state.params)
    zeros["embedding"]["W_E"] = np.full((V, 16), 3e37, np.float32)
    batch = next_token_batch(np.zeros((B, T + 1), np.int32))
    loss, grads = gradient_at(setup, zeros, batch)
    np.testing.assert_allclose(loss, np.log(V), rtol=1e-6)
    expected = 3e37 * (1 / V - np.eye(V)[0])
    np.testing.assert_allclose(grads["W_out"], np.broadcast_to(expected, (16, V)), rtol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_compiled_step_is_called_itself_without_jit(monkeypatch):
    """JAX does not call what is compiled then."""
    step = CompiledStep(setup_of("data=1", CONFIG), print)
    monkeypatch.setattr(step, "_step", jax.jit(lambda state, batch, i: (state + batch[0], i)))
    with jax.disable_jit():
        assert step(np.float32(2), (np.float32(3),), 4) == (5, 4)


@lru_cache
def loss_and_gradient(config: Config, n_chunks: int) -> tuple[jax.Array, Params]:
    """Of the first batch, with its logits made in so many pieces."""
    setup = setup_of("data=1", config)
    with pytest.MonkeyPatch.context() as patch:
        if n_chunks > 1:
            # In bfloat16, logits may take twice as many bytes.
            n_bytes = 1 if setup.compute_dtype == jnp.bfloat16 else 4
            patch.setattr(objective, "MAX_LOGITS_BYTES", -(-B * T // n_chunks) * V * n_bytes)
        chunk = rows_per_chunk(B * T, V, objective._max_logits(jnp.zeros((), setup.compute_dtype)))
        assert -(-B * T // chunk) == n_chunks
        return jax.device_get(gradient_at(setup, state_on(setup).params, BATCHES[0]))


@pytest.mark.slow
def test_bfloat16_is_close_and_gradients_of_chunks_are_summed_in_float32():
    """A rounding to bfloat16 is at most 2^-9 of a number; those of different tokens are independent, so that the mean
    over 192 of them is closer than each. A bfloat16 sum over 192 pieces is rounded 192 times, and was measured to be
    off by 1.9 % of the norm; what is computed in bfloat16 at once, and rounded once, is off by 0.4 %, and summed in
    float32 the pieces are no worse."""
    bfloat16 = computed(CONFIG, precision="bfloat16")
    (loss, grads), (close, halves), (_, pieces) = (
        loss_and_gradient(config, n) for config, n in ((CONFIG, 1), (bfloat16, 1), (bfloat16, B * T))
    )
    assert 1e-6 < abs(close / loss - 1) < 2**-10
    assert {leaf.dtype for leaf in jax.tree.leaves(halves)} == {jnp.dtype(jnp.float32)}
    exact, unchunked, chunked = (tree["W_out"] for tree in (grads, halves, pieces))
    assert np.linalg.norm(chunked - exact) < 1.25 * np.linalg.norm(unchunked - exact)


def test_logits_of_a_sequence_classifier_are_not_chunked(monkeypatch):
    """A classifier has features of each token, but logits of none."""
    config = ClassifierConfig(V, T, 8, n_heads=2, d_ff=(12,), n_blocks=1, n_classes=3)
    inputs = BATCHES[0].inputs[0], np.ones((B, T), bool)
    batch, model = Batch(inputs, np.arange(B, dtype=np.int32) % 3), config.build()
    params = abstract_params(model)
    monkeypatch.setattr(objective, "MAX_LOGITS_BYTES", 4 * V)

    def call(params: Params) -> jax.Array:
        logits = batched_apply(model, params)(*batch.inputs)[0]
        return per_target(negative_log_likelihood, logits, batch.targets)

    assert jax.eval_shape(call, params).shape == (B,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            plain_decoder(V, T),
            r"expects inputs and targets int32 \(12,\), int32 \(12,\) per .* int32 \(12,\), bool \(12,\), int32",
        ),
        (
            ClassifierConfig(V, T),
            r"ClassifierConfig expects .* bool \(12,\), int32 \(\) per .* bool \(12,\), int32 \(12,\);",
        ),
    ],
    ids=["inputs", "targets"],
)
def test_batch_with_other_inputs_or_targets_is_refused(model, message):
    """Of masked text, which fits an encoder."""
    batch = Batch((np.zeros((B, T), np.int32), np.ones((B, T), bool)), np.zeros((B, T), np.int32))
    TrainSetup(replace(CONFIG, model=EncoderConfig(V, T)), make_mesh()).check_fit(batch)
    with pytest.raises(UserError, match=message):
        TrainSetup(replace(CONFIG, model=model), make_mesh()).check_fit(batch)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_logits_of_the_batch():
    """Windows as short as the ladder's in batches too large for their logits, on one device."""
    model = replace(MODEL, vocab_size=2**14, context_length=32)

    def temporary(batch_size: int) -> np.ndarray:
        setup = setup_of("data=1", replace(CONFIG, model=model, train=TrainConfig(batch_size=batch_size)))
        batch = setup.abstract_batch
        weighed = batch._replace(weights=batch.targets.update(dtype=jnp.float32))
        learning = make_train_step(setup).lower(setup.abstract_state, batch, 0)
        eval_step: Any = make_eval_step(setup)
        evaluation = eval_step.lower(setup.abstract_state.params, weighed)
        return np.array([x.compile().memory_analysis().temp_size_in_bytes for x in (learning, evaluation)])

    small, large = 512, 2048  # two and eight times 2^27 logits, as many as are made at once in float32
    assert rows_per_chunk(32 * large, 2**14, objective.MAX_LOGITS_BYTES // 4) == 32 * small // 2
    logits = 4 * 32 * (large - small) * 2**14
    needed = temporary(large)
    # The step keeps some hundreds of numbers a token besides, an evaluation fewer; here a token has 16,384 logits.
    assert (needed - temporary(small) < logits / 10).all()
    assert (needed < 2.5 * objective.MAX_LOGITS_BYTES).all()  # a chunk of logits and their gradient


INFINITE = V - 1
"""A token whose embedding is not finite: only batches that hold it break."""


@pytest.fixture(scope="module")
def good_and_bad() -> tuple[Batch, Batch]:
    good = np.where(TOKENS[0] == INFINITE, 0, TOKENS[0])
    return next_token_batch(good), next_token_batch(np.where(np.arange(T + 1) == 3, INFINITE, good))


@pytest.mark.slow
def test_non_finite_steps_are_skipped_and_too_many_in_a_row_stop_training(good_and_bad):
    allowed, fields = 2, {"non_finite": "skip", "max_skips": 2}
    setup = setup_of("data=2,fsdp=2", replace(CONFIG, train=replace(CONFIG.train, **fields)))
    step, state = make_train_step(setup), state_on(setup)
    good, bad = good_and_bad
    W_E = state.params["embedding"]["W_E"]
    state.params["embedding"]["W_E"] = W_E.at[INFINITE, 0].set(jnp.inf)

    def take(batch: Batch) -> tuple[float, bool, int]:
        """The loss, whether anything was learned, and the count of failures."""
        nonlocal state
        before = jax.device_get((state.params, state.opt_state))
        state, metrics = step(state, batch, 0)
        after = jax.device_get((state.params, state.opt_state))
        changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
        assert metrics.finite == np.isfinite(metrics.loss) == (metrics.update_norm > 0)
        return float(metrics.loss), any(jax.tree.leaves(changed)), int(state.failures)

    loss, learned, failures = take(good)
    assert np.isfinite(loss) and learned and failures == 0
    for count in range(1, allowed + 1):  # as many as are allowed
        loss, learned, failures = take(bad)
        assert np.isnan(loss) and not learned and failures == count
    loss, learned, failures = take(good)
    assert np.isfinite(loss) and learned and failures == 0
    for count in range(1, allowed + 2):  # one more
        assert take(bad)[1:] == (False, count)
    loss, learned, failures = take(good)
    assert np.isnan(loss) and not learned and failures == allowed + 2


@pytest.mark.slow
def test_recompilation_for_another_batch_shape_is_reported():
    messages: list[str] = []
    setup = setup_of("data=1")
    step, state, split = CompiledStep(setup, messages.append), state_on(setup), batch_sharding(setup.mesh)
    assert step.compile(BATCHES[0]).startswith("memory per device: ")
    for k in range(2):
        state, _ = step(state, global_device_put(BATCHES[k], split), k)
    assert not messages
    state, metrics = step(state, global_device_put(next_token_batch(TOKENS[2][:, :8]), split), 2)
    assert messages == ["step 3 is recompiled for a batch of (16, 7)"]
    assert metrics.finite and np.isfinite(metrics.loss)
    state, _ = step(state, global_device_put(next_token_batch(TOKENS[3][:, :8]), split), 3)
    step(state, global_device_put(BATCHES[4], split), 4)  # both programs are kept
    assert len(messages) == 1


@pytest.mark.slow
def test_step_beyond_memory_is_refused_before_it_runs(monkeypatch):
    monkeypatch.setattr(memory, "memory_capacity", lambda device: 10_000)
    with pytest.raises(UserError, match=r"a step needs [\d.]+ KiB of memory per device, but there are 9.77 KiB; lower"):
        CompiledStep(setup_of("data=1"), print).compile(BATCHES[0])


@pytest.mark.parametrize(
    ("batch_size", "n_microbatches", "mesh", "message"),
    [
        (12, 1, "data=8", "12 does not split over 8 devices; use a multiple such as 16"),
        (8, 2, "data=4,fsdp=2", "8 does not split over 8 devices in 2 microbatches; use a multiple such as 16"),
        (30, 2, "fsdp=2,tensor=2", "30 does not split over 2 devices in 2 microbatches; use a multiple such as 32"),
    ],
)
def test_batch_that_does_not_split_is_refused_with_a_size_that_does(batch_size, n_microbatches, mesh, message):
    config = replace(computed(CONFIG, grad_accumulation_steps=n_microbatches), train=TrainConfig(batch_size=batch_size))
    with pytest.raises(UserError, match=message):
        setup_of(mesh, config)


def test_compute_options_reach_the_execution():
    execution = setup_of("data=1", computed(TWO_BLOCKS, remat="dots", scan_blocks=True)).execution
    assert (execution.remat, execution.scan) == ("dots", True)


class Accelerator:
    """A device elsewhere, of which a set-up reads the platform."""

    def __init__(self, platform: str) -> None:
        self.platform = platform


@pytest.mark.parametrize(
    ("platform", "fields", "model", "data", "warning"),
    [
        ("cpu", {"attention": "xla"}, {}, {}, None),
        ("gpu", {}, {}, {}, None),
        ("gpu", {"attention": "xla"}, {}, {}, r"; attention: xla, as configured; set `compute.attention='auto'`"),
        ("gpu", {"precision": "float32"}, {}, {}, r"\(not cudnn: .* float32\); set `compute.precision='bf"),
        ("gpu", {}, {}, PACKED, r"not cudnn: cuDNN supports packed .*\); set `data.packing='windows'`"),
        ("tpu", {}, {}, {}, r"splash attention needs at least 128 .*; docs/accelerators.md lists remedies"),
        ("tpu", {}, {}, PACKED, r"splash attention needs at least 128 .*; docs/accelerators.md lists remedies"),
    ],
)
def test_unfused_attention_of_an_accelerator_is_a_warning_with_reason_and_remedy(
    platform, fields, model, data, warning
):
    one_head = replace(CONFIG, model=replace(MODEL, n_heads=1, **model))  # of a width that kernels take
    config = replace(computed(one_head, **fields), data=replace(CONFIG.data, **data))
    mesh = SimpleNamespace(devices=np.array([Accelerator(platform)]), shape=dict.fromkeys(AXES, 1))
    said = TrainSetup(config, cast(Mesh, mesh)).attention.warning
    assert said is None if warning is None else re.search(f"^warning: attention is not fused, .*{warning}", said)


def test_processes_that_choose_different_attention_are_refused(monkeypatch):
    line = setup_of("data=1").attention.line
    monkeypatch.setattr(kernels, "all_gather", lambda mine: [mine, "attention: other"])
    with pytest.raises(UserError) as caught:
        setup_of("data=1").attention.line  # noqa: B018
    assert str(caught.value) == (
        f"processes differ ({line}; attention: other); set `compute.attention` to xla or blockwise."
    )
