"""The contract of a model: its task, its inputs and its capabilities, declared by its config.

The trainer, the samplers and the inspection read it with `contract_of`, instead of a module's class or its methods;
only what exists for decoders alone names their class, such as the logit lens. The axes of a model's parameters
are declared where the parameters are created; see `nn.parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

__all__ = ["Contract", "Input", "Task", "token_inputs"]


class Task(StrEnum):
    """Task that a model is trained for."""

    CAUSAL_LM = "causal_lm"
    MASKED_LM = "masked_lm"
    SEQUENCE_TO_SEQUENCE = "sequence_to_sequence"
    TEXT_CLASSIFICATION = "text_classification"
    TOKEN_CLASSIFICATION = "token_classification"  # noqa: S105 (no password)
    TEXT_EMBEDDING = "text_embedding"
    IMAGE_CLASSIFICATION = "image_classification"
    IMAGE_EMBEDDING = "image_embedding"
    VIDEO_CLASSIFICATION = "video_classification"
    CONTRASTIVE = "contrastive"
    OTHER = "other"
    """Any other task with logits over classes; the objective is the cross-entropy."""


class Input(NamedTuple):
    """Input of a model: its name, its shape in an example of maximum size, and the name of its NumPy dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class AttentionShape(NamedTuple):
    """Shape of the self-attention that most calls of a model compute, for one example of maximum size."""

    n_heads: int
    n_kv_heads: int
    """Query heads H and key/value heads G."""
    head_dim: int
    """Width K of a head's queries and keys."""
    value_dim: int
    """Width of a head's values."""
    n_positions: int
    """Number T of queries, and of keys."""
    mask: Any = None
    """None, an `ops.masks.Causal`, or `ARRAY` for a mask that is an array."""
    has_terms: bool = False
    """True if scores have a bias, a soft cap or sinks, with which the trainer uses no fused kernel."""


ARRAY = "array"
"""Placeholder for a mask that is an array, which no fused kernel supports."""


@dataclass(frozen=True)
class Contract:
    """Task, inputs and capabilities of a model."""

    task: Task = Task.OTHER
    """Task that the model is trained for."""
    inputs: tuple[Input, ...] = ()
    """Arguments of the call for one example, in order."""
    vocab_size: int | None = None
    """Number V of valid token ids in inputs; None for a model without tokens."""
    n_classes: int | None = None
    """Size of the last axis of the logits; None for a model without logits."""
    max_tokens: int | None = None
    """Maximum number of tokens in a sequence, limited by the positions; None for no limit."""
    fixed_length: bool = False
    """True if the model reads exactly `max_tokens` tokens and predicts only the next one."""
    has_features: bool = False
    """True if the call is `unembed(features(*inputs))`, from `(T, D)` to `(T, V)`. To allow computing logits in chunks,
    `unembed` is `unembedding()`, an `ops.linear_cross_entropy.Unembedding`, applied to `readout(features)`."""
    has_cache: bool = False
    """True if the method `extend(tokens_T, positions_T, cache, slot)` returns features and the updated cache. A causal
    language model creates the cache with `init_cache(n_slots, dtype)`, a sequence-to-sequence model with
    `start(*source, n_slots, dtype)`."""
    attention_window: int | None = None
    """Maximum number of positions that a query attends to, itself included; None for no limit."""
    layer_windows: tuple[int, ...] = ()
    """Attention window of each layer of causal self-attention; empty if all have `attention_window`. The cache
    of a model with layer windows is an `ops.KVCache`, of whose layers those with a short window may have fewer slots
    than the others when `extend` gets it."""
    extrapolates: bool = False
    """True if a sequence may continue past the context length, with the same `attention_window`."""
    has_prefix: bool = False
    """True if a prompt is attended to in both directions; it must be passed in a single call, and its length is the
    last argument of the call and of `extend`."""
    has_segments: bool = False
    """True if the third argument of the call is `segments_T`, the index of each token's packed example, 0 for padding;
    attention is confined to each example, and positions restart in it."""
    attention: AttentionShape | None = None
    """Shape of the multi-head self-attention, from which the trainer selects the implementation; None for a model
    without it."""
    patches: str | None = None
    """Name of the config field that contains `image_size` and `patch_size`, such as `vision`; empty for the config
    itself, None for a model without patches."""
    resizing: Any = None
    """How image files are resized to the size of the inputs, a `config.Resizing`; None for both sides at once, by
    bicubic interpolation."""
    head: tuple[str, ...] = ()
    """Patterns of the names of the parameters that serve the task alone, such as `head.*`; a model of another task that
    starts from this one has others."""
    scaled_width: int | None = None
    """Width D by which `optimizer.base_width` scales learning rates; all other widths grow in proportion to it. None
    for a model with several widths, or with tied embeddings."""
    has_residual_stream: bool = False
    """True if all blocks add to one residual stream, which `unembed` reads, as in `models.decoder.Decoder`; the logit
    lens and direct logit attribution also read its config."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", Task(self.task))  # a string equals a member, but is not it


UNDECLARED = Contract()
"""Contract of a module that declares none."""


def contract_of(model: object) -> Contract:
    """Return the contract that a module declares, either in its attribute `contract` or in that of its `config`."""
    declares = model if hasattr(model, "contract") else getattr(model, "config", None)
    return getattr(declares, "contract", UNDECLARED)


def token_inputs(length: int, *names: str) -> tuple[Input, ...]:
    """Return inputs of equal sequence length: bool for names that begin with `valid`, and int32 token ids for
    others."""
    return tuple(Input(name, (length,), "bool" if name.startswith("valid") else "int32") for name in names)


class Role(StrEnum):
    """Role of a parameter."""

    EMBEDDING = "embedding"
    """A table of tokens, segments or patches, or an unembedding matrix."""
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
    """Leading axes, along which matrices or vectors are stacked."""
    inputs: tuple[str, ...]
    """Axes that a matmul with the parameter sums over, or a table's rows; empty for a vector."""
    outputs: tuple[str, ...]
    """The other axes."""

    @classmethod
    def parse(cls, axes: str, stack: tuple[str, ...] = ()) -> ParameterAxes:
        """Return the axes named by a string such as `gates embed -> hidden`."""
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
        """True for a matrix whose fan-in is proportional to the model's width."""
        return bool(self.inputs) and not set(FIXED_INPUTS) & set(self.inputs)

    @property
    def role(self) -> Role:
        """Role of the parameter, determined by its axes."""
        if not self.inputs:
            return Role.VECTOR
        if "positions" in self.inputs:
            return Role.POSITION
        return Role.EMBEDDING if set(TABLES) & set(self.names) else Role.MATRIX
