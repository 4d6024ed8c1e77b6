"""Alignments of sequence-to-sequence models, and pictures of them."""

import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import TokenModelConfig
from jaxformer.inspect import alignment, draw_alignment
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.objective import Params
from jaxformer.models.recurrent import RecurrentConfig
from tests.arrays import random_params
from tests.helpers import slow

SOURCE, TARGET = jnp.array([3, 1, 4, 1, 5]), jnp.array([0, 2, 7])
RECURRENT = RecurrentConfig(11, 8, d_embedding=4, d_model=6)
TRANSFORMER = EncoderDecoderConfig(11, 8, d_model=8, n_heads=2, d_ff=(8,), n_encoder_blocks=1, n_decoder_blocks=2)


def params_of(config: TokenModelConfig) -> Params:
    return random_params(config.build(), *config.example())


@pytest.mark.parametrize("config", [RECURRENT, slow(TRANSFORMER)], ids=["recurrent", "transformer"])
def test_alignment_rows_sum_to_one_and_are_causal(config):
    align = jax.jit(partial(alignment, config.build(), params_of(config)))
    weights_TS = align(SOURCE, TARGET)
    assert weights_TS.shape == (3, 5)
    np.testing.assert_allclose(weights_TS.sum(axis=1), 1, rtol=1e-6)
    changed_TS = align(SOURCE, TARGET.at[2].set(9))
    np.testing.assert_allclose(changed_TS[:2], weights_TS[:2], rtol=1e-6)
    assert not np.allclose(align(SOURCE.at[0].set(9), TARGET), weights_TS, rtol=1e-3)


@pytest.mark.slow
def test_model_without_attention_has_no_alignment():
    config = RecurrentConfig(11, 8, d_embedding=4, d_model=6, attention="none")
    assert alignment(config.build(), params_of(config), SOURCE, TARGET) is None


@pytest.mark.slow
def test_any_text_is_drawn_without_a_warning(tmp_path):
    # A script that the font lacks, a control character, what matplotlib takes for mathematics, and the end.
    source, target = ["\u4f60", "\x01", "a_$^{b"], [" \n", ""]
    draw_alignment(np.full((2, 3), 1 / 3), source, target, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_alignment_is_drawn_whatever_backend_the_environment_names(monkeypatch, tmp_path):
    """Check a notebook's backend outside of its environment, which matplotlib refuses when it is imported."""
    pytest.importorskip("matplotlib")
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("MPLBACKEND", "not_a_backend")
    draw_alignment(np.full((1, 2), 0.5), "ab", "c", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert os.environ["MPLBACKEND"] == "not_a_backend"
