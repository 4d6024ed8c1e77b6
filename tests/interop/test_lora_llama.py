"""Adapters over a published Llama: import, training, merging."""

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.__main__ import main
from jaxformer.runs.checkpoints import CheckpointReader
from jaxformer.runs.run import BASE, load_run
from jaxformer.train.log import read_metrics
from tests.arrays import apply, assert_close
from tests.helpers import write_books
from tests.interop.published import publish

pytestmark = pytest.mark.slow


def arrays(run: Path) -> dict[str, np.ndarray]:
    """Return the parameters of a run's only checkpoint, or its last."""
    checkpoints = CheckpointReader(run)
    return {name: x for name, x in checkpoints.arrays(checkpoints.step()).items() if name.startswith("params/")}


def test_adapters_on_an_imported_llama_learn_and_leave_it_as_it_was(tmp_path: Path, monkeypatch: Any, capsys: Any):
    safetensors = pytest.importorskip("safetensors.numpy")
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "llama", "Llama", std=0.1, hidden_size=48, intermediate_size=64)
    write_books(tmp_path / "books")
    assert main(["import", "llama", "--run", "imported"]) == 0
    options = [
        "--data.path", "books", "--steps", "60", "--train.report-every", "0", "--train.eval-every", "30",
        "--model.context-length", "32", "--optimizer.learning-rate", "0.01", "--optimizer.warmup-steps", "5",
        "--lora.rank", "8",
    ]  # fmt: skip
    assert main(["train", "--init-from", "llama", "--run", "tuned", *options]) == 0
    losses = [row["val_loss"] for row in read_metrics(Path("tuned")) if "val_loss" in row]
    assert losses[-1] < losses[0] - 0.5, losses

    imported, base = arrays(Path("imported")), arrays(Path("tuned") / BASE)
    assert imported.keys() == base.keys()
    for name, array in imported.items():
        np.testing.assert_array_equal(base[name], array)
    published = safetensors.load_file("llama/model.safetensors")
    np.testing.assert_array_equal(
        base["params/blocks_1/mlp/W_2"], published["model.layers.1.mlp.down_proj.weight"].T
    )  # bit for bit as published

    assert main(["merge", "tuned", "--out", "merged"]) == 0
    tokens = jnp.arange(32, dtype=jnp.int32)
    tuned, merged, before = (load_run(name) for name in ("tuned", "merged", "imported"))
    logits, of_merged, of_before = (apply(run.model, run.params, tokens) for run in (tuned, merged, before))
    assert_close(of_merged, logits)
    assert np.abs(logits - of_before).max() > 0.1
    capsys.readouterr()
    # What was merged leaves as any run does.
    assert main(["export", "merged", "--format", "hf", "--out", "out"]) == 0
    shutil.rmtree("merged")
    assert main(["import", "out", "--run", "again"]) == 0
    again = load_run("again")
    assert_close(apply(again.model, again.params, tokens), logits)
