"""What `train.py` says; what it does is tested end to end."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.cli.train import _must_be_same, prompt_to_try
from jaxformer.data.dates import DatesConfig
from jaxformer.errors import UserError
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


def test_where_a_run_logs_to_may_change_on_resuming_and_how_often_may_not():
    config = load_config(f"{ROOT}/configs/quick.py")
    _must_be_same(Path("run"), config, replace(config, train=replace(config.train, log_to=("tensorboard",))))
    with pytest.raises(UserError, match=r"run was trained with train\.log_every 10, not 11"):
        _must_be_same(Path("run"), config, replace(config, train=replace(config.train, log_every=11)))
