"""Names of activations, those of TransformerLens where it has one, and what a user's names and indices select."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from operator import index as as_int
from typing import SupportsIndex

from jaxformer.nn.capture import Path
from jaxformer.nn.parameter_norms import HEADS_FIRST, dotted

Names = str | Collection[str]
"""A pattern of names as for `fnmatch`, such as `blocks.*.attention.pattern`, or several patterns. One that ends in a
number, such as `blocks.*.attention.z.3`, selects that head of each activation that has heads."""


def activation_name(path: Path) -> str:
    """Return `blocks.0.attention.z` for `('blocks_0', 'attention', 'z')`, and `embed` for `('embedding', 'embed')`."""
    return re.sub(r"(\w*)embedding\.(pos_embed|embed)$", r"\1\2", dotted(path))


def has_heads(name: str, shape: tuple[int, ...]) -> bool:
    """Return True for an activation whose first axis is that of the heads, or of the key/value heads for `k` and
    `v`."""
    return len(shape) == 3 and name.partition(" (call ")[0].rpartition(".")[2] in HEADS_FIRST


def position_axis(name: str, shape: tuple[int, ...]) -> int:
    """Return the axis of the positions of an activation: the first, after that of the heads.

    Raises:
      ValueError: the activation has no position axis.
    """
    axis = int(has_heads(name, shape))
    if len(shape) <= axis or name.endswith(".experts"):
        raise ValueError(f"{name} of shape {shape} has no position axis; choose another activation.")
    return axis


def check_index(index: SupportsIndex, size: int, kind: str, of: str) -> int:
    """Return an index, counted from the end if it is negative, as one from the start. Raises `IndexError` for one
    outside an axis of that size, which JAX would clamp or ignore, and `TypeError` for what is no integer.

    Args:
      kind, of: words of the message, such as 'head' and 'blocks.0.attention'.
    """
    if isinstance(index, bool):  # an integer for Python
        raise TypeError(f"{index} is no {kind} of {of}; give an integer.")
    if not -size <= (i := as_int(index)) < size:
        raise IndexError(f"{of} has no {kind} {i}; it has {size}, 0 to {size - 1}.")
    return i % size


def as_indices(at: SupportsIndex | Iterable[SupportsIndex]) -> tuple[SupportsIndex, ...]:
    """Return one index, or several, as a tuple."""
    if isinstance(at, Iterable) and getattr(at, "ndim", True):  # an array without axes is one index
        return tuple(at)
    return (at,)  # type: ignore[return-value]


def check_indices(at: SupportsIndex | Iterable[SupportsIndex], shape: tuple[int, ...], of: str) -> tuple[int, ...]:
    """Return indices into the first axes of an array, by `check_index`; raises `IndexError` for too many as well."""
    at = as_indices(at)
    if len(at) > len(shape):
        raise IndexError(f"{of} has {len(shape)} axes, {shape}, but {len(at)} indices are given.")
    return tuple(check_index(i, shape[axis], "index", f"axis {axis} of {of}") for axis, i in enumerate(at))


def unknown_name(name: str, known: Collection[str], kind: str = "activation") -> KeyError:
    """Return an error that names what exists, the nearest first."""
    near = ", ".join(get_close_matches(name, known, 5, cutoff=0.0)) or "none"
    return KeyError(f"no {kind} is named {name!r}; of {len(known)}, the nearest are {near}.")


class Selector:
    """Selection, by patterns of names, of the activations that a model computes."""

    def __init__(self, names: Names) -> None:
        self.patterns = (names,) if isinstance(names, str) else tuple(names)
        self.computed: dict[str, tuple[int, ...]] = {}
        """Shapes of the activations by name."""
        self._matched: set[str] = set()

    def select(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int | None]]:
        """Yield the names by which patterns select an activation or its heads, and the head's index, or None.

        Raises:
          IndexError: a pattern selects a head that the activation does not have.
        """
        self.computed[name] = shape
        selected: dict[str, int | None] = {}
        for pattern in self.patterns:
            base, head = _split_head(pattern)
            if fnmatchcase(name, pattern):
                selected[name] = None
            elif head is not None and has_heads(name, shape) and fnmatchcase(name, base):
                selected[f"{name}.{head}"] = check_index(head, shape[0], "head", name)
            else:
                continue
            self._matched.add(pattern)
        yield from selected.items()

    def check(self, others: Collection[str] = (), kind: str = "activation") -> None:
        """Raise `KeyError` for a pattern that selected nothing, with the nearest names of activations and others."""
        for pattern in self.patterns:
            if pattern in self._matched:
                continue
            if not self.computed:
                remedy = "call it within the context, without a program that was compiled ahead of time"
                raise KeyError(f"no activation is named {pattern!r}: no model was called; {remedy}.")
            base, head = _split_head(pattern)
            if head is not None and (whole := [name for name in self.computed if fnmatchcase(name, base)]):
                raise KeyError(
                    f"no activation is named {pattern!r}: {whole[0]} {self.computed[whole[0]]} has no heads."
                )
            raise unknown_name(pattern, [*self.computed, *others], kind)


def _split_head(pattern: str) -> tuple[str, int | None]:
    """Return `blocks.*.attention.z` and 3 for `blocks.*.attention.z.3`; no head for other patterns."""
    match = re.fullmatch(r"(.+)\.(0|-?[1-9]\d*)", pattern)
    return (match[1], int(match[2])) if match else (pattern, None)
