"""Llama and Mixtral of Hugging Face: the decoder's logits from equal weights.

Their side is stored; `tests/fixtures/make_llama_hf.py` made it.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.models.decoder import ExpertsConfig
from jaxformer.ops import RoPE
from jaxformer.runs.run import abstract_params
from tests.arrays import apply, assert_close, plain_decoder
from tests.helpers import ROOT

LLAMA = plain_decoder(
    61, 64, 24, n_blocks=2, n_heads=6, n_kv_heads=2, head_dim=8, d_ff=(40,),
    activation="swiglu", bias=False, norm="rmsnorm", final_norm=True, positions="none", rope=RoPE(),
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "llama, scaled": replace(LLAMA, rope=RoPE(500.0, 4.0)),
    "mixtral": replace(LLAMA, experts=ExpertsConfig(5, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str) -> None:
    with np.load(ROOT / "tests/fixtures/llama_hf.npz") as stored:
        found = dict(stored)
    config, of = MODELS[name], name.partition(",")[0]
    params = {
        key.removeprefix(f"{of}: "): jnp.asarray(weight, jnp.float32)
        for key, weight in found.items()
        if key.startswith(f"{of}: ") and not key.endswith("logits")
    }
    shapes = flatten_dict(abstract_params(config.build()), sep=".")
    assert {key: leaf.shape for key, leaf in shapes.items()} == {key: leaf.shape for key, leaf in params.items()}
    logits_TV = apply(config.build(), unflatten_dict(params, sep="."), found["tokens"])
    assert_close(logits_TV, found[f"{name}: logits"])
