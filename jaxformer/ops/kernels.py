"""Attention by kernels for one kind of device, with the signature of `ops.attention.attention`.

Each supports some shapes only, which are known while tracing; see `cudnn_refuses` and `splash_refuses`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.ops.blockwise import SAVED
from jaxformer.ops.masks import Causal, Mask

LANES = 128
"""Width of a TPU's vector registers; blocks of splash attention are multiples of it."""

BLOCK = 4 * LANES
"""Most positions of a block of splash attention."""

Shaped = jax.Array | jax.ShapeDtypeStruct


def order_refuses(q_HTK: Shaped, k_GSK: Shaped, mask: Mask) -> str | None:
    """Return the reason why no kernel here supports these positions or this mask, or None."""
    T, S = q_HTK.shape[1], k_GSK.shape[1]
    if isinstance(mask, Causal):
        return None if T == S else f"{T} queries and {S} keys do not stand at the same positions"
    return None if mask is None else "the mask is an array, of which a kernel would need a copy for every head"


def symbolic(mask: Mask) -> Causal | None:
    """Return a mask that is no array.

    Raises:
      ValueError: the mask is an array.
    """
    if mask is None or isinstance(mask, Causal):
        return mask
    raise ValueError("a fused kernel takes no array as a mask; see ops.kernels")


def cudnn_refuses(q_HTK: Shaped, k_GSK: Shaped, mask: Mask) -> str | None:
    """Return the reason why `cudnn_attention` does not support this, or None. GPUs before Hopper also refuse heads
    wider than 128."""
    K = q_HTK.shape[-1]
    if q_HTK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attends in bfloat16 or float16, not in {q_HTK.dtype}"
    if K % 8 or K > 256:
        return f"cuDNN takes heads whose width is a multiple of 8 up to 256, not {K}"
    return order_refuses(q_HTK, k_GSK, mask)


def cudnn_attention(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float = 1.0,
    *,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Return `attention` from cuDNN's fused kernel, on NVIDIA GPUs from Ampere on; memory linear in T.

    Args:
      q_HTK, k_GSK, v_GSK, mask, scale: as in `attention`, within the limits of `cudnn_refuses`.
      implementation: "xla" computes the same without the kernel, on any device.
    """
    length_first = partial(jnp.swapaxes, axis1=0, axis2=1)
    causal = symbolic(mask)
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


def splash_refuses(q_HTK: Shaped, k_GSK: Shaped, mask: Mask) -> str | None:
    """Return the reason why `splash_attention` does not support this, or None."""
    T, S = q_HTK.shape[1], k_GSK.shape[1]
    if min(T, S) < LANES:
        return f"splash attention needs at least {LANES} positions, and there are {min(T, S)}"
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
    """Return `attention` from the Pallas kernel that skips masked blocks, on TPUs; memory linear in T.

    XLA cannot split it over devices: on several, call it in a `jax.shard_map`.

    Args:
      q_HTK, k_GSK, v_GSK, mask, scale: as in `attention`, within the limits of `splash_refuses`.
      interpret: run the kernel's program step by step, slowly, on any device.
    """
    H, T, _ = q_HTK.shape
    S = k_GSK.shape[1]
    # The padding of the last block comes after all positions: a causal mask hides it.
    inputs = [jnp.pad(x, ((0, 0), (0, padded(x.shape[1]) - x.shape[1]), (0, 0))) for x in (q_HTK, k_GSK, v_GSK)]
    kernel = splash_kernel(H, padded(T), padded(S), symbolic(mask), interpret)
    return kernel(inputs[0] * scale, *inputs[1:])[:, :T]


def unit(T: int) -> int:
    """Return the unit that T positions are padded to a multiple of: small for short sequences, to waste little; large
    for long ones, as the table of small blocks would not fit the scalar memory."""
    return LANES if T <= 4 * BLOCK else BLOCK


def padded(T: int) -> int:
    """Return T, rounded up to a multiple of `unit(T)`."""
    return -(-T // unit(T)) * unit(T)


def block(T: int) -> int:
    """Return the largest block that divides T, a multiple of 128."""
    return max(b for b in range(LANES, BLOCK + 1, LANES) if T % b == 0)


@cache
def splash_kernel(H: int, T: int, S: int, mask: Causal | None, interpret: bool) -> Callable[..., jax.Array]:
    """Return the kernel for these sizes, with its table of visible blocks."""
    # Imported here, as it takes a quarter of a second, which only a TPU needs.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    class Blocks(splash.Mask):
        """Mask of one head, which the kernel's preparation reads block by block.

        It reads whether any and whether all of a block is visible; the rest is computed in the kernel. Without arrays
        of blocks, a preparation of a minute at 131,072 positions takes a second."""

        shape = (T, S)
        q_sequence = np.arange(T, dtype=np.int32)

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            """Return `[any, all]` of a block: its `any()` is any, and its `all()` is all."""
            rows, columns = index
            assert mask is not None
            furthest, nearest = rows.stop - 1 - columns.start, rows.start - (columns.stop - 1)
            window = T if mask.window is None else mask.window
            return np.array([furthest >= 0 and nearest < window, nearest >= 0 and furthest < window])

        @staticmethod
        def mask_function(query: Any, key: Any) -> Any:
            """Return the mask of positions that are arrays of one shape."""
            assert mask is not None
            visible = query >= key
            return visible if mask.window is None else visible & (query - key < mask.window)

        def __hash__(self) -> int:
            return hash(mask)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Blocks)

    b, c = block(T), block(S)
    with jax.ensure_compile_time_eval():  # the tables are constants, also where the caller is being traced
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([splash.FullMask((T, S)) if mask is None else Blocks()] * H),
            # No fused backward kernel: it sums the gradient to q over blocks of keys at the end, and keeps them all.
            block_sizes=splash.BlockSizes(
                block_q=b, block_kv=c, block_q_dkv=b, block_kv_dkv=c, block_q_dq=b, block_kv_dq=c
            ),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
    return jax.tree.map(np.asarray, kernel)
