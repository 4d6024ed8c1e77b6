"""Lines that end a training run."""

from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxformer.cli import training_report
from jaxformer.cli.arguments import load_config
from jaxformer.cli.training_report import example_prompt, final_line, header, no_improvement, rollback_line
from jaxformer.data.dates import DatesConfig
from jaxformer.errors import EXTRAS
from jaxformer.ops.attention import attention
from jaxformer.parallel.mesh import make_mesh
from jaxformer.train.evaluate import Evaluation
from jaxformer.train.kernels import ChosenAttention
from jaxformer.train.loop import Outcome
from jaxformer.train.setup import TrainSetup
from tests.helpers import ROOT


@pytest.mark.parametrize("warning", [None, "warning: attention is not fused, ..."])
def test_the_header_warns_of_unfused_attention(monkeypatch, tmp_path, warning):
    monkeypatch.setattr(TrainSetup, "attention", ChosenAttention(attention, "attention: xla", warning))
    setup = TrainSetup(load_config(f"{ROOT}/configs/quick.py"), make_mesh())
    data: Any = SimpleNamespace(unit="tokens", per_step=8, steps_per_epoch=9, notes=(), describe=lambda: "books")
    assert [line for line in header(setup, data, tmp_path, False) if "not fused" in line] == [warning] * bool(warning)


@pytest.mark.parametrize(("spec", "noted"), [("quick.py", False), ("dates.py:bahdanau", True)])
def test_the_header_notes_a_missing_extra_only_if_it_is_of_use(monkeypatch, tmp_path, spec, noted):
    monkeypatch.setattr(training_report, "missing_extras", lambda package: EXTRAS[package])
    setup = TrainSetup(load_config(f"{ROOT}/configs/{spec}"), make_mesh("", jax.devices()[:1]))
    pairs = DatesConfig(n_pairs=2, n_held_out=1, locales=("sv",), forms=("short",))
    text: Any = SimpleNamespace(unit="tokens", per_step=8, steps_per_epoch=9, notes=(), describe=lambda: "books")
    data = pairs.load(setup.config.model, 2, seed=0) if noted else text
    assert any("pip install 'jaxformer[plots]'" in line for line in header(setup, data, tmp_path, False)) == noted


@pytest.mark.parametrize(
    ("spec", "prompt"),
    [("quick.py", "The"), ("mlm.py", "The [MASK] of"), ("vision.py:vit", None), ("clip.py", None)],
)
def test_the_example_prompt_fits_the_task(spec, prompt):
    config = load_config(f"{ROOT}/configs/{spec}")
    assert example_prompt(config, data=None) == prompt  # the data matters only where it is pairs


def test_the_example_prompt_of_pairs_is_a_held_out_source():
    config = load_config(f"{ROOT}/configs/dates.py:bahdanau")
    data = DatesConfig(n_pairs=2, n_held_out=1, locales=("sv",), forms=("short",)).load(config.model, 2, seed=0)
    prompt = example_prompt(config, data)
    assert prompt == data.val[0].source and prompt.startswith("sv ")


def done(val_loss: float | None, evaluation: Evaluation | None) -> Outcome:
    return Outcome("done", 20, None, None, evaluation, val_loss)


@pytest.mark.parametrize(
    ("rows", "outcome", "warning"),
    [
        (
            [7.0, 5.0],
            done(7.5, Evaluation(6.0, targets=1)),
            "on held-out data is 7.5000, no better than 7.0000 before the f",
        ),
        (
            [7.0, 5.0],
            done(nan, Evaluation(nan, targets=1)),
            "on held-out data is nan, no better than 7.0000 before the first",
        ),
        ([7.0, 9.0], done(6.9, Evaluation(7.1, targets=1)), None),  # of all that is held out, the loss is another
        ([7.0, 9.0], done(None, Evaluation(7.1, targets=1)), None),  # it was at its end before
        ([None, 9.0], done(9.0, Evaluation(7.1, targets=1)), None),
        ([7.0, 7.2], done(None, None), "on the last training batch is 7.2000, no better than 7.0000 at step 10"),
        ([7.0, 6.8, None], done(None, None), None),
        ([7.0], done(None, None), None),
    ],
)
def test_a_run_without_improvement_is_reported(rows, outcome, warning):
    name = "loss" if outcome.evaluation is None else "val_loss"
    log = [{"step": 10 * number, name: loss} for number, loss in enumerate(rows, start=1)]
    said = no_improvement(log, outcome)
    assert said is None if warning is None else warning in said


def test_the_rollback_command_has_values():
    config = load_config(f"{ROOT}/configs/quick.py")
    config = replace(config, optimizer=replace(config.optimizer, clip_norm=None, learning_rate=1.0))
    outcome = Outcome("diverged", 121, None, None, healthy=100)
    assert rollback_line(config, outcome, Path("runs/quick")) == (
        "Checkpoint 100 precedes the divergence and is retained; roll back to it with: "
        "python -m jaxformer train --resume --run runs/quick --from-step 100 --optimizer.clip-norm 1"
    )
    assert rollback_line(config, replace(outcome, healthy=0), Path("r")).startswith(
        "No checkpoint precedes the divergence; start again with: "
        "python -m jaxformer train --resume --run r --from-step 0 "
    )


def test_final_line_shows_all_validation_metrics():
    evaluated = {"val_loss": 5.1712, "val_ppl": 176.13, "val_bpb": 2.063, "val_accuracy": 0.146, "val_targets": 9}
    assert final_line(1500, evaluated) == (
        "final: step 1,500  held-out 5.171 (perplexity 176.1, 2.063 bits/byte, 14.6% accuracy)"
    )
    assert final_line(3, {"loss": 1.5, "lr": 0.1}) == "final: step 3  loss 1.500"
    assert final_line(3, {}) == "final: step 3"
    pairs = {"val_loss": 0.5, "val_image_to_text_recall_at_1": 0.25}
    assert final_line(3, pairs) == "final: step 3  held-out 0.500 (image to text recall at 1 0.25)"
