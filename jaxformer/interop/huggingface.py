"""Export of a run to a folder that transformers, vLLM and other libraries read, by the tables of `families`."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxformer.data.pairs import TARGET_TOKENS, TargetTokens, start_of_target
from jaxformer.data.tokenizer import END_IDS, TARGET_TOKENIZER, Tokenizer
from jaxformer.errors import UserError, missing_extras
from jaxformer.interop.configs import write_config
from jaxformer.interop.families.encoders import BERT, MODERNBERT, POOLED_CLASSIFIER
from jaxformer.interop.families.tables import IMAGE_PROCESSOR, NORMALIZE, POOLING, Family, ImportedConfig, Weight
from jaxformer.interop.folder import FLAG, MODULES, POOLING_MODES, PREPROCESSOR
from jaxformer.interop.formats import Dtype, Format
from jaxformer.interop.obstacles import FAMILIES_BY_FORMAT, Obstacle, as_known, nearest_family, resolved, same_kind
from jaxformer.interop.output import cast, complete_path, save_safetensors
from jaxformer.interop.sampling import as_generation_config, as_generation_tokens
from jaxformer.interop.weights import Layout, axis_sizes, extra_name, fuse, part_of, rows
from jaxformer.models.clip import CLIPConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.objective import Params
from jaxformer.runs.run import TOKENIZER, Run

OWN = (END_IDS, TARGET_TOKENS, TARGET_TOKENIZER)
"""Fields of a tokenizer's config that other libraries do not have."""


class Published(NamedTuple):
    """A model in the layout of a published family: the content of its `config.json`, with what else is written beside
    it, and the names and float32 arrays of its tensors, one at a time."""

    config: dict[str, Any]
    tensors: Iterator[tuple[str, np.ndarray]]


def publish(run: Run, file_format: Format = "hf") -> Published:
    """Return a run's model in the layout of the first family of a format with an equivalent for each part. If there is
    none, raises `UserError` with the parts that the nearest family lacks, and the fields that would remove them."""
    model, params, families = run.config.model, run.params, FAMILIES_BY_FORMAT[file_format]
    nearest, lacking = nearest_family(model, families)
    if lacking:
        raise UserError(f"{_no_equivalent(run, lacking, families, nearest)}.")
    known = as_known(model)
    assert known is not None
    family = families[nearest]
    config = resolved(known, family)
    if isinstance(config, EncoderConfig) and config.n_segments and "W_segment" not in params:
        params = params | {"W_segment": np.zeros((1, config.width_of_embedding))}
    theirs = write_config(config, family)
    if isinstance(config, CLIPConfig) and run.tokenizer is not None:
        theirs["text_config"] |= _ends_of_captions(run, run.tokenizer)
    if run.classes:
        theirs["id2label"] = {str(i): name for i, name in enumerate(run.classes)}
        theirs["label2id"] = {name: i for i, name in enumerate(run.classes)}
    bare = ""
    if POOLING in theirs:  # modules of sentence-transformers, of which the first is saved without a head
        bare = family.prefix
        if family is POOLED_CLASSIFIER:
            theirs["architectures"] = [BERT.architecture]
    tensors = ((name.removeprefix(bare), tensor) for name, tensor in published_tensors(params, config, family))
    return Published(theirs, tensors)


def _ends_of_captions(run: Run, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens around a text. Raises `UserError` if these are the same, as transformers reads the
    features of a text at the first of the tokens that end it."""
    before, after = tokenizer.before_text, tokenizer.after_text
    if not before or not after or before == after:
        problem = (
            f"the tokenizer of {run.path} puts end of text before each text, too, where transformers would read it"
        )
        raise UserError(f"{problem}; use `format='safetensors'`.")
    return {"bos_token_id": before[0], "eos_token_id": after[0], "pad_token_id": after[0]}


def _no_equivalent(run: Run, lacking: list[Obstacle], families: Mapping[str, Family], nearest: str) -> str:
    """Return the message for a run that no family has an equivalent for."""
    known = ", ".join(name for name, family in families.items() if same_kind(family.model, families[nearest].model))
    extra = missing_extras("safetensors")
    remedy = "use `format='safetensors'`" + (f" (install it with pip install 'jaxformer[{extra}]')" if extra else "")
    if lacking[0].field == "model":
        return f"{run.path} holds a {lacking[0].value}, which none of {known} describes; {remedy}"
    parts = " and ".join(f"{field.removeprefix('model.')} {value!r}" for field, value, _ in lacking)
    fields = ", ".join(f"`{field}={needed!r}`" for field, _, needed in lacking)
    problem = (
        f"{parts} {'have' if lacking[1:] else 'has'} no equivalent in {nearest}, the nearest of the families {known}"
    )
    return f"{problem}; {remedy}, or train with {fields}"


def published_tensors(params: Params, config: ImportedConfig, family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and tensors of a family, in float32, one at a time; `config` must have no obstacle."""
    leaves = flatten_dict(params, sep=".")
    paths: dict[str, list[tuple[Weight, str, int]]] = defaultdict(list)
    for path, (weight, names) in rows(family, config).items():
        for expert, name in enumerate(names):
            if path in leaves:
                paths[name].append((weight, path, expert))
    assert {path for group in paths.values() for _, path, _ in group} == leaves.keys()
    for name, group in paths.items():
        arrays, layouts = [], []
        for weight, path, expert in sorted(group, key=lambda row: row[0].part or 0):
            leaf = leaves[path][expert] if "{e}" in weight.theirs else leaves[path]
            arrays.append(np.asarray(jax.device_get(leaf)).astype(np.float32) - np.float32(weight.offset))
            layouts.append(Layout.parse(weight.layout, axis_sizes(part_of(family, config, path))))
        tensor = fuse(layouts, arrays)
        rows_before = np.zeros((weight.first_row, *tensor.shape[1:]), np.float32)
        yield name, np.concatenate([rows_before, tensor]) if weight.first_row else tensor
        for weight, path, _ in group:
            for extra in weight.extras:  # which change nothing
                width = part_of(family, config, path).d_model
                neutral = np.ones(width) if extra == weight.scale else np.zeros((1, 1, width))
                yield extra_name(extra, path), neutral.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Special tokens, by their names in other libraries' configs."""

    bos: int
    """Id of the token that the tokenizer puts before each text, or else names; if there is none, of end-of-text, which
    precedes each document in training."""
    eos: tuple[int, ...]
    """Ids of the tokens that end a text, end-of-text first."""
    adds_bos: bool
    """True if the tokenizer puts `bos` before each text."""
    bos_text: str
    """Text of `bos`."""
    eos_text: str
    """Text of end-of-text."""
    pad: int
    """Id of the token for padding; of end-of-text if the tokenizer names none."""


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special tokens of a tokenizer."""
    added = {token["id"]: token["content"] for token in json.loads(tokenizer.as_json())["added_tokens"]}
    named, begin = tokenizer.special_tokens, next(iter(tokenizer.before_text), None)
    bos, bos_text = tokenizer.end_of_text, named["eos_token"]
    if begin is not None:
        bos, bos_text = begin, added.get(begin) or named["bos_token"]
    elif (text := named.get("bos_token")) in added.values():
        bos, bos_text = next((i, content) for i, content in added.items() if content == text)
    pad = next((i for i, content in added.items() if content == named.get("pad_token")), tokenizer.end_of_text)
    return SpecialTokens(bos, tokenizer.ends_of_text, begin is not None, bos_text, named["eos_token"], pad)


def export_huggingface(run: Run, folder: Path, dtype: Dtype = "float32") -> None:
    """Write a run to a new folder in the layout of the published family that its model belongs to. Raises `UserError`
    if the folder exists, safetensors is not installed, or no family has an equivalent for a part of the model. A
    sentence encoder's folder also has the modules of sentence-transformers."""
    published, tokenizer, model = publish(run), run.tokenizer, run.config.model
    special = None if tokenizer is None else special_tokens(tokenizer)
    generates = isinstance(model, DecoderConfig | EncoderDecoderConfig)
    ids: dict[str, Any] = {}
    if tokenizer is not None and special is not None:
        ids = {"bos_token_id": special.bos, "eos_token_id": list(special.eos) if special.eos[1:] else special.eos[0]}
        if isinstance(model, EncoderDecoderConfig):
            tokens = {**TargetTokens.of(tokenizer)._asdict(), "start": start_of_target(tokenizer)}
            ids |= as_generation_tokens(tokens) | {"pad_token_id": special.pad}
        elif published.config["model_type"] == MODERNBERT.model_type:  # whose defaults are beyond small vocabularies
            ids |= {"cls_token_id": special.bos, "sep_token_id": special.eos[0], "pad_token_id": special.pad}
        elif not generates:
            ids = {}
    with complete_path(folder) as scratch:
        scratch.mkdir()
        arrays = {name: cast(name, tensor, dtype) for name, tensor in published.tensors}
        if POOLING in published.config:
            _write_modules(scratch, published.config, arrays)
        save_safetensors(arrays, scratch / "model.safetensors", {"format": "pt"})
        # Versions of transformers before 5 read torch_dtype, later ones dtype.
        beside = (POOLING, NORMALIZE, IMAGE_PROCESSOR)
        config = {name: value for name, value in published.config.items() if name not in beside}
        _write_json(scratch / "config.json", config | ids | {"dtype": dtype, "torch_dtype": dtype})
        if IMAGE_PROCESSOR in published.config:
            _write_json(scratch / PREPROCESSOR, published.config[IMAGE_PROCESSOR])
        if tokenizer is None or special is None:
            return
        if generates:
            generation = ids | {"pad_token_id": special.pad}
            _write_json(scratch / "generation_config.json", generation | as_generation_config(run.sampling))
        tokenizer.save(scratch / TOKENIZER)
        text_model: Any = getattr(model, "text", model)
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": special.bos_text,
            "eos_token": special.eos_text,
            "pad_token": special.eos_text,
            "clean_up_tokenization_spaces": False,
            **{name: value for name, value in tokenizer.config.items() if name not in OWN},
            "model_max_length": text_model.n_positions,  # the tokenizer's own may be more
        }
        _write_json(scratch / "tokenizer_config.json", tokenizer_config)


def _write_modules(folder: Path, config: Mapping[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write the modules after a sentence encoder: pooling (see `folder.read_modules`), then normalisation or the layers
    of a classifier, the tensors of which are taken out of `arrays`."""
    layers = {2: "Tanh", 3: "Identity"} if NORMALIZE not in config else {}
    kinds = ["Transformer", "Pooling", *("Dense" for _ in layers), *(["Normalize"] if config.get(NORMALIZE) else [])]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds[1:], start=1))]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    _write_json(folder / MODULES, modules)
    for path in paths[1:]:
        (folder / path).mkdir()
    pooling = {f"{FLAG}{theirs}": ours == config[POOLING] for theirs, ours in POOLING_MODES.items()}
    _write_json(folder / paths[1] / "config.json", {"word_embedding_dimension": config["hidden_size"], **pooling})
    for i, activation in layers.items():
        layer = {name: arrays.pop(f"{paths[i]}.{name}") for name in ("linear.weight", "linear.bias")}
        n_out, n_in = layer["linear.weight"].shape
        function = f"torch.nn.{activation}"
        shape = {"in_features": n_in, "out_features": n_out, "bias": True, "activation_function": function}
        _write_json(folder / paths[i] / "config.json", shape)
        save_safetensors(layer, folder / paths[i] / "model.safetensors", {"format": "pt"})


def _write_json(file: Path, value: dict[str, Any] | list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
