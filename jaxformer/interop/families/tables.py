"""Families of published models: tables that map their configs and tensors to those of `DecoderConfig`, or of encoders
and encoder-decoders of texts, and encoders of images.

The tables are used in both directions, for import and export. Layouts are written with one letter per axis: V
vocabulary, P positions, S segments, M width of the embedding, D model width, H query heads, G key/value heads, R query
heads per key/value head, K head width, Z half of it, A the two halves, F hidden width of the MLP, U that of a shared
expert, E experts, N buckets of distances, O outputs of a head as wide as the model, C classes; of patches Y height, X
width, I channels; of CLIP J the joint space; of multi-head latent attention c the latents, q those of queries, and of a
head r the rotated features, n the others and v the values; f hidden width of blocks without experts. Axes in
parentheses are stored as one, in row-major order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxformer.models.clip import CLIPConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.vit import ViTConfig

PublishedConfig = Mapping[str, Any]
"""Content of a published `config.json`."""
ImportedConfig = DecoderConfig | EncoderConfig | EncoderDecoderConfig | ViTConfig | CLIPConfig
"""Our config for it."""

POOLING, NORMALIZE = "sentence_transformers_pooling", "sentence_transformers_normalize"
"""Fields that reading adds to the config of a sentence encoder: the pooling of features, and True for unit vectors."""
IMAGE_PROCESSOR = "image_processor"
"""Field that reading adds to the config of a model that reads images: the config of its image processor."""
MAX_TOKENS = "sentence_transformers_max_tokens"
"""Field that reading adds if texts may have fewer tokens than the model has positions: the maximum number."""
REQUIRED = object()
"""Default of a field that their config must have."""


class Field(NamedTuple):
    """One field of our config and its equivalent in theirs."""

    ours: str
    theirs: str
    """Names of the fields, ours dotted for one of `experts`. Several of ours may depend on one of theirs; several of
    theirs with the same of ours must agree."""
    default: Any = REQUIRED
    """Their value if their config has none, or a function of their config that returns it: the default of their class
    in transformers."""
    values: Mapping[Any, Any] | None = None
    """Our value by theirs; None for the same value."""
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value
    """Conversions from their value and back, if there is no table `values`."""
    is_optional: bool = False
    """True if their null is None, whatever the default; otherwise null is the default."""


class Weight(NamedTuple):
    """One parameter of ours and the tensor that holds it."""

    ours: str
    """Path of the parameter; `{i}` is the index of the block."""
    theirs: str
    """Name of the tensor; with `{e}`, there is one tensor per expert; `{gated}` is `_1` for a gated MLP, else empty."""
    layout: str
    """Their axes and ours, `theirs -> ours`. A number is an axis of that length, and a sum, such as `H+G+G`, one of
    consecutive parts; `3` in theirs is `1+1+1`."""
    part: int | None = None
    """Index of the part along the sum of their layout, for tensors that hold several parameters."""
    offset: float = 0.0
    """Offset added to their values."""
    first_row: int = 0
    """Rows of their tensor before those of ours, which are not read, and written as zeros."""
    when: tuple[str, Any] | None = None
    """Field of our config and the value with which there is such a tensor; None for any."""
    scale: str | None = None
    """Name of a tensor `(D,)` by which the parameter is multiplied along its last axis."""
    tokens: tuple[str, ...] = ()
    """Names of tensors `(1, 1, D)` that are added to the first rows, one each: learned tokens, whose positions these
    rows are."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the tensors besides the first."""
        return self.tokens if self.scale is None else (self.scale, *self.tokens)


class Windows(NamedTuple):
    """Attention windows of a family."""

    is_local: Callable[[PublishedConfig, int, int | None], bool]
    """Function that returns True for a block, by index, that has a window, of this length, if there is one; for configs
    without `layer_types`."""
    default: Any = 4096
    """Length for configs without the field, None for no window, or `REQUIRED`; null is no window."""
    enabled_by: str | None = None
    """Field without which there are no windows, whatever the length."""
    by_layer: bool = True
    """True if the family reads `layer_types`; others ignore the field."""
    name: str = "sliding_window"
    """Name of the field with the length."""
    read: Callable[[int], int | None] = lambda length: length
    write: Callable[[int], int] = lambda length: length
    """Conversions from their length to our window and back."""


def last_layers(theirs: PublishedConfig, i: int, window: int | None) -> bool:
    """Return True for the blocks from `max_window_layers` on, if there is a window."""
    return window is not None and bool(i >= theirs.get("max_window_layers", 28))


def all_but_every_sixth(theirs: PublishedConfig, i: int, window: int | None) -> bool:
    """Return False for every sixth block, or with another period from their config."""
    return bool((i + 1) % theirs.get("sliding_window_pattern", 6))


ALWAYS = Windows(lambda theirs, i, window: window is not None, by_layer=False)
LAST_LAYERS = Windows(last_layers, enabled_by="use_sliding_window")
NONE_OF: Mapping[str, Any] = dict.fromkeys(("per_layer_config", "configuration_files", "transformers_weights"))
"""Fields that no config may have: other fields by layer, and other files of the config or the weights."""


@dataclass(frozen=True)
class Family:
    """Tables of one family."""

    model_type: str
    architecture: str
    """Names in their config."""
    fields: tuple[Field, ...]
    """Rows for the config."""
    weights: tuple[Weight, ...]
    """Rows for the parameters; rows without a parameter in a model, such as for biases, are skipped."""
    constants: Mapping[str, Any]
    """Values of our fields that all models of the family share."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Values that their fields must have if present, or functions of their config that return them; another value would
    change the computation."""
    read: Callable[[PublishedConfig], PublishedConfig] = dict
    """Function of their config that returns it with the fields of the tables, where several of theirs make one."""
    write: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """The inverse of `read`."""
    rope_base: float | None = 10_000.0
    """Default of `rope_theta`; None for models without RoPE."""
    rope_fraction: float | None = None
    """Default of `partial_rotary_factor`; None for models that rotate all features, whatever it is."""
    interleaved: bool = False
    """True if RoPE rotates pairs of adjacent features."""
    rope_types: tuple[str, ...] | None = None
    """Types of RoPE scaling that the family may have; None for all that `configs` knows."""
    local_rope_base: float | None = None
    """Default of `rope_local_base_freq`, the base of blocks with a window; None if all blocks share a base."""
    windows: Windows | None = None
    """Attention windows; None for families without."""
    has_rope: Callable[[PublishedConfig, int, bool], bool] | None = None
    """Function of their config that returns True for a block, by index, that rotates queries and keys, given whether it
    has a window; None if all do."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of their fields, which take precedence, and the names in `fields`."""
    model: type[ImportedConfig] = DecoderConfig
    """Class of our config."""
    prefix: str = "model."
    """Prefix of tensor names, absent if the model was saved without its head."""
    unread: str | None = None
    """Pattern for names of tensors of parts that are left out; None for none."""
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    """Patterns for names of tensors that are not parameters."""
    sinusoids: tuple[str, ...] = ()
    """Names of tensors that may hold the sinusoidal position encoding, which here is computed."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that may be stored a second time, and those of the same content."""
    older_names: tuple[tuple[str, str], ...] = ()
    """Ends of tensor names, and what they were in older checkpoints."""
    position_grid: Callable[[PublishedConfig], tuple[int, int]] | None = None
    """Function that returns the rows and columns of patches that published positions are of, from which they are
    interpolated to those of images; None if these are the same."""
    towers: tuple[str, ...] = ()
    """Fields of our config that hold those of a tower, by which the names of its parameters begin."""

    @property
    def is_exported(self) -> bool:
        """False for an encoder all blocks of which have the same tensors, of which each of ours has a copy, or whose
        positions begin after the id of padding, which may be another token of our tokenizer."""
        is_shared = any("{i}" in weight.ours and "{i}" not in weight.theirs for weight in self.weights)
        return not is_shared and not any(weight.first_row for weight in self.weights)


def to_widths(width: int) -> tuple[int, ...]:
    """Return the widths of an MLP with one hidden layer."""
    return (width,)


def only_width(widths: tuple[int, ...]) -> int:
    """Return the width of an MLP's only hidden layer."""
    (width,) = widths
    return width


def with_defaults(fields: tuple[Field, ...], **defaults: Any) -> tuple[Field, ...]:
    """Return fields with other defaults, keyed by our names."""
    return tuple(row._replace(default=defaults.get(row.ours, row.default)) for row in fields)


def norm_rows(ours: str, theirs: str, axis: str = "D") -> tuple[Weight, Weight]:
    """Return the rows of a LayerNorm."""
    layout = f"{axis} -> {axis}"
    return Weight(f"{ours}.gamma", f"{theirs}.weight", layout), Weight(f"{ours}.beta", f"{theirs}.bias", layout)


ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
"""Activations of MLPs without gates."""
TIED = {True: "tied", False: "linear"}
