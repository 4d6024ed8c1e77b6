"""Which device holds what."""

import runpy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.config import Config, ModelConfig, OptimizerConfig
from jaxformer.contract import ParameterAxes, Role
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.models.decoder import ExpertsConfig, LatentsConfig
from jaxformer.nn.parameters import parameter_axes
from jaxformer.ops import workarounds
from jaxformer.parallel import mesh as sharding
from jaxformer.parallel.mesh import (
    assemble,
    batch_sharding,
    batch_shards,
    gather,
    global_device_put,
    local_copy,
    local_rows,
    make_mesh,
    on_each_shard,
    parse_mesh,
    replicated,
    shardings,
    spec,
    sum_over_batch,
)
from jaxformer.runs.run import abstract_params
from jaxformer.train.setup import TrainSetup
from tests.arrays import normal, plain_decoder, plain_rung
from tests.helpers import ROOT

CUBE = "data=2,fsdp=2,tensor=2"
IN, OUT = ParameterAxes.parse("embed -> hidden"), ParameterAxes.parse("embed -> vocab")


CONFIGS = {
    f"{file.stem}.{name}": value
    for file in sorted((ROOT / "configs").glob("*.py"))
    for name, value in runpy.run_path(str(file)).items()
    if isinstance(value, Config)
}
"""Every config of the repository."""


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict[str, NamedSharding]:
    model = config.build()
    return flatten_dict(shardings(abstract_params(model), parameter_axes(model), mesh), sep=".")


def test_a_mesh_is_read_axis_by_axis():
    assert parse_mesh("") == {}
    assert parse_mesh("fsdp=4") == {"fsdp": 4}
    assert parse_mesh(" data=2, tensor=3 ,") == {"data": 2, "tensor": 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model=2", "the mesh is 'model=2'; it must be one size .* the axes data, fsdp, expert, tensor, such as"),
        ("8", "the mesh is '8'"),
        ("data", "it must be one size of at least 1"),
        ("data=0", "it must be one size of at least 1"),
        ("data=-2", "it must be one size of at least 1"),
        ("data=two", "it must be one size of at least 1"),
        ("fsdp=2,fsdp=2", "it must be one size of at least 1"),
    ],
)
def test_invalid_mesh_is_a_user_error(text, said):
    with pytest.raises(UserError, match=said):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "shape", "parts"),
    [
        ("", (8, 1, 1, 1), 8),
        ("fsdp=4", (2, 4, 1, 1), 8),
        ("tensor=8", (1, 1, 1, 8), 1),
        (CUBE, (2, 2, 1, 2), 4),
        ("expert=2", (4, 1, 2, 1), 8),
    ],
)
def test_data_axis_defaults_to_the_remaining_devices(text, shape, parts):
    mesh = make_mesh(text)
    assert tuple(mesh.shape.values()) == shape
    assert mesh.axis_names == sharding.AXES
    assert batch_shards(mesh) == parts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=4", "needs data 4 = 4 devices, but there are 8"),
        ("fsdp=3", "needs fsdp 3 x data 2 = 6 devices, but there are 8"),
        ("tensor=16", "needs tensor 16 x data 1 = 16 devices, but there are 8"),
    ],
)
def test_mesh_of_another_number_of_devices_is_a_user_error(text, said):
    with pytest.raises(UserError, match=said):
        make_mesh(text)


def test_decoder_parameters_are_sharded_as_listed():
    """Heads and hidden layers over `tensor`, all matrices over `fsdp`, what has one axis of the model's width whole."""
    model = plain_rung(
        12, 6, 8, n_blocks=1, n_heads=4, n_kv_heads=2, output_projection=True, attention_bias=True, qk_norm=True,
        d_ff=(16,), activation="swiglu", norm="layernorm", final_norm=True, value_embedding=True,
    )  # fmt: skip
    expected = {
        "embedding.W_E": P("tensor", "fsdp"),
        "value_embedding.W_E": P("tensor", "fsdp"),
        "embedding.W_pos": P(None, "fsdp"),
        "blocks_0.attention.W_Q": P("fsdp", "tensor", None),
        "blocks_0.attention.W_K": P("fsdp", "tensor", None),
        "blocks_0.attention.W_V": P("fsdp", "tensor", None),
        "blocks_0.attention.b_Q": P("tensor", None, None),
        "blocks_0.attention.b_K": P("tensor", None, None),
        "blocks_0.attention.b_V": P("tensor", None, None),
        "blocks_0.attention.gamma_Q": P(),
        "blocks_0.attention.gamma_K": P(),
        "blocks_0.attention.W_O": P("tensor", None, "fsdp"),
        "blocks_0.attention.b_O": P(),
        "blocks_0.attention_norm.gamma": P(),
        "blocks_0.attention_norm.beta": P(),
        "blocks_0.mlp.W_1": P("fsdp", "tensor"),
        "blocks_0.mlp.W_gate_1": P("fsdp", "tensor"),
        "blocks_0.mlp.b_1": P("tensor"),
        "blocks_0.mlp.W_2": P("tensor", "fsdp"),
        "blocks_0.mlp.b_2": P(),
        "blocks_0.mlp_norm.gamma": P(),
        "blocks_0.mlp_norm.beta": P(),
        "final_norm.gamma": P(),
        "final_norm.beta": P(),
        "W_out": P("fsdp", "tensor"),
    }
    mesh = make_mesh(CUBE)
    placed = param_shardings(model, mesh)
    assert {name: where.spec for name, where in placed.items()} == expected


def test_expert_parameters_are_sharded_as_listed():
    """Experts over `expert`; what is within one, and the one that all share, as an MLP."""
    model = plain_rung(12, 6, 8, d_ff=(16,), activation="swiglu", experts=ExpertsConfig(4, shared_expert=True))
    expected = {
        "W_router": P("fsdp", None),
        "experts.W_1": P("expert", "fsdp", "tensor"),
        "experts.W_gate_1": P("expert", "fsdp", "tensor"),
        "experts.b_1": P("expert", "tensor"),
        "experts.W_2": P("expert", "tensor", "fsdp"),
        "experts.b_2": P("expert", None),
        "shared.W_1": P("fsdp", "tensor"),
        "shared.W_gate_1": P("fsdp", "tensor"),
        "shared.b_1": P("tensor"),
        "shared.W_2": P("tensor", "fsdp"),
        "shared.b_2": P(),
    }
    placed = param_shardings(model, make_mesh("fsdp=2,expert=2,tensor=2"))
    layer = "blocks_0.mlp."
    specs_by_name = {name.removeprefix(layer): where.spec for name, where in placed.items() if name.startswith(layer)}
    assert specs_by_name == expected


def test_latent_attention_is_sharded_as_listed():
    """Heads over `tensor`; latents have none, so projections to them are split over `fsdp` alone."""
    model = plain_decoder(12, 6, 8, n_heads=2, head_dim=6, latents=LatentsConfig(4, 4, rope_width=2), sinks=True)
    expected = {
        "W_DQ": P("fsdp", None),
        "W_DKV": P("fsdp", None),
        "W_KR": P("fsdp", None),
        "W_Q": P("fsdp", "tensor", None),
        "W_K": P("fsdp", "tensor", None),
        "W_V": P("fsdp", "tensor", None),
        "W_O": P("tensor", None, "fsdp"),
        "gamma_DQ": P(),
        "gamma_DKV": P(),
        "sinks": P("tensor"),
    }
    placed = param_shardings(model, make_mesh(CUBE))
    layer = "blocks_0.attention."
    assert {n.removeprefix(layer): w.spec for n, w in placed.items() if n.startswith(layer)} == expected


OF_EACH_KIND = {type(config.model): name for name, config in CONFIGS.items()}.values()
"""The last config of each kind of model."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_every_matrix_is_split_over_both_axes(name):
    """A device holds a fourth of it, and hardly more of all parameters. Two blocks stand for all."""
    config, mesh = CONFIGS[name].model, make_mesh(CUBE)
    if getattr(config, "n_blocks", 0) > 2:
        config = replace(config, n_blocks=2)
    model = config.build()
    params, axes = flatten_dict(abstract_params(model), sep="."), parameter_axes(model)
    n_on_device = 0
    for path, leaf in params.items():
        shard = NamedSharding(mesh, spec(axes[path], leaf.shape, mesh)).shard_shape(leaf.shape)
        n_on_device += np.prod(shard)
        if axes[path].role in (Role.MATRIX, Role.EMBEDDING):
            on_mesh = [sharding.MESH_AXES.get(axis) for axis in axes[path].names]
            split = [axis and mesh.shape[axis] == 2 and n % 2 == 0 for n, axis in zip(leaf.shape, on_mesh, strict=True)]
            assert np.prod(shard) == leaf.size / 2 ** sum(map(bool, split)), path
    # Heads of the first rungs are one and cannot be split; a vocabulary of 50,257 is odd.
    assert n_on_device <= sum(leaf.size for leaf in params.values()) / 2


def test_axes_that_do_not_divide_are_not_split():
    assert spec(OUT, (8, 12), make_mesh("fsdp=2,tensor=4")) == P("fsdp", "tensor")
    assert spec(OUT, (8, 13), make_mesh("fsdp=2,tensor=4")) == P("fsdp", None)
    assert spec(OUT, (7, 12), make_mesh("fsdp=2,tensor=4")) == P(None, "tensor")
    assert spec(OUT, (8, 12), make_mesh("fsdp=8")) == P("fsdp", None)


def test_a_mesh_axis_splits_one_axis_of_a_parameter():
    table = ParameterAxes.parse("vocab -> vocab")
    assert spec(table, (8, 8), make_mesh("data=2,tensor=4")) == P("tensor", None)
    assert spec(table, (7, 8), make_mesh("data=2,tensor=4")) == P(None, "tensor")


@pytest.mark.parametrize("name", ["nesterov_sgd", "adamw", "muon", "lion", "schedule_free"])
def test_optimizer_state_is_sharded_as_its_parameters(name):
    model = plain_decoder(16, 4, 8, n_heads=2, d_ff=(16,), norm="rmsnorm")
    config = Config("test", model, data=TextConfig(), steps=3, optimizer=OptimizerConfig(name=name, learning_rate=0.1))
    state = TrainSetup(config, make_mesh("fsdp=4,tensor=2")).abstract_state
    params = flatten_dict(state.params, sep=".")
    names = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state):
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if keys and keys[0] in ("muon", "adamw"):  # the two parts of muon's state
            keys = keys[1:]
        if not keys:
            assert leaf.size <= 3 and leaf.sharding.spec == P()  # a count of steps, muon's three coefficients
            continue
        assert leaf.sharding == params[".".join(keys)].sharding
        names.add(".".join(keys))
    assert names == set(params)


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", CUBE, "tensor=8"])
def test_gather_is_an_all_gather_with_a_reduce_scatter_gradient(mesh):
    """f(W) = the sum over examples x of |W x|², whose gradient is 2 W (the sum of x xᵀ)."""
    mesh = make_mesh(mesh)
    W, x_BD = normal(16, 8), normal(16, 8, seed=1)
    specs = {"W": spec(IN, W.shape, mesh)}

    def gradient(shard, x_BD):
        def loss(shard):
            gathered_array = gather(shard, specs, mesh)["W"]
            assert gathered_array.shape == W.shape
            return jnp.sum((x_BD @ gathered_array.T) ** 2)

        return sum_over_batch(jax.grad(loss)(shard), specs), sum_over_batch(loss(shard))

    sharded = on_each_shard(gradient, mesh, (specs, P(sharding.BATCH)), (specs, P()))
    params = {"W": jax.device_put(W, NamedSharding(mesh, specs["W"]))}
    grads, loss = jax.jit(sharded)(params, jax.device_put(x_BD, batch_sharding(mesh)))
    np.testing.assert_allclose(loss, np.sum((x_BD @ W.T) ** 2), rtol=1e-5)
    np.testing.assert_allclose(grads["W"], 2 * W @ (x_BD.T @ x_BD), rtol=1e-4, atol=1e-4)
    split = mesh.shape["fsdp"]
    assert {s.data.shape[0] for s in grads["W"].addressable_shards} == {16 // split}


@pytest.mark.parametrize("mesh", ["", "fsdp=8", CUBE, "tensor=8"])
def test_batch_is_assembled_from_rows(mesh):
    split, batch = batch_sharding(make_mesh(mesh)), np.arange(48).reshape(16, 3)
    row_indices = local_rows(split, 16)
    assert row_indices.tolist() == list(range(16))  # one process holds all
    assembled = assemble(batch[row_indices], row_indices, 16, split)
    assert assembled.sharding == split
    np.testing.assert_array_equal(assembled, batch)


def test_batch_is_assembled_from_the_rows_of_one_process(monkeypatch):
    """What process 1 of two would see: devices 4 to 7, and so the second half of the batch."""
    mesh = make_mesh("data=4,tensor=2")
    split, batch = batch_sharding(mesh), np.arange(48).reshape(16, 3)
    here = set(jax.devices()[4:])

    class Half:
        """The sharding, as that process knows it."""

        def addressable_devices_indices_map(self, shape):
            return {d: index for d, index in split.devices_indices_map(shape).items() if d in here}

    row_indices = local_rows(Half(), 16)
    assert row_indices.tolist() == list(range(8, 16))
    calls = {}
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, _, at: calls.update(shape=shape, at=at))
    assemble(batch[row_indices], row_indices, 16, split)
    assert calls["shape"] == (16, 3)
    for index in Half().addressable_devices_indices_map((16, 3)).values():
        np.testing.assert_array_equal(calls["at"](index), batch[index])


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", CUBE])
def test_local_copy_is_on_one_device(mesh):
    mesh = make_mesh(mesh)
    W = {"W_1": normal(8, 16)}
    copy = local_copy(jax.device_put(W, shardings(W, {"W_1": IN}, mesh)), mesh)
    assert len(copy["W_1"].devices()) == 1
    np.testing.assert_array_equal(copy["W_1"], W["W_1"])


def test_global_device_put_shards_an_array():
    mesh, array = make_mesh(), np.arange(8.0)
    for where in (replicated(mesh), batch_sharding(mesh)):
        placed = global_device_put(array, where)
        assert placed.sharding == where
        np.testing.assert_array_equal(placed, array)


@pytest.mark.slow
def test_all_gather_by_rings_is_an_all_gather(monkeypatch):
    lengths, axis = (2, 2, 2), 1
    monkeypatch.setattr(workarounds, "rings", lambda devices: lengths)
    mesh = make_mesh("fsdp=8")
    spec = P(*["fsdp" if i == axis else None for i in range(2)])
    w = jnp.arange(16 * 24, dtype=jnp.float32).reshape(16, 24)
    gathered = on_each_shard(lambda w: gather(w, spec, mesh), mesh, (spec,), P())
    np.testing.assert_array_equal(gathered(w), w)

    def loss(w, x):
        return (gather(w, spec, mesh) * x[0]).sum()

    x = jnp.arange(8 * w.size, dtype=jnp.float32).reshape(8, *w.shape) % 7
    grad = on_each_shard(jax.grad(loss), mesh, (spec, P("fsdp")), spec)(w, x)
    np.testing.assert_array_equal(grad, x.sum(0))  # whole numbers: no rounding
