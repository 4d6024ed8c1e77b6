"""Whatever the model and the data, there is one trainer: what it promises, it promises for all of them."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.inspect import first_non_finite
from jaxformer.inspect.callbacks import make_callbacks
from jaxformer.models.objective import objective_of
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan.plan import make_plan
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
RECURRENT = {"vocab_size": 257, "d_embedding": 8, "d_model": 8}
IMAGES = {**SMALL, "image_size": (4, 6), "patch_size": (2, 2), "n_classes": 3, "n_blocks": 1}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "mlm.py": (TEXT | {"vocab_size": 281}, "books"),
    "prefix.py": (TEXT, "books"),
    "moe.py:moe": (TEXT | {"n_experts": 4, "capacity_factor": None}, "books"),
    "dates.py:bahdanau": (RECURRENT, ""),
    "translation.py:transformer": (
        SMALL | {"vocab_size": 265, "context_length": 16, "n_encoder_blocks": 1, "n_decoder_blocks": 1}, "pairs",
    ),
    "vision.py:vit": (IMAGES, "images"),
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


ONCE = "moe.py:moe"
"""The one in which a mesh has most to say."""


@pytest.mark.slow
@pytest.mark.parametrize("spec", [pytest.param(spec, marks=[] if spec == ONCE else pytest.mark.slow) for spec in CASES])
def test_every_model_trains_resumes_and_is_inspected(spec, places, tmp_path):
    config = small(spec, places, steps=4)
    load = partial(config.data.load, config.model, config.train.batch_size, config.seed)

    def run(name: str, steps: int, n_devices: int, watched: bool = False, resume: bool = False) -> Path:
        run_config, mesh = replace(config, steps=steps), make_mesh("", jax.devices()[:n_devices])
        folder = tmp_path / name
        data = load(load_run(folder).tokenizer) if resume else load()
        if not resume:
            create_run(folder, run_config, data.tokenizer, allow_suffix=False)
        setup = TrainSetup(run_config, mesh)
        outcome = train(
            setup, data, folder, make_callbacks(setup, data, folder) if watched else [], Resume() if resume else None
        )
        assert (outcome.status, outcome.step) == ("done", steps)
        return folder

    # The same on one device and on as many as there are examples in a batch.
    one, many = run("one", 4, 1, watched=True), run("many", 4, config.train.batch_size)
    rows = read_metrics(one)
    losses = [[row["loss"] for row in read_metrics(folder)[1:]] for folder in (one, many)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert rows[-1]["gradients"] and rows[-1]["val_loss"] == rows[-1]["val_loss"]
    assert ("entropy" in rows[-1]) == (not isinstance(config.model, RecurrentConfig))

    # As if it had never stopped.
    shutil.copytree(one, tmp_path / "stopped")
    for last in (tmp_path / "stopped/checkpoints").glob("4*"):
        shutil.rmtree(last) if last.is_dir() else last.unlink()
    resumed, uninterrupted = load_run(run("stopped", 4, 1, resume=True)), load_run(one)
    assert resumed.config == config
    jax.tree.map(np.testing.assert_array_equal, resumed.params, uninterrupted.params)
    measured = [[row["loss"] for row in read_metrics(folder)[1:]] for folder in (one, tmp_path / "stopped")]
    assert measured[0] == measured[1]

    # Any of it can be computed again, planned, and differentiated from outside.
    batch, model = load().batch(0), resumed.model
    assert first_non_finite(model, resumed.params, batch) is None
    setup = TrainSetup(config, make_mesh("", jax.devices()[:1]))
    setup.check_fit(batch)
    plan = make_plan(setup)
    assert plan.n_parameters == sum(w.size for w in jax.tree.leaves(resumed.params)) and plan.model_flops > 0
    example = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    grads = jax.jit(jax.grad(lambda p: objective_of(model).example_loss(model, p, example)))(resumed.params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads)) and any(np.any(g) for g in jax.tree.leaves(grads))
