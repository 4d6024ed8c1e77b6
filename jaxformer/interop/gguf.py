"""Export to GGUF, the format of llama.cpp.

Tensor names come from the tables of the `gguf` package, which map the names in published folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from math import pi
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, import_extra
from jaxformer.interop.formats import Dtype
from jaxformer.interop.gguf_tokenizer import pre_type
from jaxformer.interop.huggingface import publish, special_tokens
from jaxformer.interop.output import cast, complete_path
from jaxformer.interop.sampling import as_gguf
from jaxformer.runs.run import Run

ARCHITECTURES = {"llama": ("llama", True), "qwen3": ("qwen3", False)}
"""llama.cpp's architecture by `model_type`, and True if its RoPE rotates adjacent features (2i, 2i + 1), so that rows
of the query and key projections must be permuted; others rotate features i and i + K/2, as published folders do."""
DTYPES: Mapping[Dtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of dtypes in the `gguf` package."""
CONFIG_FIELDS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "value_length": "head_dim",
    "rope_dimension_count": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
}
"""Fields of a published config by their names in the `gguf` package."""
ENDS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn or a message, all of which llama.cpp takes for ends."""
SPECIAL = {"unk_token": "unk", "pad_token": "pad", "sep_token": "sep", "mask_token": "mask"}
"""Other special tokens and their names in the `gguf` package."""
ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Projections whose outputs RoPE rotates, and the fields with their numbers of heads."""


def export_gguf(run: Run, file: Path, dtype: Dtype = "float32") -> None:
    """Write a run to a new GGUF file. `dtype` applies to matrices; vectors stay in float32, as llama.cpp requires.
    Raises `UserError` if the file exists, gguf is not installed, or llama.cpp has no equivalent for a part of the model
    or of its tokenizer."""
    gguf = import_extra("gguf", "`format='gguf'`")
    published = publish(run, "gguf")
    theirs = published.config
    _, tokenizer = run.text_model()
    architecture, adjacent = ARCHITECTURES[theirs["model_type"]]
    with complete_path(file) as scratch, closing(gguf.GGUFWriter(scratch, architecture)) as writer:
        writer.add_name(run.config.name)
        writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if dtype == 'float32' else 'MOSTLY'}_{DTYPES[dtype]}"])
        for added, field in CONFIG_FIELDS.items():
            getattr(writer, f"add_{added}")(theirs[field])
        for key, value in as_gguf(run.sampling).items():
            (writer.add_int32 if key.endswith(".top_k") else writer.add_float32)(key, value)
        writer.add_rope_freq_base(theirs["rope_parameters"]["rope_theta"])
        _add_tokenizer(gguf, writer, tokenizer, theirs["vocab_size"])
        if templates := tokenizer.chat_templates:  # llama.cpp's default is ChatML
            writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])
        kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
        names = gguf.get_tensor_name_map(kind, theirs["num_hidden_layers"])
        for their_name, tensor in published.tensors:
            part = their_name.split(".")[-2]
            if adjacent and part in ROTATED:
                tensor = pairs_adjacent(tensor, int(theirs[ROTATED[part]]))
            name, kept = names.get_name(their_name, try_suffixes=(".weight", ".bias")), dtype
            if tensor.ndim == 1:
                kept = "float32"
            array = cast(name, tensor, kept)
            as_bytes = array.view(np.uint8) if kept == "bfloat16" else array  # as the package writes bfloat16
            writer.add_tensor(name, as_bytes, raw_dtype=gguf.GGMLQuantizationType[DTYPES[kept]])
        scaling = theirs["rope_parameters"]
        if scaling["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling["factor"])
        elif scaling["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(scaling, theirs["head_dim"]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def pairs_adjacent(tensor: np.ndarray, n_heads: int) -> np.ndarray:
    """Return a projection `(H·K, …)` with rows i and i + K/2 of each head moved to rows 2i and 2i + 1."""
    return tensor.reshape(n_heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def pairs_apart(tensor: np.ndarray, n_heads: int) -> np.ndarray:
    """Return the projection of which `pairs_adjacent` returns this one."""
    return tensor.reshape(n_heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def llama3_divisors(scaling: Mapping[str, float], head_dim: int) -> np.ndarray:
    """Return the divisor of each RoPE frequency in Llama 3.1's scaling, `(K/2,)` float32; `scaling` is
    `rope_parameters` of the published config."""
    half = head_dim // 2
    frequencies = scaling["rope_theta"] ** (-np.arange(half) / half)
    periods = scaling["original_max_position_embeddings"] * frequencies / (2 * pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    undivided = np.clip((periods - low) / (high - low), 0, 1)
    return (1 / ((1 - undivided) / scaling["factor"] + undivided)).astype(np.float32)


def check_tokenizer(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer, given the content of `tokenizer.json`. Raises `UserError`
    if llama.cpp does not know the tokenizer."""
    if (kind := content["model"]["type"]) != "BPE":
        raise UserError(f"the tokenizer is a {kind} model, which cannot be exported to GGUF; only BPE can.")
    return pre_type(content)


def _add_tokenizer(gguf: ModuleType, writer: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Add tokens, merges and special tokens, and unused tokens for further rows of the embedding. Raises `UserError` if
    llama.cpp does not know the tokenizer."""
    content, special = json.loads(tokenizer.as_json()), special_tokens(tokenizer)
    pre, model = check_tokenizer(content), content["model"]
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for added in content["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(special.bos)
    for name, end in zip(ENDS, special.eos, strict=False):
        getattr(writer, f"add_{name}_token_id")(end)
    for name, key in SPECIAL.items():
        if (text := tokenizer.special_tokens.get(name)) in tokens:
            getattr(writer, f"add_{key}_token_id")(tokens.index(text))
    writer.add_add_bos_token(special.adds_bos)
    writer.add_add_eos_token(bool(tokenizer.after_text))
