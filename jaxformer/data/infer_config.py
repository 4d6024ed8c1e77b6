"""Inference of model config fields from data: vocabulary size, image size, patch size."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any, TypeVar

from jaxformer.config import Fixed, ModelConfig, TokenModelConfig
from jaxformer.config.fields import MAX_SIDE, differences
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError

MAX_INFERRED_SIDE_PIXELS = 256
"""Largest image side, in pixels, that a model's config adopts; larger images are resized to the model's own size."""


Config = TypeVar("Config", bound=ModelConfig)
Sized = TypeVar("Sized", bound=Any)
"""A config with `image_size` and, if it has patches, `patch_size`."""


def is_fixed(name: str, fixed: Fixed) -> bool:
    """Return True for a field that is not to be inferred; `fixed` of None fixes all."""
    return fixed is None or name in fixed


def infer_n_classes(model: Config, n: int, path: str, fixed: Fixed) -> Config:
    """Return the config of a classifier with n classes. Raises `UserError` if its own number is fixed, and another."""
    if not is_fixed("n_classes", fixed):
        return replace(model, n_classes=n)  # type: ignore[call-arg]
    if (own := model.contract.n_classes) != n:
        raise UserError(f"{path} has {n} classes, but `model.n_classes` is {own}; set `model.n_classes={n}`.")
    return model


def infer_vocab_size(model: TokenModelConfig, tokenizer: Tokenizer, extra: int = 0) -> TokenModelConfig:
    """Return the config with a vocabulary of at most the tokenizer's size plus `extra`."""
    return replace(model, vocab_size=min(model.vocab_size, tokenizer.vocab_size + extra))


def fit_vocab_size(model: TokenModelConfig, tokenizer: Tokenizer, extra: int, fixed: Fixed) -> TokenModelConfig:
    """Return the config with the vocabulary size of a given tokenizer plus `extra`, or with its own if that is fixed.
    Raises `UserError` if the config's vocabulary is fixed and smaller."""
    needed = tokenizer.vocab_size + extra
    if fixed is None or "vocab_size" not in fixed:
        return replace(model, vocab_size=needed)
    if model.vocab_size < needed:
        problem = f"`model.vocab_size` is {model.vocab_size:,}, but the tokenizer of `data.tokenizer` needs {needed:,}"
        raise UserError(f"{problem}; set it to that, or omit it.")
    return model


def infer_image_size(model: Sized, images: tuple[int, ...] | None, fixed: Fixed, prefix: str = "") -> Sized:
    """Return the config with the size of the images (height and width of all, None if they differ), and with about as
    many patches as before. The config has `image_size` and, if it has patches, `patch_size`, heights and widths in
    pixels. `fixed` has the names, with the prefix, of fields that are not inferred; None fixes all. Images need
    resizing if the model's size is fixed, if their sizes differ or exceed `MAX_INFERRED_SIDE_PIXELS`, or if no patch
    size fits."""
    patch = getattr(model, "patch_size", None)
    fixed_size = is_fixed(f"{prefix}image_size", fixed)
    fixed_patch = patch is None or is_fixed(f"{prefix}patch_size", fixed)
    if fixed_size or images is None or max(images) > MAX_INFERRED_SIDE_PIXELS:
        images = model.image_size
    sides = [
        _infer_side(old, side, new, fixed_size, fixed_patch)
        for old, side, new in zip(model.image_size, patch or (1, 1), images, strict=True)
    ]
    size, new_patch = zip(*sides, strict=True)
    return replace(model, image_size=size, **({} if patch is None else {"patch_size": new_patch}))


def fit_patches(model: Any, given: str, size: tuple[int, ...]) -> Any:
    """Return the config with the given image or patch size, and the other of the two adjusted so that patches divide
    images; the unchanged config if `size` is invalid.

    Args:
      given: `image_size` or `patch_size`.
      size: height and width in pixels, or one number for both.
    """
    sides = size * 2 if len(size) == 1 else size
    if len(sides) != 2 or min(sides) < 1 or max(sides) > MAX_SIDE:
        return model
    is_size = given == "image_size"
    new, patch = (sides, model.patch_size) if is_size else (model.image_size, sides)
    fixed = {"fixed_size": is_size, "fixed_patch": not is_size}
    fitted = [_infer_side(*side, **fixed) for side in zip(model.image_size, patch, new, strict=True)]
    images, patches = zip(*fitted, strict=True)
    return replace(model, image_size=images, patch_size=patches)


def _infer_side(old: int, patch: int, new: int, fixed_size: bool, fixed_patch: bool) -> tuple[int, int]:
    """Return one side of the images and one of the patches; see `infer_image_size`."""
    n_patches = max(1, old // patch)

    def distance(divisor: int) -> float:
        return abs(log(new // divisor / n_patches))

    if new % patch == 0 and (fixed_patch or distance(patch) <= log(2)):
        return new, patch
    best = min((n for n in range(1, new + 1) if new % n == 0), key=distance)
    if not fixed_patch and (fixed_size or distance(best) <= log(2)):
        return new, best
    return (new, patch) if fixed_size else (max(1, round(new / patch)) * patch, patch)


def describe_changes(before: ModelConfig, after: ModelConfig, reason: str) -> tuple[str, ...]:
    """Return a note about the fields in which the configs differ, or none."""

    def words(value: object) -> str:
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    changes = [f"{name} {words(new)} (not {words(old)})" for name, old, new in differences(before, after, "model")]
    return (f"{reason}: {', '.join(changes)}",) if changes else ()


def describe_tokenizer_sample(tokenizer: Tokenizer, name: str) -> tuple[str, ...]:
    """Return a note if a tokenizer was trained on a sample of the named text, or none."""
    if tokenizer.one_in == 1:
        return ()
    return (f"the tokenizer was trained on about 1/{tokenizer.one_in} of {name}, sampled from all parts of it",)
