"""Tensor layouts, written as `(H K) D -> D H K`: their axes, with axes in parentheses stored as one, and our axes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax
import numpy as np

from jaxformer.models.decoder import DecoderConfig


def axis_sizes(config: DecoderConfig) -> dict[str, int]:
    """Return axis sizes by letter."""
    return {
        "V": config.vocab_size, "P": config.n_positions, "D": config.d_model, "H": config.n_heads, "G": config.kv_heads,
        "K": config.width_of_head, "F": config.d_ff[0], "E": getattr(config, "n_experts", None) or 0,
    }  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Axes of a tensor: per axis of theirs, the axes that it combines; the axes of our parameter in our order; and the
    size of each axis by letter. A number is its own size."""

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int]) -> Layout:
        """Parse a layout such as `(H K) D -> D H K`."""
        theirs, _, ours = text.partition(" -> ")
        groups = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\S+", theirs))
        return cls(groups, tuple(ours.split()), tuple(sizes.items()))

    def shape(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the sizes of axes."""
        sizes = dict(self.sizes)
        return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in axes)

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of their tensor."""
        return tuple(prod(self.shape(group)) for group in self.theirs)

    @property
    def parts(self) -> str | None:
        """Axis of theirs, a number, along which several of our parameters are stored; None for a single parameter."""
        axes = (axis for group in self.theirs for axis in group if axis.isdigit())
        return next(axes, None)

    def to_ours(self, tensor: jax.Array, part: int | None = None) -> jax.Array:
        """Return their tensor in our layout; if it holds several parameters, the one with index `part`."""
        axes = [axis for group in self.theirs for axis in group]
        tensor = tensor.reshape(self.shape(axes))
        if self.parts is not None:
            assert part is not None
            tensor = tensor[(slice(None),) * axes.index(self.parts) + (part,)]
            axes.remove(self.parts)
        present = [axis for axis in self.ours if axis in axes]
        return tensor.transpose([axes.index(axis) for axis in present]).reshape(self.shape(self.ours))

    def to_theirs(self, parameters: Sequence[np.ndarray]) -> np.ndarray:
        """Return their tensor, given all of our parameters that it holds, in the order of their parts."""
        axes = [axis for group in self.theirs for axis in group if axis != self.parts]
        present = [axis for axis in self.ours if axis in axes]
        shape, order = self.shape(present), [present.index(axis) for axis in axes]
        ordered = [parameter.reshape(shape).transpose(order) for parameter in parameters]
        if self.parts is None:
            return ordered[0].reshape(self.their_shape)
        position = [axis for group in self.theirs for axis in group].index(self.parts)
        return np.stack(ordered, position).reshape(self.their_shape)
