"""Import of a published model as a run."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Literal

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.captions import CaptionsConfig
from jaxformer.data.images import ImagesConfig
from jaxformer.data.labelled import LabelledTextConfig
from jaxformer.data.labelled_tokens import LabelledTokensConfig
from jaxformer.data.masked import MaskedTextConfig
from jaxformer.data.pairs import PairsConfig, TargetTokens
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError, parse_json
from jaxformer.interop.configs import family_of, read_config
from jaxformer.interop.families.encoders import class_names
from jaxformer.interop.families.tables import MAX_TOKENS, ImportedConfig
from jaxformer.interop.folder import PICKLED, ModelFolder, PublishedModel
from jaxformer.interop.gguf_file import GgufFile
from jaxformer.interop.packages import published_name
from jaxformer.interop.weights import Source, find_sources, load_params, stored_dtype
from jaxformer.models.clip import LARGEST_LOG_SCALE, CLIPConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import ClassifierConfig, EmbedderConfig, EncoderConfig, TokenClassifierConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.objective import Params
from jaxformer.models.vit import ViTConfig
from jaxformer.nn.parameters import parameter_axes
from jaxformer.parallel.mesh import shardings
from jaxformer.runs.pretrained import Pretrained
from jaxformer.runs.run import abstract_params, check_can_create, create_run
from jaxformer.terminal import echo_status

Dtype = Literal["auto", "float32", "bfloat16"]


def open_published(source: Path) -> PublishedModel:
    """Return the model in a GGUF file or a folder. Raises `UserError` if there is none that can be read."""
    return GgufFile.open(source) if source.is_file() else ModelFolder.open(source)


def load_published_tokenizer(published: PublishedModel, config: ImportedConfig) -> Tokenizer | None:
    """Return the tokenizer of a published model, without special tokens that the model has no embedding for; None for a
    model without text. Raises `UserError` if there is no tokenizer, a text needs one of these, or the model has no
    embedding for other tokens."""
    if (vocab_size := config.contract.vocab_size) is None:
        return None
    tokenizer = published.tokenizer()
    if tokenizer.vocab_size > vocab_size:  # such as the image token of Gemma 3's text-only models
        try:
            tokenizer = tokenizer.without_special_from(vocab_size)
        except ValueError as error:
            problem = f"without its tokens from {vocab_size:,} on, which the model does not embed"
            raise UserError(f"{problem}, the tokenizer of {published.path} {error}; use the model's own.") from error
    if tokenizer.vocab_size > vocab_size:
        problem = f"the tokenizer of {published.path} has {tokenizer.vocab_size:,} tokens, but the model embeds"
        raise UserError(f"{problem} {vocab_size:,}; use the model's own tokenizer.")
    start, first, last, banned = TargetTokens.of(tokenizer)
    for token in (start, first, last, *banned):
        if token is not None and not 0 <= token < vocab_size:
            problem = f"the config of {published.path} names the token {token} for targets, but the model embeds"
            raise UserError(f"{problem} {vocab_size:,}; restore the published one.")
    return tokenizer


def import_run(
    source: Path, run: Path, *, context_length: int | None = None, dtype: Dtype = "auto", mesh: Mesh | None = None
) -> tuple[Path, Config]:
    """Import a published model, a GGUF file or a folder with `config.json`, weights in safetensors and
    `tokenizer.json`, as a run with one checkpoint, at step 0; return the run's folder, which is created atomically, and
    its config. Training sequences have `context_length` tokens, None for at most `MAX_TRAINING_CONTEXT`; a sentence
    encoder has as many positions as texts may have tokens. dtype 'auto' stores parameters exactly, in the published
    dtype, and quantised ones in float32. On a mesh, each device holds its shards of them. Raises `UserError` if the
    source cannot be read as a known family, or the run exists."""
    check_can_create(run)
    published, model, tokenizer, abstract, sources = _open(source, context_length)
    sampling = _sampling(published, model)
    structs: dict[str, jax.ShapeDtypeStruct] = flatten_dict(abstract, sep=".")
    split = {} if mesh is None else shardings(abstract, parameter_axes(model.build()), mesh)
    split = flatten_dict(split, sep=".")
    for path, struct in structs.items():
        stored = stored_dtype(published, sources[path]) if dtype == "auto" else dtype
        structs[path] = jax.ShapeDtypeStruct(struct.shape, stored, sharding=split.get(path))
    params = _load(published, sources, unflatten_dict(structs, sep="."))
    limit = published.config.get(MAX_TOKENS, inf)
    if isinstance(model, EncoderConfig) and limit < model.context_length:  # positions beyond it are never used
        model = replace(model, context_length=limit)
        if "W_pos" in params["embedding"]:
            params["embedding"]["W_pos"] = params["embedding"]["W_pos"][:limit]
    config = finetuning_config(run.name, model)
    classes = class_names(published.config) if getattr(model, "n_classes", 0) else []
    echo_status(f"writing {run} ...")
    created = create_run(run, config, tokenizer, allow_suffix=False, classes=classes, params=params, sampling=sampling)
    return created, config


def _open(
    source: Path, context_length: int | None = None
) -> tuple[PublishedModel, ImportedConfig, Tokenizer | None, Params, dict[str, Source]]:
    """Return a published model, our config for it, its tokenizer if it reads texts, and the shapes and verified tensors
    of its parameters."""
    published = open_published(source)
    model = read_config(published.config, context_length)
    tokenizer, abstract = load_published_tokenizer(published, model), abstract_params(model.build())
    if tokenizer is not None and isinstance(model, CLIPConfig):
        _check_end_of_captions(published, tokenizer)
    return published, model, tokenizer, abstract, find_sources(published, family_of(published.config), model, abstract)


def left_out(source: Path) -> str | None:
    """Return the names of the parts of a published model that its import leaves out, such as `vision_tower`; None if it
    leaves out none."""
    published = open_published(source)
    pattern = family_of(published.config).unread
    found = [re.search(pattern, name) for name in published.names] if pattern else []
    return " and ".join(sorted({match[0].strip(".").rpartition(".")[2] for match in found if match})) or None


def _check_end_of_captions(published: PublishedModel, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if transformers reads the features of a text at another token than its last: at the first
    `eos_token_id`, or with that of older configs, 2, at the largest id."""
    named = family_of(published.config).read(published.config).get("text_config.eos_token_id", 49_407)
    if tokenizer.after_text != [tokenizer.vocab_size - 1 if named == 2 else named]:
        problem = (
            f"the tokenizer of {published.path} ends a text with {tokenizer.after_text or 'no token'}, but the model"
        )
        raise UserError(f"{problem} reads it at eos_token_id {named} of text_config; restore the published files.")


def _load(published: PublishedModel, sources: dict[str, Source], abstract: Params) -> Params:
    """Return the parameters, as `load_params` does. Raises `UserError` for a logit scale beyond the largest."""
    params = load_params(published, sources, abstract)
    if (t := params.get("t")) is not None and t > LARGEST_LOG_SCALE + 1e-4:
        limit = f"the limit is {LARGEST_LOG_SCALE:.4f}, the logarithm of 100"
        raise UserError(f"logit_scale in {published.path} is {t}; {limit}: use another checkpoint.")
    return params


def is_published(folder: Path) -> bool:
    """Return True for a file, or a folder with a published model, of any family and format, and False for a run."""
    if folder.is_file():
        return True
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return any(file.suffix in (".safetensors", ".gguf", *PICKLED) for file in folder.glob("*"))
    return isinstance(config, dict) and "model_type" in config


def pretrained_model(source: Path) -> Pretrained:
    """Return a published model as a starting point for training; its parameters are read later. Raises as `import_run`
    does."""
    published, model, tokenizer, _, sources = _open(source)
    config = finetuning_config(published_name(source), model)
    load = lambda abstract: _load(published, sources, abstract)  # noqa: E731
    return Pretrained(source, model, tokenizer, load, config, _sampling(published, model))


def _sampling(published: PublishedModel, model: ImportedConfig) -> dict[str, float]:
    """Return the sampling settings of a model that generates text."""
    return published.sampling() if isinstance(model, DecoderConfig) else {}


def finetuning_config(name: str, model: ImportedConfig) -> Config:
    """Return the config for fine-tuning a published model, with a small learning rate and few steps; a sentence encoder
    becomes a classifier of texts."""
    optimizer = OptimizerConfig("adamw", learning_rate=2e-5, schedule="cosine", warmup_steps=20, clip_norm=1.0)
    name = re.sub(r"^\W+|[^\w.-]+", "-", name).lstrip("-") or "imported"
    if isinstance(model, ViTConfig):
        train = TrainConfig(batch_size=32)
        return Config(name, model, data=ImagesConfig(), steps=400, optimizer=optimizer, train=train)
    if isinstance(model, CLIPConfig):
        train = TrainConfig(batch_size=64)
        return Config(name, model, data=CaptionsConfig(), steps=400, optimizer=optimizer, train=train)
    if isinstance(model, EmbedderConfig | ClassifierConfig | TokenClassifierConfig):
        optimizer = replace(optimizer, learning_rate=1e-4, weight_decay=0.01, b2=0.999)
        train = TrainConfig(batch_size=32, eval_examples=512)
        labelled = LabelledTokensConfig() if isinstance(model, TokenClassifierConfig) else LabelledTextConfig()
        return Config(name, model, data=labelled, steps=400, optimizer=optimizer, train=train)
    if isinstance(model, EncoderDecoderConfig):
        return Config(name, model, data=PairsConfig(), steps=500, optimizer=optimizer, train=TrainConfig(batch_size=8))
    data = MaskedTextConfig() if isinstance(model, EncoderConfig) else TextConfig()
    return Config(name, model, data=data, steps=500, optimizer=optimizer, train=TrainConfig(batch_size=8))
