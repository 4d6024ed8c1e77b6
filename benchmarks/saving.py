"""Saving and restoring checkpoints of parameters and momentum."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Figures


def arrays(n: int) -> dict[str, np.ndarray]:
    """Return four random arrays with n values in total."""
    return {f"W_{i}": np.random.default_rng(i).standard_normal((n // 4096, 1024), np.float32) for i in range(4)}


def jaxformer(folder: Path, parameters: int, action: str) -> tuple[Any, Figures]:
    """Save with Orbax and SHA-256 checksums, and wait until the files are written; or verify and restore."""
    import jax

    from jaxformer.runs.checkpoints import CheckpointManager, CheckpointReader

    params, momentum = ({name: jax.device_put(x) for name, x in arrays(parameters).items()} for _ in range(2))

    def save(number: int) -> float:
        run = folder / "jaxformer"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        with CheckpointManager(run) as checkpoints:
            checkpoints.save(1, params, momentum, {"healthy": True}, None)
        return 0.0

    def restore(_: int) -> Any:
        reader, shapes = CheckpointReader(folder / "jaxformer"), jax.eval_shape(lambda: params)
        assert reader.last_intact_step() == 1
        return reader.restore(1, shapes, shapes)[0]["W_0"][0, 0]

    save(0)
    return (save if action == "save" else restore), {}


def torch(folder: Path, parameters: int, action: str) -> tuple[Any, Figures]:
    """Save with `torch.save`, which has no checksums and waits only for the page cache; or load."""
    import torch

    state = [{name: torch.from_numpy(x) for name, x in arrays(parameters).items()} for _ in range(2)]
    file = folder / "torch.pt"

    def save(_: int) -> float:
        torch.save(state, file)
        return 0.0

    save(0)
    return (save if action == "save" else lambda _: torch.load(file)[0]["W_0"][0, 0]), {}
