"""Causal attention forward and backward: jaxformer, Flax and torch. Each function imports only its own library."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.harness import Figures


def inputs(B: int, H: int, T: int, K: int) -> list[np.ndarray]:
    """Return queries, keys, values and the output gradient, each `(B, H, T, K)` float32."""
    return list(np.random.default_rng(0).standard_normal((4, B, H, T, K), np.float32))


def norms(results: Any) -> list[float]:
    """Return the norm of the output and of each gradient."""
    return [float(np.linalg.norm(np.asarray(x, np.float32))) for x in results]


def with_jax(attend_BHTK: Any, dtype: Any, B: int, H: int, T: int, K: int) -> tuple[Any, list[float], int]:
    """Return a step that runs a function of `(B, H, T, K)` arrays and its backward pass, with the batch sharded over
    the devices; the norms of its results; and the bytes that it needs per device."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from jaxformer.parallel.memory import memory_needed
    from jaxformer.parallel.mesh import BATCH, batch_sharding, make_mesh, on_each_shard

    mesh = make_mesh()
    arrays = jax.device_put([jnp.asarray(x, dtype) for x in inputs(B, H, T, K)], batch_sharding(mesh))

    def forward_backward(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(attend_BHTK, q, k, v)
        return y, *pullback(dy)

    split = PartitionSpec(BATCH)
    step = jax.jit(on_each_shard(forward_backward, mesh, (split,) * 4, (split,) * 4)).lower(*arrays).compile()
    first = jax.jit(lambda y: y[0, 0, 0, 0])  # indexing outside jit takes longer than attention on a GPU
    return lambda _: first(step(*arrays)[0]), norms(step(*arrays)), memory_needed(step)


def jaxformer(folder: Path, B: int, H: int, T: int, K: int) -> tuple[Any, Figures]:
    """Attend with the implementation that training uses on this device."""
    import jax

    from jaxformer.cli import machine
    from jaxformer.config import ComputeConfig
    from jaxformer.ops.masks import Causal
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.train.kernels import FusedAttention, make_attention
    from jaxformer.train.setup import resolve_precision

    machine.set_up(B)
    dtype = resolve_precision(ComputeConfig(), make_mesh())
    q_HTK = jax.ShapeDtypeStruct((H, T, K), dtype)
    attention, line = make_attention("auto", jax.default_backend(), q_HTK, q_HTK, Causal())

    def attend(*qkv_BHTK: jax.Array) -> jax.Array:
        return jax.vmap(lambda q, k, v: attention(q, k, v, Causal(), K**-0.5))(*qkv_BHTK)

    step, values, n_bytes = with_jax(attend, dtype, B, H, T, K)
    return step, {
        "values": values, "dtype": dtype.name, "attention": line, "is_fused": isinstance(attention, FusedAttention),
        "memory_bytes": n_bytes,
    }  # fmt: skip


def flax(folder: Path, B: int, H: int, T: int, K: int) -> tuple[Any, Figures]:
    """Attend with `flax.linen.dot_product_attention`."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxformer.cli import machine

    machine.set_up(B)
    dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)

    def attend(*qkv_BHTK: jax.Array) -> jax.Array:
        q, k, v = (x.swapaxes(1, 2) for x in qkv_BHTK)
        return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(jnp.ones((len(q), T)))).swapaxes(1, 2)

    step, values, n_bytes = with_jax(attend, dtype, B, H, T, K)
    return step, {"values": values, "dtype": dtype.name, "memory_bytes": n_bytes}


def torch(folder: Path, B: int, H: int, T: int, K: int) -> tuple[Any, Figures]:
    """Attend with `torch.nn.functional.scaled_dot_product_attention`, in bfloat16 on a GPU."""
    import torch

    torch.set_num_threads(record.cores())
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    q, k, v, dy = (torch.from_numpy(x).to(device, dtype) for x in inputs(B, H, T, K))
    for x in (q, k, v):
        x.requires_grad_()

    def forward_backward() -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y, *torch.autograd.grad(y, (q, k, v), dy)

    results = [x.detach().float().cpu().numpy() for x in forward_backward()]
    values = {"values": norms(results), "dtype": str(dtype).removeprefix("torch.")}
    return lambda _: forward_backward()[0][0, 0, 0, 0].detach(), values


def layer_inputs(B: int, T: int, H: int, G: int, K: int) -> list[np.ndarray]:
    """Return features and the gradient to the output, `(B, T, D)` with D = H · K, and the matrices by heads."""
    draw, D = np.random.default_rng(0), H * K
    x, dy = draw.standard_normal((2, B, T, D), np.float32)
    W = [draw.standard_normal((D, heads, K), np.float32) * D**-0.5 for heads in (H, G, G)]
    return [x, *W, draw.standard_normal((H, K, D), np.float32) * D**-0.5, dy]


def layer(folder: Path, B: int, T: int, H: int, G: int, K: int, attends: bool = True) -> tuple[Any, Figures]:
    """Project, attend as in training and project back, on one device."""
    import jax
    import jax.numpy as jnp

    from jaxformer.cli import machine
    from jaxformer.config import ComputeConfig
    from jaxformer.ops.attention import merge_heads, project_heads
    from jaxformer.ops.masks import Causal
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.train.kernels import FusedAttention, make_attention
    from jaxformer.train.setup import resolve_precision

    machine.set_up(1)
    dtype = resolve_precision(ComputeConfig(), make_mesh())
    q_HTK, k_GTK = (jax.ShapeDtypeStruct((heads, T, K), dtype) for heads in (H, G))
    attention, line = make_attention("auto", jax.default_backend(), q_HTK, k_GTK, Causal())

    def forward(x_TD: jax.Array, *W: jax.Array) -> jax.Array:
        q, k, v = (project_heads(x_TD, w) for w in W[:3])
        if attends:
            return merge_heads(attention(q, k, v, Causal(), K**-0.5), W[3])
        return merge_heads(q + jnp.repeat(k + v, H // G, axis=0), W[3])

    def forward_backward(x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(jax.vmap(forward, (0, None, None, None, None)), x, *rest[:4])
        return y, *pullback(rest[4])

    arrays = [jnp.asarray(x, dtype) for x in layer_inputs(B, T, H, G, K)]
    step = jax.jit(forward_backward).lower(*arrays).compile()
    first = jax.jit(lambda y: y[0, 0, 0])
    values = {"values": norms(step(*arrays))} if attends else {}
    return lambda _: first(step(*arrays)[0]), values | {
        "dtype": dtype.name, "attention": line, "is_fused": isinstance(attention, FusedAttention),
    }  # fmt: skip


def layer_torch(folder: Path, B: int, T: int, H: int, G: int, K: int) -> tuple[Any, Figures]:
    """Do the same with torch, compiled on a GPU."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(record.cores())
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    x, *W, dy = (torch.from_numpy(each).to(device, dtype) for each in layer_inputs(B, T, H, G, K))
    for each in (x, *W):
        each.requires_grad_()

    def forward(x: torch.Tensor, *W: torch.Tensor) -> torch.Tensor:
        q, k, v = ((x @ w.flatten(1)).unflatten(-1, (-1, K)).transpose(1, 2) for w in W[:3])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G != H)
        return y.transpose(1, 2).flatten(2) @ W[3].flatten(0, 1)

    run = torch.compile(forward) if on_gpu else forward

    def forward_backward() -> tuple[torch.Tensor, ...]:
        y = run(x, *W)
        return y, *torch.autograd.grad(y, (x, *W), dy)

    results = [each.detach().float().cpu().numpy() for each in forward_backward()]
    facts = {"values": norms(results), "dtype": str(dtype).removeprefix("torch.")}
    return lambda _: forward_backward()[0][0, 0, 0].detach(), facts
