"""Models in GGUF, the format of llama.cpp, read as published folders are: a config, tensors and a tokenizer, by the
tables of `families.gguf`."""

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
from jaxformer.interop.configs import family_of, read_config
from jaxformer.interop.families import GGUF_FAMILIES
from jaxformer.interop.families.gguf import ARCHITECTURE, head_width, is_tensor
from jaxformer.interop.families.tables import PublishedConfig
from jaxformer.interop.gguf import ROPE_DIVISORS, llama3_divisors
from jaxformer.interop.gguf_tokenizer import tokenizer_config, tokenizer_json
from jaxformer.interop.sampling import from_gguf

OTHER_KEYS = {
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "partial_rotary_factor": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
}
"""Keys of fields that messages name as in published configs."""
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of tensors that can be read; quantised ones are read as float32."""
ROW = "ffn_gate_inp_shexp.weight"
"""Tensors with one row, which may be stored as a matrix."""
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
    """Tensors by their names in the file."""

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
        architecture = metadata.get(ARCHITECTURE)
        if architecture not in [*GGUF_FAMILIES]:  # which need not be hashable
            known = ", ".join(GGUF_FAMILIES)
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
            config = _config(metadata, stored)
            if "llama3" in (family_of(config).rope_types or ()) and ROPE_DIVISORS in stored:
                divisors, rope = _read(gguf, data, stored.pop(ROPE_DIVISORS)), config["rope_parameters"]
                config["rope_parameters"] = rope | find_llama3(divisors, rope, head_width(config))
            read_config(config)
        except UserError as error:
            raise UserError(_in_file(error)) from error
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            problem = f"{path} has no equivalent as a {architecture} ({type(error).__name__}: {error})"
            raise UserError(f"{problem}; {REMEDY}, or choose another model.") from error
        return cls(path, config, metadata, stored)

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as it is read, such as `BF16`, without reading it."""
        kind = self.tensors[name].kind
        return kind if kind in DTYPES else "F32"

    def read(self, name: str) -> np.ndarray:
        """Return a tensor, dequantised. Raises `UserError` if the file has changed."""
        try:
            data = np.memmap(self.path, mode="r")  # anew, as all that is read of a mapped file stays in memory
            return _read(import_extra("gguf", "reading GGUF"), data, self.tensors[name])
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path} has changed since it was opened ({error}); {REMEDY}.") from error

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
        shape = shape[-1:] if name.endswith(ROW) and prod(shape) == shape[-1] else shape
        stored[name] = Stored(name, kind.name, shape, start, start + prod(shape) // per_block * n_bytes)
    return metadata, stored


def _read(gguf: Any, data: np.ndarray, tensor: Stored) -> np.ndarray:
    """Return a tensor, dequantised."""
    kept = data[tensor.start : tensor.stop]
    if tensor.kind in DTYPES:
        return kept.view(DTYPES[tensor.kind]).reshape(tensor.shape)
    rows = np.asarray(kept).reshape(*tensor.shape[:-1], -1)  # parts of a mapped array take long to make
    array: np.ndarray = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind])
    return array


def _config(metadata: Mapping[str, Any], stored: Mapping[str, Stored]) -> dict[str, Any]:
    """Return the keys below the architecture, read as the fields of its family, with those that follow from the tensors
    in the file. Raises ordinary exceptions if one is missing or has no equivalent."""
    family, below = GGUF_FAMILIES[metadata[ARCHITECTURE]], f"{metadata[ARCHITECTURE]}."
    keys = {name.removeprefix(below): value for name, value in metadata.items() if name.startswith(below)}
    parts = {field.theirs for field in family.fields if is_tensor(field.theirs)}
    own = {ARCHITECTURE: family.model_type, "vocab_size": stored["token_embd.weight"].shape[0]}
    return dict(family.read(keys | own | {name: name in stored for name in parts}))


def _in_file(error: UserError) -> str:
    """Return the message of an error about a config, with the keys of fields that it names as in published ones."""
    given = [f"{field} is {key}" for field, key in OTHER_KEYS.items() if field in str(error) and key not in str(error)]
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
