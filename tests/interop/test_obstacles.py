"""Obstacles of configs to formats."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.cli.arguments import load_config
from jaxformer.errors import UserError
from jaxformer.interop.obstacles import Obstacle, obstacles
from jaxformer.models.moe import MoEConfig
from tests.helpers import ROOT

LLAMA = load_config(f"{ROOT}/configs/quick.py:llama")
MODEL = replace(MoEConfig(**vars(LLAMA.model)), n_heads=4, n_blocks=2)
VALUES: dict[str, list[Any]] = {
    "activation": ["relu", "gelu", "geglu", "squared_relu"], "bias": [True], "norm": ["none", "layernorm"],
    "norm_placement": ["post", "both"], "positions": ["learned", "sinusoidal", "none"], "attention_bias": [True],
    "output_bias": [True, False], "window": [8], "global_blocks": [(1,)], "local_rope_base": [1e4],
    "unembedding": ["tied"], "embedding_scale": [3.0], "logit_soft_cap": [30.0],
    "score_scale": [0.3], "final_norm": [False],
    "prefix": [True], "n_experts": [4], "shared_expert": [True], "qk_norm": [True],
    "d_ff": [(8, 8)], "rope_scaling": [2.0], "rope_original_context": [16], "n_kv_heads": [2], "head_dim": [20],
    "renormalize_experts": [False], "local_heads": [1],
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([(name, value) for name in VALUES for value in VALUES[name]]), max_size=6))
def test_a_model_with_the_needed_values_has_no_obstacle(changes: list[tuple[str, Any]]):
    try:
        model = replace(MODEL, **dict(changes))
    except UserError:  # values that exclude each other
        return
    for file_format in ("hf", "gguf"):
        found = obstacles(replace(LLAMA, model=model), file_format)
        names = {obstacle.field.removeprefix("model."): obstacle.needed for obstacle in found}
        assert names.keys() <= {field.name for field in fields(model)}
        assert all(obstacle.value == getattr(model, obstacle.field.removeprefix("model.")) for obstacle in found)
        assert obstacles(replace(LLAMA, model=replace(model, **names)), file_format) == []


def test_obstacles_are_fields_of_the_config_with_the_values_that_remove_them():
    quick = load_config("quick")
    changes = {"n_kv_heads": 2, "positions": "rope", "activation": "swiglu", "n_heads": 4}
    config = replace(quick, model=replace(quick.model, **changes))
    assert obstacles(config, "hf") == [Obstacle("model.bias", True, False)]
    assert obstacles(config, "gguf") == obstacles(config, "hf")
    assert obstacles(config, "safetensors") == obstacles(config, "stablehlo") == []


@pytest.mark.parametrize("file_format", ["hf", "gguf"])
def test_a_model_of_another_kind_is_one_obstacle(file_format: str):
    vit = load_config(f"{ROOT}/configs/vision.py:vit")
    assert obstacles(vit, file_format) == [Obstacle("model", type(vit.model).__name__, "DecoderConfig")]
