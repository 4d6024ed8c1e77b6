"""Generation with each format of weights and cache, beside a full pass in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decode.generation import generate_tokens
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.weights import lay_out, restored, store
from jaxformer.ops import RoPE
from tests.arrays import plain_decoder, random_params
from tests.gpu.beside_float64 import Comparison, beside

__all__ = ["beside"]

CONFIG = plain_decoder(
    vocab_size=512, context_length=128, d_model=256, n_blocks=2, n_heads=4, n_kv_heads=2, d_ff=(512,),
    activation="swiglu", norm="rmsnorm", final_norm=True, positions="none", rope=RoPE(),
)  # fmt: skip
NEW = 24
ALLOWED = {"float32": 1e-3, "bfloat16": 0.1, "int8": 0.1}
"""By how much a chosen token's logit may be below the largest, in standard deviations of the logits."""


@pytest.mark.parametrize(
    ("weights", "cache"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "bfloat16"), ("int8", "int8")]
)
def test_greedy_tokens_have_the_largest_logit_of_a_full_pass_in_float64(
    beside: Comparison, weights: str, cache: str
) -> None:
    model, params = CONFIG.build(), random_params(CONFIG.build(), *CONFIG.example())
    stored = store(jax.device_put(params, beside.device), weights, model)
    prompts = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(3, 10)).tolist()
    pieces = generate_tokens(
        model, lay_out(stored, model), prompts, Sampling(0), [0] * 3, max_new_tokens=NEW,
        context_length=CONFIG.context_length, cache_dtype=jnp.dtype(cache),
    )  # fmt: skip
    new = np.concatenate([np.asarray(piece.tokens) for piece in pieces], axis=1)
    texts = np.concatenate([np.asarray(prompts), new], axis=1)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = jax.tree.map(lambda w: jnp.asarray(np.asarray(w, np.float64)), restored(jax.device_get(stored)))
        logits = jax.jit(jax.vmap(lambda tokens: model.apply({"params": exact}, tokens)))(jnp.asarray(texts[:, :-1]))
    logits = np.asarray(logits)[:, -NEW:]
    chosen = np.take_along_axis(logits, new[..., None], axis=-1)[..., 0]
    below = (logits.max(-1) - chosen) / logits.std(-1)
    limit = ALLOWED[weights] if cache != "int8" else 2 * ALLOWED[weights]
    beside.close("logit", 1 + below.max(), 1.0, limit)
    assert len(np.unique(new)) > 3  # or the texts would show little
