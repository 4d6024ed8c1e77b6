"""Fitting a model's config to data: as many tokens as a text supports, images of the size that they have."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from math import log
from typing import Any

from jaxformer.config import ModelConfig, TokenModelConfig
from jaxformer.data.tokenizer import MAX_LEARNED_CHARACTERS, Tokenizer
from jaxformer.fields import MAX_BY_FIELD, differences

MAX_INFERRED_SIDE_PIXELS = 256
"""Pixels; a model is not fitted to images that are larger, they are resized to it."""


class All(Container[str]):
    """Contains every field: nothing of the model may change."""

    def __contains__(self, field: object) -> bool:
        return True


ALL = All()


def infer_vocab_size(model: TokenModelConfig, tokenizer: Tokenizer, extra: int = 0) -> TokenModelConfig:
    """Return the model with no more tokens than its tokenizer has, and `extra` ones."""
    return replace(model, vocab_size=min(model.vocab_size, tokenizer.vocab_size + extra))


def infer_image_size(
    size: tuple[int, ...], patch: tuple[int, ...], images: tuple[int, ...] | None, fixed_size: bool, fixed_patch: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the height and width, and those of patches, with which a model reads images.

    The model takes the size that the images have, in about as many patches as before. Images are to be resized to
    another size where the model's is fixed, where theirs differ or are above `MAX_INFERRED_SIDE_PIXELS`,
    and where no patch divides them.

    Args:
      size: of the model's images, in pixels.
      patch: of its patches.
      images: height and width of all images, None where they have several.
      fixed_size: `size` must stay.
      fixed_patch: `patch` must stay.
    """
    if fixed_size or images is None or max(images) > MAX_INFERRED_SIDE_PIXELS:
        images = size
    sides = [
        _fit_side(old, side, new, fixed_size, fixed_patch) for old, side, new in zip(size, patch, images, strict=True)
    ]
    return tuple(side for side, _ in sides), tuple(side for _, side in sides)


def infer_patch_size(model: Any, size: tuple[int, ...]) -> Any:
    """Return a config for images of this size, one number for both sides, with patches that divide them; the config as
    it is, if it has no patches or this is no size."""
    sides = size * 2 if len(size) == 1 else size
    if not (hasattr(model, "patch_size") and hasattr(model, "image_size")) or len(sides) != 2:
        return model
    if min(sides) < 1 or max(sides) > MAX_BY_FIELD["image_size"]:
        return model
    patches = [
        _fit_side(old, patch, new, fixed_size=True, fixed_patch=False)[1]
        for old, patch, new in zip(model.image_size, model.patch_size, sides, strict=True)
    ]
    return replace(model, image_size=sides, patch_size=tuple(patches))


def _fit_side(old: int, patch: int, new: int, fixed_size: bool, fixed_patch: bool) -> tuple[int, int]:
    n_patches = max(1, old // patch)

    def distance(divisor: int) -> float:
        return abs(log(new // divisor / n_patches))

    if new % patch == 0 and (fixed_patch or distance(patch) <= log(2)):
        return new, patch
    best = min((n for n in range(1, new + 1) if new % n == 0), key=distance)
    if not fixed_patch and (fixed_size or distance(best) <= log(2)):
        return new, best
    return (new, patch) if fixed_size else (max(1, round(new / patch)) * patch, patch)


def describe_changes(before: ModelConfig, after: ModelConfig, why: str) -> tuple[str, ...]:
    """Return a sentence about the fields in which the configs differ, or none."""
    changes = [f"{name} {_shown(new)} (not {_shown(old)})" for name, old, new in differences(before, after, "model")]
    return (f"{why}: {', '.join(changes)}",) if changes else ()


def describe_tokenizer_sample(tokenizer: Tokenizer, name: str) -> tuple[str, ...]:
    """Return a sentence where a tokenizer learned from a sample of what the name stands for."""
    if tokenizer.one_in == 1:
        return ()
    return (
        f"{name} has more than {MAX_LEARNED_CHARACTERS:,} characters of different words: the tokenizer learned from "
        f"about 1/{tokenizer.one_in} of the text, taken from all parts of it",
    )


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
