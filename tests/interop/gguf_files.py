"""Tiny random models in GGUF, written by the `gguf` package."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.interop.configs import family_of, read_config
from jaxformer.interop.huggingface import published_tensors
from jaxformer.interop.obstacles import resolved
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params
from tests.arrays import random_params
from tests.interop.published import TEXTS

V, D, F, H, G, K = 283, 24, 40, 6, 2, 4
BASE = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
GATED_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
NEOX = {"model_type": "gpt_neox", "rotary_pct": 0.5, "hidden_act": "gelu"}
FALCON = {"model_type": "falcon", "num_kv_heads": G, "ffn_hidden_size": F, "rope_theta": 1e6}
STABLELM = {"model_type": "stablelm", "partial_rotary_factor": 0.5, "rope_theta": 1e6}
COHERE = {"logit_scale": 0.5, "layer_norm_eps": 1e-5, "rope_theta": 1e6}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
OLMO2 = {
    "model_type": "olmo3", "rms_norm_eps": 1e-6, "sliding_window": None, "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
}  # fmt: skip
GEMMA2 = {"sliding_window": 5, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500.0, "head_dim": K},
    "qwen2": {"model_type": "qwen2", **BASE, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **BASE, "head_dim": 10},
    "gemma3": {
        "model_type": "gemma3_text", "rms_norm_eps": 1e-6, "head_dim": 10, "query_pre_attn_scalar": 10,
        "sliding_window": 5, "final_logit_softcapping": 30.0, "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma": {"model_type": "gemma", **BASE, "head_dim": 10},
    "gemma2": {"model_type": "gemma2", **BASE, **GEMMA2, "head_dim": 10, "query_pre_attn_scalar": 10},
    "qwen3moe": {"model_type": "qwen3_moe", **BASE, **GATED_EXPERTS, "head_dim": 10, "norm_topk_prob": True},
    "qwen2moe": {"model_type": "qwen2_moe", **BASE, **GATED_EXPERTS, "shared_expert_intermediate_size": 20},
    "phi3": {"model_type": "phi3", **BASE, "partial_rotary_factor": 0.5},
    "olmo2": OLMO2,
    "olmo2, windows": {**OLMO2, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2},
    "granite": {
        "model_type": "granite", **BASE, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
        "attention_multiplier": 0.3, "tie_word_embeddings": True,
    },
    "smollm3": {"model_type": "smollm3", **BASE, "num_hidden_layers": 4, "tie_word_embeddings": True},
    "starcoder2": {"model_type": "starcoder2", "rope_theta": 1e6, "sliding_window": None, "initializer_range": 0.02},
    "gptneox": NEOX,
    "gptneox, sequential": {**NEOX, "use_parallel_residual": False, "rotary_pct": 1.0},
    "falcon": {**FALCON, "new_decoder_architecture": True},
    "falcon, one norm": {**FALCON, "tie_word_embeddings": False},
    "stablelm": {**STABLELM, "use_qkv_bias": True},
    "stablelm, parallel": {**STABLELM, "use_parallel_residual": True},
    "phi2": {"model_type": "phi", "partial_rotary_factor": 0.5},
    "glm4": {"model_type": "glm4", **BASE, "head_dim": 8, "partial_rotary_factor": 0.5},
    "command-r": {"model_type": "cohere", **COHERE},
    "cohere2": {"model_type": "cohere2", **COHERE, "sliding_window": 5, "num_hidden_layers": 4},
    "olmo": {"model_type": "olmo", "rope_theta": 1e6},
    "gpt2": {"model_type": "gpt2", "n_inner": F},
    "bloom": {"model_type": "bloom", "seq_length": 64},
}  # fmt: skip
"""Published configs by llama.cpp's architecture, without `SHAPES`."""
SHAPES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": H,
    "num_key_value_heads": G, "max_position_embeddings": 64,
}  # fmt: skip
RMS = {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6}
NORM = {"rope.freq_base": 1e6, "attention.layer_norm_epsilon": 1e-5}
HALF = {"rope.dimension_count": 2}
WIDE = {"attention.key_length": 10, "attention.value_length": 10}
MOE = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 12}
KEYS: dict[str, dict[str, Any]] = {
    "llama": {"rope.freq_base": 500.0, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": K},
    "qwen2": RMS,
    "qwen3": {**RMS, **WIDE},
    "gemma3": {
        **RMS, **WIDE, "attention.sliding_window": 5, "final_logit_softcapping": 30.0,
        "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "block_count": 7,
    },
    "gemma": {**RMS, **WIDE},
    "gemma2": {
        **RMS, **WIDE, "attention.sliding_window": 5, "final_logit_softcapping": 10.0, "attn_logit_softcapping": 20.0,
    },
    "qwen3moe": {**RMS, **WIDE, **MOE},
    "qwen2moe": {**RMS, **MOE, "expert_shared_feed_forward_length": 20},
    "phi3": {**RMS, **HALF},
    "olmo2": RMS,
    "olmo2, windows": {**RMS, "attention.sliding_window": 5},
    "granite": {**RMS, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0, "attention.scale": 0.3},
    "smollm3": {**RMS, "block_count": 4},
    "starcoder2": NORM,
    "gptneox": {**NORM, **HALF, "rope.freq_base": 1e4, "use_parallel_residual": True, "attention.head_count_kv": H},
    "falcon": NORM,
    "falcon, one norm": {**NORM, "attention.head_count_kv": 1},
    "stablelm": {**NORM, **HALF},
    "stablelm, parallel": {**NORM, **HALF},
    "phi2": {**NORM, **HALF, "rope.freq_base": 1e4},
    "glm4": {**RMS, "rope.dimension_count": 4, "attention.key_length": 8, "attention.value_length": 8},
    "command-r": {**NORM, "logit_scale": 0.5},
    "cohere2": {**NORM, "logit_scale": 0.5, "attention.sliding_window": 5, "block_count": 4},
    "olmo": NORM,
    "gpt2": {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": H},
    "bloom": {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": H, "feed_forward_length": 4 * D},
}  # fmt: skip
KEYS["gptneox, sequential"] = {**KEYS["gptneox"], "use_parallel_residual": False, "rope.dimension_count": None}
"""Keys of each architecture, which `SHAPE_KEYS` precede."""
PERMUTED = ("llama", "granite", "smollm3", "olmo")
SHAPE_KEYS = {
    "context_length": 64, "embedding_length": D, "block_count": 2, "feed_forward_length": F, "attention.head_count": H,
    "attention.head_count_kv": G,
}  # fmt: skip
QUANTISABLE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Quantised types that the `gguf` package writes."""


class Model(NamedTuple):
    """A random model, with its tensors by their names in published folders."""

    config: DecoderConfig
    params: Params
    tensors: dict[str, np.ndarray]


def random_model(architecture: str, **changes: Any) -> Model:
    """Return a random model of an architecture."""
    theirs = {**SHAPES, **CONFIGS[architecture], **changes}
    config = read_config(theirs)
    params = random_params(config.build(), *config.example())
    return Model(config, params, dict(published_tensors(params, resolved(config), family_of(theirs))))


def tokenizer_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keys of a tokenizer that this project has trained, with unused tokens for the other rows."""
    content = json.loads(tokenizer.as_json())
    vocab = content["model"]["vocab"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get) + [f"[PAD{i}]" for i in range(len(vocab), V)],
        "tokenizer.ggml.token_type": [3] + [1] * (len(vocab) - 1) + [5] * (V - len(vocab)),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


def as_stored(architecture: str, tensors: dict[str, np.ndarray], heads: tuple[int, int] = (H, G)) -> dict[str, Any]:
    """Return tensors of a published folder, by their names there, as llama.cpp's converter stores them: rows of queries
    and keys for adjacent pairs in Llama, gains of Gemma plus 1, queries, keys and values one after the other, matrices
    of GPT-2 transposed, and those of all experts as one."""
    stored: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            n_heads = heads["k_proj" in name]
            half = len(tensor) // n_heads // 2
            rows = [2 * half * h + i + half * second for h in range(n_heads) for i in range(half) for second in (0, 1)]
            stored[name] = tensor[rows]
        elif architecture.startswith("gemma") and "norm" in name:
            stored[name] = tensor + 1
        elif "query_key_value" in name:
            per_group = tensor.reshape((len(tensor) // K - H) // 2, -1, K, *tensor.shape[1:])
            parts = per_group[:, :-2], per_group[:, -2], per_group[:, -1]
            stored[name] = np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        elif architecture == "gpt2" and ".c_" in name and tensor.ndim == 2:
            stored[name] = tensor.T
        elif ".experts." in name:
            stored.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(tensor)
        else:
            stored[name] = tensor
    return {name: np.stack(x) if isinstance(x, list) else np.ascontiguousarray(x) for name, x in stored.items()}


def write_gguf(
    file: Path, case: str, tensors: dict[str, Any], keys: dict[str, Any] | None = None, kind: str = "F32",
    heads: tuple[int, int] = (H, G), n_blocks: int = 7, raw: dict[str, tuple[np.ndarray, str]] | None = None,
) -> Path:  # fmt: skip
    """Write a file with tensors named as in published folders, matrices in a type of tensors, and `raw` bytes of others
    by their own names. A key of None is left out."""
    gguf, architecture = pytest.importorskip("gguf"), case.partition(",")[0]
    keys = {
        **{f"{architecture}.{key}": value for key, value in {**SHAPE_KEYS, **KEYS[case]}.items()},
        **tokenizer_keys(Tokenizer.train(TEXTS, 280)),
        **(keys or {}),
    }
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            adds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            adds[type(value)](key, value)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, n_blocks)
    for name, stored in as_stored(architecture, tensors, heads).items():
        name = name.removeprefix("transformer.") if architecture == "bloom" else name
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        stored_kind = gguf.GGMLQuantizationType[kind if stored.ndim > 1 else "F32"]
        writer.add_tensor(theirs, gguf.quants.quantize(stored, stored_kind), raw_dtype=stored_kind)
    for name, (data, raw_kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[raw_kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
