"""FLOPs, bytes and times of a step agree with sums by hand."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.ops import RoPE
from jaxformer.ops.kernels import BLOCK, splash_attention
from jaxformer.ops.masks import Causal
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan.hlo import Collective
from jaxformer.plan.roofline import (
    CHIPS,
    Chip,
    Estimate,
    matmul_flops,
    model_flops,
    visible_pairs,
    without_dead_code,
)
from jaxformer.train.setup import TrainSetup
from tests.arrays import plain_decoder, rung_like

MODEL = plain_decoder(
    vocab_size=48, context_length=12, d_model=16, n_blocks=3, n_heads=4, d_ff=(32,),
    bias=False, norm="rmsnorm", positions="none", rope=RoPE(),
)  # fmt: skip
CONFIG = Config("t", MODEL, data=TextConfig(), steps=2, optimizer=OptimizerConfig(), train=TrainConfig(batch_size=16))


def test_slowest_of_three_bounds_the_step_and_mfu_counts_model_flops():
    chip = Chip(flops=100.0, memory=1.0, bandwidth=10.0, link=2.0, source="")
    e = Estimate.of(400.0, 20.0, [Collective("all-reduce", 1, 4.0)], model_flops=300.0, chip=chip)
    assert (e.compute, e.memory, e.network) == (4, 2, 2)
    assert (e.seconds, e.bound, e.mfu, e.mfu_without_overlap) == (4, "compute", 0.75, 3 / 8)
    assert Estimate.of(400.0, 20.0, [Collective("all-reduce", 1, 12.0)], 300.0, chip).bound == "network"


@pytest.mark.parametrize(("per_host", "seconds"), [(0, 6.0), (1, 24.0), (2, 12.0), (4, 6.0), (8, 6.0)])
def test_a_ring_over_hosts_sends_by_the_cards_of_its_devices_on_each(per_host, seconds):
    """At most as fast as the links within a host: 12 bytes at 2 per second, or at 0.5 per second and card."""
    chip = Chip(flops=1.0, memory=1.0, bandwidth=1.0, link=2.0, source="", nic=0.5)
    assert chip.send_seconds([Collective("all-gather", 3, 12.0, per_host)]) == seconds
    assert replace(chip, nic=0.0).send_seconds([Collective("all-gather", 3, 12.0, per_host)]) == 6  # TPUs


def test_every_chip_has_a_source():
    assert all(chip.source and chip.flops > chip.bandwidth > chip.link for chip in CHIPS.values())


@pytest.mark.parametrize(
    ("name", "chips", "of_all"),
    [("TPU v4", 4096, 1.1e15), ("TPU v5 lite", 256, 51.2e12), ("TPU v6 lite", 256, 102.4e12)],
)
def test_links_agree_with_the_all_reduce_of_a_pod(name, chips, of_all):
    """cloud.google.com/tpu/docs gives "all-reduce bandwidth per Pod", too: that of all links of all chips."""
    dimensions = 3 if name == "TPU v4" else 2
    assert chips * dimensions * CHIPS[name].link == pytest.approx(of_all, rel=0.01)


def test_products_count_in_loops_branches_and_functions():
    x, w = jnp.ones((3, 5)), jnp.ones((5, 7))
    one = 2 * 3 * 5 * 7

    def count(f, *args):
        return matmul_flops(jax.make_jaxpr(f)(*args))

    assert count(lambda x, w: x @ w, x, w) == one
    assert count(jax.jit(lambda x, w: x @ w + x @ w), x, w) == 2 * one
    assert count(lambda x, w: jax.lax.scan(lambda c, _: (c + (x @ w).sum(), None), 0.0, None, 11)[0], x, w) == 11 * one
    assert count(lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: (x @ w).sum(), lambda: 0.0), x, w) == one
    assert count(jax.grad(lambda x, w: jnp.sin(x @ w).sum(), (0, 1)), x, w) == 3 * one
    again = jax.checkpoint(lambda x, w: jnp.sin(x @ w).sum())
    assert (
        count(jax.grad(again, (0, 1)), x, w) == 3 * one + one
    )  # the product is recomputed for the derivative of the sine


def test_dead_code_does_not_count():
    x = jnp.ones((3, 3))
    jaxpr = jax.make_jaxpr(lambda x: (jax.jit(lambda x: (x @ x, jnp.sin(x)))(x)[1], x @ x))(x)
    assert matmul_flops(jaxpr) == 2 * matmul_flops(without_dead_code(jaxpr)) == 2 * 54


@pytest.mark.parametrize("mask", [Causal(), Causal(600), None])
def test_attention_kernel_counts_its_visible_blocks(mask):
    H, T, K = 2, 3 * BLOCK, 128
    x = jax.ShapeDtypeStruct((H, T, K), jnp.bfloat16)
    visible = visible_pairs(mask, T, T, BLOCK) / T**2
    jaxpr = jax.make_jaxpr(partial(splash_attention, mask=mask))(x, x, x)
    assert matmul_flops(jaxpr, visible) == pytest.approx(4 * H * K * visible_pairs(mask, T, T, BLOCK))


@pytest.mark.parametrize("window", [None, 1, 2, 5, 12, 99])
@pytest.mark.parametrize("block", [1, 3, 4])
def test_visible_pairs_are_those_of_the_mask(window, block):
    visible = Causal(window).array(12, 12)
    blocks = visible.reshape(12 // block, block, 12 // block, block).any(axis=(1, 3)).sum()
    assert visible_pairs(Causal(window), 12, 12, block) == blocks * block**2


def test_model_flops_by_hand():
    T, D, L, F, V = 12, 16, 3, 32, 48
    weights = L * (4 * D * D + 2 * D * F) + D * V
    attention = L * 4 * D * (T * (T + 1) // 2)  # two products over the pairs that a causal mask does not hide
    assert model_flops(TrainSetup(CONFIG, make_mesh())).total == 3 * (2 * T * weights + attention)
    wide = TrainSetup(
        replace(CONFIG, model=rung_like(MODEL, value_dim=12)),
        make_mesh(),
    )  # three times as wide as keys
    weights += L * 2 * 2 * D * D
    assert model_flops(wide).total == 3 * (2 * T * weights + 2 * attention)


@pytest.mark.slow
def test_model_flops_of_experts_count_routed_tokens():
    """Two of eight experts per token, whatever their capacity."""
    T, D, L, F, V, E, J = 12, 16, 3, 32, 48, 8, 2
    weights = L * (4 * D * D + E * D + J * (2 * D * F + D)) + D * V  # with the sum of the outputs of two experts
    attention = L * 4 * D * (T * (T + 1) // 2)
    for capacity in (None, 1.25):
        model = replace(MODEL, experts=ExpertsConfig(E, J, capacity_factor=capacity))
        setup = TrainSetup(replace(CONFIG, model=model), make_mesh())
        assert model_flops(setup).total == 3 * (2 * T * weights + attention)
