"""The contract that each model declares is the one that its module keeps."""

import inspect
from dataclasses import replace
from typing import Any

import jax
import pytest
from flax import linen as nn

from jaxformer.config import ModelConfig
from jaxformer.contract import ARRAY, UNDECLARED, AttentionShape, Contract, ParameterAxes, Task, contract_of
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.rungs import RungDecoderConfig
from jaxformer.nn.attention import MultiHeadAttention
from tests.test_x64 import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_inputs_are_the_arguments_of_the_call(name: str) -> None:
    config = MODELS[name]
    arguments = list(inspect.signature(type(config.build()).__call__).parameters)[1:]
    assert [x.name for x in config.contract.inputs] == arguments[: len(config.contract.inputs)]
    assert [(x.shape, x.dtype) for x in config.contract.inputs] == [(x.shape, x.dtype) for x in config.example()]


@pytest.mark.parametrize("name", MODELS)
def test_capabilities_are_methods_of_the_module(name: str) -> None:
    model, contract = MODELS[name].build(), MODELS[name].contract
    assert contract_of(model) == contract
    if contract.has_features:
        assert all(callable(getattr(model, name)) for name in ("features", "unembed", "readout", "unembedding"))
    begin = "start" if contract.task is Task.SEQUENCE_TO_SEQUENCE else "init_cache"
    assert contract.has_cache == hasattr(model, "extend") == hasattr(model, begin)


@pytest.mark.parametrize("name", MODELS)
def test_the_last_axis_of_logits_is_the_number_of_classes(name: str) -> None:
    config = MODELS[name]
    model = config.build()
    outputs = jax.eval_shape(lambda *xs: model.init_with_output(jax.random.key(0), *xs)[0], *config.example())
    if config.contract.task is Task.CONTRASTIVE:
        assert config.contract.n_classes is None
    else:
        assert outputs.shape[-1] == config.contract.n_classes


@pytest.mark.parametrize(
    "config",
    [
        *MODELS.values(),
        *(
            RungDecoderConfig(**{"vocab_size": 13, "context_length": 6, "d_model": 8, "n_heads": 2} | fields)
            for fields in (
                {"window": 2},
                {"prefix": True},
                {"n_kv_heads": 1},
                {"output_projection": True, "value_dim": 3},
            )
        ),
    ],
    ids=str,
)
def test_the_shape_of_attention_is_that_of_a_call(config: ModelConfig) -> None:
    """Of the first that has no array as mask, if there is one."""
    calls = []

    def listen(call, args, kwargs, context):
        if isinstance(context.module, MultiHeadAttention) and context.method_name == "attend":
            (H, T, K), (G, S, _), mask = args[0].shape, args[1].shape, args[3]
            value_dim = args[2].shape[-1]
            calls.append((AttentionShape(H, G, K, value_dim, T, ARRAY if isinstance(mask, jax.Array) else mask), S))
        return call(*args, **kwargs)

    with nn.intercept_methods(listen):
        jax.eval_shape(lambda *xs: config.build().init(jax.random.key(0), *xs), *config.example())
    first = next((call for call in calls if call[0].mask != ARRAY), calls[0] if calls else (None, None))
    shape = config.contract.attention
    assert (shape, shape and shape.n_positions) == first


def test_a_module_may_declare_its_contract_itself_or_not_at_all() -> None:
    class Declared(nn.Module):
        contract = Contract(Task.CAUSAL_LM)

    assert contract_of(Declared()).task is Task.CAUSAL_LM
    assert contract_of(nn.Dense(3)) is UNDECLARED
    with pytest.raises(NotImplementedError):
        contract_of(ModelConfig())


def test_capabilities_depend_on_the_config() -> None:
    config = DecoderConfig(vocab_size=11, context_length=5, d_model=4)
    assert config.contract.max_tokens == 5 and not config.contract.extrapolates
    rotary = replace(config, positions="rope", window=3, prefix=False)
    assert rotary.contract.extrapolates and rotary.contract.attention_window == 3
    assert rotary.contract.max_tokens is None
    prefix = replace(config, prefix=True)
    assert prefix.contract.has_prefix and [x.name for x in prefix.contract.inputs] == ["tokens_T", "prefix"]
    assert [x.shape for x in prefix.example()] == [(5,), ()]


def test_matrices_sum_over_the_width_unless_they_read_tables_or_pixels() -> None:
    scaled = ("embed -> heads head_dim", "heads head_dim -> embed", "gates embed -> hidden", "embed -> vocab")
    assert all(ParameterAxes.parse(axes).sums_over_width for axes in scaled)
    fixed = ("vocab -> embed", "positions -> embed", "pixels -> embed", "patches -> embed", "heads 1 head_dim", "")
    assert not any(ParameterAxes.parse(axes).sums_over_width for axes in fixed)


def test_the_scaled_width_is_that_of_models_with_one_and_an_unembedding_of_their_own() -> None:
    models: dict[str, Any] = MODELS
    widths = {name: config.contract.scaled_width for name, config in models.items()}
    scaled = ("decoder", "mlp", "mixing", "recurrent LM", "classifier", "vit", "vivit")
    assert widths == {name: models[name].d_model if name in scaled else None for name in models}
    assert DecoderConfig(d_model=48).contract.scaled_width == 48
    assert DecoderConfig(unembedding="tied").contract.scaled_width is None


def test_a_task_named_by_a_string_is_that_task():
    assert Contract("causal_lm").task is Task.CAUSAL_LM
    with pytest.raises(ValueError, match="'causal' is not a valid Task"):
        Contract("causal")
