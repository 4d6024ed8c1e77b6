"""Device-specific attention kernels with the signature of `ops.attention.attention`.

Each supports only some shapes and masks, which is known at trace time; see `cudnn_refuses` and `splash_refuses`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.ops.attention import check_inputs
from jaxformer.ops.bias import Bias, bias_array
from jaxformer.ops.blockwise import SAVED
from jaxformer.ops.masks import Causal, Mask, Packed, causal_part
from jaxformer.ops.workarounds import batched_together

if TYPE_CHECKING:
    from jax.extend.core import Primitive

LANES = 128
"""Width of a TPU's vector registers; blocks of splash attention are multiples of it."""

BLOCK = 4 * LANES
"""Maximum positions per block of splash attention."""

CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
"""Name of the primitive of cuDNN's forward pass."""

Shaped = jax.Array | jax.ShapeDtypeStruct


def is_cudnn_forward(primitive: Primitive, *_: object, **__: object) -> bool:
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
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Return `attention`, computed by cuDNN's fused kernel on NVIDIA GPUs from Ampere on, with memory linear in T.

    The arguments are those of `attention`, within the limits of `cudnn_refuses`; the kernel has neither a soft cap nor
    sinks.

    Args:
      bias: as in `attention`; the kernel reads an array `(H, T, S)` in the dtype of the queries, per example. Gradients
        need even T and S.
      implementation: "xla" computes the same without the kernel, on any device.

    Raises:
      ValueError: the kernel does not support the mask, a soft cap or sinks.
    """
    length_first = partial(jnp.swapaxes, axis1=0, axis2=1)
    if reason := _cudnn_refuses_segments(mask):
        raise ValueError(reason)
    if soft_cap is not None or sinks is not None:
        name = "soft cap" if sinks is None else "sinks"
        raise ValueError(f"cuDNN attention has no {name}; use blockwise_attention, which computes the same")
    causal, _ = symbolic(mask)
    (H, T, _), S = q_HTK.shape, k_GSK.shape[1]
    check_inputs(q_HTK, k_GSK, v_GSK, mask, scale, bias)
    if (bias_HTS := bias_array(bias, T, S)) is not None:
        bias_HTS = jnp.broadcast_to(bias_HTS, (H, T, S)).astype(q_HTK.dtype)
        q_HTK, k_GSK, v_GSK, bias_HTS = batched_together(q_HTK, k_GSK, v_GSK, bias_HTS)
    else:
        q_HTK, k_GSK, v_GSK = batched_together(q_HTK, k_GSK, v_GSK)
    window = None if causal is None or causal.window is None else (causal.window - 1, 0)  # positions before and after
    y_THK = jax.nn.dot_product_attention(
        length_first(q_HTK),
        length_first(k_GSK),
        length_first(v_GSK),
        None if bias_HTS is None else bias_HTS[None],
        scale=scale,
        is_causal=causal is not None,
        local_window_size=window,
        implementation=implementation,
    )
    (y_THK,) = batched_together(y_THK)  # for its cotangent
    return length_first(y_THK)


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
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return `attention`, computed on TPUs by the Pallas kernel that skips masked blocks; memory linear in T.

    XLA cannot partition the kernel: on several devices, call it inside `jax.shard_map`. The arguments are those of
    `attention`, within the limits of `splash_refuses`; the kernel has no bias.

    Args:
      interpret: run the kernel's program step by step, slowly, on any device.

    Raises:
      ValueError: the kernel does not support the mask, or a bias.
    """
    if bias is not None:
        raise ValueError("splash attention has no bias; use blockwise_attention, which computes the same")
    H, T, _ = q_HTK.shape
    S = k_GSK.shape[1]
    # The padding of the last block follows all positions, so a causal mask hides it.
    inputs = [jnp.pad(x, ((0, 0), (0, padded(x.shape[1]) - x.shape[1]), (0, 0))) for x in (q_HTK, k_GSK, v_GSK)]
    causal, segments_T = symbolic(mask)
    kernel = splash_kernel(H, padded(T), padded(S), causal, interpret, soft_cap)
    segments = None
    if segments_T is not None:
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        segments = SegmentIds(*2 * (jnp.pad(segments_T, (0, padded(T) - T)),))
    scale = check_inputs(q_HTK, k_GSK, v_GSK, mask, scale, bias, soft_cap, sinks)
    return kernel(inputs[0] * scale, *inputs[1:], segments, sinks)[:, :T]


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
def splash_kernel(
    H: int, T: int, S: int, mask: Causal | None, interpret: bool, soft_cap: float | None = None
) -> Callable[..., jax.Array]:
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
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)
