"""A process that trains with jaxformer when asked: see `processes` and `peers`.

    python benchmarks/train_jaxformer.py FOLDER

`job.json` in the folder says what to train. Shape, first weights, batches and learning rates are left there for
those who train the same in another library.
"""

import json
import os
import sys
from dataclasses import asdict, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
import record
from flax.traverse_util import flatten_dict
from processes import serve

from jaxformer.cli import machine
from jaxformer.config import Config
from jaxformer.data.windows import next_token_batch
from jaxformer.fields import from_dict, to_dict
from jaxformer.memory import memory_needed
from jaxformer.runs import count_parameters
from jaxformer.sharding import batch_sharding, global_device_put, make_mesh
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step

BATCHES = 8
"""Different batches; the steps go round them."""


def read_job(job: dict[str, Any]) -> Config:
    """Return the config of a `peers.Job`."""
    file, _, name = job["config"].partition(":")
    # Imported by name: a command's way of reading configs would bring in all that reads arguments.
    config: Config = getattr(import_module(f"configs.{file}"), name)

    def changed(name: str, value: Any) -> Any:
        part: Any = getattr(config, name)
        return from_dict(type(part), asdict(part) | value, name) if is_dataclass(part) else value  # type: ignore[arg-type]

    return replace(config, **{name: changed(name, value) for name, value in job["changes"].items()})


def main(folder: Path) -> None:
    """Set everything up as `train.py` does, and serve."""
    job = json.loads((folder / "job.json").read_text())
    config = read_job(job)
    model: Any = config.model
    B, T = config.train.batch_size, model.context_length
    machine.set_up(B, config.mesh)
    setup = TrainSetup(config, make_mesh(config.mesh))
    state, split = setup.init_state(), batch_sharding(setup.mesh)
    weights = flatten_dict(jax.tree.map(np.asarray, state.params), sep=".")
    batches = np.random.default_rng(config.seed).integers(model.vocab_size, size=(BATCHES, B, T + 1), dtype=np.int32)
    rates = [float(setup.schedule(step)) for step in range(job["steps"])]
    dtype = setup.compute_dtype.name
    np.savez(folder / "weights.npz", **weights)
    np.save(folder / "batches.npy", batches)
    (folder / "config.json").write_text(json.dumps(to_dict(config) | {"learning_rates": rates, "dtype": dtype}))

    step_number = jax.ShapeDtypeStruct((), np.int32)
    compiled = make_train_step(setup).lower(setup.abstract_state, setup.abstract_batch, step_number).compile()
    cost = compiled.cost_analysis() or {}

    def step(taken: int) -> jax.Array:
        nonlocal state
        state, metrics = compiled(
            state, global_device_put(next_token_batch(batches[taken % BATCHES]), split), np.int32(taken)
        )
        return metrics.loss

    device = jax.devices()[0]
    serve(
        step,
        jax.profiler.trace,
        parameters=count_parameters(state.params),
        matrix_parameters=sum(w.size for name, w in weights.items() if in_a_product(name, "W_out" in weights)),
        batch_size=B,
        context_length=T,
        attention_width=model.n_heads * model.width_of_head,
        n_blocks=model.n_blocks,
        dtype=dtype,
        attention=setup.attention_line,
        platform=device.platform,
        device=device.device_kind,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        compiler={
            "flops_a_step": cost.get("flops"),
            "bytes_accessed_a_step": cost.get("bytes accessed"),
            "memory_bytes": memory_needed(compiled),
        },
        versions=record.versions("jax", "jaxlib", "flax"),
    )


def in_a_product(name: str, untied: bool) -> bool:
    """Return whether a parameter is a matrix that every token is multiplied with, and no table."""
    leaf = name.rpartition(".")[2]
    return leaf.startswith("W_") and leaf != "W_pos" and not (untied and leaf == "W_E")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
