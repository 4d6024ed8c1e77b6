"""Fields of config dataclasses: range checks, comparison, and conversion to and from JSON."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

import numpy as np

from jaxformer.config_files import kind_of
from jaxformer.errors import UserError, abbreviate

T = TypeVar("T")
MAX_INTEGER = 2**31 - 1
"""Largest int32, the integer type on devices."""
LARGEST, SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
"""Largest and smallest positive float32, the type of real numbers on devices, which treat smaller ones as 0."""
MAX_SIZE = 2**20
"""Default maximum of integers in a model's config, such as its width or its number of heads, classes or experts."""
MAX_BY_FIELD: Mapping[str, int] = {
    **dict.fromkeys(("n_blocks", "n_encoder_blocks", "n_decoder_blocks", "n_temporal_blocks", "n_layers"), 2**10),
    **dict.fromkeys(("image_size", "patch_size", "n_frames", "tubelet_frames", "shift", "max_speed"), 2**14),
    **dict.fromkeys(("vocab_size", "context_length", "max_context", "window", "n_pairs", "n_held_out"), 2**24),
    "rope_original_context": 2**24,
    **dict.fromkeys(("sample_tokens",), 2**16),
    **dict.fromkeys(("batch_size", "grad_accumulation_steps", "processes"), 2**20),
    "seed": 2**32 - 1,
    "heartbeat_seconds": 86_400,
}
"""Maximum of integer fields by name, in every config: far beyond existing models, but small enough to fail at once
instead of exhausting memory."""
BOUNDS: Mapping[str, Mapping[str, Any]] = {
    name: bounds
    for names, bounds in (
        (
            """vocab_size context_length channels n_classes d_model n_heads n_kv_heads head_dim value_dim d_ff
            d_attention d_joint d_embedding n_blocks n_encoder_blocks n_decoder_blocks n_temporal_blocks n_layers
            n_frames tubelet_frames window n_experts experts_per_token rope_base local_rope_base rope_scaling
            rope_original_context
            n_pairs n_held_out stride shortest_prefix max_speed base_width
            steps batch_size grad_accumulation_steps log_every eval_examples max_skips sample_tokens
            max_new_tokens num_samples num_beams prefill_chunk heartbeat_seconds""",
            {"least": 1},
        ),
        (
            """projection_std embedding_std unembedding_std balance_weight router_z_weight n_segments rank shift
            local_heads diagonal_heads
            seed warmup_steps weight_decay final_fraction eval_every report_every gradients_every checkpoint_every
            skip_batches from_step""",
            {"least": 0},
        ),
        ("momentum b1 b2 label_smoothing dropout drop_words tolerance", {"least": 0, "below": 1}),
        ("scale jitter", {"least": 0, "most": 1}),
        ("rotate", {"least": 0, "most": 180}),
        ("learning_rate std alpha score_scale logit_soft_cap", {"above": 0}),
        ("clip_norm", {"above": 0, "hint": ", or none to disable it"}),
        ("norm_eps", {"above": 0, "hint": ", such as 1e-6, or none for that of the norm"}),
        ("capacity_factor", {"above": 0, "hint": ", such as 1.25, or none to drop nothing"}),
        ("val_fraction", {"above": 0, "below": 1, "hint": ", such as 0.05"}),
        ("masked_fraction", {"above": 0, "most": 1, "hint": ", such as 0.15"}),
        ("decay_fraction", {"above": 0, "most": 1, "hint": ", such as 0.2"}),
    )
    for name in names.split()
}
"""Range of numeric fields by name, in every config of this package; see `check_range`."""


def check_fields(config: object, max_integer: int = MAX_INTEGER, prefix: str = "") -> None:
    """Check choices, finiteness in float32, maxima of integers (`max_integer` for fields not in `MAX_BY_FIELD`) and
    `BOUNDS` of a config, a dataclass; NumPy scalars count as numbers. Raises `UserError`, with the prefix, such as
    `data.`, before the field's name, if a value is not a choice of its `Literal`, not finite, above its maximum or out
    of its bounds."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        value, hint, maximum = getattr(config, f.name), hints[f.name], MAX_BY_FIELD.get(f.name, max_integer)
        values, hint = (value, typing.get_args(hint)[0]) if typing.get_origin(hint) is tuple else ((value,), hint)
        if typing.get_origin(hint) is Literal:
            for wrong in (v for v in values if v not in typing.get_args(hint)):
                raise not_a_choice(f.name, wrong, typing.get_args(hint))
        for number in _numbers(value):
            if isinstance(number, int) and _has_integers(hint) and number > maximum:
                raise UserError(f"{f.name} is {abbreviate(number)}; it must be at most {maximum}.")
            if not abs(number) <= LARGEST:
                raise UserError(f"{f.name} is {abbreviate(number)}; it must be a finite number, at most 3.4e38.")
        # Python 3.14 has no `__annotations__` in the `vars` of a class; a subclass has the same object for a field.
        *_, owner = (cls for cls in type(config).__mro__ if vars(cls).get("__dataclass_fields__", {}).get(f.name) is f)
        if f.name in BOUNDS and owner.__module__.startswith("jaxformer."):
            check_range(config, f"{prefix}{f.name}", **BOUNDS[f.name])


def not_a_choice(name: str, value: object, choices: Iterable[object]) -> UserError:
    """Return the error for a value that is not one of its choices, with a similar one."""
    words = [*map(str, choices)]
    near = get_close_matches(str(value), words, 1)
    remedy = f"; did you mean {near[0]}?" if near else "."
    return UserError(f"{name} is {abbreviate(value)}; it must be one of {', '.join(words)}{remedy}")


def _numbers(value: Any) -> Iterator[int | float]:
    """Yield the numbers in a value and its nested tuples, as Python numbers."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item)
    elif not isinstance(value, bool) and isinstance(value, Real):
        yield int(value) if isinstance(value, Integral) else float(value)


def _has_integers(hint: Any) -> bool:
    """Return True for `int`, and for tuples or optional values of `int`."""
    return hint is int or any(map(_has_integers, typing.get_args(hint)))


def check_range(
    config: object, *names: str, least: float = -inf, above: float = -inf, most: float = inf, below: float = inf,
    hint: str = "",
) -> None:  # fmt: skip
    """Raise `UserError` for the first of the named fields with a number outside the closed bounds `least` and `most` or
    the open bounds `above` and `below`, or whose float32, which devices compute with, is outside; None is not checked.
    A prefix of a name, such as `data.`, appears only in the message, which ends with the hint, such as ", such as
    0.1"."""
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    limits = " and ".join(f"{words} {bound}" for words, bound in bounds.items() if isfinite(bound))
    for name in names:
        value = getattr(config, name.rpartition(".")[2])
        inside = lambda x: least <= x <= most and (x > above or above == -inf) and (x < below or below == inf)  # noqa: E731
        for number in _numbers(value):
            rounded = as_float32(number)
            if not (inside(number) and inside(rounded)):
                outside = f", which is {rounded:g} in float32" if inside(number) else ""
                raise UserError(f"{name} is {value}{outside}; it must be {limits}{hint}.")


def as_float32(number: int | float) -> int | float:
    """Return a number as devices compute with it; integers are unchanged."""
    if isinstance(number, int) or abs(number) > LARGEST:
        return number
    return float(np.float32(number)) if abs(number) >= SMALLEST else 0.0


def expand_sides(config: object, *names: str) -> None:
    """Expand fields with one value to a height and a width in pixels. Raises `UserError` unless there are one or
    two."""
    for name in names:
        value = getattr(config, name)
        sides = value if isinstance(value, tuple) else (value,)
        sides = sides * 2 if len(sides) == 1 else sides
        if len(sides) != 2 or min(sides) < 1:
            raise UserError(f"{name} is {value}; it must be a height and a width of at least 1 pixel, or one for both.")
        object.__setattr__(config, name, sides)


def expand_patches(config: Any) -> None:
    """Apply `expand_sides` to `image_size` and `patch_size`. Raises `UserError` if patches do not divide images."""
    expand_sides(config, "image_size", "patch_size")
    if any(size % patch for size, patch in zip(config.image_size, config.patch_size, strict=True)):
        raise UserError(f"patch_size {config.patch_size} does not divide image_size {config.image_size}; change one.")


def differences(a: object, b: object, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Return the fields in which two configs differ, as `(dotted name, value in a, value in b)`."""
    if type(a) is not type(b) or not dataclasses.is_dataclass(a):
        return [] if a == b else [(prefix, a, b)]
    return [
        row
        for f in dataclasses.fields(a)
        for row in differences(getattr(a, f.name), getattr(b, f.name), f"{prefix}.{f.name}".lstrip("."))
    ]


def flatten(value: Any, name: str = "", separator: str = ".") -> dict[str, Any]:
    """Return the leaves of a JSON tree by path; list items are keyed by their "name" if all have one, else by index."""
    if isinstance(value, dict):
        items: dict[Any, Any] = value
    elif isinstance(value, list):
        named = all(isinstance(x, dict) and "name" in x for x in value)
        items = {
            (x["name"] if named else i): {k: v for k, v in x.items() if k != "name"} if named else x
            for i, x in enumerate(value)
        }
    else:
        return {name: value}
    leaves: dict[str, Any] = {}
    for key, item in items.items():
        leaves |= flatten(item, f"{name}{separator}{key}" if name else str(key), separator)
    return leaves


def nonfinite_to_none(value: Any) -> Any:
    """Return a tree with None in place of infinities and NaN, which JSON cannot represent."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: nonfinite_to_none(x) for name, x in value.items()}
    return [nonfinite_to_none(x) for x in value] if isinstance(value, list | tuple) else value


def to_dict(config: object) -> dict[str, Any]:
    """Return a config as plain JSON types. A subclass of a field's declared class is named in `kind`; see
    `config_files.kind_of`."""
    assert dataclasses.is_dataclass(config)
    hints = typing.get_type_hints(type(config))
    values: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = values[f.name] = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            kind = {} if type(value) is hints[f.name] else {"kind": kind_of(type(value))}
            values[f.name] = kind | to_dict(value)
    return values


def from_dict(cls: type[T], values: Mapping[str, Any], path: str = "config") -> T:
    """Return the config that `to_dict` converted, a dataclass whose fields are plain types or dataclasses. `kind` is
    not handled, and missing fields have their default. Raises `UserError`, with `path` as the prefix of field names, if
    a field is unknown, has the wrong type, or is missing and has no default."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the known ones are {', '.join(names)}."
            raise UserError(f"{path} has a field {abbreviate(name)} that {cls.__name__} does not know; {hint}")
    try:
        return cls(**{name: _convert(hints[name], value, f"{path}.{name}") for name, value in values.items()})
    except TypeError as error:
        raise UserError(f"{path} is incomplete: {error}.") from error


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Return a JSON value as the annotated type, lists as tuples. Raises `UserError` if it has another type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return from_dict(hint, value, path)
    elif origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value, path)
    elif origin is Literal:
        if value not in args:
            raise not_a_choice(path, value, args)
        return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(args[0], v, path) for v in value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if isinstance(value, float) or value.bit_length() < 1024 else inf
    elif type(value) is hint:
        return value
    raise UserError(f"{path} is {abbreviate(value)}, which is not {getattr(hint, '__name__', None) or hint}.")
