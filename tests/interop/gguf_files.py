"""Tiny random models in GGUF, written by the `gguf` package."""

import json
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
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500.0, "head_dim": K},
    "qwen2": {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 10},
    "gemma3": {
        "model_type": "gemma3_text", "rms_norm_eps": 1e-6, "head_dim": 10, "query_pre_attn_scalar": 10,
        "sliding_window": 5, "final_logit_softcapping": 30.0, "num_hidden_layers": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip
"""Published configs by llama.cpp's architecture, without `SHAPES`."""
SHAPES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2, "num_attention_heads": H,
    "num_key_value_heads": G, "max_position_embeddings": 64,
}  # fmt: skip
KEYS = {
    "llama": {"rope.freq_base": 500.0, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": K},
    "qwen2": {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6},
    "qwen3": {
        "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 10,
        "attention.value_length": 10,
    },
    "gemma3": {
        "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 10,
        "attention.value_length": 10, "attention.sliding_window": 5, "final_logit_softcapping": 30.0,
        "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "block_count": 7,
    },
}  # fmt: skip
"""Keys of each architecture, which `SHAPE_KEYS` precede."""
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


def as_stored(architecture: str, name: str, tensor: np.ndarray, heads: tuple[int, int] = (H, G)) -> np.ndarray:
    """Return a tensor of a published folder as llama.cpp stores it: rows of queries and keys for adjacent pairs in
    Llama, gains of Gemma plus 1."""
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        n_heads = heads["k_proj" in name]
        half = len(tensor) // n_heads // 2
        rows = [2 * half * h + i + half * second for h in range(n_heads) for i in range(half) for second in (0, 1)]
        return tensor[rows]
    return tensor + 1 if architecture == "gemma3" and "norm" in name else tensor


def write_gguf(
    file: Path, architecture: str, tensors: dict[str, Any], keys: dict[str, Any] | None = None, kind: str = "F32",
    heads: tuple[int, int] = (H, G), n_blocks: int = 7, raw: dict[str, tuple[np.ndarray, str]] | None = None,
) -> Path:  # fmt: skip
    """Write a file with tensors named as in published folders, matrices in a type of tensors, and `raw` bytes of others
    by their own names. A key of None is left out."""
    gguf = pytest.importorskip("gguf")
    keys = {
        **{f"{architecture}.{key}": value for key, value in {**SHAPE_KEYS, **KEYS[architecture]}.items()},
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
    for name, tensor in tensors.items():
        stored = as_stored(architecture, name, tensor, heads)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        stored_kind = gguf.GGMLQuantizationType[kind if tensor.ndim > 1 else "F32"]
        writer.add_tensor(theirs, gguf.quants.quantize(stored, stored_kind), raw_dtype=stored_kind)
    for name, (data, raw_kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[raw_kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
