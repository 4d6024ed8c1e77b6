"""Configs of translation: comparable models."""

import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.config import Config
from jaxformer.config.fields import differences
from jaxformer.data.pairs import check_seq2seq
from jaxformer.runs.run import abstract_params, count_parameters
from tests.helpers import ROOT

COMPARED = ("gru", "bahdanau", "transformer")


def config(name: str) -> Config:
    return load_config(f"{ROOT}/configs/translation.py:{name}")


def parameters(name: str) -> int:
    model = config(name).model
    check_seq2seq(model)
    return count_parameters(abstract_params(model.build()))


@pytest.mark.slow
def test_models_have_similar_parameter_counts() -> None:
    counts = [parameters(name) for name in (*COMPARED, "transformer_modern")]
    assert max(counts) <= 1.03 * min(counts)
    assert all(8.0e6 < n < 8.5e6 for n in counts)


@pytest.mark.parametrize("name", COMPARED[1:])
def test_configs_differ_in_the_model_only(name: str) -> None:
    changed = {field.partition(".")[0] for field, *_ in differences(config(COMPARED[0]), config(name))}
    assert changed == {"name", "model"}
    for field in ("vocab_size", "context_length", "dropout"):
        assert getattr(config(name).model, field) == getattr(config(COMPARED[0]).model, field)


def test_the_paper_differs_in_the_place_of_norms_and_what_is_modern_sees_as_many_pairs() -> None:
    transformer, modern = config("transformer"), config("transformer_modern")
    changed = {field for field, *_ in differences(transformer, config("transformer_2017"))}
    assert changed == {"name", "model.norm_placement"}
    assert modern.steps * modern.train.batch_size == transformer.steps * transformer.train.batch_size


@pytest.mark.slow
def test_base_matches_the_paper() -> None:
    """Check table 3 (65 million) and equation 3 (the peak learning rate) of Vaswani et al. 2017."""
    assert parameters("base") == pytest.approx(65e6, rel=0.04)
    optimizer = config("base").optimizer
    assert optimizer.learning_rate == pytest.approx(512**-0.5 * optimizer.warmup_steps**-0.5)
