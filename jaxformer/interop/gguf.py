"""Export to GGUF, the format of llama.cpp, by the tables of `families.gguf`."""

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
from jaxformer.interop.families.gguf import head_width, is_tensor
from jaxformer.interop.formats import Dtype
from jaxformer.interop.gguf_tokenizer import pre_type
from jaxformer.interop.huggingface import publish, special_tokens
from jaxformer.interop.obstacles import FAMILIES_BY_FORMAT
from jaxformer.interop.output import cast, complete_path
from jaxformer.interop.sampling import as_gguf
from jaxformer.runs.run import Run

DTYPES: Mapping[Dtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Names of dtypes in the `gguf` package."""
ROPE_DIVISORS = "rope_freqs.weight"
"""Tensor with the divisor of each frequency of RoPE."""
ENDS = ("eos", "eot", "eom")
"""Tokens that end a text, a turn or a message, all of which llama.cpp takes for ends."""
SPECIAL = {"unk_token": "unk", "pad_token": "pad", "sep_token": "sep", "mask_token": "mask"}
"""Other special tokens and their names in the `gguf` package."""


def export_gguf(run: Run, file: Path, dtype: Dtype = "float32") -> None:
    """Write a run to a new GGUF file. `dtype` applies to matrices; vectors stay in float32, as llama.cpp requires.
    Raises `UserError` if the file exists, gguf is not installed, or llama.cpp has no equivalent for a part of the model
    or of its tokenizer."""
    gguf = import_extra("gguf", "`format='gguf'`")
    published = publish(run, "gguf")
    theirs = published.config
    _, tokenizer = run.text_model()
    family = FAMILIES_BY_FORMAT["gguf"][theirs["model_type"]]
    with complete_path(file) as scratch, closing(gguf.GGUFWriter(scratch, family.model_type)) as writer:
        writer.add_name(run.config.name)
        writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if dtype == 'float32' else 'MOSTLY'}_{DTYPES[dtype]}"])
        adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        for key in dict.fromkeys(field.theirs for field in family.fields):
            if not is_tensor(key) and (value := theirs[key]) is not None:
                adds[type(value)](f"{family.model_type}.{key}", value)
        for key, value in as_gguf(run.sampling).items():
            (writer.add_int32 if key.endswith(".top_k") else writer.add_float32)(key, value)
        if rope := theirs.get("rope_parameters"):
            writer.add_rope_freq_base(rope["rope_theta"])
            if (fraction := rope.get("partial_rotary_factor")) is not None:
                writer.add_rope_dimension_count(int(fraction * head_width(theirs)))
        _add_tokenizer(gguf, writer, tokenizer, theirs["vocab_size"])
        if templates := tokenizer.chat_templates:  # llama.cpp's default is ChatML
            writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])
        for name, tensor in published.tensors:
            kept: Dtype = "float32" if tensor.ndim == 1 else dtype
            array = cast(name, tensor, kept)
            as_bytes = array.view(np.uint8) if kept == "bfloat16" else array  # as the package writes bfloat16
            writer.add_tensor(name, as_bytes, raw_dtype=gguf.GGMLQuantizationType[DTYPES[kept]])
        if rope and rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        elif rope and rope["rope_type"] == "llama3":
            writer.add_tensor(ROPE_DIVISORS, llama3_divisors(rope, head_width(theirs)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


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
