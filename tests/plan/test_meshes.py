"""Counts of communication and memory per mesh agree with sums by hand, and so does the order of the meshes."""

from dataclasses import replace

import pytest

from jaxformer.config import ComputeConfig, LoraConfig
from jaxformer.errors import UserError
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan import make_plan
from jaxformer.plan.hlo import Collective
from jaxformer.plan.meshes import (
    MeshCost,
    describe_meshes,
    memory_of,
    minimal_bytes_sent,
    on_one_device,
    rank_meshes,
    required_collectives,
)
from jaxformer.plan.roofline import Chip, Estimate
from jaxformer.train.setup import TrainSetup
from tests.plan.test_roofline import CONFIG, MODEL

B, T, D, L, F, V = 16, 12, 16, 3, 32, 48  # of CONFIG
BLOCKS, TABLES, GAINS = L * (4 * D * D + 2 * D * F), 2 * V * D, L * 2 * D
CHIP = Chip(flops=1e9, memory=1e9, bandwidth=1e9, link=1e6, source="", nic=1e5)
SETUP = on_one_device(CONFIG)  # in bfloat16


def sizes(data=1, fsdp=1, expert=1, tensor=1):
    return {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}


def sent(config, host_size=None, **axes) -> dict[tuple[str, int], float]:
    """Return the bytes that a device sends by kind of collective and devices per host."""
    return {
        (c.kind, c.per_host): c.n_bytes for c in required_collectives(on_one_device(config), sizes(**axes), host_size)
    }


def test_sharded_parameters_are_gathered_in_bfloat16_and_gradients_summed_in_float32():
    one_way = 3 / 4 * 2 * (BLOCKS + TABLES)
    gains, shards = 2 * 7 / 8 * 4 * GAINS, 2 * 1 / 2 * 4 * (BLOCKS + TABLES) / 4  # each shard has two replicas
    result = sent(CONFIG, host_size=4, data=2, fsdp=4)
    assert result == {
        ("all-gather", 0): one_way, ("reduce-scatter", 0): one_way,  # between the four of a host
        ("all-reduce", 1): pytest.approx(shards), ("all-reduce", 4): gains,  # one or all of each host
    }  # fmt: skip
    again = replace(CONFIG, compute=ComputeConfig(remat="block", grad_accumulation_steps=2))
    gathered = sent(again, data=2, fsdp=4)
    assert gathered["all-gather", 0] == 3 / 4 * 2 * 2 * (2 * BLOCKS + TABLES)
    assert gathered["reduce-scatter", 0] == 2 * one_way


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_counts_agree_with_compiled_programs(axes):
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
    of_float32 = {"model": replace(MODEL, n_blocks=1), "compute": ComputeConfig(precision="float32")}
    config = replace(CONFIG, mesh=mesh, **of_float32)
    compiled = {c.kind: c.n_bytes for c in make_plan(TrainSetup(config, make_mesh(mesh))).collectives}
    counted = sent(config, **axes)
    assert compiled["reduce-scatter"] == counted["reduce-scatter", 0]
    gathers = compiled["all-gather"], counted["all-gather", 0]
    assert gathers[0] > gathers[1] if "tensor" in axes else gathers[0] == gathers[1]


def test_tensor_parallelism_sums_activations_as_its_paper_says():
    """Shoeybi et al. 2019, section 3: four all-reduces per block, and two for the vocabulary."""
    activations = 2 * 3 / 4 * (B // 2 * T * D * 2)
    result = required_collectives(SETUP, sizes(data=2, tensor=4), 4)
    matrices = 2 * 1 / 2 * 4 * (BLOCKS + TABLES) / 4
    assert result == (
        Collective("all-reduce", 4 * L + 2, (4 * L + 2) * activations, 0),
        Collective("all-reduce", 2 * L + 6 * L + 2, pytest.approx(matrices + 4 * GAINS), 1),
    )
    tied = replace(CONFIG, model=replace(MODEL, unembedding="tied"), compute=ComputeConfig(remat="block"))
    assert required_collectives(on_one_device(tied), sizes(tensor=4))[0].times == 5 * L + 2


@pytest.mark.slow
def test_experts_exchange_their_slots():
    """Two all-to-alls forward, two backward: of three slots per token, two experts with a capacity factor of 1.5."""
    model = replace(MODEL, experts=ExpertsConfig(8, 2, capacity_factor=1.5))
    of_tokens = B // 4 * T * D * 2
    result = sent(replace(CONFIG, model=model), expert=4)
    assert result["all-to-all", 0] == 4 * L * 3 / 4 * 3 * of_tokens


@pytest.mark.slow
def test_minimal_bytes_sent_is_unknown_where_activations_are_sent():
    minimum = lambda mesh, model=MODEL: minimal_bytes_sent(TrainSetup(replace(CONFIG, model=model), make_mesh(mesh)))  # noqa: E731
    assert minimum("data=8") == 2 * 7 / 8 * 4 * (BLOCKS + TABLES + GAINS)
    assert minimum("fsdp=8") == pytest.approx(7 / 8 * 2 * 4 * (BLOCKS + TABLES) + 2 * 7 / 8 * 4 * GAINS)
    assert minimum("fsdp=2,tensor=4") is None
    assert minimum("expert=8") == minimum("data=8")  # the model has no experts
    assert minimum("expert=8", replace(MODEL, experts=ExpertsConfig(8))) is None


def test_memory_by_hand():
    """Momentum: three float32 arrays per parameter and a cast; tables are gathered with their gradients, and a token
    stores the outputs of its matmuls."""
    parameter, tables = 3 * 4 + 2, 2 * 2 * TABLES
    tokens = B / 4 * T
    outputs = 3 * D + D + F + D + 4 * D
    state = parameter * ((BLOCKS + TABLES) / 4 + GAINS)
    assert memory_of(SETUP, sizes(fsdp=4)) == pytest.approx(state + tables + 2 * tokens * L * outputs, abs=200)
    recomputed = on_one_device(replace(CONFIG, compute=ComputeConfig(remat="block")))
    expected = state + tables + 2 * tokens * (L * (D + D) + outputs)
    assert memory_of(recomputed, sizes(fsdp=4)) == pytest.approx(expected, abs=200)


@pytest.mark.slow
def test_memory_counts_every_slot_of_experts():
    """Per token, three slots instead of two: two experts with a capacity factor of 1.5 instead of 1."""
    of_factor = lambda factor: memory_of(  # noqa: E731
        on_one_device(replace(CONFIG, model=replace(MODEL, experts=ExpertsConfig(8, 2, capacity_factor=factor)))),
        sizes(expert=4),
    )
    assert of_factor(1.5) - of_factor(1.0) == pytest.approx(2 * B / 4 * T * L * (F + D), abs=1)


def test_meshes_are_ranked_by_fit_and_by_compute_and_network_one_after_the_other():
    ranked = rank_meshes(SETUP, 8, CHIP, capacity=1e9, host_size=4)
    names = [cost.mesh for cost in ranked]
    assert len(names) == len(set(names)) == 4 + 3 + 2  # tensor 1, 2 or 4, as there are four heads
    in_turn = [cost.estimate.compute + cost.estimate.network for cost in ranked]
    assert in_turn == sorted(in_turn)
    assert ranked[0].bytes_sent == sum(c.n_bytes for c in required_collectives(SETUP, sizes(fsdp=8), 4))
    assert names[0] == "fsdp=8"
    small = memory_of(SETUP, sizes(fsdp=8))
    ranked = rank_meshes(SETUP, 8, CHIP, capacity=small, host_size=4)
    fitting = [cost.mesh for cost in ranked if cost.fits]
    assert "fsdp=8" in fitting and names[: len(fitting)] != names and ranked[-1].memory > small
    assert not any(cost.fits for cost in ranked[len(fitting) :])


def test_a_ranking_lists_the_best_and_counts_the_rest():
    costs = [MeshCost(f"data={n}", 2e9, n < 11, 3e9, Estimate(1.0, 0.0, 0.5, 1.0, CHIP)) for n in range(1, 13)]
    head, first, *_, rest = describe_meshes(costs)
    assert head.split()[0] == "mesh" and first.split() == ["data=1", "2.0", "3", "1", "0.5", "1.5"]  # the sum
    assert rest == "  and 4 others, of which 2 fit"
    assert describe_meshes(costs[-1:])[1].endswith("does not fit")
    hidden = replace(costs[1], exposed=0.25)
    assert hidden.order < costs[0].order < costs[-1].order
    assert describe_meshes([hidden])[1].endswith(" 1.25  0.25 s of the network exposed")


@pytest.mark.parametrize(
    ("config", "n", "message"),
    [
        (CONFIG, 5, r"no mesh of 5 devices splits `train.batch_size` 16; use a multiple of 5"),
        (replace(CONFIG, compute=ComputeConfig(grad_accumulation_steps=4)), 32, "16 in 4 microbatches; .* of 128"),
        (
            replace(CONFIG, init_from="run", lora=LoraConfig(rank=2)),
            8,
            "does not count the adapters of `lora`; set `mesh`",
        ),
    ],
)
def test_what_cannot_be_ranked_is_a_user_error(config, n, message):
    with pytest.raises(UserError, match=message):
        rank_meshes(on_one_device(config), n, CHIP, 1e9)
