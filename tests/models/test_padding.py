"""What stands at a padded place reaches neither what a model says nor its gradient."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import ModelConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.recurrent import RecurrentConfig
from tests.arrays import random_params

TEXT: dict[str, Any] = {"vocab_size": 7, "context_length": 5}
BLOCKS: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_ff": (12,)}
MODELS: dict[str, tuple[ModelConfig, str]] = {
    "encoder-decoder": (EncoderDecoderConfig(**TEXT, **BLOCKS, n_encoder_blocks=1, n_decoder_blocks=1), "encode"),
    "lstm": (RecurrentConfig(**TEXT, d_embedding=8, d_model=8, cell="lstm", attention="dot"), "__call__"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_token_whose_embedding_is_nan_changes_no_bit(name: str) -> None:
    config, method = MODELS[name]
    model = config.build()
    params = random_params(model, *config.example())
    tokens_T, valid_T = jnp.array([1, 2, 3, 6, 6]), jnp.arange(5) < 3  # 6 stands at padding alone
    inputs = (tokens_T, valid_T, tokens_T[:3]) if isinstance(config, RecurrentConfig) else (tokens_T, valid_T)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(params: Any) -> tuple[jax.Array, jax.Array]:
        y = model.apply({"params": params}, *inputs, method=method)
        y = y[:3] if method == "encode" else y
        return jnp.sum(jnp.sin(y)), y

    found = []
    for value in (0.0, jnp.nan):
        W_E = params["embedding"]["W_E"].at[6].set(value)
        found.append(jax.tree.leaves(run(params | {"embedding": params["embedding"] | {"W_E": W_E}})))
    for wanted, got in zip(*found, strict=True):
        np.testing.assert_array_equal(got, wanted)
        assert np.isfinite(got).all()
