"""Classification of images, videos, texts and tokens, zero-shot classification of images by texts and retrieval of
images by texts, and vectors of images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.data.captions import tokenize_captions
from jaxformer.data.image_io import read_model_input
from jaxformer.data.labelled import pad_texts, tokenize_text, tokens_around
from jaxformer.decode.batches import padded_length
from jaxformer.decode.programs import call
from jaxformer.decode.prompts import Prompt
from jaxformer.models.objective import Params
from jaxformer.runs.run import Run

Ranking = list[tuple[str, float]]
"""Names with their probabilities, the most likely first."""


@partial(jax.jit, static_argnames=("model",))
def classify(model: nn.Module, params: Params, *inputs: jax.Array) -> jax.Array:
    """Return the class probabilities, `(n_classes,)` float32, for an image `(height, width, C)` or a video, uint8, or
    for the tokens of a text and their mask; `(T, n_classes)` from a model that classifies tokens."""
    return jax.nn.softmax(call(model, params, "__call__", *inputs).astype(jnp.float32))


@partial(jax.jit, static_argnames=("model",))
def match(model: nn.Module, params: Params, images: jax.Array, tokens_NT: jax.Array, valid_NT: jax.Array) -> jax.Array:
    """Return the logits of a `CLIP` for each image and text, scaled cosines, `(n_images, N)` float32; the softmax over
    texts is their probability for an image (Radford et al. 2021, section 3.1.2). Images are `(n_images, height, width,
    C)` uint8; `data.captions.tokenize_captions` makes the texts."""
    image_IE = jax.vmap(partial(call, model, params, "encode_image"))(images)
    text_NE = jax.vmap(partial(call, model, params, "encode_text"))(tokens_NT, valid_NT)
    # A device's default matmul precision may leave the cosines only a few digits, and the scale is up to 100.
    cosine_IN = jnp.matmul(image_IE, text_NE.T, precision=jax.lax.Precision.HIGHEST)
    return jnp.exp(call(model, params, "log_scale")) * cosine_IN


@partial(jax.jit, static_argnames=("model",))
def _features(model: nn.Module, params: Params, pixels: jax.Array) -> jax.Array:
    return call(model, params, "encode", pixels).astype(jnp.float32)


def embed_images(run: Run, files: Sequence[str]) -> np.ndarray:
    """Return the features of each image, `(n_images, F)` float32. Raises `UserError` if an image cannot be read."""
    return np.stack([_features(run.model, run.params, pixels) for pixels in _read_images(run, files)])


def classify_images(run: Run, files: Sequence[str]) -> list[Ranking]:
    """Return, per image, the names of all classes with their probabilities, the most likely first. Raises `UserError`
    if an image cannot be read."""
    probs = [classify(run.model, run.params, pixels).tolist() for pixels in _read_images(run, files)]
    return _ranked(run.classes or range(len(probs[0])), probs)


def encode_labelled(prompt: Prompt, run: Run) -> list[int]:
    """Return the tokens of a text to classify or embed. Raises `UserError` if the prompt has a seed or is too long."""
    prompt.check_no_seed(f"a {type(run.model).__name__} does not sample")
    model, tokenizer = run.text_model()
    tokens = tokenize_text(prompt.text, tokenizer)
    limit = model.context_length
    n_added = "one before and one after the text" if tokenizer.after_text else "one before the text"
    prompt.check_length(len(tokens), limit, f"{limit}, {n_added} included")
    return tokens


def classify_text(run: Run, tokens: Sequence[int]) -> Ranking:
    """Return the labels of a text with their probabilities, the most likely first."""
    tokens_BT, valid_BT = pad_texts([tokens], padded_length(len(tokens), run.text_model()[0].context_length))
    probs = classify(run.model, run.params, tokens_BT[0], valid_BT[0]).tolist()
    return _ranked(run.classes or range(len(probs)), [probs])[0]


def classify_tokens(run: Run, tokens: Sequence[int]) -> list[tuple[str, Ranking]]:
    """Return each token of a text with its own text, and all labels with their probabilities, the most likely first;
    without the tokens around the text. `tokens` are those of `encode_labelled`."""
    model, tokenizer = run.text_model()
    tokens_BT, valid_BT = pad_texts([tokens], padded_length(len(tokens), model.context_length))
    probs = classify(run.model, run.params, tokens_BT[0], valid_BT[0])
    before, after = tokens_around(tokenizer)
    inner = slice(len(before), len(tokens) - len(after))
    rankings = _ranked(run.classes or range(probs.shape[-1]), probs[inner].tolist())
    return [(tokenizer.decode_part([token]), row) for token, row in zip(tokens[inner], rankings, strict=True)]


def rank_matches(run: Run, files: Sequence[str], texts: list[str], by_text: bool = False) -> list[Ranking]:
    """Return, per image, the texts with their probabilities, the most likely first; with `by_text`, per text, the
    images. Raises `UserError` if an image cannot be read."""
    assert run.tokenizer is not None
    tokens_NT, valid_NT, _ = tokenize_captions(texts, run.tokenizer, _max_text_tokens(run))
    images = np.stack(_read_images(run, files))
    logits_IN = match(run.model, run.params, images, tokens_NT, valid_NT)
    names, logits = (files, logits_IN.T) if by_text else (texts, logits_IN)
    return _ranked(names, jax.nn.softmax(logits).tolist())


def check_text(prompt: Prompt, run: Run) -> str:
    """Return the text of a prompt for the text encoder. Raises `UserError` if the prompt has a seed or too many
    tokens."""
    prompt.check_no_seed("classification does not sample")
    assert run.tokenizer is not None
    limit = _max_text_tokens(run) - 2
    prompt.check_length(len(run.tokenizer.encode(prompt.text)), limit, f"{limit}, and one before and after them")
    return prompt.text


def _max_text_tokens(run: Run) -> int:
    """Return the maximum number of tokens per text, including the start and end tokens."""
    return run.config.model.example()[1].shape[0]


def _read_images(run: Run, files: Sequence[str]) -> list[np.ndarray]:
    contract = run.config.model.contract
    return [read_model_input(file, contract.inputs[0].shape, contract.resizing) for file in files]


def _ranked(names: Iterable[object], probs: Sequence[Sequence[float]]) -> list[Ranking]:
    return [sorted(zip(map(str, names), row, strict=True), key=lambda named: -named[1]) for row in probs]
