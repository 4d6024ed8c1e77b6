"""Configs of language and vision models: parameters, and data that match the model."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.config import Config
from jaxformer.data.images import ImageFolderConfig
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import abstract_params, count_parameters, read_config, write_config
from jaxformer.train.setup import TrainSetup
from tests.data.test_images import idx
from tests.helpers import ROOT, write_books


def config_of(spec: str) -> Config:
    return load_config(str(ROOT / "configs" / spec))


def active_parameters(config: Config) -> int:
    """Return the number of parameters that are active per token: those of its own experts only."""
    model = config.model
    assert isinstance(model, DecoderConfig)
    params = abstract_params(model.build())
    each = {jax.tree_util.keystr(path): leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    idle = sum(size for name, size in each.items() if "'experts'" in name)
    if not idle:
        return count_parameters(params)
    experts = model.experts
    assert experts is not None and idle % experts.n_experts == 0
    return count_parameters(params) - idle // experts.n_experts * (experts.n_experts - experts.per_token)


@pytest.mark.slow
def test_moe_and_dense_models_have_equal_active_parameters() -> None:
    """Check a block's MLP: 2 · 128 · 512 = 2 · (2 · 128 · 254) + 128 · 8, the last for the router."""
    dense, moe = config_of("moe.py:dense"), config_of("moe.py:moe")
    attention, mlp, norms = 4 * 128 * 128, 2 * 128 * 512, 2 * 128
    assert active_parameters(dense) == 2048 * 128 + 4 * (attention + mlp + norms) + 128
    assert active_parameters(moe) == active_parameters(dense)
    assert replace(moe, name="dense", model=dense.model) == dense  # the same data, steps and optimizer


@pytest.mark.parametrize("name", ["vit", "vivit", "vivit_class"])
def test_vision_configs_match_fashion_mnist(name: str, tmp_path: Path) -> None:
    """Check images of 28 x 28 bytes in 10 classes."""
    config = config_of(f"vision.py:{name}")
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert isinstance(config.data, ImageFolderConfig)
    with pytest.raises(UserError, match=r"the path of the data is ''; give a folder of images"):
        config.data.load(config.model, 2, seed=0)
    for part in ("train", "t10k"):
        pixels, labels = np.zeros((20, 28, 28), np.uint8), np.arange(20, dtype=np.uint8) % 10
        for what, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            (tmp_path / f"{part}-{what}-ubyte").write_bytes(idx(array))
    data = replace(config.data, path=str(tmp_path)).load(config.model, 2, seed=0)
    TrainSetup(config, make_mesh()).check_fit(data.batch(0))


@pytest.mark.parametrize("spec", ["mlm.py", "prefix.py", "moe.py:moe", "moe.py:dense"])
def test_data_of_a_config_matches_its_model(spec: str, tmp_path: Path) -> None:
    config = config_of(spec)
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert isinstance(config.data, TextConfig) and isinstance(config.model, DecoderConfig | EncoderConfig)
    model = replace(config.model, vocab_size=280)
    books = replace(config.data, path=str(write_books(tmp_path / "books")))
    TrainSetup(replace(config, model=model), make_mesh()).check_fit(books.load(model, 2, seed=0).batch(0))
