"""Whatever the model and the data, there is one trainer: what it promises, it promises for all of them."""

import shutil
from dataclasses import replace
from functools import partial
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
from jaxformer.train.resume import Resume
from jaxformer.train.setup import TrainSetup
from tests.arrays import assert_close
from tests.data.test_captions import MODEL as CLIP
from tests.data.test_captions import write as write_captions
from tests.data.test_images import write_idx
from tests.helpers import ROOT, write_books

SMALL = {"d_model": 8, "n_heads": 2, "d_ff": (12,)}
TEXT = {**SMALL, "vocab_size": 280, "context_length": 16, "n_blocks": 1}
RECURRENT = {"vocab_size": 257, "d_embedding": 8, "d_model": 8}
IMAGES = {**SMALL, "image_size": (4, 6), "patch_size": (2, 2), "n_classes": 3, "n_blocks": 1}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "mlm.py": (TEXT | {"vocab_size": 281}, "books"),
    "moe.py:moe": (TEXT | {"n_experts": 4, "capacity_factor": None}, "books"),
    "dates.py:bahdanau": (RECURRENT, ""),
    "translation.py:transformer": (
        SMALL | {"vocab_size": 265, "context_length": 16, "n_encoder_blocks": 1, "n_decoder_blocks": 1}, "pairs",
    ),
    "vision.py:vivit": (
        IMAGES | {"image_size": (8, 12), "n_classes": 8, "n_frames": 4, "patch_size": (4, 4), "n_temporal_blocks": 1},
        "images",
    ),
    "clip.py": ({}, "captions"),
}  # fmt: skip
"""By config: fields of its model that make it small, and the data it is given."""
B = 4


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Data of each kind."""
    folder = tmp_path_factory.mktemp("data")
    rows = [f"the {a} {b}\tle {a}{b * (i % 2)}" for i, (a, b) in enumerate([("x", "y"), ("z", "w"), ("u", "v")] * 8)]
    for name, part in (("train", rows), ("val", rows[:3])):
        (folder / f"pairs.{name}.tsv").write_text("\n".join(part) + "\n")
    (folder / "captions").mkdir()
    return {
        "": "",
        "books": str(write_books(folder / "books")),
        "pairs": str(folder / "pairs"),
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
                          checkpoint_every=2, sample_tokens=4, label_smoothing=config.train.label_smoothing),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spec", CASES)
def test_every_model_trains_and_resumes_on_other_devices_with_the_same_losses(spec, places, tmp_path):
    config = small(spec, places, steps=4)
    load = partial(config.data.load, config.model, config.train.batch_size, config.seed)

    # On one device, looked into as it trains.
    data, one = load(), tmp_path / "one"
    create_run(one, config, data.tokenizer, allow_suffix=False)
    setup = TrainSetup(config, make_mesh("", jax.devices()[:1]))
    setup.check_fit(data.batch(0))
    outcome = train(setup, data, one, make_callbacks(setup, data, one))
    assert (outcome.status, outcome.step) == ("done", 4)
    rows = read_metrics(one)
    assert rows[-1]["gradients"] and rows[-1]["val_loss"] == rows[-1]["val_loss"]
    assert ("entropy" in rows[-1]) == (not isinstance(config.model, RecurrentConfig))

    # As if it had never stopped, on two.
    stopped = tmp_path / "stopped"
    shutil.copytree(one, stopped)
    shutil.rmtree(stopped / "checkpoints/4")
    setup = TrainSetup(config, make_mesh("", jax.devices()[:2]))
    outcome = train(setup, load(load_run(stopped).tokenizer), stopped, [], Resume())
    assert (outcome.status, outcome.step) == ("done", 4)
    resumed, uninterrupted = load_run(stopped), load_run(one)
    assert resumed.config == config
    jax.tree.map(assert_close, resumed.params, uninterrupted.params)
    losses = [[row["loss"] for row in read_metrics(folder)[1:]] for folder in (one, stopped)]
    assert len(losses[0]) == 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
