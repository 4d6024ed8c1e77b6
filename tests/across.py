"""One of the processes of `test_processes.py`: python -m tests.across FOLDER MESH COORDINATOR PROCESSES PROCESS"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig, next_token_batch
from jaxformer.parallel.mesh import assemble, batch_sharding, local_rows, make_mesh
from jaxformer.parallel.processes import AsyncMax, DistributedOptions, barrier, broadcast, connect, shutdown
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step
from tests.arrays import plain_decoder

MODEL = plain_decoder(40, 12, 16, n_blocks=1, n_heads=2, d_ff=(24,), norm="rmsnorm")
CONFIG = Config(
    "test", MODEL, data=TextConfig(), steps=20, optimizer=OptimizerConfig("adamw", learning_rate=3e-3, clip_norm=1.0),
    train=TrainConfig(batch_size=16),
)  # fmt: skip
BATCHES = np.random.default_rng(0).integers(0, 40, (20, 16, 13)).astype(np.int32)
SAVED = 10
"""The step at which a checkpoint is made."""


def main(folder: str, mesh_text: str, coordinator: str, processes: str, process: str) -> int:
    """Train, save, and print what this process saw as a line of JSON."""
    connect(DistributedOptions(coordinator, int(processes), int(process)))
    mesh = make_mesh(mesh_text)
    split = batch_sharding(mesh)
    held = local_rows(split, CONFIG.train.batch_size)
    setup = TrainSetup(CONFIG, mesh)
    state, step, losses = setup.init_state(), make_train_step(setup), []
    with CheckpointManager(Path(folder)) as checkpoints:
        for k, batch in enumerate(BATCHES):
            if k == SAVED:
                checkpoints.save(k, state.params, state.opt_state, {"step": k}, None)
            state, metrics = step(state, assemble(next_token_batch(batch[held]), held, len(batch), split), np.int32(k))
            losses.append(float(metrics.loss))
    told = {
        "losses": losses,
        "rows": held.tolist(),
        "text": broadcast(f"from {jax.process_index()}"),
        "largest": int(AsyncMax(mesh).reduce(jax.process_index())),
    }
    barrier()
    print(json.dumps(told))
    return shutdown(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
