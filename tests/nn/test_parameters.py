"""Parameters and their declared axes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.errors import ScopeParamShapeError

from jaxformer.contract import Contract, Input, ParameterAxes, Role
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.nn.parameters import parameter, parameter_axes, trace_init
from tests.arrays import plain_decoder


@pytest.mark.parametrize(
    ("text", "role", "stack", "inputs", "outputs"),
    [
        ("embed -> heads head_dim", Role.MATRIX, (), ("embed",), ("heads", "head_dim")),
        ("heads head_dim -> embed", Role.MATRIX, (), ("heads", "head_dim"), ("embed",)),
        ("gates embed -> hidden", Role.MATRIX, ("gates",), ("embed",), ("hidden",)),
        ("vocab -> embed", Role.EMBEDDING, (), ("vocab",), ("embed",)),
        ("embed -> vocab", Role.EMBEDDING, (), ("embed",), ("vocab",)),
        ("positions -> embed", Role.POSITION, (), ("positions",), ("embed",)),
        ("heads 1 head_dim", Role.VECTOR, (), (), ("heads", "1", "head_dim")),
        ("vocab", Role.VECTOR, (), (), ("vocab",)),
        ("", Role.VECTOR, (), (), ()),
    ],
)
def test_axes_decide_the_role(text: str, role: Role, stack: tuple, inputs: tuple, outputs: tuple) -> None:
    axes = ParameterAxes.parse(text)
    assert (axes.role, axes.stack, axes.inputs, axes.outputs) == (role, stack, inputs, outputs)
    assert axes.names == (*stack, *inputs, *outputs)


def test_experts_are_stacked() -> None:
    model = plain_decoder(12, 6, 8, d_ff=(16,), experts=ExpertsConfig(4, shared_expert=True)).build()
    axes = parameter_axes(model)
    assert axes["blocks_0.mlp.experts.W_1"] == ParameterAxes.parse("experts embed -> hidden")
    assert axes["blocks_0.mlp.experts.b_2"] == ParameterAxes.parse("embed", ("experts",))
    assert axes["blocks_0.mlp.shared.W_2"] == ParameterAxes.parse("hidden -> embed")


def test_one_trace_has_what_several_had() -> None:
    config = plain_decoder(12, 6, 8, d_ff=(16,), n_blocks=2)
    model, trace = config.build(), trace_init(config.build())
    assert trace is trace_init(model)  # which is not traced again
    output, variables = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), *config.example()))
    assert jax.tree.map(jnp.shape, (output, variables["params"])) == jax.tree.map(jnp.shape, trace[:2])
    assert parameter_axes(model) is trace.axes
    names = [name for name in trace.axes if "." in name]
    assert names.index("embedding.W_E") == 0 < names.index("blocks_0.mlp.W_1") < names.index("blocks_1.attention.W_Q")


class Layer(nn.Module):
    axes: str | None
    contract = Contract(inputs=(Input("x", (3,), "float32"),))

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.axes is None:
            return x @ self.param("W_new", nn.initializers.ones, (3, 4))
        return x @ parameter(self, "W_new", nn.initializers.ones, (3, 4), self.axes)


def test_declaring_axes_changes_no_parameter() -> None:
    plain, declared = (Layer(axes).init(jax.random.key(0), jnp.ones(3)) for axes in (None, "embed -> hidden"))
    assert jax.tree.structure(plain) == jax.tree.structure(declared)
    assert parameter_axes(Layer("embed -> hidden")) == {"W_new": ParameterAxes.parse("embed -> hidden")}


def test_axes_are_declared_also_by_a_program_that_jax_has_traced_before() -> None:
    jitted = nn.jit(Layer)

    class Model(nn.Module):
        contract = Layer.contract

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return jitted("embed -> hidden", name="layer")(x)

    for _ in range(2):
        trace_init.cache_clear()
        assert parameter_axes(Model()) == {"layer.W_new": ParameterAxes.parse("embed -> hidden")}


@pytest.mark.parametrize(("axes", "named"), [(None, "no axes"), ("embed", "the axes embed")])
def test_a_parameter_without_a_name_for_each_axis_is_an_error(axes: str | None, named: str) -> None:
    with pytest.raises(ValueError, match=rf"parameter W_new of shape \(3, 4\) declares {named}; create it with"):
        parameter_axes(Layer(axes))


def test_a_model_is_not_applied_to_parameters_of_another_shape() -> None:
    def scaled(width: int) -> nn.Module:
        class Scaled(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x * parameter(self, "gamma", nn.initializers.ones, (width,), "embed")

        return Scaled()

    variables = scaled(1).init(jax.random.key(0), jnp.ones(3))  # would be broadcast
    with pytest.raises(ScopeParamShapeError, match=r'"gamma".*\(3,\), but .*\(1,\)'):
        scaled(3).apply(variables, jnp.ones(3))
