"""Attention by each implementation: causal, windows, packed documents, shared key/value heads, three head widths."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.attention import attention
from jaxformer.ops.bias import ALiBi, alibi_slopes
from jaxformer.ops.blockwise import blockwise_attention
from jaxformer.ops.kernels import cudnn_attention
from jaxformer.ops.masks import Causal, Packed
from jaxformer.train.kernels import FusedAttention
from tests.gpu.beside_float64 import Comparison, beside

__all__ = ["beside"]

B, H, T = 2, 4, 384
SEGMENTS = np.arange(T) * 3 // T + (np.arange(T) > 50)
IMPLEMENTATIONS: dict[str, Any] = {
    "cudnn": cudnn_attention, "blockwise": partial(blockwise_attention, block=128), "xla": attention,
    "fused": FusedAttention("cudnn"),
}  # fmt: skip
CASES: dict[str, tuple[int, int, Any]] = {
    "causal, 64": (4, 64, Causal), "causal, 128": (4, 128, Causal), "causal, 256": (4, 256, Causal),
    "window": (4, 64, lambda: Causal(50)), "shared heads": (2, 64, Causal), "no mask": (4, 64, lambda: None),
    "packed": (4, 64, lambda: Packed(jnp.asarray(SEGMENTS))),
    "packed, window, shared heads": (1, 64, lambda: Packed(jnp.asarray(SEGMENTS), Causal(50))),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_and_its_gradients_are_those_of_float64(beside: Comparison, name: str, case: str, dtype: str) -> None:
    G, K, mask = CASES[case]
    if name == "cudnn" and (dtype == "float32" or beside.device.platform != "gpu"):
        pytest.skip("cuDNN does not support it")
    if name == "fused" and (dtype == "float32" or "packed" not in case):
        pytest.skip("another implementation, which has a test")
    if dtype == "float32" and case != "packed, window, shared heads":
        pytest.skip("bfloat16 shows it")
    draw = np.random.default_rng(0)
    qkv = [draw.normal(size=(B, heads, T, K)) for heads in (H, G, G)]

    def batched(attend: Any) -> Any:
        return jax.vmap(lambda q, k, v: attend(q, k, v, mask()))

    beside.agree(batched(IMPLEMENTATIONS[name]), batched(attention), dtype, *qkv)


@pytest.mark.parametrize("name", ["cudnn", "blockwise"])
def test_attention_with_a_bias_by_distance_is_that_of_float64(beside: Comparison, name: str) -> None:
    if name == "cudnn" and beside.device.platform != "gpu":
        pytest.skip("cuDNN does not support it")
    draw, bias = np.random.default_rng(0), ALiBi(alibi_slopes(H))
    qkv = [draw.normal(size=(B, heads, T, 64)) for heads in (H, 2, 2)]

    def batched(attend: Any) -> Any:
        return jax.vmap(lambda q, k, v: attend(q, k, v, Causal(), bias=bias))

    beside.agree(batched(IMPLEMENTATIONS[name]), batched(attention), "bfloat16", *qkv)
