"""What `train.py` says; what it does is tested end to end."""

import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.cli.train import prompt_to_try
from jaxformer.data.dates import DatesConfig
from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("spec", "prompt"),
    [("quick.py", "The "), ("mlm.py", "The [MASK] of"), ("vision.py:vit", None), ("clip.py", None)],
)
def test_a_new_run_is_tried_with_what_its_model_reads(spec, prompt):
    config = load_config(f"{ROOT}/configs/{spec}")
    assert prompt_to_try(config, data=None) == prompt  # the data matters only where it is pairs


def test_a_new_run_of_pairs_is_tried_with_a_source_that_was_held_out():
    config = load_config(f"{ROOT}/configs/dates.py:bahdanau")
    data = DatesConfig(n_pairs=2, n_held_out=1, locales=("sv",), forms=("short",)).load(config.model, 2, seed=0)
    prompt = prompt_to_try(config, data)
    assert prompt == data.val[0].source and prompt.startswith("sv ")
