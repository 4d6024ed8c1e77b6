"""Attention of `configs/gpt.py:gpt2_124m` on this device: the fused kernel, or the reason why it is none.

    python benchmarks/attention.py [--smoke] [--results FOLDER]

It compiles and tries the kernel as training does at its start, and times it forward and backward beside the one that is
not fused. The status is 0 where attention is fused, 1 where it is not, and 2 without an accelerator; with `--smoke`,
which runs at a tiny shape anywhere, 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import record

from configs.gpt import gpt2_124m
from jaxformer.cli import machine
from jaxformer.ops.masks import Causal
from jaxformer.sharding import make_mesh
from jaxformer.train.kernels import FusedAttention, unfused_attention
from jaxformer.train.setup import TrainSetup

REPEATS = 10


def milliseconds(attend: Callable[..., jax.Array], shape_BHTK: tuple[int, ...], dtype: jnp.dtype) -> float:
    """Return the median time of attention and its gradient, on random numbers, under the causal mask."""
    q, k, v = (jax.random.normal(jax.random.key(i), shape_BHTK, dtype) for i in range(3))

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        y = jax.vmap(lambda q, k, v: attend(q, k, v, Causal(), shape_BHTK[-1] ** -0.5))(q, k, v)
        return jnp.sum(y.astype(jnp.float32))

    step = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    jax.block_until_ready(step(q, k, v))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(step(q, k, v))
        seconds.append(time.perf_counter() - began)
    return round(1e3 * median(seconds), 3)


def main() -> int:
    """Print and store the attention; return the exit status."""
    parser = argparse.ArgumentParser(description="Attention of gpt2_124m on this device.")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, any device")
    parser.add_argument("--results", type=Path, help="where to write the result (default: benchmarks/results)")
    options = parser.parse_args()
    machine.set_up()
    device, config, B = jax.devices()[0], gpt2_124m, 16
    if device.platform == "cpu" and not options.smoke:
        print("error: there is no GPU; --smoke runs on any device.", file=sys.stderr)
        return 2
    if options.smoke:
        tiny = {"vocab_size": 211, "context_length": 32, "d_model": 32, "n_blocks": 2, "n_heads": 2, "d_ff": (128,)}
        config, B = replace(config, model=replace(config.model, **tiny)), 2
    setup = TrainSetup(config, make_mesh(devices=[device]))
    is_fused = isinstance(setup.attention, FusedAttention)
    print(f"{device.device_kind}: {setup.attention_line}: {'fused' if is_fused else 'NOT FUSED'}", flush=True)
    model: Any = config.model
    shape = (B, model.n_heads, model.context_length, model.width_of_head)
    implementations = {"chosen": setup.attention, "unfused": unfused_attention}
    ms = {name: milliseconds(attend, shape, setup.compute_dtype) for name, attend in implementations.items()}
    print(f"forward and backward at {shape}: {ms['chosen']} ms, unfused {ms['unfused']} ms")
    results = options.results or (None if options.smoke else record.RESULTS)
    if results:
        figures = {
            "attention": setup.attention_line, "fused": is_fused, "shape_BHTK": shape,
            "dtype": setup.compute_dtype.name, "median_ms": ms,
        }  # fmt: skip
        versions = record.versions("jax", "jaxlib", "flax")
        print(f"written: {record.write('gpu_attention', figures, versions, results, gpu=device.device_kind)}")
    if is_fused or options.smoke:
        return 0
    print("error: attention is not fused; docs/accelerators.md lists remedies.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
