"""Device-specific attention kernels with the signature of `ops.attention.attention`.

Each supports only some shapes and masks, which is known at trace time; see `cudnn_refuses`, `triton_refuses` and
`splash_refuses`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxformer.ops.blockwise import SAVED
from jaxformer.ops.masks import Causal, Mask, Packed, causal_part
from jaxformer.ops.precision import upcast

LANES = 128
"""Width of a TPU's vector registers; blocks of splash attention are multiples of it."""

BLOCK = 4 * LANES
"""Maximum positions per block of splash attention."""

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
"""Name of the primitive of cuDNN's forward pass."""

TRITON_BLOCKS = 128, 64, 32
"""Positions per block of Triton's kernels: in the forward pass, in the forward pass of heads wider than 128, whose
blocks would not fit into shared memory otherwise, and in the backward pass."""

Shaped = jax.Array | jax.ShapeDtypeStruct


def is_cudnn_forward(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True if a primitive is the forward pass of cuDNN's attention. It serves as a rematerialisation policy that
    saves the output and the logsumexp of each row, which carry no checkpoint name."""
    return bool(primitive.name == CUDNN_FORWARD)


def order_refuses(q_HTK: Shaped, k_GSK: Shaped, mask: Mask) -> str | None:
    """Return the reason why no kernel in this file supports these positions or this mask, or None."""
    T, S = q_HTK.shape[1], k_GSK.shape[1]
    if isinstance(mask, Causal | Packed):
        return None if T == S else f"it needs queries and keys at the same positions, not {T} queries and {S} keys"
    return None if mask is None else "the mask is an array, which a kernel would copy for every head"


def symbolic(mask: Mask) -> tuple[Causal | None, jax.Array | None]:
    """Return the causal part and the segments of a mask that is not an array.

    Raises:
      ValueError: the mask is an array.
    """
    if not isinstance(mask, Causal | Packed | None):
        raise ValueError("fused kernels do not support array masks; see ops.kernels")
    return causal_part(mask), mask.segments_T if isinstance(mask, Packed) else None


def _cudnn_refuses_segments(mask: Mask) -> str | None:
    """Return the reason why `cudnn_attention` does not support this mask, or None."""
    if isinstance(mask, Packed):
        return "cuDNN supports packed documents only in a fixed number, not by the segment of each position"
    return None


def cudnn_refuses(q_HTK: Shaped, k_GSK: Shaped, mask: Mask) -> str | None:
    """Return the reason why `cudnn_attention` does not support these inputs, or None. GPUs before Hopper also refuse
    heads wider than 128."""
    K = q_HTK.shape[-1]
    if q_HTK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention needs bfloat16 or float16, not {q_HTK.dtype}"
    if K % 8 or K > 256:
        return f"cuDNN attention needs a head width that is a multiple of 8 up to 256, not {K}"
    return order_refuses(q_HTK, k_GSK, mask) or _cudnn_refuses_segments(mask)


def cudnn_attention(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float = 1.0,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Return `attention`, computed by cuDNN's fused kernel on NVIDIA GPUs from Ampere on, with memory linear in T.

    Args:
      q_HTK, k_GSK, v_GSK, mask, scale: as in `attention`, within the limits of `cudnn_refuses`.
      implementation: "xla" computes the same without the kernel, on any device.

    Raises:
      ValueError: the kernel does not support the mask.
    """
    length_first = partial(jnp.swapaxes, axis1=0, axis2=1)
    if reason := _cudnn_refuses_segments(mask):
        raise ValueError(reason)
    causal, _ = symbolic(mask)
    window = None if causal is None or causal.window is None else (causal.window - 1, 0)  # positions before and after
    y_THK = jax.nn.dot_product_attention(
        length_first(q_HTK),
        length_first(k_GSK),
        length_first(v_GSK),
        scale=scale,
        is_causal=causal is not None,
        local_window_size=window,
        implementation=implementation,
    )
    return length_first(y_THK)


def triton_refuses(q_HTK: Shaped, k_GSK: Shaped, mask: Mask) -> str | None:
    """Return the reason why `triton_attention` does not support these inputs, or None."""
    K = q_HTK.shape[-1]
    if q_HTK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Triton's kernel needs bfloat16 or float16, not {q_HTK.dtype}"
    if not 8 < K <= 256:
        return f"Triton's kernel needs a head width from 9 to 256, not {K}"
    return order_refuses(q_HTK, k_GSK, mask) or _triton_positions_refuse(q_HTK.shape[1], k_GSK.shape[1], mask)


def _triton_positions_refuse(T: int, S: int, mask: Mask) -> str | None:
    """Return the reason why `triton_attention` does not support T queries and S keys under a mask, or None."""
    if T != S:
        return f"Triton's kernel needs as many queries as keys, not {T} and {S}"
    causal = causal_part(mask)
    if causal is not None and causal.window is not None and causal.window < T:
        return f"Triton's kernel does not support attention windows, and the mask has one of {causal.window} positions"
    return None


def triton_attention(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float = 1.0,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return `attention`, computed by a Pallas kernel that Triton compiles (Dao 2023) on NVIDIA GPUs; memory linear in
    T.

    Heads that share keys and values read copies of them. XLA cannot partition the kernel: on several devices, call it
    inside `jax.shard_map`.

    Args:
      q_HTK, k_GSK, v_GSK, mask, scale: as in `attention`, within the limits of `triton_refuses`.
      interpret: run the kernel's program step by step, slowly, on any device.

    Raises:
      ValueError: the kernel does not support the mask or the number of positions.
    """
    causal, segments_T = symbolic(mask)
    _, T, K = q_HTK.shape
    if reason := _triton_positions_refuse(T, k_GSK.shape[1], mask):
        raise ValueError(reason)
    widest, wide_heads, _ = TRITON_BLOCKS
    block = min(widest if K <= LANES else wide_heads, max(16, 1 << (T - 1).bit_length()))
    pad = partial(jnp.pad, pad_width=((0, 0), (0, -T % block), (0, 0)))
    call = TritonCall(block, scale, causal is not None, interpret)
    if segments_T is None and causal is None and T % block:
        segments_T = jnp.zeros(T, jnp.int32)
    # The padding follows all positions: a causal mask hides it, and without one it is a separate segment.
    segments_1T = None if segments_T is None else jnp.pad(segments_T, (0, -T % block), constant_values=-1)[None]
    qkv = (pad(x).swapaxes(0, 1)[None] for x in (q_HTK, k_GSK, v_GSK))
    return triton_mha(call, *qkv, segments_1T)[0, :T].swapaxes(0, 1)


@dataclass(frozen=True)
class TritonCall:
    """Static arguments of Triton's kernels."""

    block: int
    """Positions per block in the forward pass, a power of two that divides the padded length."""
    scale: float
    is_causal: bool
    interpret: bool

    def blocks(self, block_sizes: Any) -> Any:
        """Return an instance of the kernel's `BlockSizes` class."""
        return block_sizes(self.block, self.block, *4 * (min(self.block, TRITON_BLOCKS[2]),))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def triton_mha(
    call: TritonCall, q_1THK: jax.Array, k_1TGK: jax.Array, v_1TGK: jax.Array, segments_1T: jax.Array | None
) -> jax.Array:
    """Return `triton_attention` of padded positions, `(1, T, H, K)`."""
    return _triton_forward(call, q_1THK, k_1TGK, v_1TGK, segments_1T)[0]


def _repeat_heads(q_1THK: jax.Array, k_1TGK: jax.Array, v_1TGK: jax.Array) -> tuple[jax.Array, ...]:
    """Return queries, keys and values, with keys and values repeated for every query head."""
    return q_1THK, *(jnp.repeat(x, q_1THK.shape[2] // x.shape[2], axis=2) for x in (k_1TGK, v_1TGK))


def _triton_forward(
    call: TritonCall, q_1THK: jax.Array, k_1TGK: jax.Array, v_1TGK: jax.Array, segments_1T: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    """Return the output, and the residuals for `_triton_backward`."""
    from jax.experimental.pallas.ops.gpu import attention as pallas  # slow to import, and only GPUs need it

    y_1THK, log_total_1HT = pallas.mha(
        *_repeat_heads(q_1THK, k_1TGK, v_1TGK), segments_1T, call.scale, call.is_causal,
        call.blocks(pallas.BlockSizes), interpret=call.interpret, return_residuals=True,
    )  # fmt: skip
    y_1THK, log_total_1HT = (checkpoint_name(x, SAVED) for x in (y_1THK, log_total_1HT))
    return y_1THK, (q_1THK, k_1TGK, v_1TGK, segments_1T, y_1THK, log_total_1HT)


def _triton_backward(call: TritonCall, saved: tuple[Any, ...], dy_1THK: jax.Array) -> tuple[jax.Array | None, ...]:
    """Return the gradients with respect to queries, keys and values, and None for the segments.

    The library's own differentiation rule is bypassed so that output and log-sums carry a name, by which a
    rematerialised block saves them.
    """
    from jax.experimental.pallas.ops.gpu import attention as pallas

    *qkv, segments_1T, y_1THK, log_total_1HT = saved
    dq, dk, dv, _ = pallas._mha_backward(
        call.scale, call.is_causal, call.blocks(pallas.BlockSizes), "triton", None, 2, None, call.interpret, False,
        False, (*_repeat_heads(*qkv), segments_1T, y_1THK, log_total_1HT), dy_1THK,
    )  # fmt: skip
    _, T, G, K = qkv[1].shape
    dk, dv = (upcast(x.reshape(1, T, G, -1, K)).sum(3).astype(x.dtype) for x in (dk, dv))
    return dq, dk, dv, None


triton_mha.defvjp(_triton_forward, _triton_backward)


def splash_refuses(q_HTK: Shaped, k_GSK: Shaped, mask: Mask) -> str | None:
    """Return the reason why `splash_attention` does not support these inputs, or None."""
    T, S = q_HTK.shape[1], k_GSK.shape[1]
    if min(T, S) < LANES:
        return f"splash attention needs at least {LANES} positions, but there are {min(T, S)}"
    if mask is None and (T % unit(T) or S % unit(S)):
        return f"{T} queries and {S} keys are not multiples of {unit(max(T, S))}, and no causal mask hides the padding"
    return order_refuses(q_HTK, k_GSK, mask)


def splash_attention(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float = 1.0,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Return `attention`, computed on TPUs by the Pallas kernel that skips masked blocks; memory linear in T.

    XLA cannot partition the kernel: on several devices, call it inside `jax.shard_map`.

    Args:
      q_HTK, k_GSK, v_GSK, mask, scale: as in `attention`, within the limits of `splash_refuses`.
      interpret: run the kernel's program step by step, slowly, on any device.
    """
    H, T, _ = q_HTK.shape
    S = k_GSK.shape[1]
    # The padding of the last block follows all positions, so a causal mask hides it.
    inputs = [jnp.pad(x, ((0, 0), (0, padded(x.shape[1]) - x.shape[1]), (0, 0))) for x in (q_HTK, k_GSK, v_GSK)]
    causal, segments_T = symbolic(mask)
    kernel = splash_kernel(H, padded(T), padded(S), causal, interpret)
    segments = None
    if segments_T is not None:
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        segments = SegmentIds(*2 * (jnp.pad(segments_T, (0, padded(T) - T)),))
    return kernel(inputs[0] * scale, *inputs[1:], segments)[:, :T]


def unit(T: int) -> int:
    """Return the number of positions that T is padded to a multiple of: small for short sequences, to waste little;
    large for long ones, because the table of small blocks would not fit into scalar memory."""
    return LANES if T <= 4 * BLOCK else BLOCK


def padded(T: int) -> int:
    """Return T rounded up to a multiple of `unit(T)`."""
    return -(-T // unit(T)) * unit(T)


def block(T: int) -> int:
    """Return the largest block that divides T, a multiple of 128."""
    return max(b for b in range(LANES, BLOCK + 1, LANES) if T % b == 0)


@cache
def splash_kernel(H: int, T: int, S: int, mask: Causal | None, interpret: bool) -> Callable[..., jax.Array]:
    """Return the kernel for these sizes, including its table of visible blocks."""
    # Imported here because it takes a quarter of a second and only TPUs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    class Blocks(splash.Mask):
        """Mask of one head, which the kernel's setup reads block by block.

        The setup reads whether any and whether all of a block is visible; the rest is computed in the kernel. Without
        arrays of blocks, setup at 131,072 positions takes a second instead of a minute."""

        shape = (T, S)
        q_sequence = np.arange(T, dtype=np.int32)

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            """Return an array whose `any()` and `all()` are those of the block."""
            rows, columns = index
            assert mask is not None
            furthest, nearest = rows.stop - 1 - columns.start, rows.start - (columns.stop - 1)
            window = T if mask.window is None else mask.window
            return np.array([furthest >= 0 and nearest < window, nearest >= 0 and furthest < window])

        @staticmethod
        def mask_function(query: Any, key: Any) -> Any:
            """Return the mask for query and key positions of equal shape."""
            assert mask is not None
            visible = query >= key
            return visible if mask.window is None else visible & (query - key < mask.window)

        def __hash__(self) -> int:
            return hash(mask)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Blocks)

    b, c = block(T), block(S)
    with jax.ensure_compile_time_eval():  # the tables are constants even if the caller is being traced
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([splash.FullMask((T, S)) if mask is None else Blocks()] * H),
            # No fused backward kernel: it stores q's gradient for every block of keys and sums them only at the end.
            block_sizes=splash.BlockSizes(
                block_q=b, block_kv=c, block_q_dkv=b, block_kv_dkv=c, block_q_dq=b, block_kv_dq=c
            ),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)
