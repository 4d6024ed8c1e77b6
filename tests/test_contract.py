"""The contract that each model declares is the one that its module keeps."""

import inspect
from dataclasses import replace
from typing import Any

import jax
import pytest
from flax import linen as nn

from jaxformer.config import ModelConfig
from jaxformer.contract import ARRAY, UNDECLARED, AttentionShape, Contract, ParameterAxes, Task, contract_of
from jaxformer.models.decoder import BlockAttention
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.ops import RoPE
from tests.arrays import plain_decoder, plain_rung
from tests.test_x64 import MODELS


def test_inputs_and_capabilities_are_those_of_the_module() -> None:
    for name, config in MODELS.items():
        model, contract = config.build(), config.contract
        arguments = list(inspect.signature(type(model).__call__).parameters)[1:]
        assert [x.name for x in contract.inputs] == arguments[: len(contract.inputs)], name
        assert [(x.shape, x.dtype) for x in contract.inputs] == [(x.shape, x.dtype) for x in config.example()], name
        assert contract_of(model) == contract, name
        if contract.has_features:
            methods = ("features", "unembed", "readout", "unembedding")
            assert all(callable(getattr(model, method)) for method in methods), name
        begin = "start" if contract.task is Task.SEQUENCE_TO_SEQUENCE else "init_cache"
        assert contract.has_cache == hasattr(model, "extend") == hasattr(model, begin), name


SMALL: dict[str, Any] = {"vocab_size": 13, "context_length": 6, "d_model": 8, "n_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        *MODELS.values(),
        plain_rung(**SMALL, attention=BlockAttention(2)),
        plain_rung(**SMALL, prefix=True),
        plain_rung(**SMALL, n_kv_heads=1, output_projection=True, value_dim=3),
    ],
    ids=str,
)
def test_shapes_of_logits_and_of_attention_are_those_of_a_call(config: ModelConfig) -> None:
    """Attention's of the first call that has no array as mask, if there is one."""
    calls = []

    def listen(call, args, kwargs, context):
        if isinstance(context.module, MultiHeadAttention) and context.method_name == "attend":
            (H, T, K), (G, S, _), mask = args[0].shape, args[1].shape, args[3]
            value_dim = args[2].shape[-1]
            calls.append((AttentionShape(H, G, K, value_dim, T, ARRAY if isinstance(mask, jax.Array) else mask), S))
        return call(*args, **kwargs)

    model, contract = config.build(), config.contract
    with nn.intercept_methods(listen):
        outputs = jax.eval_shape(lambda *xs: model.init_with_output(jax.random.key(0), *xs)[0], *config.example())
    first = next((call for call in calls if call[0].mask != ARRAY), calls[0] if calls else (None, None))
    shape = contract.attention
    assert (shape, shape and shape.n_positions) == first
    if contract.task is Task.CONTRASTIVE:
        assert contract.n_classes is None
    else:
        assert outputs.shape[-1] == contract.n_classes


def test_a_module_may_declare_its_contract_itself_or_not_at_all() -> None:
    class Declared(nn.Module):
        contract = Contract(Task.CAUSAL_LM)

    assert contract_of(Declared()).task is Task.CAUSAL_LM
    assert contract_of(nn.Dense(3)) is UNDECLARED
    with pytest.raises(NotImplementedError):
        contract_of(ModelConfig())


def test_capabilities_depend_on_the_config() -> None:
    config = plain_decoder(vocab_size=11, context_length=5, d_model=4)
    assert config.contract.max_tokens == 5 and not config.contract.extrapolates
    rotary = replace(config, positions="none", rope=RoPE(), attention=BlockAttention(3), prefix=False)
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
    assert plain_decoder(d_model=48).contract.scaled_width == 48
    assert plain_decoder(unembedding="tied").contract.scaled_width is None


def test_a_task_named_by_a_string_is_that_task():
    assert Contract("causal_lm").task is Task.CAUSAL_LM
    with pytest.raises(ValueError, match="'causal' is not a valid Task"):
        Contract("causal")
