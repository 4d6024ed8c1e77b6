"""Folders of published models: the config, and the tensors, read one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import UserError, abbreviate, import_extra, parse_json

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of pickled files, which can run code when they are read."""
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Floating-point dtypes in safetensors, and their sizes in bytes."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with `config.json` and weights in safetensors, in one file or several shards."""

    path: Path
    config: Mapping[str, Any]
    files: Mapping[str, Any]
    """Open file of each tensor, by tensor name; tensors are read on demand."""

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Open a folder and verify that all shards are present and complete. Raises `UserError` if it is not such a
        folder, its weights are pickled, or a file is missing or corrupt."""
        if not path.is_dir():
            if path.suffix in PICKLED:
                raise UserError(f"{path} is pickled, and reading it would run code; convert it to safetensors.")
            reason = "is a file" if path.exists() else "does not exist"
            raise UserError(f"{path} {reason}; name a folder with {CONFIG} and weights in safetensors.")
        config = read_object(path / CONFIG)
        files = _open_shards(path, _shards(path))
        return cls(path, config, files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return tuple(self.files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, such as `BF16`, without reading it."""
        dtype: str = self.files[name].get_slice(name).get_dtype()
        return dtype

    def read(self, name: str) -> np.ndarray:
        """Return a tensor; bfloat16 has the dtype of ml_dtypes."""
        tensor: np.ndarray = self.files[name].get_tensor(name)
        return tensor


def read_object(file: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file. Raises `UserError` if it cannot be read or is not an object."""
    try:
        value = parse_json(file.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{file.parent} has no {file.name}; name a folder with a published model.") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore the published one.") from error
    if not isinstance(value, Mapping):
        raise UserError(f"{file} holds {abbreviate(value)}, not an object; restore the published one.")
    return value


def _shards(path: Path) -> Mapping[str, list[str]]:
    """Return the weight files, each with the names of the tensors that it must hold, empty if unknown."""
    if (path / INDEX).exists():
        names_by_file: dict[str, list[str]] = {}
        weight_map = read_object(path / INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise UserError(f"{path / INDEX} has no weight_map; restore the published one.")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(f"{path / INDEX} names a shard {abbreviate(file)}, which is not a file of the folder.")
            names_by_file.setdefault(file, []).append(name)
        return names_by_file
    if (path / SINGLE).exists():
        return {SINGLE: []}
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in PICKLED)
    if pickled:
        problem = f"{path} has its weights in {pickled[0]}, which is pickled, and reading it would run code"
        raise UserError(f"{problem}; convert it to safetensors.")
    raise UserError(f"{path} has neither {SINGLE} nor {INDEX}; name a folder with weights in safetensors.")


def _open_shards(path: Path, shards: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the open file of each tensor. Raises `UserError` if a shard is missing, corrupt or lacks a tensor."""
    safetensors = import_extra("safetensors", "reading published weights")
    files: dict[str, Any] = {}
    for number, (shard, expected) in enumerate(sorted(shards.items()), start=1):
        if not (path / shard).is_file():
            raise UserError(f"{path} lacks {shard}, shard {number} of {len(shards)}; download it again.")
        try:
            file = safetensors.safe_open(path / shard, framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            remedy = f"download it again: it has {(path / shard).stat().st_size:,} bytes"
            raise UserError(f"{path / shard} is corrupt or truncated ({error}); {remedy}.") from error
        names = set(file.keys())
        if absent := sorted({*expected} - names):
            raise UserError(f"{path / shard} lacks the tensor {absent[0]} that {INDEX} names; download both again.")
        files |= dict.fromkeys(expected or names, file)
    return files
