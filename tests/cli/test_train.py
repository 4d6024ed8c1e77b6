"""What `train.py` says; what it does is tested end to end."""

import os
import signal
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest

from jaxformer.checkpoints import CheckpointManager
from jaxformer.cli.arguments import load_config
from jaxformer.cli.train import _check_same, _conclude, _is_finished, _main, _way_back, main, no_better, prompt_to_try
from jaxformer.data.dates import DatesConfig
from jaxformer.errors import UserError
from jaxformer.sharding import make_mesh
from jaxformer.train.evaluate import Evaluation
from jaxformer.train.loop import Outcome
from jaxformer.train.setup import TrainSetup
from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("spec", "prompt"),
    [("quick.py", "The"), ("mlm.py", "The [MASK] of"), ("vision.py:vit", None), ("clip.py", None)],
)
def test_a_new_run_is_tried_with_what_its_model_reads(spec, prompt):
    config = load_config(f"{ROOT}/configs/{spec}")
    assert prompt_to_try(config, data=None) == prompt  # the data matters only where it is pairs


def test_a_new_run_of_pairs_is_tried_with_a_source_that_was_held_out():
    config = load_config(f"{ROOT}/configs/dates.py:bahdanau")
    data = DatesConfig(n_pairs=2, n_held_out=1, locales=("sv",), forms=("short",)).load(config.model, 2, seed=0)
    prompt = prompt_to_try(config, data)
    assert prompt == data.val[0].source and prompt.startswith("sv ")


def test_where_and_how_often_a_run_reports_may_change_on_resuming_and_what_it_learns_from_may_not():
    config = load_config(f"{ROOT}/configs/quick.py")
    reports = {
        "log_every": 11, "eval_every": 0, "eval_examples": 8, "report_every": 0, "gradients_every": 0,
        "checkpoint_every": 7, "sample_prompt": "A", "sample_tokens": 3, "log_to": ("tensorboard",),
    }  # fmt: skip
    assert not _check_same(Path("run"), config, replace(config, train=replace(config.train, **reports)), False)
    for name, old, new in (("batch_size", 8, 16), ("label_smoothing", 0.0, 0.1), ("skip_batches", 0, 1)):
        other = replace(config, train=replace(config.train, **{name: new}))
        with pytest.raises(UserError, match=rf"run was trained with train\.{name} {old}, not {new}"):
            _check_same(Path("run"), config, other, False)


def test_rolling_back_the_optimizer_may_change_but_for_its_name():
    config = load_config(f"{ROOT}/configs/quick.py:modern")
    other = replace(config, optimizer=replace(config.optimizer, clip_norm=0.5, learning_rate=0.001))
    changes = "optimizer.learning_rate 0.001 instead of 0.003, optimizer.clip_norm 0.5 instead of 1.0"
    assert _check_same(Path("run"), config, other, True) == changes
    with pytest.raises(UserError, match=r"learning_rate 0\.003, not 0\.001; leave .*, roll back with --from-step, or"):
        _check_same(Path("run"), config, other, False)
    named = replace(config, optimizer=replace(config.optimizer, name="lion"))
    with pytest.raises(
        UserError, match=r"optimizer\.name 'adamw', not 'lion'; leave .* to go on with it, or start a new"
    ):
        _check_same(Path("run"), config, named, True)
    with pytest.raises(UserError, match=r"train\.batch_size 8, not 16"):
        _check_same(Path("run"), config, replace(other, train=replace(config.train, batch_size=16)), True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from-step", "100"], "--from-step goes with --resume"),
        (["--skip-batches", "5"], "--skip-batches goes with --resume and --from-step"),
        (["--skip-batches", "-5"], "--skip-batches is -5; give a number of batches, at least 0"),
    ],
)
def test_rolling_back_is_of_a_run(options, said):
    with pytest.raises(UserError, match=said):
        _main(["--config", f"{ROOT}/configs/quick.py", *options])


def test_batches_are_left_out_by_rolling_back():
    config = load_config(f"{ROOT}/configs/quick.py")
    other = replace(config, train=replace(config.train, skip_batches=3))
    with pytest.raises(
        UserError, match=r"skip_batches 0, not 3; leave .*, leave out batches with --from-step and --sk"
    ):
        _check_same(Path("run"), config, other, False)


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
def test_a_run_that_ends_no_better_than_it_began_is_warned_of(rows, outcome, warning):
    name = "loss" if outcome.evaluation is None else "val_loss"
    log = [{"step": 10 * number, name: loss} for number, loss in enumerate(rows, start=1)]
    said = no_better(log, outcome)
    assert said is None if warning is None else warning in said


def test_a_terminal_that_is_closed_at_the_end_stops_no_report(monkeypatch, tmp_path, capfd):
    closed = []
    monkeypatch.setattr("jaxformer.train.log.plot_metrics", lambda folder: os.kill(os.getpid(), signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, lambda *given: closed.append(given))
    try:
        outcome = Outcome("interrupted", 20, None, None, signal=signal.SIGINT)
        setup = TrainSetup(load_config(f"{ROOT}/configs/quick.py"), make_mesh())
        assert _conclude(setup, None, tmp_path, outcome) == 130
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not closed and "interrupted at step 20 and saved" in capfd.readouterr().out


def test_the_way_back_is_a_command_with_values():
    config = load_config(f"{ROOT}/configs/quick.py")
    config = replace(config, optimizer=replace(config.optimizer, clip_norm=None, learning_rate=1.0))
    outcome = Outcome("diverged", 121, None, None, healthy=100)
    assert _way_back(config, outcome, "runs/quick") == (
        "Checkpoint 100 is from before the divergence and is kept; roll back to it with: python train.py --resume "
        "--run runs/quick --from-step 100 --optimizer.clip-norm 1"
    )
    assert _way_back(config, replace(outcome, healthy=0), "r").startswith(
        "No checkpoint is from before the divergence; begin again with: python train.py --resume --run r --from-step 0 "
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_before_the_first_step_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, number):
    def load_data(*_: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("jaxformer.runs.load_data", load_data)
    before = signal.getsignal(number)
    options = ["--config", f"{ROOT}/configs/quick.py", "--run", str(tmp_path / "run")]
    assert main(options) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted before the first step; nothing to save"
    assert signal.getsignal(number) is before and not (tmp_path / "run").exists()


def test_a_run_without_steps_left_or_without_whole_checkpoints_is_noticed_early(tmp_path):
    config = replace(load_config(f"{ROOT}/configs/quick.py"), steps=20)
    assert not _is_finished(tmp_path, config, True, None)  # killed before its first checkpoint
    with CheckpointManager(tmp_path) as saved:
        for step in (10, 20):
            saved.save(step, {"W": np.ones(3)}, {"m": np.ones(3)}, {"step": step}, None)
    assert _is_finished(tmp_path, config, True, None)
    assert not _is_finished(tmp_path, config, False, None)  # the data may have changed
    assert not _is_finished(tmp_path, replace(config, steps=30), True, None)
    assert not _is_finished(tmp_path, config, True, 0) and not _is_finished(tmp_path, config, True, 10)
    with pytest.raises(UserError, match="has no checkpoint 7"):
        _is_finished(tmp_path, config, True, 7)
    (tmp_path / "checkpoints/20/sha256.json").unlink()
    assert not _is_finished(tmp_path, config, True, None)
    (tmp_path / "checkpoints/10/sha256.json").unlink()
    with pytest.raises(UserError, match=r"every checkpoint of .* is corrupt"):
        _is_finished(tmp_path, config, True, None)
