"""The contract of a model: its task, its inputs and its capabilities, declared by its config.

The trainer, the samplers and the inspection read it with `contract_of`, in place of a module's class or the methods it
happens to have; only the initialisation check, of one architecture, names a class. The axes of a model's parameters are
declared where they are made; see `nn.parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Task(StrEnum):
    """The task that a model is trained for."""

    CAUSAL_LM = "causal_lm"
    MASKED_LM = "masked_lm"
    SEQUENCE_TO_SEQUENCE = "sequence_to_sequence"
    TEXT_CLASSIFICATION = "text_classification"
    IMAGE_CLASSIFICATION = "image_classification"
    VIDEO_CLASSIFICATION = "video_classification"
    CONTRASTIVE = "contrastive"
    OTHER = "other"
    """Any other task with logits over classes; the objective is the cross-entropy."""


class Input(NamedTuple):
    """An argument of a model: its name, the shape of the largest example, and the name of its NumPy dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class AttentionShape(NamedTuple):
    """Shape of the self-attention that most calls of a model compute, for one example of the largest size."""

    n_heads: int
    n_kv_heads: int
    """Query heads H and key/value heads G."""
    head_dim: int
    """Width K of a head's queries and keys."""
    value_dim: int
    """Width of its values."""
    n_positions: int
    """Queries T, and as many keys."""
    mask: Any = None
    """None, an `ops.masks.Causal`, or `ARRAY` for a mask that is an array."""


ARRAY = "array"
"""A mask that is an array, which no fused kernel reads."""


@dataclass(frozen=True)
class Contract:
    """Task, inputs and capabilities of a model."""

    task: Task = Task.OTHER
    """The task that the model is trained for."""
    inputs: tuple[Input, ...] = ()
    """Arguments of the call for one example, in order."""
    vocab_size: int | None = None
    """Number of token ids V that inputs may hold; None for a model without tokens."""
    n_classes: int | None = None
    """Length of the last axis of the logits; None for a model without logits."""
    max_tokens: int | None = None
    """Most tokens of a sequence, as there are no positions past them; None for no limit."""
    fixed_length: bool = False
    """The model reads exactly `max_tokens` tokens and predicts only the one that follows."""
    has_features: bool = False
    """The call is `unembed` of `features(*inputs)`, `(T, D)` to `(T, V)`. So that logits may be computed in chunks,
    these are `unembedding()`, an `ops.linear_cross_entropy.Unembedding`, of `readout(features)`; where the readout is
    the logits, `unembedding()` is None."""
    has_cache: bool = False
    """The method `extend(tokens_T, positions_T, cache, slot)` returns features and the cache after them. A causal
    language model creates the cache with `init_cache(n_slots, dtype)`, a sequence-to-sequence model with
    `start(*source, n_slots, dtype)`."""
    attention_window: int | None = None
    """Most positions that a query attends to, itself included; None for no limit."""
    layer_windows: tuple[int, ...] = ()
    """The same for each layer of causal self-attention; empty for `attention_window` in all."""
    extrapolates: bool = False
    """A text may go on past the context, with the same `attention_window`."""
    has_prefix: bool = False
    """A prompt is attended to in both directions; it must come in one call, and its length is the last argument of the
    call and of `extend`."""
    has_segments: bool = False
    """The call takes `segments_T` as its third argument, the number of the packed example that each token belongs to;
    the model attends within each, and its positions restart in each."""
    attention: AttentionShape | None = None
    """Shape of the multi-head self-attention, by which the trainer chooses the implementation; None for a model
    without."""
    patches: str | None = None
    """Name of the field of the config that holds `image_size` and `patch_size`, such as `vision`; empty for the config
    itself, None for a model without patches."""
    scaled_width: int | None = None
    """Width D by which `optimizer.base_width` scales learning rates, and in proportion to which all other widths grow;
    None for a model of several widths, or whose embedding also makes the logits."""
    has_residual_stream: bool = False
    """All blocks add to one stream, which `unembed` reads, as of `models.decoder.Decoder`; the logit lens and the
    direct logit attribution also read its config."""


UNDECLARED = Contract()
"""The contract of a module that declares none."""


def contract_of(model: Any) -> Contract:
    """Return the contract that a module declares, as its attribute `contract` or as that of its `config`."""
    declares = model if hasattr(model, "contract") else getattr(model, "config", None)
    return getattr(declares, "contract", UNDECLARED)


def token_inputs(length: int, *names: str) -> tuple[Input, ...]:
    """Return inputs of one sequence length: token ids, int32, and for names that begin with `valid`, bool."""
    return tuple(Input(name, (length,), "bool" if name.startswith("valid") else "int32") for name in names)


class Role(StrEnum):
    """The role of a parameter."""

    EMBEDDING = "embedding"
    """A table of tokens, segments or patches, or the matrix that logits are computed with."""
    POSITION = "position"
    """A table of positions."""
    MATRIX = "matrix"
    VECTOR = "vector"
    """A bias, a gain, a token or a scalar."""


STACKS = ("experts", "gates")
"""Names of axes along which parameters are stacked."""
TABLES = ("vocab", "segments", "patches", "classes")
"""Names of axes that make a matrix an embedding or an unembedding."""
FIXED_INPUTS = ("vocab", "segments", "patches", "positions", "pixels", "queries")
"""Names of input axes that do not grow with a model's width."""


@dataclass(frozen=True)
class ParameterAxes:
    """Names of the axes of a parameter."""

    stack: tuple[str, ...]
    """Axes along which matrices, or vectors, are stacked; they come first."""
    inputs: tuple[str, ...]
    """Axes that a product with the parameter sums over, or a table's rows; none for a vector."""
    outputs: tuple[str, ...]
    """The other axes."""

    @classmethod
    def parse(cls, axes: str, stack: tuple[str, ...] = ()) -> ParameterAxes:
        """Return the axes that a text such as `gates embed -> hidden` names."""
        before, arrow, after = axes.partition("->")
        inputs, outputs = (before.split(), after.split()) if arrow else ([], before.split())
        stack += tuple(name for name in inputs if name in STACKS)
        return cls(stack, tuple(name for name in inputs if name not in STACKS), tuple(outputs))

    @property
    def names(self) -> tuple[str, ...]:
        """All axes in order."""
        return self.stack + self.inputs + self.outputs

    @property
    def sums_over_width(self) -> bool:
        """True for a matrix whose products sum over as many numbers as the model is wide, or in proportion."""
        return bool(self.inputs) and not set(FIXED_INPUTS) & set(self.inputs)

    @property
    def role(self) -> Role:
        """Role of the parameter, which its axes decide."""
        if not self.inputs:
            return Role.VECTOR
        if "positions" in self.inputs:
            return Role.POSITION
        return Role.EMBEDDING if set(TABLES) & set(self.names) else Role.MATRIX
