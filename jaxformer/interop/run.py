"""Import of a published model as a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError, parse_json
from jaxformer.interop.configs import family_of, read_config
from jaxformer.interop.folder import GENERATION, PICKLED, ModelFolder, read_object
from jaxformer.interop.weights import Source, find_sources, load_params, stored_dtype
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params
from jaxformer.runs.pretrained import Pretrained
from jaxformer.runs.run import TOKENIZER, abstract_params, check_writable_parent, create_run

Dtype = Literal["auto", "float32", "bfloat16"]


def load_published_tokenizer(folder: ModelFolder, config: DecoderConfig) -> Tokenizer:
    """Return the tokenizer of a published model, without special tokens that the model has no embedding for. Raises
    `UserError` if there is no tokenizer, or it has other tokens that the model has no embedding for."""
    file = folder.path / TOKENIZER
    if not file.exists():
        remedy = "write it with save_pretrained of transformers' AutoTokenizer"
        raise UserError(f"{folder.path} has no {TOKENIZER}; {remedy}.")
    tokenizer = Tokenizer.load(file, eos_token_ids(folder))
    if tokenizer.vocab_size > config.vocab_size:  # such as the image token of Gemma 3's text-only models
        tokenizer = tokenizer.without_special_from(config.vocab_size)
    if tokenizer.vocab_size > config.vocab_size:
        problem = f"{file} has {tokenizer.vocab_size:,} tokens, but the model embeds {config.vocab_size:,}"
        raise UserError(f"{problem}; use the model's own tokenizer.")
    return tokenizer


def eos_token_ids(folder: ModelFolder) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text, of which a published config may name any number. Raises `UserError`
    if they are not ids."""
    generation = folder.path / GENERATION
    named = read_object(generation).get("eos_token_id") if generation.exists() else None
    named = folder.config.get("eos_token_id") if named is None else named
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(token) is int for token in ids):  # True would be read as token 1
        raise UserError(f"the eos_token_id of {folder.path} is {named!r}; it must be an id or a list of ids.")
    return tuple(ids)


def import_run(
    source: Path, run: Path, *, context_length: int | None = None, dtype: Dtype = "auto"
) -> tuple[Path, Config]:
    """Import a published model, a folder with `config.json`, weights in safetensors and `tokenizer.json`, as a run with
    one checkpoint, at step 0; return the run's folder, which is created atomically, and its config. Training sequences
    have `context_length` tokens, None for at most `MAX_TRAINING_CONTEXT`; dtype 'auto' stores parameters exactly, in
    the published dtype. Raises `UserError` if the source cannot be read as a known family, or the run exists."""
    if run.exists():
        raise UserError(f"{run} exists; choose another --run.")
    check_writable_parent(run)
    folder, model, tokenizer, abstract, sources = _open(source, context_length)
    structs: dict[str, jax.ShapeDtypeStruct] = flatten_dict(abstract, sep=".")
    for path, struct in structs.items():
        stored = stored_dtype(folder, sources[path]) if dtype == "auto" else dtype
        structs[path] = jax.ShapeDtypeStruct(struct.shape, stored)
    params = load_params(folder, sources, unflatten_dict(structs, sep="."))
    config = finetuning_config(run.name, model)
    return create_run(run, config, tokenizer, allow_suffix=False, params=params), config


def _open(
    source: Path, context_length: int | None = None
) -> tuple[ModelFolder, DecoderConfig, Tokenizer, Params, dict[str, Source]]:
    """Return a published model's folder, our config for it, its tokenizer, and the shapes and verified tensors of its
    parameters."""
    folder = ModelFolder.open(source)
    model = read_config(folder.config, context_length)
    tokenizer, abstract = load_published_tokenizer(folder, model), abstract_params(model.build())
    return folder, model, tokenizer, abstract, find_sources(folder, family_of(folder.config), model, abstract)


def is_published(folder: Path) -> bool:
    """Return True for a folder with a published model, of any family and format, and False for a run."""
    try:
        config = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return any(file.suffix in (".safetensors", *PICKLED) for file in folder.glob("*"))
    return isinstance(config, dict) and "model_type" in config


def pretrained_model(source: Path) -> Pretrained:
    """Return a published model as a starting point for training; its parameters are read later. Raises as `import_run`
    does."""
    folder, model, tokenizer, _, sources = _open(source)
    config = finetuning_config(source.resolve().name, model)
    return Pretrained(source, model, tokenizer, lambda abstract: load_params(folder, sources, abstract), config)


def finetuning_config(name: str, model: DecoderConfig) -> Config:
    """Return the config for fine-tuning a published model, with a small learning rate and few steps."""
    optimizer = OptimizerConfig("adamw", learning_rate=2e-5, schedule="cosine", warmup_steps=20, clip_norm=1.0)
    name = re.sub(r"^\W+|[^\w.-]+", "-", name).lstrip("-") or "imported"
    return Config(name, model, data=TextConfig(), steps=500, optimizer=optimizer, train=TrainConfig(batch_size=8))
