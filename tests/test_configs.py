"""What the configs promise of themselves."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.config import Config
from jaxformer.data.corpus import TextConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.runs import abstract_params, count_parameters, read_config, write_config
from jaxformer.train.step import check_fit
from tests.helpers import ROOT, write_books


def config_of(spec: str) -> Config:
    return load_config(str(ROOT / "configs" / spec))


def active_parameters(config: Config) -> int:
    """Those that act on a token: of all experts, its own alone."""
    model = config.model
    assert isinstance(model, DecoderConfig)
    params = abstract_params(model.build(), model)
    each = {jax.tree_util.keystr(path): leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    idle = sum(size for name, size in each.items() if "'experts'" in name)
    if not idle:
        return count_parameters(params)
    assert model.n_experts is not None and idle % model.n_experts == 0
    return count_parameters(params) - idle // model.n_experts * (model.n_experts - model.experts_per_token)


def test_as_many_parameters_act_on_a_token_of_the_mixture_as_of_the_dense_model() -> None:
    """Of a block's MLP: 2 · 128 · 512 = 2 · (2 · 128 · 254) + 128 · 8, the last of which are the router's."""
    dense, moe = config_of("moe.py:dense"), config_of("moe.py:moe")
    attention, mlp, norms = 4 * 128 * 128, 2 * 128 * 512, 2 * 128
    assert active_parameters(dense) == 2048 * 128 + 4 * (attention + mlp + norms) + 128
    assert active_parameters(moe) == active_parameters(dense)
    assert replace(moe, name="dense", model=dense.model) == dense  # the same text, as often, and the same optimizer


@pytest.mark.parametrize("spec", ["mlm.py", "prefix.py", "moe.py:moe", "moe.py:dense"])
def test_the_data_of_a_config_is_what_its_model_is_called_with(spec: str, tmp_path: Path) -> None:
    config = config_of(spec)
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert isinstance(config.data, TextConfig) and isinstance(config.model, DecoderConfig | EncoderConfig)
    model = replace(config.model, vocab_size=280)
    books = replace(config.data, path=str(write_books(tmp_path / "books")))
    check_fit(model, books.load(model, 2, seed=0).rows(0))
