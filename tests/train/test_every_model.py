"""Whatever the model and the data, there is one trainer: what it promises, it promises for all of them."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.inspect.callbacks import make_callbacks
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import create_run, load_run
from jaxformer.train.log import read_metrics
from jaxformer.train.loop import train
from jaxformer.train.resume import Resume
from jaxformer.train.setup import TrainSetup
from tests.data.test_captions import MODEL as CLIP
from tests.data.test_captions import write as write_captions
from tests.data.test_images import write_idx
from tests.helpers import ROOT, write_books

SMALL = {"d_model": 8, "n_heads": 2, "d_ff": (12,)}
TEXT = {**SMALL, "vocab_size": 280, "context_length": 16, "n_blocks": 1}
IMAGES = {**SMALL, "image_size": (8, 12), "patch_size": (4, 4), "n_classes": 8, "n_blocks": 1}
RECURRENT = {"vocab_size": 257, "d_embedding": 8, "d_model": 8}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "mlm.py": (TEXT | {"vocab_size": 281}, "books"),
    "moe.py:moe": (TEXT | {"experts": ExpertsConfig(4)}, "books"),
    "dates.py:bahdanau": (RECURRENT, ""),
    "translation.py:transformer": (
        SMALL | {"vocab_size": 265, "context_length": 16, "n_encoder_blocks": 1, "n_decoder_blocks": 1}, "pairs",
    ),
    "vision.py:vivit": (IMAGES | {"n_frames": 4, "n_temporal_blocks": 1}, "images"),
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


MESHED = "moe.py:moe"
"""The one in which a mesh has most to say."""


@pytest.mark.slow
@pytest.mark.parametrize("spec", CASES)
def test_every_model_trains_and_resumes_bit_identically(spec, places, tmp_path):
    config, one = small(spec, places, steps=4), tmp_path / "one"
    load = partial(config.data.load, config.model, config.train.batch_size, config.seed)

    def run(folder: Path, n_devices: int, resume: bool, watched: bool = False) -> list[float]:
        """Train to the end; return the losses of all steps."""
        data = load(load_run(folder).tokenizer) if resume else load()
        if not resume:
            create_run(folder, config, data.tokenizer, allow_suffix=False)
        setup = TrainSetup(config, make_mesh("", jax.devices()[:n_devices]))
        setup.check_fit(data.batch(0))
        callbacks = make_callbacks(setup, data, folder) if watched else []
        outcome = train(setup, data, folder, callbacks, Resume() if resume else None)
        assert (outcome.status, outcome.step) == ("done", 4)
        return [row["loss"] for row in read_metrics(folder)[1:]]

    losses = run(one, 1, resume=False, watched=True)  # looked into as it trains
    assert len(losses) == 4
    rows = read_metrics(one)
    assert rows[-1]["gradients"] and rows[-1]["val_loss"] == rows[-1]["val_loss"]
    assert ("entropy" in rows[-1]) == (not isinstance(config.model, RecurrentConfig))

    # As if it had never stopped; on two devices, with the same losses.
    for n_devices in (1, 2) if spec == MESHED else (1,):
        stopped = tmp_path / f"stopped, {n_devices}"
        shutil.copytree(one, stopped)
        shutil.rmtree(stopped / "checkpoints/4")
        again, resumed = run(stopped, n_devices, resume=True), load_run(stopped)
        assert resumed.config == config
        if n_devices == 1:
            assert again == losses
            jax.tree.map(np.testing.assert_array_equal, resumed.params, load_run(one).params)
        else:
            np.testing.assert_allclose(again, losses, rtol=1e-5)
