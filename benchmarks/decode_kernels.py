"""Kernels and memory traffic of one decode step of `configs/gpt.py:gpt2_124m` on a GPU, from the compiled program.

    python -m benchmarks.decode_kernels [--topology h100:1] [--batch-sizes 1 8 64] [--n-blocks 12] [--results FOLDER]

XLA compiles for a GPU that need not be present (`pip install -e '.[plan-gpu]'`). It then does not tune matmuls of
several rows, and nothing runs: these are counts, not times. A step reads a KV cache of 1024 slots in bfloat16. Kernels
are counted in the body of the loop over tokens, which XLA launches as one CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks import record
from configs.gpt import gpt2_124m
from jaxformer.cli.command import as_command
from jaxformer.cli.options import CommandLine
from jaxformer.decode import programs
from jaxformer.decode.samplers import Sampling, init_history
from jaxformer.decode.weights import lay_out, store
from jaxformer.errors import UserError
from jaxformer.models.decoder import DecoderConfig
from jaxformer.plan.hlo import parse
from jaxformer.plan.topology import compiler_of, count_devices, topology_devices

GPT2: DecoderConfig = gpt2_124m.model  # type: ignore[assignment]
WEIGHTS = ("float32", "bfloat16", "int8")
GREEDY = Sampling(temperature=0)


def compiled_step(model: Any, weights: Any, batch_size: int, device: jax.Device) -> str:
    """Return the text of the compiled decode program, with parameters stored as in `sample.py`."""
    n_slots, V = model.config.context_length, model.config.vocab_size

    def arguments() -> tuple[Any, programs.DecodeState]:
        params = model.init(jax.random.key(0), jnp.zeros(1, jnp.int32))["params"]
        cache = jax.vmap(lambda _: model.init_cache(n_slots, jnp.bfloat16))(jnp.zeros(batch_size))
        history = jax.vmap(partial(init_history, GREEDY, V))(jnp.zeros((batch_size, 1), int), jnp.ones(batch_size, int))
        numbers = (jnp.zeros(batch_size, dtype) for dtype in (jnp.int32, jnp.int32, jnp.uint32, bool))
        params = lay_out(store(params, weights, model, "gpu"), model, "gpu")
        return params, programs.DecodeState(cache, history, *numbers)

    def on_device(tree: Any) -> Any:
        sharding = SingleDeviceSharding(device)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    numbers = (jax.ShapeDtypeStruct((batch_size,), bool), *(jax.ShapeDtypeStruct((), jnp.int32),) * 3)
    lowered = programs.decode.lower(model, GREEDY, *on_device((*jax.eval_shape(arguments), *numbers)), mesh=None)
    return str(lowered.compile().as_text())


@as_command()
def main(line: CommandLine) -> int:
    """Count kernels and bytes, print and store them; return the exit status."""
    parser = argparse.ArgumentParser(description="Kernels and memory traffic of one decode step on a GPU.")
    parser.add_argument("--topology", default="h100:1", help="one GPU that plan knows")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--n-blocks", type=int, default=GPT2.n_blocks)
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="where to write the result")
    options = parser.parse_args(line.words())
    compiler, n_devices = compiler_of(options.topology), count_devices(options.topology)
    if compiler.kind != "GPU" or n_devices != 1 or not compiler.is_installed:
        raise UserError(
            f"{options.topology} is not one GPU, or its compiler is not installed; give one such as h100:1, after "
            "pip install -e '.[plan-gpu]'."
        )
    config = replace(GPT2, n_blocks=options.n_blocks)
    jax.config.update("jax_platforms", "cpu")  # nothing runs on a GPU, even if there is one
    device = topology_devices(options.topology)[0]
    figures: dict[str, Any] = {"n_blocks": config.n_blocks, "slots_read": config.context_length}
    for batch_size in options.batch_sizes:
        for weights in WEIGHTS:
            ((kernels, n_bytes),) = parse(compiled_step(config.build(), weights, batch_size, device)).loop_bodies()
            counts = {"kernels_per_step": len(kernels), "mb_per_step": round(n_bytes / 1e6, 1)}
            figures.setdefault(f"batch_{batch_size}", {})[weights] = counts
            print(f"batch {batch_size}, {weights}: {json.dumps(counts)}", flush=True)
    versions = record.versions("jax", "jaxlib", "flax")
    path = record.write("decode_kernels", figures, versions, options.results, compiled_for=device.device_kind)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
