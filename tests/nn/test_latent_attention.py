"""Multi-head latent attention against attention to keys and values that are computed from its parameters."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxformer.nn.latent_attention import LatentAttention
from jaxformer.ops import masks
from jaxformer.ops.attention import attention
from jaxformer.ops.cache import LayerCache, init_cache
from jaxformer.ops.norms import rms_norm
from jaxformer.ops.positions import RoPE
from tests.arrays import apply, assert_close, normal, random_params

T, D, H, K, R, C, VALUES = 5, 13, 3, 7, 4, 6, 2
MODULE = LatentAttention(H, K, value_dim=VALUES, rope=RoPE(100.0), latent_dim=C, rope_dim=R, query_latent_dim=11)
X_TD, POSITIONS_T = normal(T, D), jnp.arange(T)
CAUSAL_TT = masks.causal(POSITIONS_T, POSITIONS_T)


@jax.jit
def explicit(params: dict) -> jax.Array:
    """The output, `(T, D)`, by products of the parameters."""

    def latents(name: str) -> jax.Array:
        return rms_norm(X_TD @ params[f"W_{name}"], params[f"gamma_{name}"], 1e-6)

    q = jnp.einsum("td,dhk->htk", latents("DQ"), params["W_Q"])
    k, v = (jnp.einsum("tc,chk->htk", latents("DKV"), params[name]) for name in ("W_K", "W_V"))
    rotated_q, rotated_k = (RoPE(100.0)(x, POSITIONS_T) for x in (q[..., -R:], (X_TD @ params["W_KR"])[None]))
    q = jnp.concatenate([q[..., :-R], rotated_q], -1)
    k = jnp.concatenate([k, jnp.repeat(rotated_k, H, 0)], -1)
    return jnp.einsum("htk,hkd->td", attention(q, k, v, CAUSAL_TT, K**-0.5), params["W_O"])


@pytest.mark.slow
def test_one_pass_and_steps_with_a_cache_of_latents_agree_with_the_formula() -> None:
    params = random_params(MODULE, X_TD, POSITIONS_T, CAUSAL_TT)
    wanted = explicit(params)
    assert_close(apply(MODULE, params, X_TD, POSITIONS_T, CAUSAL_TT)[0], wanted)
    layer = init_cache(1, 1, T, R, jnp.float32, C).layers[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(layer)) == T * (C + R)
    for t in range(T):
        step = slice(t, t + 1)
        y, layer = apply(MODULE, params, X_TD[step], POSITIONS_T[step], CAUSAL_TT[step], layer, t)
        assert_close(y, wanted[step])


@pytest.mark.slow
def test_a_decode_step_neither_copies_its_cache_nor_expands_it() -> None:
    """Measured in temporary bytes of the compiled step; keys and values of all heads would be larger than the cache."""
    module, n_slots = MODULE.clone(latent_dim=64, rope_dim=16, head_dim=48, value_dim=32), 4096
    layer = jax.eval_shape(lambda: init_cache(1, 1, n_slots, 16, jnp.float32, 64).layers[0])
    x_1D = jax.ShapeDtypeStruct((1, D), jnp.float32)
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, D))))

    @partial(jax.jit, donate_argnums=2)
    def step(params: dict, x_1D: jax.Array, layer: LayerCache, slot: jax.Array) -> tuple:
        return module.apply(params, x_1D, slot[None], (jnp.arange(n_slots) <= slot)[None], layer, slot)

    slot = jax.ShapeDtypeStruct((), jnp.int32)
    memory: Any = step.lower(params, x_1D, layer, slot).compile().memory_analysis()
    assert memory.temp_size_in_bytes < n_slots * (64 + 16) * 4 / 4
