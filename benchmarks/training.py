"""Training steps with jaxformer, and the matmuls that bound them."""

import json
import os
from dataclasses import asdict, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from benchmarks.harness import Figures
from jaxformer.cli import machine
from jaxformer.config import ComputeConfig, Config
from jaxformer.config.fields import from_dict, to_dict
from jaxformer.data.windows import next_token_batch
from jaxformer.parallel.memory import memory_needed
from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh
from jaxformer.runs.run import count_parameters
from jaxformer.train.setup import TrainSetup, resolve_precision
from jaxformer.train.step import make_train_step

BATCHES = 8
"""Number of distinct batches, which the steps cycle through."""
WARM_UP = 5
"""Steps before the timed ones. The sides must agree on their losses."""
LEARNING_RATES = 2000
"""Steps of the learning-rate schedule passed to the peers; later steps use the last learning rate."""
PRODUCTS = 10
"""Number of consecutive matmuls per step."""


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """Return a config with changed fields; fields of its parts are in a mapping, `{"model": {"n_blocks": 1}}`."""

    def new(name: str, value: Any) -> Any:
        part: Any = getattr(config, name)
        return from_dict(type(part), asdict(part) | value, name) if is_dataclass(part) else value  # type: ignore[arg-type]

    return replace(config, **{name: new(name, value) for name, value in changes.items()})


def jaxformer(folder: Path, config: str, changes: dict[str, Any], **others: Any) -> tuple[Any, Figures]:
    """Set up training as `train.py` does, and write config, initial weights, batches and learning rates for the
    peers."""
    (folder / "config.json").unlink(missing_ok=True)  # of another point
    file, _, name = config.partition(":")
    whole: Config = changed(getattr(import_module(f"configs.{file}"), name), changes)
    model: Any = whole.model
    B, T = whole.train.batch_size, model.context_length
    machine.set_up(B, whole.mesh)
    setup = TrainSetup(whole, make_mesh(whole.mesh))
    state, split = setup.init_state(), batch_sharding(setup.mesh)
    weights = flatten_dict(jax.tree.map(np.asarray, state.params), sep=".")
    batches = np.random.default_rng(whole.seed).integers(model.vocab_size, size=(BATCHES, B, T + 1), dtype=np.int32)
    rates = jax.vmap(lambda step: jnp.float32(setup.schedule(step)))(jnp.arange(LEARNING_RATES))
    dtype = setup.compute_dtype.name
    np.savez(folder / "weights.npz", **weights)
    np.save(folder / "batches.npy", batches)
    (folder / "config.json").write_text(json.dumps(to_dict(whole) | {"learning_rates": rates.tolist(), "dtype": dtype}))

    step_number = jax.ShapeDtypeStruct((), np.int32)
    compiled = make_train_step(setup).lower(setup.abstract_state, setup.abstract_batch, step_number).compile()

    def step(number: int) -> jax.Array:
        nonlocal state
        batch = global_device_put(next_token_batch(batches[number % BATCHES]), split)
        state, metrics = compiled(state, batch, np.int32(number))
        return metrics.loss

    matrices = sum(w.size for name, w in weights.items() if in_a_product(name, "W_out" in weights))
    # 6·N + 12·L·T·d: N counts the weights that multiply every token, d is the total width of all heads. Attention
    # counts as if every position attended to all T (Chowdhery et al. 2022, appendix B); recomputation does not count.
    flops = 6 * matrices + 12 * model.n_blocks * T * model.n_heads * model.width_of_head
    return step, {
        "values": [float(step(number)) for number in range(WARM_UP)],
        "parameters": count_parameters(state.params), "tokens_per_step": B * T, "flops_per_token": flops,
        "dtype": dtype, "attention": setup.attention.line, "memory_bytes": memory_needed(compiled),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }  # fmt: skip


def in_a_product(name: str, untied: bool) -> bool:
    """Return True for a matrix that multiplies every token, and False for a lookup table."""
    leaf = name.rpartition(".")[2]
    return leaf.startswith("W_") and leaf != "W_pos" and not (untied and leaf == "W_E")


def matmuls(folder: Path, size: int = 1024, **_: Any) -> tuple[Any, Figures]:
    """Multiply square matrices, one per device, in the compute dtype; with random values, as GPUs are faster on
    zeros."""
    machine.set_up(machine.cores())
    mesh = make_mesh()
    dtype, n = resolve_precision(ComputeConfig(), mesh), mesh.size
    a, b = (jax.random.normal(jax.random.key(seed), (n, size, size), dtype) for seed in (0, 1))
    a, b = jax.device_put((a, b * size**-0.5), batch_sharding(mesh))  # keeps the scale of a

    @jax.jit
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, PRODUCTS, lambda _, product: product @ b, a)[0, 0, 0].astype(jnp.float32)

    return lambda _: multiply(a, b), {"flops": 2 * size**3 * PRODUCTS * n, "dtype": dtype.name}
