"""Models in GGUF, the format of llama.cpp, read as published folders are: a config, tensors and a tokenizer with the
names and layouts of such folders."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import pi, prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tokenizers

from jaxformer.data.tokenizer import Tokenizer, is_library_error, published_tokenizer
from jaxformer.errors import UserError, abbreviate, import_extra
from jaxformer.interop.configs import read_config
from jaxformer.interop.families import FAMILIES
from jaxformer.interop.families.tables import PublishedConfig
from jaxformer.interop.gguf import ARCHITECTURES, ROTATED, llama3_divisors, pairs_apart
from jaxformer.interop.gguf_tokenizer import tokenizer_config, tokenizer_json
from jaxformer.interop.sampling import from_gguf

FAMILIES_BY_ARCHITECTURE = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
"""Our families by llama.cpp's architecture."""
FIELDS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
"""Keys that each file must have, below its architecture, by fields of a published config."""
PER_LAYER = {"feed_forward_length", "attention.head_count", "attention.head_count_kv"}
"""Keys that may have a value for each block, which must be equal."""
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of tensors that can be read; quantised ones are read as float32."""
ROPE_DIVISORS = "rope_freqs.weight"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of scalars in `struct`, by their type in metadata."""
TEXT, ARRAY, FLOAT = 8, 9, 6
"""Other types in metadata, and that of float32."""
REMEDY = "download it again"


class Stored(NamedTuple):
    """A tensor in a file: its name there, type and shape, and the range of its bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header:
    """Cursor over the start of a file. The reader of the `gguf` package makes an array per token, which takes seconds
    and hundreds of megabytes for a vocabulary of today."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data.data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def text(self) -> str:
        n = self.scalar("Q")
        self.at += n
        if self.at > len(self.data):
            raise ValueError("it ends within its header")
        return str(self.data[self.at - n : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        """Return a value of metadata; a float32 as the shortest number that rounds to it, as in published configs."""
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            kind, n = self.scalar("I"), self.scalar("Q")
            if kind not in SCALARS:
                return [self.value(kind) for _ in range(n)]
            values = np.frombuffer(self.data, "<" + SCALARS[kind], n, self.at)
            self.at += values.nbytes
            return values.tolist()
        value = self.scalar(SCALARS[kind])
        return float(str(np.float32(value))) if kind == FLOAT else value


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, whose tensors are read on demand."""

    path: Path
    config: PublishedConfig
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, Stored] = field(repr=False)
    """Tensors by their names in published folders."""

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file. Raises `UserError` if it is no complete GGUF file, gguf is not installed, or its architecture or
        the type of a tensor is not supported."""
        gguf = import_extra("gguf", "reading GGUF")
        try:
            data = np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); make it readable.") from error
        if bytes(data[:4]) != b"GGUF":
            raise UserError(f"{path} is no GGUF file; name one, or a folder with config.json and safetensors.")
        try:
            metadata, stored = _read_header(Header(data), gguf)
            for tensor in stored.values():
                if tensor.stop > len(data):
                    raise ValueError(f"it ends before the end of {tensor.name}")
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, struct.error) as error:
            raise UserError(f"{path} is incomplete or corrupt ({error}); {REMEDY}.") from error
        architecture = metadata.get("general.architecture")
        if architecture not in [*FAMILIES_BY_ARCHITECTURE]:  # which need not be hashable
            known = ", ".join(FAMILIES_BY_ARCHITECTURE)
            problem = f"the architecture of {path} is {abbreviate(architecture)}, which is not supported"
            raise UserError(f"{problem}; supported are {known}.")
        if (n_parts := metadata.get("split.count", 1)) != 1:
            remedy = "merge them with llama-gguf-split --merge of llama.cpp"
            raise UserError(f"{path} is one of {abbreviate(n_parts)} parts of a model; {remedy}.")
        for tensor in stored.values():
            if tensor.kind not in (*DTYPES, *QUANTISED):
                problem = f"{tensor.name} in {path} is {tensor.kind}, which is not supported"
                raise UserError(f"{problem}; use a file with {', '.join((*DTYPES, *QUANTISED))} only.")
        try:
            divisors = stored.pop(ROPE_DIVISORS, None)
            config = _config(metadata, stored)
            if divisors is not None:
                scaling = find_llama3(_read(gguf, data, divisors), config["rope_parameters"], config["head_dim"])
                config["rope_parameters"] |= scaling
            tensors = _published_names(gguf, config, architecture, stored)
            read_config(config)
        except UserError as error:
            raise UserError(_in_file(error, architecture)) from error
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            problem = f"{path} has no equivalent as a {architecture} ({type(error).__name__}: {error})"
            raise UserError(f"{problem}; {REMEDY}, or choose another model.") from error
        return cls(path, config, metadata, tensors)

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors in published folders."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as it is read, such as `BF16`, without reading it."""
        kind = self.tensors[name].kind
        return kind if kind in DTYPES else "F32"

    def read(self, name: str) -> np.ndarray:
        """Return a tensor, dequantised."""
        stored = self.tensors[name]
        data = np.memmap(self.path, mode="r")  # anew, as all that is read of a mapped file stays in memory
        tensor = _read(import_extra("gguf", "reading GGUF"), data, stored)
        part, architecture = name.split(".")[-2], self.metadata["general.architecture"]
        if part in ROTATED and ARCHITECTURES.get(architecture, ("", False))[1]:
            return pairs_apart(tensor, self.config[ROTATED[part]])
        # llama.cpp stores the gains of Gemma themselves, published folders less 1.
        return tensor - 1 if architecture == "gemma3" and part.endswith("norm") else tensor

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `UserError` if it is not supported."""
        remedy = "import the model from a folder with its tokenizer.json"
        try:
            inner = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(self.metadata)))
            config = tokenizer_config(self.metadata)
        except BaseException as error:
            if not (isinstance(error, Exception) or is_library_error(error)):
                raise
            problem = f"{self.path} has no readable tokenizer ({type(error).__name__}: {error})"
            raise UserError(f"{problem}; {remedy}.") from error
        return published_tokenizer(inner, config, self.path, remedy)

    def sampling(self) -> dict[str, float]:
        """Return the sampling settings; empty if there are none. Raises `UserError` if they cannot be used."""
        return from_gguf(self.metadata, self.path)


def _read_header(header: Header, gguf: Any) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the metadata by key, and the tensors by name. Raises ordinary exceptions for a corrupt header."""
    header.at = 4
    if (version := header.scalar("I")) not in (2, 3):
        raise ValueError(f"its version is {version}, not 2 or 3")
    n_tensors, n_keys = header.scalar("Q"), header.scalar("Q")
    metadata = {}
    for _ in range(n_keys):
        key = header.text()
        metadata[key] = header.value(header.scalar("I"))
    found = []
    for _ in range(n_tensors):
        name = header.text()
        shape = tuple(header.scalar("Q") for _ in range(header.scalar("I")))[::-1]
        found.append((name, shape, gguf.GGMLQuantizationType(header.scalar("I")), header.scalar("Q")))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    data_start = -(-header.at // alignment) * alignment
    stored = {}
    for name, shape, kind, offset in found:
        per_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % per_block:
            raise ValueError(f"{name} has rows of {shape[-1]} numbers, no multiple of {per_block}")
        start = data_start + offset
        stored[name] = Stored(name, kind.name, shape, start, start + prod(shape) // per_block * n_bytes)
    return metadata, stored


def _read(gguf: Any, data: np.ndarray, tensor: Stored) -> np.ndarray:
    """Return a tensor in the names and order of the file, dequantised."""
    kept = data[tensor.start : tensor.stop]
    if tensor.kind in DTYPES:
        return kept.view(DTYPES[tensor.kind]).reshape(tensor.shape)
    rows = kept.reshape(*tensor.shape[:-1], -1)
    array: np.ndarray = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind])
    return array


def _config(metadata: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Return the published config. Raises ordinary exceptions if a value is missing or has no equivalent."""
    architecture = metadata["general.architecture"]
    values = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items() if k.startswith(f"{architecture}.")}
    for key in PER_LAYER & values.keys():
        if isinstance(values[key], list) and len({*values[key]}) == 1:
            values[key] = values[key][0]
    config = {field: values[key] for field, key in FIELDS.items()}
    family, heads = FAMILIES[FAMILIES_BY_ARCHITECTURE[architecture]], config["num_attention_heads"]
    head_dim = values.get("attention.key_length", config["hidden_size"] // heads)
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear", 0))
    kind = values.get("rope.scaling.type", "linear")
    expected = {
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.scaling.attn_factor": 1,
        "attention.causal": True,
        "expert_count": 0,
        "rope.scaling.type": kind if kind in ("none", "linear") else "none or linear",
    }
    if architecture == "gemma3":
        expected["rope.dimension_count_swa"] = head_dim
    for key, value in expected.items():
        if values.get(key, value) != value:
            raise ValueError(f"{architecture}.{key} is {abbreviate(values[key])}, and only {value} has an equivalent")
    config |= {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": stored["token_embd.weight"].shape[0],
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_output.bias" in stored,
    }
    kind = "default" if kind == "none" or factor in (0, 1) else kind
    rope = {"rope_type": kind, "rope_theta": values.get("rope.freq_base", 10_000.0), "factor": factor}
    config["rope_parameters"] = rope
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": values.get("rope.freq_base_swa", 10_000.0)}
        is_27b, window = config["num_hidden_layers"] == 62, values.get("attention.sliding_window", 0)
        period = values.get("attention.sliding_window_pattern", 6)
        is_local = (
            period if isinstance(period, list) else [(i + 1) % period > 0 for i in range(config["num_hidden_layers"])]
        )
        config |= {
            "rope_parameters": {"full_attention": rope, "sliding_attention": local},
            "sliding_window": window,
            "layer_types": ["sliding_attention" if window and local else "full_attention" for local in is_local],
            "query_pre_attn_scalar": config["hidden_size"] // heads if is_27b else head_dim,  # as llama.cpp finds out
            "final_logit_softcapping": values.get("final_logit_softcapping") or None,  # 0 is none
        }
    return config


def _in_file(error: UserError, architecture: str) -> str:
    """Return the message of an error about a published config, with the file's keys for its fields."""
    keys = {**FIELDS, "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}
    keys |= {
        "rope_theta": "rope.freq_base",
        "factor": "rope.scaling.factor",
        "sliding_window": "attention.sliding_window",
    }
    keys |= {"layer_types": "attention.sliding_window_pattern", "final_logit_softcapping": "final_logit_softcapping"}
    given = [f"{field} is {architecture}.{key}" for field, key in keys.items() if field in str(error)]
    return f"{str(error).rstrip('.')}; in the file, {', '.join(given)}." if given else str(error)


def find_llama3(divisors: np.ndarray, rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the fields of Llama 3.1's scaling with the given divisors of RoPE frequencies, `(K/2,)`: the inverse of
    `llama3_divisors`. Context, low and high factor are known up to a common factor, which changes nothing; the low one
    is 1. Raises `ValueError` if there is no such scaling."""
    factor = float(divisors.max())
    if rope.get("rope_type") != "default" or factor <= 1:
        raise ValueError(f"it has {ROPE_DIVISORS} with another scaling")
    # Between the two, the undivided fraction is (original context · frequency / 2π - low) / (high - low).
    undivided = (1 / divisors.astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    between = (undivided > 1e-6) & (undivided < 1 - 1e-6)
    high, context = 4.0, 8192
    if between.sum() > 1:
        frequencies = rope["rope_theta"] ** (-np.arange(len(divisors)) / len(divisors))
        slope, start = np.polyfit(frequencies[between], undivided[between], 1).tolist()
        high, context = round(1 - 1 / start, 4), round(-2 * pi * slope / start)
    found = {"factor": round(factor, 6), "low_freq_factor": 1.0, "high_freq_factor": high}
    found["original_max_position_embeddings"] = context
    if not np.allclose(llama3_divisors({**rope, **found}, head_dim), divisors, rtol=1e-4):
        raise ValueError(f"{ROPE_DIVISORS} is not a scaling of Llama 3.1")
    return {"rope_type": "llama3", **found}


def _published_names(
    gguf: Any, config: PublishedConfig, architecture: str, stored: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Return the tensors by their names in published folders, and others by their own."""
    n_blocks = min(config["num_hidden_layers"], len(stored))
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names, theirs = gguf.get_tensor_name_map(arch, n_blocks), {}
    for weight in FAMILIES[config["model_type"]].weights:
        for i in range(n_blocks) if "{i}" in weight.theirs else (0,):
            published = weight.theirs.replace("{i}", str(i))
            theirs[names.get_name(published, try_suffixes=(".weight", ".bias"))] = published
    return {theirs.get(name, name): tensor for name, tensor in stored.items()}
