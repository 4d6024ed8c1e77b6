"""Fields of config dataclasses: range checks, comparison, and conversion to and from JSON."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from itertools import pairwise
from math import inf, isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar

from jaxformer.config.files import kind_of
from jaxformer.errors import UserError, abbreviate

T = TypeVar("T")
MAX_INTEGER = 2**31 - 1
"""Largest int32, the integer type on devices."""
MAX_FLOAT = (2 - 2**-23) * 2.0**127
"""Largest float32."""
MAX_LENGTH, MAX_SIDE = 2**24, 2**14
"""Maximum number of tokens, and of pixels along a side of an image: far beyond existing models, but small enough to
fail at once instead of exhausting memory."""

KINDS: dict[object, str] = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
"""Description of each plain type in error messages."""
NUMBERS: dict[object, type] = {int: Integral, float: Real}
"""Types of the values that a number may have, also NumPy's; bool is none of them here."""


@dataclass(frozen=True)
class Range:
    """Range of a number, as an annotation of a field: `Annotated[int, Range(least=1)]`; `check_fields` checks it."""

    least: float = -inf
    above: float = -inf
    most: float = inf
    below: float = inf
    hint: str = ""
    """End of the message, such as ", such as 0.1"."""

    def check(self, name: str, number: int | float) -> None:
        """Raise `UserError` if a finite number is outside."""
        if not (self.least <= number <= self.most and self.above < number < self.below):
            bounds = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
            limits = " and ".join(f"{words} {bound}" for words, bound in bounds.items() if isfinite(bound))
            raise UserError(f"{name} is {number}; it must be {limits}{self.hint}.")


Positive = Annotated[int, Range(least=1)]
NonNegative = Annotated[int, Range(least=0)]
Size = Annotated[Positive, Range(most=2**20)]
"""Width, or number of heads, classes, experts or examples in a batch."""
Depth = Annotated[Positive, Range(most=2**10)]
"""Number of blocks or layers."""
Length = Annotated[Positive, Range(most=MAX_LENGTH)]
"""Number of tokens or texts."""
Side = Annotated[Positive, Range(most=MAX_SIDE)]
"""Pixels along a side of an image, or frames of a video."""
Seed = Annotated[NonNegative, Range(most=2**32 - 1)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(least=0, below=1)]
ValFraction = Annotated[float, Range(above=0, below=1, hint=", such as 0.05")]
NormEps = Annotated[float, Range(above=0, hint=", such as 1e-6, or none for that of the norm")]


type_hints: Callable[[type], dict[str, Any]] = cache(partial(typing.get_type_hints, include_extras=True))
"""Return the resolved annotations of a class, with the metadata of `Annotated`."""


class FieldDocs:
    """Base of configs whose docstring, as `help` shows it, ends with those of the fields."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = typing.cast("str", _DocWithFields(cls.__doc__ or ""))


class _DocWithFields:
    """Docstring of a dataclass that adds those of the fields when it is read, as sources are slow to parse."""

    def __init__(self, doc: str) -> None:
        self._doc = doc

    def __get__(self, _: object, cls: type) -> str:
        if "__match_args__" not in vars(cls):  # the decorator is still making the dataclass, and only needs any text
            return self._doc
        docs = field_docstrings(cls)
        lines = [f"{f.name}: {docs.get(f.name, '')}" for f in dataclasses.fields(cls)]
        return "\n".join(
            [
                inspect.cleandoc(self._doc),
                "",
                *(textwrap.fill(" ".join(x.split()), 100, subsequent_indent="    ") for x in lines),
            ]
        )


def check_fields(config: object, section: str | None = None) -> None:
    """Check and convert the fields of a config, a dataclass, by their annotations: NumPy scalars become numbers, paths
    strings, and a list or a single value of a tuple field a tuple. Raises `UserError`, with the field's path, which
    begins with the section, such as `data.` (None for a config that may be part of any other: the name alone), if a
    value has another type, is not a choice of its `Literal`, not finite, not an int32 or float32, or outside the
    `Range` of its annotation."""
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        path = f.name if section is None else f"`{section}{f.name}`"
        value = checked(path, type_hints(type(config))[f.name], getattr(config, f.name))
        object.__setattr__(config, f.name, value)


def checked(name: str, hint: object, value: Any) -> Any:
    """Return a value in the form of `check_fields`, and a mapping, such as of JSON, as the dataclass of its annotation.
    Raises `UserError` as `check_fields` does, with the value's name."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    plain, *marks = args if origin is Annotated else (hint,)
    if origin is tuple:
        return tuple(checked(name, args[0], item) for item in (value if isinstance(value, tuple | list) else (value,)))
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        parts = nested_classes(hint)
        if isinstance(value, Mapping) and parts:
            return from_dict(*_of_kind(name, parts, value), name)
        if any(isinstance(value, part) for part in parts):
            return checked(name, type(value), value)
        plain_types = [arg for arg in args if arg is not type(None) and not nested_classes(arg)]
        return value if len(plain_types) > 1 else checked(name, (plain_types or parts)[0], value)
    if origin is Literal:
        if value not in args:
            raise not_a_choice(name, value, args)
        return value
    if isinstance(value, NUMBERS.get(plain, ())) and not isinstance(value, bool):
        return _number(name, plain, value, marks)
    if origin is Annotated:
        return checked(name, plain, value)
    if plain is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(plain) and isinstance(value, Mapping):
        return from_dict(typing.cast("type", plain), value, name)
    if dataclasses.is_dataclass(type(value)) and isinstance(value, plain) and not isinstance(value, FieldDocs):
        return from_dict(type(value), vars(value), name)  # it does not check itself
    is_checked = plain in (bool, str) or dataclasses.is_dataclass(plain)
    if plain in NUMBERS or (is_checked and not isinstance(value, typing.cast("type", plain))):
        cls = getattr(plain, "__name__", str(plain))
        kind = KINDS.get(plain) or f"{'an' if cls[0] in 'AEIOU' else 'a'} {cls}"
        raise UserError(f"{name} is {abbreviate(value)}; it must be {kind}.")
    return value


def nested_classes(hint: object) -> list[type]:
    """Return the dataclasses among the alternatives of a field's type, such as `RoPE` of `RoPE | None`, or that extend
    one of them, other than a plain type, such as `str`, of which there may be anybody's."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    classes = [part for part in (typing.get_args(hint) if is_union else (hint,)) if isinstance(part, type)]
    classes = [cls for cls in classes if cls.__module__ != "builtins"]
    parts: list[list[type]] = [
        [part] if dataclasses.is_dataclass(part) else type.__subclasses__(part) for part in classes
    ]
    return [part for group in parts for part in group if dataclasses.is_dataclass(part)]


def item_class(hint: object) -> type | None:
    """Return the dataclass of the items of a tuple field; None for other fields."""
    part = next(iter(typing.get_args(hint)), None) if typing.get_origin(hint) is tuple else None
    return part if dataclasses.is_dataclass(part) and isinstance(part, type) else None


def _of_kind(name: str, classes: Sequence[type], values: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """Return the class of a mapping and its fields: the class that `kind` names or, without it, the first that these
    fields complete, or that has them all. Raises `UserError` for a class that is unknown."""
    rest = {name: value for name, value in values.items() if name != "kind"}
    named = [cls for cls in classes if kind_of(cls) == values.get("kind")]
    fitting = [cls for cls in classes if rest.keys() <= {f.name for f in dataclasses.fields(cls)}]
    if "kind" in values and not named:
        known = ", ".join(kind_of(cls) for cls in classes)
        raise UserError(f"{name} is a {abbreviate(values['kind'])}; a run can hold only one of {known}.")
    complete = [cls for cls in fitting if {*required_fields(cls)} <= rest.keys()]
    return (complete or fitting or classes)[0] if not named else named[0], rest


def required_fields(cls: Any) -> list[str]:
    """Return the names of the fields without a default, of a dataclass; none of an instance, which has values."""
    if not isinstance(cls, type):
        return []
    return [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]


def _number(name: str, plain: Any, value: Any, marks: Iterable[object]) -> int | float:
    """Return a number as `plain`, int or float, within its bounds and the `Range`s among the marks; see `checked`."""
    try:
        number: int | float = plain(value)
    except OverflowError:
        number = inf
    if plain is float and not isfinite(number):
        raise UserError(f"{name} is {number}; it must be a finite number.")
    if plain is float and abs(number) > MAX_FLOAT:
        raise UserError(f"{name} is {number}; it must be at most {MAX_FLOAT:.2g}, the largest float32.")
    for limits in [*marks, *([Range(most=MAX_INTEGER)] if plain is int else [])]:
        if isinstance(limits, Range):
            limits.check(name, number)
    return number


def not_a_choice(name: str, value: object, choices: Iterable[object]) -> UserError:
    """Return the error for a value that is not one of its choices, with a similar one."""
    words = [*map(str, choices)]
    near = get_close_matches(str(value), words, 1)
    remedy = f"; did you mean {near[0]}?" if near else "."
    return UserError(f"{name} is {abbreviate(value)}; it must be one of {', '.join(words)}{remedy}")


def expand_sides(config: object, *names: str) -> None:
    """Expand fields with one value to a height and a width in pixels. Raises `UserError` unless there are one or
    two."""
    for name in names:
        sides = getattr(config, name)
        if len(sides) not in (1, 2):
            raise UserError(f"{name} is {sides}; it must be a height and a width in pixels, or one for both.")
        object.__setattr__(config, name, sides * 2 if len(sides) == 1 else sides)


def expand_patches(config: Any) -> None:
    """Apply `expand_sides` to `image_size` and `patch_size`. Raises `UserError` if patches do not divide images."""
    expand_sides(config, "image_size", "patch_size")
    if any(size % patch for size, patch in zip(config.image_size, config.patch_size, strict=True)):
        raise UserError(f"patch_size {config.patch_size} does not divide image_size {config.image_size}; change one.")


def shortest_period(values: Sequence[T]) -> tuple[T, ...]:
    """Return the fewest first values that, repeated, are all of them."""
    lengths = range(1, len(values) + 1)
    return next(tuple(values[:n]) for n in lengths if all(x == values[i % n] for i, x in enumerate(values)))


def differences(a: object, b: object, prefix: str = "") -> list[tuple[str, object, object]]:
    """Return the fields in which two configs differ, as `(dotted name, value in a, value in b)`."""
    if type(a) is not type(b) or not dataclasses.is_dataclass(a):
        same = a == b or any(x.is_same_model(y) for x, y in ((a, b), (b, a)) if hasattr(x, "is_same_model"))
        return [] if same else [(prefix, a, b)]
    return [
        row
        for f in dataclasses.fields(a)
        for row in differences(getattr(a, f.name), getattr(b, f.name), f"{prefix}.{f.name}".lstrip("."))
    ]


def flatten(value: object, name: str = "", separator: str = ".") -> dict[str, Any]:
    """Return the leaves of a JSON tree by path; list items are keyed by their "name" if all have one, else by index."""
    if isinstance(value, dict):
        items: dict[object, object] = value
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


def nonfinite_to_none(value: object) -> Any:
    """Return a tree with None in place of infinities and NaN, which JSON cannot represent."""
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: nonfinite_to_none(x) for name, x in value.items()}
    return [nonfinite_to_none(x) for x in value] if isinstance(value, list | tuple) else value


def to_dict(config: object) -> dict[str, Any]:
    """Return a config as plain JSON types. The class of a nested config is named in `kind`, unless it is the only one
    that the field's type names; see `config.files.kind_of`."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    for name, value in values.items():
        hint = type_hints(type(config))[name]
        if dataclasses.is_dataclass(value):
            kind = {} if nested_classes(hint) == [type(value)] else {"kind": kind_of(type(value))}
            values[name] = kind | to_dict(value)
        elif item_class(hint) is not None:
            values[name] = [to_dict(item) for item in value]
    return values


def from_dict(cls: type[T], values: Mapping[str, object], path: str = "config") -> T:
    """Return the config that `to_dict` converted, a dataclass whose fields are plain types or dataclasses. `kind` is
    only handled where a field's type names several dataclasses, and missing fields have their default. Raises
    `UserError`, with `path` as the prefix of field names, if a field is unknown, has the wrong type or value, or is
    missing and has no default."""
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in (name for name in values if name not in names):
        near = get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the known ones are {', '.join(names)}."
        raise UserError(f"{path} has a field {abbreviate(name)} that {cls.__name__} does not know; {hint}")
    try:
        return cls(**{name: checked(f"{path}.{name}", type_hints(cls)[name], x) for name, x in values.items()})
    except TypeError as error:
        raise UserError(f"{path} is incomplete: {error}.") from error
    except ValueError as error:  # of a class that is not only a config
        raise UserError(f"{path}: {error}.") from error


@cache
def field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, including inherited fields and docstrings."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):  # not defined in a file, or not parsable after a dedent
            continue
        assert isinstance(node, ast.ClassDef)
        for statement, following in pairwise(node.body):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = str(following.value.value)
    return _attribute_docs(cls) | docs


def _attribute_docs(cls: type) -> dict[str, str]:
    """Return the entries of the section `Attributes` of a class's docstring."""
    doc = "" if issubclass(cls, FieldDocs) else inspect.cleandoc(vars(cls).get("__doc__") or "")
    _, _, section = doc.partition("\nAttributes:\n")
    entries = re.findall(r"^  (\w[\w, ]*): (.*(?:\n    .*)*)", section, re.MULTILINE)
    return {
        name: f"{text[0].upper()}{' '.join(text[1:].split())}" for names, text in entries for name in names.split(", ")
    }
