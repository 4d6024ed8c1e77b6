"""Configs of dates: two models that differ in attention only."""

import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.config.fields import differences
from jaxformer.data.dates import DatesConfig
from jaxformer.data.pairs import PairDataset
from tests.helpers import ROOT


def test_configs_differ_in_attention_only() -> None:
    fixed, bahdanau = (load_config(f"{ROOT}/configs/dates.py:{name}") for name in ("fixed", "bahdanau"))
    assert {field for field, *_ in differences(fixed, bahdanau)} == {"name", "model.attention"}


@pytest.mark.slow
def test_all_dates_fit_the_context() -> None:
    config = load_config(f"{ROOT}/configs/dates.py:bahdanau")
    data = config.data.load(config.model, config.train.batch_size, config.seed)
    assert isinstance(data, PairDataset) and isinstance(config.data, DatesConfig)
    assert data.steps_per_epoch == config.data.n_pairs // config.train.batch_size
    assert "longer" not in data.describe() and "cut" not in data.describe()
