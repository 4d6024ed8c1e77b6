"""Obstacles of configs to formats."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import CommandLine, as_words
from jaxformer.config import Config
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.interop.configs import read_config
from jaxformer.interop.obstacles import Obstacle, obstacles
from jaxformer.models.decoder import BlockAttention, ExpertsConfig, LatentsConfig
from jaxformer.ops import RoPE
from jaxformer.ops.positions import Llama3Scaling, Yarn
from tests.helpers import ROOT
from tests.interop.gguf_files import CONFIGS, SHAPES

LLAMA = load_config(f"{ROOT}/configs/quick.py:llama")
MODEL = replace(LLAMA.model, n_heads=4, n_blocks=2)
VALUES: dict[str, list[Any]] = {
    "activation": ["relu", "gelu", "geglu", "squared_relu", "clamped_swiglu"], "bias": [True], "sinks": [True],
    "norm": ["none", "layernorm", "layernorm_no_bias", "layernorm_no_parameters"],
    "norm_placement": ["post", "both", "output", "parallel", "parallel_two"],
    "positions": ["learned", "sinusoidal", "alibi"], "attention_bias": [True], "embedding_norm": [True],
    "unembedding_bias": [True],
    "output_bias": [True, False],
    "rope": [
        None, RoPE(5e5), RoPE(scaling=2.0), RoPE(scaling=Llama3Scaling(2.0, 1.0, 4.0, 16)),
        RoPE(scaling=Yarn(2.0, 16)), RoPE(fraction=0.5), RoPE(interleaved=True),
    ],
    "attention": [
        (BlockAttention(8),), (BlockAttention(8), BlockAttention()), (BlockAttention(8, RoPE(1e3)), BlockAttention()),
        (BlockAttention(use_rope=False), BlockAttention()), (BlockAttention(rope=RoPE(1e3)),),
    ],
    "unembedding": ["tied"], "embedding_scale": [3.0], "logit_soft_cap": [30.0],
    "score_soft_cap": [30.0], "qk_norm_kind": ["width", "layernorm"], "residual_scale": [0.5], "logit_scale": [0.5],
    "score_scale": [0.3], "final_norm": [False],
    "prefix": [True], "qk_norm": [True],
    "experts": [
        ExpertsConfig(4), ExpertsConfig(4, shared_expert=True), ExpertsConfig(4, renormalize=False),
        ExpertsConfig(4, shared_expert=True, shared_width=8, shared_gate=True), ExpertsConfig(4, bias=True),
        ExpertsConfig(4, router="sigmoid", n_groups=2, dense_blocks=1), ExpertsConfig(4, dense_blocks=1, dense_width=9),
    ],
    "d_ff": [(8, 8)], "n_kv_heads": [2], "head_dim": [20],
    "local_heads": [1], "latents": [LatentsConfig(24, None, 8), LatentsConfig(24, 16, 8, 12)],
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
        options = " ".join(as_words(obstacle.field, obstacle.needed) for obstacle in found).split()
        config = CommandLine(options).parse(replace(LLAMA, model=model), "", "")
        assert obstacles(config, file_format) == []


def test_obstacles_are_fields_of_the_config_with_the_values_that_remove_them():
    quick = load_config("quick")
    changes = {"n_kv_heads": 2, "positions": "none", "rope": RoPE(), "activation": "swiglu", "n_heads": 4}
    config = replace(quick, model=replace(quick.model, **changes))
    assert obstacles(config, "hf") == [Obstacle("model.bias", True, False)]
    assert obstacles(config, "gguf") == obstacles(config, "hf")
    modern, moe = obstacles(load_config("quick:modern"), "hf"), obstacles(load_config("moe:moe"), "gguf")
    assert {o.field for o in modern} == {"model.activation", "model.local_heads", "model.embedding_scale"}
    assert all(obstacle.value is not None for obstacle in moe if obstacle.field.startswith("model.experts")), moe
    partial = replace(config, model=replace(config.model, bias=False, rope=RoPE(fraction=0.5, scaling=Yarn(2.0, 16))))
    assert [obstacle.field for obstacle in obstacles(partial, "hf")] == ["model.rope.fraction"]
    named = [obstacle.field for obstacle in obstacles(partial, "gguf")]
    assert named == ["model.rope.fraction", "model.rope.scaling"], named
    assert obstacles(config, "safetensors") == obstacles(config, "stablehlo") == []


@pytest.mark.parametrize("file_format", ["hf", "gguf"])
def test_a_model_of_another_kind_is_one_obstacle(file_format: str):
    vivit = load_config(f"{ROOT}/configs/vision.py:vivit")
    assert obstacles(vivit, file_format) == [Obstacle("model", type(vivit.model).__name__, "DecoderConfig")]


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3", {"attention_bias": True}), ("gptneox", {"unembedding": "tied"}),
        ("gptneox", {"attention_bias": False}), ("gpt2", {"attention_bias": False}),
        ("gpt2", {"head_dim": 8}), ("olmo", {"attention_bias": True}),
        ("starcoder2", {"attention_bias": False, "output_bias": False}), ("command-r", {"unembedding": "linear"}),
        ("gemma", {"unembedding": "linear"}),
    ],
)  # fmt: skip
def test_models_with_other_tensors_than_llama_cpp_expects_are_not_exported(architecture, changes):
    model = read_config({**SHAPES, **CONFIGS[architecture]})
    assert not obstacles(Config("it", model, data=TextConfig(), steps=1), "gguf")
    assert obstacles(Config("it", replace(model, **changes), data=TextConfig(), steps=1), "gguf")
