"""`sample.py` on the run of a model that sees: it says what images show, or which of several texts fits them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxformer.cli.load import RunOptions, open_run
from jaxformer.cli.prompts import Prompt, prepared
from jaxformer.contract import Task, contract_of
from jaxformer.errors import UserError
from jaxformer.terminal import echo

if TYPE_CHECKING:
    from jaxformer.runs import Run

APPLY = {"--run", "--checkpoint", "--weights", "--images", "--jsonl"}
"""The options that all such models know."""
TEXTS = {"--prompt", "--prompts-file"}
"""And those that one of images and texts knows, too."""
MOST_NAMED = 5
"""So many of what an image may show are named for people; JSON has all."""


def tell_images(
    options: RunOptions, images: Sequence[str], prompts: Sequence[Prompt | UserError], given: set[str], jsonl: bool
) -> int:
    """Print a line for each image: what it may show with how probable that is, the likeliest first; the exit status.

    Raises:
      UserError: there are no images, or no texts to choose from; an option says nothing of them; an image cannot be
        read; or a prompt that is not of a file has too many tokens.
    """
    from jaxformer.data.captions import tokenize_captions
    from jaxformer.data.image_io import read_model_input
    from jaxformer.decode.classify import classify, match
    from jaxformer.decode.weights import restored
    from jaxformer.runs import CLASSES

    run = open_run(options, None)
    run = dataclasses.replace(run, params=restored(run.params))  # read once, so rounding saves no time
    chooses = contract_of(run.model).task is Task.CONTRASTIVE
    if others := sorted(given - APPLY - (TEXTS if chooses else set())):
        raise UserError(f"the run says what images show, of which {others[0]} says nothing; leave it out.")
    if not images:
        raise UserError("there is nothing to look at; give --images, such as --images photo.png.")
    if chooses and not given & TEXTS:
        raise UserError("there is nothing to choose from; give texts with --prompt or --prompts-file.")
    seen = [read_model_input(file, run.config.model.example()[0].shape) for file in images]
    if not chooses:
        found = [classify(run.model, run.params, pixels).tolist() for pixels in seen]
        n = len(found[0])
        if run.classes and len(run.classes) != n:
            raise UserError(
                f"{run.path / CLASSES} has {len(run.classes)} names, but the model {n} classes; remove it for numbers."
            )
        return _show(images, found, run.classes or [str(number) for number in range(n)], jsonl)
    check = lambda prompt: _text(prompt, run)  # noqa: E731
    texts: list[str] = prepared(prompts, check, "--prompts-file" in given)
    if texts:
        assert run.tokenizer is not None
        tokens, valid, _ = tokenize_captions(texts, run.tokenizer, _length(run))
        _show(images, match(run.model, run.params, np.stack(seen), tokens, valid).tolist(), texts, jsonl)
    return 2 if len(texts) < len(prompts) else 0


def _length(run: Run) -> int:
    """Tokens of a text at most, with the ones at its start and its end."""
    return run.config.model.example()[1].shape[0]


def _text(prompt: Prompt, run: Run) -> str:
    """A prompt's text, if it can be read to its end."""
    if prompt.seed is not None:
        raise UserError(f"{prompt.where} has a seed, but nothing is drawn; leave it out.")
    assert run.tokenizer is not None
    n, most = len(run.tokenizer.encode(prompt.text)), _length(run) - 2
    if n > most:
        raise UserError(f"{prompt.where} has {n} tokens; it may have at most {most}, and one before and after them.")
    return prompt.text


def _show(images: Sequence[str], found: Iterable[Sequence[float]], names: Sequence[str], jsonl: bool) -> int:
    for image, probabilities in zip(images, found, strict=True):
        row = sorted(zip(names, probabilities, strict=True), key=lambda named: -named[1])
        if jsonl:
            echo(json.dumps({"image": image, "shows": [(name, float(f"{p:.4g}")) for name, p in row]}))
        else:
            echo(f"{image}: " + ", ".join(f"{name} {p:.3f}" for name, p in row[:MOST_NAMED]))
    return 0
