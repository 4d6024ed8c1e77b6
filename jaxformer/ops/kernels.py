"""Device-specific attention kernels with the signature of `ops.attention.attention`.

Each supports only some shapes and masks, which is known at trace time; see `cudnn_refuses` and `splash_refuses`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxformer.ops.attention import check_inputs
from jaxformer.ops.bias import Bias, bias_array
from jaxformer.ops.blockwise import SAVED, blockwise_attention, over_examples
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
    """Return the reason why cuDNN does not support this mask on this GPU, or None."""
    if not isinstance(mask, Packed):
        return None
    try:  # private names, which another jax may lack
        from jax._src.cudnn.fused_attention_stablehlo import (  # noqa: F401
            MaskType,
            check_compute_capability,
            dot_product_attention,
        )
    except ImportError as error:
        return f"this jax has no cuDNN attention for packed documents ({error})"
    return None if check_compute_capability("9.0") else "cuDNN supports packed documents on GPUs from Hopper on"


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
    sinks. Packed documents take a GPU from Hopper on, have no bias, and are as for `packed_attention`.

    Args:
      bias: as in `attention`; the kernel reads an array `(H, T, S)` in the dtype of the queries, per example. Gradients
        need even T and S.
      implementation: "xla" computes the same without the kernel, on any device.

    Raises:
      ValueError: the kernel does not support the mask, here or at all, a soft cap or sinks.
    """
    length_first = partial(jnp.swapaxes, axis1=0, axis2=1)
    if soft_cap is not None or sinks is not None:
        name = "soft cap" if sinks is None else "sinks"
        raise ValueError(f"cuDNN attention has no {name}; use blockwise_attention, which computes the same")
    causal, segments_T = symbolic(mask)
    (H, T, _), S = q_HTK.shape, k_GSK.shape[1]
    of_scores = check_inputs(q_HTK, k_GSK, v_GSK, mask, scale, bias)
    if segments_T is not None:
        if bias is not None:
            raise ValueError("cuDNN attention has no bias for packed documents; use blockwise_attention instead")
        if implementation == "cudnn" and (reason := _cudnn_refuses_segments(mask)):
            raise ValueError(reason)
        assert causal is not None
        # jax 0.10 computes the offsets of fewer key/value heads from the number of query heads (mended by #39521).
        k_GSK, v_GSK = (jnp.repeat(x, H // len(x), axis=0) for x in (k_GSK, v_GSK))
        call = PackedCall(of_scores, causal.window, implementation)
        return length_first(packed_attention(call, *map(length_first, (q_HTK, k_GSK, v_GSK)), segments_T))
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


MAX_DOCUMENTS = 32
"""Maximum runs of equal segments in a row that cuDNN attends within. It allocates statistics `(H, T)` for each of them,
used or not, so a number that grew with T would take memory quadratic in T."""


class PackedCall(NamedTuple):
    """Static arguments of `packed_attention`."""

    scale: float
    window: int | None
    implementation: Literal["cudnn", "xla"] = "cudnn"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def packed_attention(
    call: PackedCall, q_THK: jax.Array, k_THK: jax.Array, v_THK: jax.Array, segments_T: jax.Array
) -> jax.Array:
    """Return the attention output `(T, H, K)` of packed documents, by cuDNN's kernel for sequences given by offset and
    length (jax #25812), which the gradient computes again.

    If any row that a device attends to at once has more than `MAX_DOCUMENTS` runs of equal segments, or two runs of the
    same segment, `blockwise_attention` computes them all.
    """
    return _packed_forward(call, q_THK, k_THK, v_THK, segments_T)[0]


def _packed_forward(call: PackedCall, *inputs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    (y_BTHK,) = over_examples(_attend_packed, call)(None, *(x[None] for x in inputs))
    return checkpoint_name(y_BTHK[0], SAVED), inputs


def _packed_backward(call: PackedCall, inputs: tuple[jax.Array, ...], dy_THK: jax.Array) -> tuple:
    gradients = over_examples(_packed_gradients, call)(None, *(x[None] for x in (*inputs, dy_THK)))
    return *(x[0] for x in gradients), None


packed_attention.defvjp(_packed_forward, _packed_backward)


def _attend_packed(call: PackedCall, _: None, *inputs: jax.Array) -> tuple[jax.Array]:
    """Return `(B, T, H, K)` for q, k, v `(B, T, H, K)` and segments `(B, T)`."""
    *qkv, segments_BT = inputs
    fits, fused, unfused = _packed_ways(call, segments_BT)
    return (jax.lax.cond(fits, fused, unfused, *qkv),)


def _packed_gradients(call: PackedCall, _: None, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients with respect to q, k and v, given also that of the output, `(B, T, H, K)`."""
    *qkv, segments_BT, dy_BTHK = inputs
    fits, *ways = _packed_ways(call, segments_BT)
    gradients = [lambda dy, *qkv, way=way: jax.vjp(way, *qkv)[1](dy) for way in ways]
    return tuple(jax.lax.cond(fits, *gradients, dy_BTHK, *qkv))


def _packed_ways(call: PackedCall, segments_BT: jax.Array) -> tuple[jax.Array, Callable, Callable]:
    """Return whether all rows fit into the kernel, and attention with and without it, functions of q, k and v."""
    T = segments_BT.shape[1]
    differ = lambda x_BT: jnp.pad(x_BT[:, 1:] != x_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)  # noqa: E731
    begins_BT = differ(segments_BT)
    n_runs_B, n_segments_B = begins_BT.sum(1), differ(jnp.sort(segments_BT, axis=1)).sum(1)
    fits = jnp.all((n_runs_B <= MAX_DOCUMENTS) & (n_runs_B == n_segments_B))
    # The first positions of runs, then T, then -1; lengths of runs, then -1, as cuDNN's caller in jax expects.
    starts = partial(jnp.nonzero, size=MAX_DOCUMENTS + 1, fill_value=T)
    starts_BM = jax.vmap(lambda begins_T: starts(begins_T)[0])(begins_BT).astype(jnp.int32)
    lengths_BM = jnp.diff(starts_BM, axis=1)
    lengths_BM, offsets_BM = jnp.where(lengths_BM > 0, lengths_BM, -1), jnp.where(starts_BM < T, starts_BM, -1)

    def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if call.implementation == "xla":
            return _attend_by_offsets(call, q, k, v, offsets_BM, lengths_BM)
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

        y: jax.Array = dot_product_attention(
            q, k, v, q_seqlen=lengths_BM, kv_seqlen=lengths_BM, q_offsets=offsets_BM, kv_offsets=offsets_BM,
            scale=call.scale, mask_type=MaskType.PADDING_CAUSAL, sliding_window_length=call.window,
        )  # fmt: skip
        return y

    def unfused(*qkv: jax.Array) -> jax.Array:
        def attend(segments_T: jax.Array, *qkv: jax.Array) -> jax.Array:
            q_HTK, k_HTK, v_HTK = (x.swapaxes(0, 1) for x in qkv)
            y_HTK = blockwise_attention(q_HTK, k_HTK, v_HTK, Packed(segments_T, Causal(call.window)), call.scale)
            return y_HTK.swapaxes(0, 1)

        return jax.vmap(attend)(segments_BT, *qkv)

    return fits, fused, unfused


def _attend_by_offsets(
    call: PackedCall, q: jax.Array, k: jax.Array, v: jax.Array, offsets_BM: jax.Array, lengths_BM: jax.Array
) -> jax.Array:
    """Return what the kernel computes, on any device."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, offsets_M: jax.Array, lengths_M: jax.Array) -> jax.Array:
        t, first, n = jnp.arange(len(q))[:, None], offsets_M[None, :-1], lengths_M[None]
        run_T = jnp.argmax((first >= 0) & (first <= t) & (t < first + n), axis=1)
        mask = Packed(run_T, Causal(call.window)).array(len(q), len(q))
        return jax.nn.dot_product_attention(q, k, v, mask=mask[None], scale=call.scale)

    return jax.vmap(attend)(q, k, v, offsets_BM, lengths_BM)


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
