"""Published models: the config, the tensors, read one at a time, and the tokenizer; and the folders that hold them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxformer.data.pairs import TARGET_TOKENS
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, abbreviate, import_extra, lone_surrogate, parse_json
from jaxformer.interop import mxfp4
from jaxformer.interop.families.encoder_decoders import GENERATION_DEFAULTS, with_stored_head
from jaxformer.interop.families.tables import IMAGE_PROCESSOR, MAX_TOKENS, NORMALIZE, POOLING, PublishedConfig
from jaxformer.interop.mxfp4 import BLOCKS, SCALES
from jaxformer.interop.sampling import from_generation_config, target_tokens
from jaxformer.interop.sentencepiece import SOURCE_PIECES, load_marian_tokenizer
from jaxformer.runs.run import TOKENIZER

CONFIG, GENERATION, MODULES = "config.json", "generation_config.json", "modules.json"
TRANSFORMER_CONFIGS = "sentence_*_config.json"
"""The config of the module Transformer, which sentence-transformers names after a family, such as `bert`."""
SENTENCES_CONFIG = "config_sentence_transformers.json"
"""The config of all modules of sentence-transformers."""
PREPROCESSOR, PROCESSORS = "preprocessor_config.json", "processor_config.json"
"""Files with the config of the image processor, and of all processors, which takes precedence, as in transformers."""
ADAPTER = "adapter_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of pickled files, which can run code when they are read."""
POOLING_MODES = {"mean_tokens": "mean", "cls_token": "cls"}
"""Values of `families.POOLING`, which is `pooling_mode` in their config, by the flags that older versions of
sentence-transformers have for them."""
FLAG = "pooling_mode_"
"""Prefix of these flags."""
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Floating-point dtypes in safetensors, and their sizes in bytes."""


class PublishedModel(Protocol):
    """A published model, with the names and layouts of `families`."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> PublishedConfig: ...
    @property
    def names(self) -> Collection[str]:
        """Names of the tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, such as `BF16`, without reading it."""

    def read(self, name: str) -> np.ndarray:
        """Return a tensor; bfloat16 has the dtype of ml_dtypes."""

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `UserError` if there is none that can be used."""

    def sampling(self) -> dict[str, float]:
        """Return the sampling settings; empty if there are none. Raises `UserError` if they cannot be used."""


class Stored(NamedTuple):
    """A tensor in a file, with its dtype there, such as `BF16`."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scales: Path | None = None
    """File of the other tensor that an MXFP4 tensor is stored as; None for other tensors."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with `config.json` and weights in safetensors, in one file or several shards."""

    path: Path
    config: PublishedConfig
    tensors: Mapping[str, Stored]
    """Tensors by name, read on demand."""

    @classmethod
    def open(cls, path: Path) -> ModelFolder:
        """Open a folder, and read the headers of all its shards. Raises `UserError` if it is not such a folder, its
        weights are pickled, or a file is missing or corrupt."""
        if not path.is_dir():
            raise UserError(f"{path} does not exist; name a folder with {CONFIG} and safetensors, or a GGUF file.")
        if not (path / CONFIG).exists() and (ggufs := sorted(path.glob("*.gguf"))):
            raise UserError(f"{path} has no {CONFIG}; name its GGUF file, such as {ggufs[0]}.")
        if (path / ADAPTER).exists():  # which transformers would apply
            raise UserError(
                f"{path} has an adapter ({ADAPTER}), which is not supported; merge it into the model first."
            )
        config = {**read_object(path / CONFIG), **read_modules(path), **read_image_processor(path)}
        if (path / SINGLE).exists():  # takes precedence, as in transformers
            shards = [SINGLE]
        elif (path / INDEX).exists():
            shards = read_shards(path / INDEX)
        else:
            remedy = "convert pickled weights, which would run code when they are read"
            raise UserError(f"{path} has neither {SINGLE} nor {INDEX}; {remedy}.")
        tensors: dict[str, Stored] = {}
        for shard in shards:
            with _opened(path / shard) as file:
                parts = {name: file.get_slice(name) for name in [*file.keys()]}
            tensors |= {name: Stored(path / shard, tuple(x.get_shape()), x.get_dtype()) for name, x in parts.items()}
        return cls(path, with_stored_head(config, tensors), with_dequantized(tensors))

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, such as `BF16`, without reading it."""
        return self.tensors[name].dtype

    def read(self, name: str) -> np.ndarray:
        """Return a tensor; bfloat16 has the dtype of ml_dtypes. Raises `UserError` if its file has changed."""
        file, _, _, scales = self.tensors[name]
        if scales is None:
            return _read_tensor(file, name)
        return mxfp4.dequantize(*(_read_tensor(x, name + end) for x, end in ((file, BLOCKS), (scales, SCALES))))

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer in `tokenizer.json`. Raises `UserError` if there is none that can be used."""
        file = self.path / TOKENIZER
        if file.exists():
            tokenizer = Tokenizer.load(file, self._eos_token_ids())
        elif (self.path / SOURCE_PIECES).exists():  # of Marian
            tokenizer = load_marian_tokenizer(self.path)
        else:
            remedy = "write it with save_pretrained of transformers' AutoTokenizer"
            raise UserError(f"{self.path} has no {TOKENIZER}; {remedy}.")
        if (defaults := GENERATION_DEFAULTS.get(str(self.config.get("model_type")))) is None:
            return tokenizer
        generation = self._generation
        values = read_object(generation) if generation.name == GENERATION else {**defaults, **self.config}
        start = self.config.get("decoder_start_token_id", defaults.get("decoder_start_token_id"))
        return tokenizer.with_settings({TARGET_TOKENS: target_tokens(values, start, generation)})

    def sampling(self) -> dict[str, float]:
        """Return the sampling settings, of which older folders have some in their config."""
        return from_generation_config(read_object(self._generation), self._generation)

    @property
    def _generation(self) -> Path:
        """File with the settings of generation."""
        return next((file for name in (GENERATION, CONFIG) if (file := self.path / name).exists()), self.path)

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end a text, of which a published config may name any number. Raises
        `UserError` if they are not ids."""
        generation = self.path / GENERATION
        named = read_object(generation).get("eos_token_id") if generation.exists() else None
        named = self.config.get("eos_token_id") if named is None else named
        ids = [] if named is None else named if isinstance(named, list) else [named]
        if not all(type(token) is int for token in ids):  # True would be read as token 1
            raise UserError(f"the eos_token_id of {self.path} is {named!r}; it must be an id or a list of ids.")
        return tuple(ids)


def with_dequantized(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors with one in the place of two that hold it as MXFP4."""
    result = dict(tensors)
    for name in [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]:
        blocks, scales = tensors[name + BLOCKS], tensors.get(name + SCALES)
        if scales is None or (shape := mxfp4.dequantized_shape(blocks.shape, scales.shape)) is None:
            continue
        del result[name + BLOCKS], result[name + SCALES]
        result[name] = Stored(blocks.file, shape, "BF16", scales.file)
    return result


def _read_tensor(path: Path, name: str) -> np.ndarray:
    """Return a tensor of a file in safetensors; all that is read of an open file stays in memory."""
    with _opened(path) as file:
        tensor: np.ndarray = file.get_tensor(name)
    return tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Yield an open file in safetensors. Raises `UserError` if it is missing or corrupt."""
    safetensors = import_extra("safetensors", "reading published weights")
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            yield opened
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{file} is missing or corrupt ({error}); download it again.") from error


def read_shards(file: Path) -> list[str]:
    """Return the names of the files in an index, sorted. Raises `UserError` if it maps no tensors to names of files."""
    files = read_object(file).get("weight_map")
    names = files.values() if isinstance(files, Mapping) else []
    is_file = lambda name: isinstance(name, str) and Path(name).name == name and lone_surrogate(name) is None  # noqa: E731
    if not names or not all(map(is_file, names)):
        problem = f"the weight_map of {file} is {abbreviate(files)}"
        raise UserError(f"{problem}; it must map tensors to files beside it; restore the published one.")
    return sorted(set(names))


def read_modules(path: Path) -> PublishedConfig:
    """Return the fields of a sentence-transformers folder, which lists its modules, for the pooling and normalisation
    after the encoder and the maximum length of texts; none for another folder. Raises `UserError` for other modules or
    kinds of pooling, or no length."""
    if not (path / MODULES).exists():
        return {}
    modules = read_object(path / MODULES, list)
    kinds = [module.get("type") if isinstance(module, Mapping) else module for module in modules]
    names = [str(kind).rpartition(".")[2] for kind in kinds]
    modes = list[str]()
    if is_known := names in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        pooling = read_object(path / str(modules[1].get("path")) / CONFIG)
        flags = [name for name, used in pooling.items() if name.startswith(FLAG) and used is True]
        older = [POOLING_MODES.get(name.removeprefix(FLAG), name) for name in flags]
        modes = [str(pooling["pooling_mode"])] if "pooling_mode" in pooling else older
    if not is_known or len(modes) != 1 or modes[0] not in POOLING_MODES.values():
        problem = f"{path} has the modules {', '.join(names)}, and pools by {' and '.join(modes) or 'nothing'}"
        limit = (
            f"supported are Transformer, Pooling and Normalize, and pooling by {' or '.join(POOLING_MODES.values())}"
        )
        raise UserError(f"{problem}; {limit}; use another sentence encoder.")
    # The config may still name the architecture that the encoder was trained in, with a head.
    fields = {POOLING: modes[0], NORMALIZE: "Normalize" in names, "architectures": None}
    file = next(iter(sorted(path.glob(TRANSFORMER_CONFIGS))), None)
    for config, option in ((file, "do_lower_case"), (path / SENTENCES_CONFIG, "default_prompt_name")):
        # Both change a text before it is tokenized.
        if config is not None and config.exists() and (value := read_object(config).get(option)):
            raise UserError(f"{option} in {config} is {value!r}, which is not supported; use another sentence encoder.")
    if file is None or (length := read_object(file).get("max_seq_length")) is None:
        return fields
    if type(length) is not int or length < 1:
        raise UserError(f"max_seq_length in {file} is {length!r}; it must be a number of tokens; restore the file.")
    return fields | {MAX_TOKENS: length}


def read_image_processor(path: Path) -> dict[str, Any]:
    """Return the field `IMAGE_PROCESSOR` with the config of a folder's image processor; none without one."""
    if (file := path / PROCESSORS).exists() and (nested := read_object(file).get(IMAGE_PROCESSOR)) is not None:
        return {IMAGE_PROCESSOR: nested}
    return {IMAGE_PROCESSOR: read_object(file)} if (file := path / PREPROCESSOR).exists() else {}


def read_object(file: Path, kind: type = Mapping) -> Any:
    """Return the object, or another `kind` of value, in a JSON file. Raises `UserError` if it cannot be read or is of
    another kind."""
    try:
        value = parse_json(file.read_bytes())
        if not isinstance(value, kind):
            raise TypeError(f"it is not {'an object' if kind is Mapping else f'a {kind.__name__}'}")
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore the published one.") from error
    return value
