"""The training loop."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.config import Config, DataConfig, OptimizerConfig, TrainConfig
from jaxformer.data.corpus import load_corpus
from jaxformer.models.decoder import DecoderConfig
from jaxformer.sharding import make_mesh
from jaxformer.train.log import read_metrics
from jaxformer.train.loop import Outcome, train
from tests.arrays import assert_close
from tests.helpers import write_books

MODEL = DecoderConfig(280, 16, 16, n_blocks=1, n_heads=2, output_projection=True, d_ff=(24,), norm="rmsnorm")
TRAIN = TrainConfig(batch_size=8, log_every=1, eval_every=10, eval_windows=16, checkpoint_every=5)


@pytest.fixture(scope="module", autouse=True)
def compiled_in_half_the_time() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
def test_a_run_goes_on_on_fewer_devices(tmp_path):
    """Eight devices, then two, then one, against a run that never stopped."""
    config = Config(
        "test", MODEL, steps=20, data=DataConfig(str(write_books(tmp_path / "books"))), train=TRAIN,
        optimizer=OptimizerConfig("adamw", learning_rate=3e-3, warmup_steps=4, weight_decay=0.1, clip_norm=1.0),
    )  # fmt: skip
    corpus = load_corpus(config.data, MODEL.vocab_size)

    def run(name: str, steps: int, mesh: str, n_devices: int, resume: bool = False) -> Outcome:
        folder, on = tmp_path / name, make_mesh(mesh, jax.devices()[:n_devices])
        folder.mkdir(exist_ok=True)
        outcome = train(replace(config, steps=steps, mesh=mesh), corpus, folder, on, [], resume)
        assert (outcome.status, outcome.step) == ("done", steps)
        return outcome

    whole = run("whole", 20, "data=8", 8)
    run("moved", 10, "data=2,fsdp=4", 8)
    run("moved", 15, "tensor=2", 2, resume=True)
    moved = run("moved", 20, "", 1, resume=True)

    losses = [[row["loss"] for row in read_metrics(tmp_path / name)[1:]] for name in ("whole", "moved")]
    assert len(losses[0]) == 20
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.1
    for got, wanted in zip(jax.tree.leaves(moved.state), jax.tree.leaves(whole.state), strict=True):
        if np.issubdtype(got.dtype, np.floating):
            assert_close(got, wanted)
