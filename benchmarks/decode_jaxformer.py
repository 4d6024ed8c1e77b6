"""A process that continues prompts with jaxformer when asked: see `decode` and `processes`.

    python benchmarks/decode_jaxformer.py FOLDER BATCH WEIGHTS

The weights, which are drawn from a seed, are left in the folder for the peer.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import record
from flax.traverse_util import flatten_dict
from processes import serve

from jaxformer.cli import machine
from jaxformer.decode.generation import generate
from jaxformer.decode.samplers import Sampling
from jaxformer.decode.weights import as_declared, lay_out, store
from jaxformer.models.decoder import DecoderConfig


def drawn(params: Any, seed: int) -> Any:
    """Return weights of GPT-2's standard deviation, gains of 1, and matrices so large that not all texts repeat."""
    draw = np.random.default_rng(seed)

    def one(path: tuple, leaf: jax.Array) -> np.ndarray:
        if path[-1].key == "gamma":
            return np.ones(leaf.shape, np.float32)
        return draw.normal(0, 0.08, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(one, params)


def main(folder: Path, batch_size: int, weights: Any) -> None:
    """Set up, make one text to compare, measure what is measured once, and serve."""
    job = json.loads((folder / "job.json").read_text())
    machine.set_up()
    if job["device"] == "gpu" and jax.default_backend() != "gpu":
        sys.exit("error: there is no GPU; --smoke runs on any device.")
    shape = job["shape"] | {"d_ff": (job["shape"]["d_ff"],)}
    config = DecoderConfig(
        **shape, output_projection=True, attention_bias=True, activation="gelu", norm="layernorm", final_norm=True,
        unembedding="tied",
    )  # fmt: skip
    model, V = config.build(), config.vocab_size
    exact = drawn(model.init(jax.random.key(0), jnp.zeros(4, jnp.int32))["params"], 0)
    np.savez(folder / "weights.npz", **flatten_dict(exact, sep="."))
    params = lay_out(jax.device_put(store(jax.tree.map(jnp.asarray, exact), weights, model)), model)
    prompts = np.random.default_rng(1).integers(0, V, (batch_size, job["prompt"])).astype(np.int32)
    np.save(folder / f"prompts_{batch_size}.npy", prompts)
    dtype = jnp.float32 if job["device"] == "cpu" else jnp.bfloat16

    def run(prompts: np.ndarray, n: int) -> np.ndarray:
        pieces = generate(
            model, params, prompts.tolist(), Sampling(temperature=0), [0] * len(prompts), max_new_tokens=n,
            context_length=config.context_length, cache_dtype=dtype,
        )  # fmt: skip
        return np.concatenate([piece.tokens_BN for piece in pieces], axis=1)

    def first_token_over_forward(length: int) -> float:
        """Warm, one prompt; medians of both taken in turns."""
        prompt = np.random.default_rng(2).integers(0, V, (1, length)).astype(np.int32)
        forward = jax.jit(jax.vmap(lambda tokens_T: model.apply({"params": as_declared(params)}, tokens_T)))
        times: dict[str, list[float]] = {"first": [], "forward": []}
        for _ in range(15):
            for name, call in (("first", lambda: run(prompt, 1)), ("forward", lambda: forward(prompt))):
                began = time.perf_counter()
                jax.block_until_ready(call())
                times[name].append(time.perf_counter() - began)
        return round(median(times["first"][2:]) / median(times["forward"][2:]), 2)

    tokens = run(prompts, job["new"])
    mean_length = job["prompt"] + job["new"] / 2
    cached = 2 * config.n_blocks * config.kv_heads * config.width_of_head * jnp.dtype(dtype).itemsize
    serve(
        lambda taken: run(prompts, job["new"])[0, -1],
        jax.profiler.trace,
        tokens=tokens.tolist(),
        bytes_a_step=read_a_step(params) + int(batch_size * cached * mean_length),
        gb_per_s=reading_rate(job["device"]),
        first_token_over_forward={str(n): first_token_over_forward(n) for n in job["first"]} if batch_size == 1 else {},
        versions=record.versions("jax", "jaxlib", "flax"),
    )


def read_a_step(params: Any) -> int:
    """Return the bytes of parameters that a decode step reads: all but the table of positions."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(leaf.nbytes for path, leaf in leaves if "W_pos" not in jax.tree_util.keystr(path))


def reading_rate(device: str) -> float:
    """GB/s at which this machine reads memory: the best of ten passes over 256 MB or, on a GPU, 4 GB."""
    if device == "cpu":
        parts = np.array_split(np.ones(2**26, np.float32), record.cores())
        with ThreadPoolExecutor(len(parts)) as pool:
            read = lambda: list(pool.map(np.max, parts))  # noqa: E731
            return _best(read, 2**28)
    x = jnp.ones(2**30, jnp.float32)
    largest = jax.jit(jnp.max)
    return _best(lambda: largest(x).block_until_ready(), 2**32)


def _best(read: Any, n_bytes: int) -> float:
    seconds = []
    for _ in range(11):
        began = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - began)
    return n_bytes / min(seconds[1:]) / 1e9


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
