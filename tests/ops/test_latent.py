from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention import attention
from jaxformer.ops.latent import latent_attention
from jaxformer.ops.masks import Causal
from jaxformer.ops.norms import rms_norm
from jaxformer.ops.positions import RoPE
from tests.arrays import assert_close, normal

H, T, K, R, C, V = 3, 7, 5, 4, 11, 6


def test_latents_attend_as_the_keys_and_values_that_they_stand_for() -> None:
    """In one pass, and in a step that reads a cache of C + R numbers per position."""
    q, q_rotated, latent, k_rotated = (
        normal(H, T, K),
        normal(H, T, R, seed=1),
        normal(T, C, seed=2),
        normal(T, R, seed=3),
    )
    W_K, W_V, sinks = normal(H, K, C, seed=4), normal(H, C, V, seed=5), normal(H, seed=6)

    @jax.jit
    def results() -> tuple[Any, Any, Any]:
        keys = jnp.concatenate([jnp.einsum("sc,hkc->hsk", latent, W_K), jnp.broadcast_to(k_rotated, (H, T, R))], -1)
        queries, values = jnp.concatenate([q, q_rotated], -1), jnp.einsum("sc,hcv->hsv", latent, W_V)
        wanted = attention(queries, keys, values, Causal(), (K + R) ** -0.5, sinks=sinks)
        rest, visible_1S = (latent, k_rotated, W_K, W_V), jnp.arange(T)[None] <= 4
        step = latent_attention(q[:, 4:5], q_rotated[:, 4:5], *rest, visible_1S, sinks=sinks)
        return wanted, latent_attention(q, q_rotated, *rest, Causal(), sinks=sinks), step

    wanted, got, step = results()
    assert_close(got, wanted)
    assert_close(step, wanted[:, 4:5])


@pytest.mark.slow
def test_output_and_gradients_are_those_of_deepseek_v3() -> None:
    torch = pytest.importorskip("torch")
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    D = 13
    config = deepseek.DeepseekV3Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=None, kv_lora_rank=C,
        qk_rope_head_dim=R, qk_nope_head_dim=K, v_head_dim=V, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = deepseek.DeepseekV3Attention(config, 0).double()
    x = torch.tensor(np.array(normal(T, D), np.float64), requires_grad=True)
    cos_sin = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(T)[None])
    hidden = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    wanted = theirs(x[None], cos_sin, hidden)[0][0]
    (wanted**2).sum().backward()
    weight = {name: jnp.asarray(value.detach().numpy(), jnp.float32) for name, value in theirs.named_parameters()}

    @jax.jit
    def ours(x_TD: jax.Array) -> jax.Array:
        rotate, positions = RoPE(interleaved=True), jnp.arange(T)
        q = (x_TD @ weight["q_proj.weight"].T).reshape(T, H, K + R).swapaxes(0, 1)
        latent, k = jnp.split(x_TD @ weight["kv_a_proj_with_mqa.weight"].T, [C], axis=-1)
        latent = rms_norm(latent, weight["kv_a_layernorm.weight"], 1e-6)
        W_K, W_V = jnp.split(weight["kv_b_proj.weight"].reshape(H, K + V, C), [K], axis=1)
        inputs = q[..., :K], rotate(q[..., K:], positions), latent, rotate(k[None], positions)[0]
        y = latent_attention(*inputs, W_K, W_V.swapaxes(1, 2), Causal())
        return y.swapaxes(0, 1).reshape(T, -1) @ weight["o_proj.weight"].T

    x_TD = jnp.asarray(x.detach().numpy(), jnp.float32)
    assert_close(ours(x_TD), wanted.detach())
    assert_close(jax.jit(jax.grad(lambda x: (ours(x) ** 2).sum()))(x_TD), x.grad)
