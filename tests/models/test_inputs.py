"""What is no example of a model is one sentence, and costs nothing where JAX traces."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Config, ModelConfig
from jaxformer.data.windows import TextConfig
from jaxformer.inspect import (
    alignment,
    attention_maps,
    capture,
    explain,
    logit_attribution,
    logit_lens,
    patch_activations,
)
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.inputs import check_example
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from jaxformer.ops import RoPE
from jaxformer.runs.run import Run
from tests.arrays import build, plain_decoder, random_params
from tests.helpers import slow
from tests.test_x64 import MODELS

V, CONTEXT = 13, 6
SHAPE: dict[str, Any] = {"vocab_size": V, "context_length": CONTEXT, "d_model": 8, "d_ff": (12,)}
BLOCKS: dict[str, Any] = SHAPE | {"n_heads": 2}
TOKEN_MODELS: dict[str, Any] = {
    "decoder": plain_decoder(**SHAPE),
    "encoder": EncoderConfig(**BLOCKS, n_blocks=1, n_segments=2),
    "encoder-decoder": EncoderDecoderConfig(**BLOCKS, n_encoder_blocks=1, n_decoder_blocks=1),
    "mlp": MLPConfig(**SHAPE),
    "recurrent": RecurrentConfig(V, CONTEXT, d_embedding=4, d_model=4),
    "recurrent lm": RecurrentLMConfig(V, CONTEXT, d_model=4),
}
LEARNED, ROTARY = plain_decoder(**SHAPE), plain_decoder(**SHAPE, positions="none", rope=RoPE())


def opened(config: ModelConfig) -> Run:
    model, params = build(config)
    return Run(Path("it"), Config("it", config, TextConfig(), steps=1), model, params, None, 0)


@pytest.mark.parametrize(
    ("config", "tokens", "said"),
    [
        (ROTARY, np.zeros((8, 5), int), r"expected an input of shape \(T,\), got \(8, 5\); use jax.vmap for a batch"),
        (ROTARY, 3, r"expected an input of shape \(T,\), got \(\)\.$"),
        (ROTARY, [], "expected 2 tokens or more, got 0"),
        (ROTARY, [3], "expected 2 tokens or more, got 1"),
        (ROTARY, [3, V, 1], "token 13 at position 1 is not in the vocabulary of 13"),
        (ROTARY, [3, 1, -1], "token -1 at position 2"),
        (LEARNED, range(CONTEXT + 2), "7 tokens, but the model has 6 learned positions"),
        (MLPConfig(**SHAPE), range(CONTEXT + 2), "7 tokens, but the model has 6 learned positions"),
        (
            MLPConfig(**SHAPE, mixing="concatenate"),
            range(CONTEXT),
            "5 tokens, but this model needs a window of exactly 6",
        ),
    ],
)
def test_an_invalid_sequence_is_refused_with_the_expected_shape(config: ModelConfig, tokens: Any, said: str) -> None:
    run = opened(config)
    with pytest.raises(ValueError, match=said):
        run.loss(run.params, jnp.asarray(tokens, jnp.int32))


@pytest.mark.parametrize(("tokens", "dtype"), [([1.5, np.nan], "float32"), ([True, False], "bool")])
def test_token_ids_that_are_no_integers_are_refused(tokens: Any, dtype: str) -> None:
    run = opened(ROTARY)
    for call in (lambda: run.loss(run.params, tokens), lambda: check_example(run.model, jnp.array(tokens))):
        with pytest.raises(TypeError, match=rf"^token ids are {dtype}; give integers, such as int32\.$"):
            call()


@pytest.mark.parametrize(
    "name", ["decoder", "encoder", "mlp", *map(slow, ("encoder-decoder", "recurrent", "recurrent lm"))]
)
def test_a_list_of_tokens_is_an_example_and_a_mask_of_integers_is_not(name: str) -> None:
    """As a tokenizer gives them; 1 and 0 could also be added to scores."""
    config = TOKEN_MODELS[name]
    model, declared = config.build(), config.contract.inputs
    arrays = [np.array([True, True, False]) if x.dtype == "bool" else np.array([3, 1, 2]) for x in declared]
    params = {"params": random_params(model, *arrays)}
    lists = [x if x.dtype == bool else x.tolist() for x in arrays]
    shapes = [jax.eval_shape(lambda inputs=inputs: model.apply(params, *inputs)) for inputs in (lists, arrays)]
    assert shapes[0] == shapes[1]
    if any(x.dtype == bool for x in arrays):
        with pytest.raises(TypeError, match="valid is int64; give a bool array, True for tokens"):
            jax.eval_shape(lambda: model.apply(params, *(x.astype(int) for x in arrays)))


@pytest.mark.slow
def test_a_sequence_of_the_longest_length_has_a_loss_and_a_gradient_also_while_tracing() -> None:
    for config in (LEARNED, ROTARY):
        run = opened(config)
        for T in (2, CONTEXT + 1) if config is LEARNED else (2, 3 * CONTEXT):
            tokens_T = np.arange(T, dtype=np.int32) % V
            # Compiled for these tokens, which are looked at: they are values, not traced.
            loss = jax.jit(lambda params, run=run, tokens_T=tokens_T: run.loss(params, tokens_T))
            assert np.isfinite(loss(run.params))
    grad = jax.jit(jax.vmap(jax.grad(run.loss), (None, 0)))(run.params, tokens_T.reshape(3, CONTEXT))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grad))


def test_a_check_adds_nothing_to_a_compiled_program() -> None:
    model = ROTARY.build()
    assert not jax.make_jaxpr(lambda tokens_T: (check_example(model, tokens_T), tokens_T)[1])(jnp.arange(4)).eqns


@pytest.mark.parametrize("name", MODELS)
def test_an_example_of_every_model_is_one_and_a_batch_is_not(name: str) -> None:
    model, example = MODELS[name].build(), MODELS[name].example()
    check_example(model, *example)
    with pytest.raises(ValueError, match=r"use jax\.vmap for a batch"):
        check_example(model, *(np.stack([x, x]) for x in example))


def test_a_module_without_contract_is_not_checked() -> None:
    check_example(SimpleNamespace(), np.zeros((3, 4)))


def test_every_inspection_of_one_example_refuses_a_batch_and_invalid_ids() -> None:
    model: nn.Module
    model, params = build(plain_decoder(**SHAPE))
    wrong_T, batch = jnp.array([1, V, 2]), jnp.zeros((2, 3), jnp.int32)
    for tokens, said in ((wrong_T, "token 13 at position 1"), (batch, "use jax.vmap")):
        probes = (
            lambda x: capture(model, params, x),
            lambda x: attention_maps(model, params, x),
            lambda x: logit_lens(model, params, x),
            lambda x: logit_attribution(model, params, x, target_T=x),
            lambda x: patch_activations(model, params, [x], [x], "blocks.*.resid_pre", jnp.sum),
        )
        for probe in probes:
            with pytest.raises(ValueError, match=said):
                probe(tokens)
    with pytest.raises(ValueError, match="token 13 at position 1"):
        explain(model, params, wrong_T.tolist(), 1)
    with pytest.raises(ValueError, match="token 13 at position 1"):
        alignment(MODELS["encoder-decoder"].build(), {}, wrong_T, wrong_T)
