"""Checks before a run is resumed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.errors import UserError
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.train.resume import check_resumable, is_finished
from tests.helpers import ROOT


def test_reports_may_change_on_resuming_and_the_batch_may_not():
    config = load_config(f"{ROOT}/configs/quick.py")
    reports = {
        "log_every": 11, "eval_every": 0, "eval_examples": 8, "report_every": 0, "gradients_every": 0,
        "checkpoint_every": 7, "sample_prompt": "A", "sample_tokens": 3, "log_to": ("tensorboard",),
    }  # fmt: skip
    assert not check_resumable(Path("run"), config, replace(config, train=replace(config.train, **reports)), False)
    for name, old, new in (("batch_size", 8, 16), ("label_smoothing", 0.0, 0.1), ("skip_batches", 0, 1)):
        other = replace(config, train=replace(config.train, **{name: new}))
        for given, omitted in (
            ((), "that option"),
            (("config", "steps"), "`config`"),
            ((f"train.{name}",), f"`train.{name}`"),
        ):
            message = rf"run was trained with train\.{name} {old}, not {new}; omit {omitted} to resume it"
            with pytest.raises(UserError, match=message):
                check_resumable(Path("run"), config, other, False, given)


def test_a_rollback_may_change_the_optimizer_but_not_its_name():
    config = load_config(f"{ROOT}/configs/quick.py:modern")
    other = replace(config, optimizer=replace(config.optimizer, clip_norm=0.5, learning_rate=0.001))
    changes = "optimizer.learning_rate 0.001 instead of 0.003, optimizer.clip_norm 0.5 instead of 1.0"
    assert check_resumable(Path("run"), config, other, True) == changes
    with pytest.raises(UserError, match=r"learning_rate 0\.003, not 0\.001; omit .*, keep it and roll back with `fr"):
        check_resumable(Path("run"), config, other, False)
    named = replace(config, optimizer=replace(config.optimizer, name="lion"))
    with pytest.raises(UserError, match=r"optimizer\.name 'adamw', not 'lion'; omit .* to resume it, or start a new"):
        check_resumable(Path("run"), config, named, True)
    with pytest.raises(UserError, match=r"train\.batch_size 8, not 16"):
        check_resumable(Path("run"), config, replace(other, train=replace(config.train, batch_size=16)), True)


def test_skipped_batches_change_by_rollback_only():
    config = load_config(f"{ROOT}/configs/quick.py")
    other = replace(config, train=replace(config.train, skip_batches=3))
    with pytest.raises(UserError, match=r"skip_batches 0, not 3; omit .*, skip batches with `from_step` and `sk"):
        check_resumable(Path("run"), config, other, False)


def test_a_finished_or_corrupt_run_is_noticed_before_the_data_is_read(tmp_path):
    config = replace(load_config(f"{ROOT}/configs/quick.py"), steps=20)
    assert not is_finished(tmp_path, config, True, None)  # killed before its first checkpoint
    with CheckpointManager(tmp_path) as saved:
        for step in (10, 20):
            saved.save(step, {"W": np.ones(3)}, {"m": np.ones(3)}, {"step": step}, None)
    assert is_finished(tmp_path, config, True, None)
    assert not is_finished(tmp_path, config, False, None)  # the data may have changed
    assert not is_finished(tmp_path, replace(config, steps=30), True, None)
    assert not is_finished(tmp_path, config, True, 0) and not is_finished(tmp_path, config, True, 10)
    with pytest.raises(UserError, match="has no checkpoint 7"):
        is_finished(tmp_path, config, True, 7)
    (tmp_path / "checkpoints/20/sha256.json").unlink()
    assert not is_finished(tmp_path, config, True, None)
    (tmp_path / "checkpoints/10/sha256.json").unlink()
    with pytest.raises(UserError, match=r"every checkpoint of .* is corrupt"):
        is_finished(tmp_path, config, True, None)
