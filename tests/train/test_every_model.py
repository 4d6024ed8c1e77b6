"""Whatever the model and the data, there is one trainer: what it promises, it promises for all of them."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.inspect.callbacks import make_callbacks
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import create_run, load_run
from jaxformer.train.log import read_metrics
from jaxformer.train.loop import train
from jaxformer.train.setup import TrainSetup
from tests.data.test_captions import MODEL as CLIP
from tests.data.test_captions import write as write_captions
from tests.data.test_images import write_idx
from tests.helpers import ROOT, write_books
from tests.train.test_metric_writers import logged_rows, tensorboard_rows

SMALL = {"d_model": 8, "n_heads": 2, "d_ff": (12,)}
TEXT = {**SMALL, "vocab_size": 280, "context_length": 16, "n_blocks": 1}
IMAGES = {**SMALL, "image_size": (8, 12), "patch_size": (4, 4), "n_classes": 8, "n_blocks": 1}
RECURRENT = {"vocab_size": 257, "d_embedding": 8, "d_model": 8}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "mlm.py": (TEXT | {"vocab_size": 281}, "books"),
    "dates.py:bahdanau": (RECURRENT, ""),
    "vision.py:vivit": (IMAGES | {"n_frames": 4, "n_temporal_blocks": 1}, "images"),
    "clip.py": ({}, "captions"),
}  # fmt: skip
"""By config: fields of its model that make it small, and the data it is given."""
B = 4


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Data of each kind."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "captions").mkdir()
    return {
        "": "",
        "books": str(write_books(folder / "books")),
        "images": str(write_idx(folder / "images", {"train": 3 * B, "t10k": 5})),
        "captions": write_captions(folder / "captions"),
    }


def small(spec: str, places: dict[str, str], steps: int) -> Config:
    """The config with a small model, for a few steps of something that is quick to compile."""
    config, (fields, kind) = load_config(str(ROOT / "configs" / spec)), CASES[spec]
    model = replace(config.model, **fields, **({"dropout": 0.1} if hasattr(config.model, "dropout") else {}))
    if kind == "captions":
        model = CLIP  # for the images of that test
    given = (
        {"path": places[kind]} if kind else {"n_pairs": 64, "n_held_out": 8, "locales": ("en_GB",), "forms": ("short",)}
    )
    if kind == "captions":
        given["shift"] = 1  # of images of 4 pixels
    data = replace(config.data, **given)
    return replace(
        config, model=model, data=data, steps=steps, optimizer=OptimizerConfig(learning_rate=0.05),
        train=TrainConfig(batch_size=B, log_every=1, eval_every=2, eval_examples=4, report_every=2,
                          checkpoint_every=2, sample_tokens=4, label_smoothing=config.train.label_smoothing,
                          log_to=("tensorboard",)),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spec", CASES)
def test_every_model_trains_watched_and_its_data_are_read_again_alike(spec, places, tmp_path):
    pytest.importorskip("tensorboardX")
    config = small(spec, places, steps=2)
    data = config.data.load(config.model, B, config.seed)
    folder = create_run(tmp_path / "run", config, data.tokenizer, allow_suffix=False)
    setup = TrainSetup(config, make_mesh("", jax.devices()[:1]))
    setup.check_fit(data.batch(0))
    assert "\n" not in data.describe()
    outcome = train(setup, data, folder, make_callbacks(setup, data, folder))
    assert (outcome.status, outcome.step) == ("done", 2)
    rows, run = read_metrics(folder), load_run(folder)
    assert tensorboard_rows(folder) == logged_rows(folder)
    assert len([row["loss"] for row in rows[1:]]) == 2
    assert rows[-1]["gradients"] and rows[-1]["val_loss"] == rows[-1]["val_loss"]
    assert ("entropy" in rows[-1]) == (not isinstance(config.model, RecurrentConfig))
    # All that resuming reads; what it does with these is the same for every model.
    assert run.config == config
    again = run.config.data.load(config.model, B, config.seed, run.tokenizer)
    jax.tree.map(np.testing.assert_array_equal, again.batch(3), data.batch(3))
    jax.tree.map(np.testing.assert_array_equal, run.params, jax.device_get(outcome.state.params))
