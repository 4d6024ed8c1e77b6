"""Checks before a run is resumed."""

from dataclasses import replace

import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.errors import UserError
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.train.resume import is_finished
from tests.helpers import ROOT


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
