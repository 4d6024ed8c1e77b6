"""Selection of the attention implementation for a platform, with a trial run before it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jaxformer.config import Config
from jaxformer.contract import ARRAY
from jaxformer.errors import UserError
from jaxformer.ops.attention import attention
from jaxformer.ops.bias import Bias
from jaxformer.ops.blockwise import blockwise_attention
from jaxformer.ops.kernels import (
    Shaped,
    cudnn_attention,
    cudnn_refuses,
    splash_attention,
    splash_refuses,
)
from jaxformer.ops.masks import Causal, Mask, Packed
from jaxformer.parallel.processes import all_gather

MIN_BLOCKWISE_POSITIONS = 512
"""Positions from which attention without a kernel is blockwise, with all heads at once. Measured forward and backward
on two CPU cores (batch 2, 4 heads of width 64, causal): at 512 positions 15 against 27 ms and 25 against 33 MiB, at
4,096 0.77 against 1.98 s and 78 against 2,056 MiB. Shorter sequences fit into one block, with little to gain."""

MIN_CPU_BLOCKWISE_POSITIONS = 256
"""The same threshold with `CPU_BLOCK`, one head after another: 256 positions in a batch of 8 take 15.8 ms instead of
20.7, and 128 in a batch of 16 would take 13.4 instead of 10.6."""

CPU_BLOCK = 128
"""Positions per block on a CPU: the scores of a tile take 64 KiB, a fraction of a core's cache. Measured forward and
backward (4 heads of width 64, causal): a batch of 4 at 512 positions takes 39 ms of CPU time, with 64 or 256 per
block 43 and 46, and with all heads at once, 512 per block, 72; one of 2 at 2,048 positions 241 against 385."""

MAX_TRIAL_POSITIONS = 1024
"""Maximum positions in a trial: more than one block of any kernel, with scores that still fit on any device."""

Name = Literal["auto", "xla", "blockwise", "cudnn", "splash"]


class Attention(Protocol):
    """Signature of `ops.attention.attention`."""

    def __call__(
        self,
        q_HTK: jax.Array,
        k_GSK: jax.Array,
        v_GSK: jax.Array,
        mask: Mask = None,
        scale: float | None = None,
        *,
        bias: Bias = None,
        soft_cap: float | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array: ...


class Kernel(NamedTuple):
    """A fused kernel."""

    attend: Attention
    refuses: Callable[[Shaped, Shaped, Mask], str | None]
    """Function that returns the reason why the kernel does not support queries, keys and mask, or None."""


KERNELS = {
    "cudnn": Kernel(cudnn_attention, cudnn_refuses),
    "splash": Kernel(splash_attention, splash_refuses),
}
PLATFORM_KERNELS = {"gpu": "cudnn", "tpu": "splash"}
"""Kernel of each platform that has one."""


def unfused_attention(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float | None = None,
    blockwise: Attention = blockwise_attention,
    min_positions: int = MIN_BLOCKWISE_POSITIONS,
    **terms: Any,
) -> jax.Array:
    """Return `attention` for short sequences, and `blockwise` for those with at least `min_positions` queries and
    keys."""
    is_long = min(q_HTK.shape[1], k_GSK.shape[1]) >= min_positions
    return (blockwise if is_long else attention)(q_HTK, k_GSK, v_GSK, mask, scale, **terms)


cpu_blockwise_attention = partial(blockwise_attention, block=CPU_BLOCK, sequential=True)
cpu_attention = partial(unfused_attention, blockwise=cpu_blockwise_attention, min_positions=MIN_CPU_BLOCKWISE_POSITIONS)
"""Attention on a CPU, unless heads are split over several devices."""


@dataclass(frozen=True)
class FusedAttention:
    """`ops.attention.attention` computed by one of `KERNELS`, or by `unfused_attention` for inputs the kernel refuses.

    It is called inside `mesh.on_each_shard`, where the batch is already split. If the mesh axis `tensor` has
    several devices, heads are split over them here, if their number allows, because XLA cannot partition a kernel.
    """

    kernel: str
    tensor: int = 1
    """Size of the mesh axis `tensor`."""

    def refuses(self, q_HTK: Shaped, k_GSK: Shaped, mask: Mask, value_dim: int) -> str | None:
        """Return the reason why the kernel does not support these shapes and dtypes; None if it does."""
        if value_dim != (K := k_GSK.shape[-1]):
            return f"it needs values as wide as keys, {K}, not {value_dim}"
        return KERNELS[self.kernel].refuses(q_HTK, k_GSK, mask)

    def __call__(
        self,
        q_HTK: jax.Array,
        k_GSK: jax.Array,
        v_GSK: jax.Array,
        mask: Mask = None,
        scale: float | None = None,
        **terms: Any,
    ) -> jax.Array:
        """Return the same as `ops.attention.attention`; with a bias, a soft cap or sinks, not by the kernel."""
        if terms or self.refuses(q_HTK, k_GSK, mask, v_GSK.shape[-1]):
            return unfused_attention(q_HTK, k_GSK, v_GSK, mask, scale, **terms)

        def attend(q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, mask: Mask) -> jax.Array:
            return KERNELS[self.kernel].attend(q_HTK, k_GSK, v_GSK, mask, scale)

        if self.tensor == 1:
            return attend(q_HTK, k_GSK, v_GSK, mask)
        H, G = q_HTK.shape[0], k_GSK.shape[0]
        spec = PartitionSpec("tensor") if H % self.tensor == 0 else PartitionSpec()
        if spec and G % self.tensor:  # key/value heads that several devices share are copied to each of them
            k_GSK, v_GSK = (jnp.repeat(x, lcm(G, self.tensor) // G, axis=0) for x in (k_GSK, v_GSK))
        # Kernels do not declare how their results vary over a mesh, so shard_map cannot check it.
        in_specs = (spec, spec, spec, PartitionSpec())
        split = jax.shard_map(attend, in_specs=in_specs, out_specs=spec, axis_names={"tensor"}, check_vma=False)
        return split(q_HTK, k_GSK, v_GSK, mask)


class ChosenAttention(NamedTuple):
    """An attention implementation."""

    function: Attention
    line: str
    """Line for the log that names the implementation and the reason for it."""
    warning: str | None = None
    """Warning with reason and remedy if an accelerator's attention is not fused."""


def choose_attention(config: Config, mesh: Mesh, dtype: DTypeLike) -> ChosenAttention:
    """Return the attention of a config's model on the devices of a mesh, with matmuls in `dtype`; see `make_attention`.

    Raises:
      UserError: `compute.attention` cannot run there, or processes would use different implementations.
    """
    if (shape := config.model.contract.attention) is None:
        return ChosenAttention(attention, "attention: no multi-head layers")
    H, G, K, value_dim, T, mask, has_terms = shape
    platform, tensor = mesh.devices.flat[0].platform, mesh.shape["tensor"]
    q_HTK, k_GTK = (jax.ShapeDtypeStruct((n_heads, T, K), dtype) for n_heads in (H, G))

    def make(is_packed: bool, try_first: bool) -> tuple[Attention, str]:
        segments_T: Any = jax.ShapeDtypeStruct((T,), jnp.int32)
        packed: Any = Packed(segments_T, mask) if isinstance(mask, Causal) else ARRAY
        own, name = packed if is_packed else mask, config.compute.attention
        options: dict[str, Any] = {"value_dim": value_dim, "has_terms": has_terms, "try_first": try_first}
        return make_attention(name, platform, q_HTK, k_GTK, own, tensor, **options)

    is_local = bool(set(mesh.devices.flat) & set(jax.local_devices()))
    function, line = make(config.data.has_segments, try_first=is_local)
    lines = list(dict.fromkeys(all_gather(line[:1000]))) if is_local else [line]
    if len(lines) > 1:  # processes with different programs would deadlock
        raise UserError(f"processes differ ({'; '.join(lines)}); set `compute.attention` to xla or blockwise.")
    if platform == "cpu" or isinstance(function, FusedAttention):
        return ChosenAttention(function, line)
    if config.compute.attention != "auto":
        remedy = "set `compute.attention='auto'`"
    elif dtype == jnp.float32:
        remedy = "set `compute.precision='bfloat16'`"
    elif config.data.has_segments and isinstance(make(False, try_first=False)[0], FusedAttention):
        remedy = "set `data.packing='windows'`"
    else:
        remedy = "docs/accelerators.md lists remedies"
    warning = f"warning: attention is not fused, which costs time and memory; {line}; {remedy}"
    return ChosenAttention(function, line, warning)


def make_attention(
    name: Name,
    platform: str,
    q_HTK: jax.ShapeDtypeStruct,
    k_GSK: jax.ShapeDtypeStruct,
    mask: Mask = None,
    tensor: int = 1,
    *,
    value_dim: int | None = None,
    has_terms: bool = False,
    try_first: bool = True,
) -> tuple[Attention, str]:
    """Return the attention for these queries and keys, and a line for the log that names it and the reason.

    Args:
      name: "auto" for the platform's kernel if it supports them, and `unfused_attention` if not; or the name of one.
      platform: platform of the devices: cpu, gpu or tpu.
      q_HTK, k_GSK: shapes and dtype of queries and keys of most calls, for one example.
      mask: mask of most calls; `contract.ARRAY` for an array; the segments of a `Packed` as shape and dtype.
      tensor: number of devices over which heads are split.
      value_dim: width of the values; None for that of the keys.
      has_terms: True if calls have a bias, a soft cap or sinks; see `FusedAttention`.
      try_first: run a trial of the kernel before it is chosen; not possible when compiling for devices that are not
        attached.

    Raises:
      UserError: a kernel selected by name cannot run on these devices.
    """
    if name == "xla":
        return attention, "attention: xla, as configured"
    is_cpu = platform == "cpu" and tensor == 1
    if name == "blockwise":
        chosen = cpu_blockwise_attention if is_cpu else blockwise_attention
        return chosen, "attention: blockwise, as configured"
    kernel = PLATFORM_KERNELS.get(platform)
    reason = f"{platform} has no fused kernel" if kernel is None else f"{platform} has {kernel}"
    if kernel and name in ("auto", kernel):
        fused = FusedAttention(kernel, tensor)
        refused = fused.refuses(q_HTK, k_GSK, mask, value_dim or k_GSK.shape[-1])
        if has_terms:
            refused = "scores have a bias, a soft cap or sinks"
        if refused is None and try_first:
            refused = trial(replace(fused, tensor=1), q_HTK, k_GSK, mask)
        if refused is None:
            return fused, f"attention: {kernel}"
        reason = f"not {kernel}: {refused}"
    if name != "auto":
        raise UserError(f"`compute.attention` is {name!r}, which cannot be used ({reason}); set it to auto.")
    min_positions = MIN_CPU_BLOCKWISE_POSITIONS if is_cpu else MIN_BLOCKWISE_POSITIONS
    unfused = "blockwise" if min(q_HTK.shape[1], k_GSK.shape[1]) >= min_positions else "xla"
    return cpu_attention if is_cpu else unfused_attention, f"attention: {unfused} ({reason})"


def trial(attend: Attention, q_HTK: jax.ShapeDtypeStruct, k_GSK: jax.ShapeDtypeStruct, mask: Mask = None) -> str | None:
    """Return the reason why an attention implementation fails its trial on these devices, or None.

    It is run forward and backward on this process's first device, on two examples of normally distributed inputs of
    these shapes with at most `MAX_TRIAL_POSITIONS` positions (for a `Packed` mask, with two and three documents), and
    must agree with `attention`.

    For the output and each of the three gradients, the norm of the difference may be 1/32 of the norm: bfloat16 keeps 8
    bits, and a few roundings add up.
    """
    draw = np.random.default_rng(0)
    shapes = [(2, x.shape[0], min(x.shape[1], MAX_TRIAL_POSITIONS), x.shape[2]) for x in (q_HTK, k_GSK, k_GSK, q_HTK)]
    inputs, T = [jnp.asarray(draw.normal(size=shape), q_HTK.dtype) for shape in shapes], shapes[0][2]
    segments_BT = jnp.arange(T) * jnp.array([[2], [3]]) // T if isinstance(mask, Packed) else None

    def run(attend: Attention, inputs: list[jax.Array]) -> list[jax.Array]:
        def attend_each(q: jax.Array, k: jax.Array, v: jax.Array, segments_T: jax.Array | None) -> jax.Array:
            own = Packed(segments_T, mask.causal) if segments_T is not None and isinstance(mask, Packed) else mask
            return attend(q, k, v, own, q.shape[-1] ** -0.5)

        y, pull = jax.vjp(lambda q, k, v: jax.vmap(attend_each)(q, k, v, segments_BT), *inputs[:3])
        return [x.astype(jnp.float32) for x in (y, *pull(inputs[3]))]

    try:
        outputs = jax.block_until_ready(jax.jit(run, static_argnums=0)(attend, inputs))
    except Exception as error:  # whatever a driver, a library or a compiler raises
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    references = jax.jit(run, static_argnums=0)(attention, [x.astype(jnp.float32) for x in inputs])
    for name, actual, expected in zip(
        ("output", "gradient to q", "gradient to k", "gradient to v"), outputs, references, strict=True
    ):
        off = float(jnp.linalg.norm(actual - expected) / jnp.linalg.norm(expected))
        if not off <= 2**-5:  # also fails for NaN
            return f"its {name} is off by {off:.3f} of the norm"
    return None
