"""Families of published models: tables between their configs and tensors and those of `DecoderConfig`.

A table is read in both directions: from their folder to our model, and back. Layouts are written with one letter per
axis: V vocabulary, P positions, D model width, H query heads, G key/value heads, K width of a head, F hidden width of
the MLP, E experts. Axes in parentheses are stored as one, the first the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxformer.errors import UserError

REQUIRED = object()
"""Mark of a field that their config must have."""


def unchanged(value: Any) -> Any:
    """Return the value."""
    return value


class Field(NamedTuple):
    """One field of our config and its equivalent in theirs.

    Attributes:
      ours, theirs: names.
      default: their value where their config has none.
      values: our value of each of theirs; None for the same value.
      read, write: conversions from theirs and back, where no table of values says it.
    """

    ours: str
    theirs: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None
    read: Callable[[Any], Any] = unchanged
    write: Callable[[Any], Any] = unchanged


class Weight(NamedTuple):
    """One parameter of ours and the tensor that holds it.

    Attributes:
      ours: path of the parameter, `{i}` the index of the block.
      theirs: name of the tensor; with `{e}`, one tensor for each expert.
      layout: their axes and ours, `theirs -> ours`. A number is an axis of that length.
      part: index along the axis of a number in their layout, for tensors that hold several parameters.
      offset: number that is added to theirs.
    """

    ours: str
    theirs: str
    layout: str
    part: int | None = None
    offset: float = 0.0


class Rope(NamedTuple):
    """The rotation of their config, in our fields; see `read_rope`."""

    theirs: str = "rope_theta"
    default: float = 10_000.0


@dataclass(frozen=True)
class Family:
    """Tables of one family.

    Attributes:
      model_type, architecture: names in their config.
      fields: rows of the config.
      weights: rows of the parameters; those that a model has no parameter for, such as biases, are left out.
      constants: our fields that all models of the family share.
      required: values that their fields must have, or be without; another value changes the computation.
      rope: their base of the rotation; None for models without.
      prefix: of names of tensors, absent where the model was saved without its head.
      ignored: ends of names of tensors that hold no parameter.
    """

    model_type: str
    architecture: str
    fields: tuple[Field, ...]
    weights: tuple[Weight, ...]
    constants: Mapping[str, Any]
    required: Mapping[str, Any] = field(default_factory=dict)
    rope: Rope | None = field(default_factory=Rope)
    prefix: str = "model."
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


def one_layer(width: int) -> tuple[int]:
    """Return the widths of an MLP with one hidden layer."""
    return (width,)


def only_layer(widths: tuple[int, ...]) -> int:
    """Return the width of an MLP's only hidden layer.

    Raises:
      UserError: there are several.
    """
    if len(widths) != 1:
        raise UserError(f"d_ff {widths} has {len(widths)} hidden layers, which no published family has; use one.")
    return widths[0]


TIED = {True: "tied", False: "linear"}
LLAMA_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("max_context", "max_position_embeddings", 2048),
    Field("d_model", "hidden_size"),
    Field("n_blocks", "num_hidden_layers"),
    Field("n_heads", "num_attention_heads"),
    Field("n_kv_heads", "num_key_value_heads", None),
    Field("head_dim", "head_dim", None),
    Field("d_ff", "intermediate_size", read=one_layer, write=only_layer),
    Field("activation", "hidden_act", "silu", {"silu": "swiglu"}),
    Field("norm_eps", "rms_norm_eps", 1e-6),
    Field("unembedding", "tie_word_embeddings", False, TIED),
    Field("embedding_std", "initializer_range", 0.02),
)
LLAMA_CONSTANTS = {
    "output_projection": True, "norm": "rmsnorm", "final_norm": True, "positions": "rope", "bias": False,
}  # fmt: skip

LLAMA_ENDS = (
    Weight("embedding.W_E", "model.embed_tokens.weight", "V D -> V D"),
    Weight("final_norm.gamma", "model.norm.weight", "D -> D"),
    Weight("W_out", "lm_head.weight", "V D -> D V"),
)
LLAMA_ATTENTION = (
    Weight("blocks_{i}.attention_norm.gamma", "model.layers.{i}.input_layernorm.weight", "D -> D"),
    Weight("blocks_{i}.attention.W_Q", "model.layers.{i}.self_attn.q_proj.weight", "(H K) D -> D H K"),
    Weight("blocks_{i}.attention.W_K", "model.layers.{i}.self_attn.k_proj.weight", "(G K) D -> D G K"),
    Weight("blocks_{i}.attention.W_V", "model.layers.{i}.self_attn.v_proj.weight", "(G K) D -> D G K"),
    Weight("blocks_{i}.attention.W_O", "model.layers.{i}.self_attn.o_proj.weight", "D (H K) -> H K D"),
    Weight("blocks_{i}.attention.b_Q", "model.layers.{i}.self_attn.q_proj.bias", "(H K) -> H 1 K"),
    Weight("blocks_{i}.attention.b_K", "model.layers.{i}.self_attn.k_proj.bias", "(G K) -> G 1 K"),
    Weight("blocks_{i}.attention.b_V", "model.layers.{i}.self_attn.v_proj.bias", "(G K) -> G 1 K"),
    Weight("blocks_{i}.attention.b_O", "model.layers.{i}.self_attn.o_proj.bias", "D -> D"),
)
LLAMA_MLP = (
    Weight("blocks_{i}.mlp_norm.gamma", "model.layers.{i}.post_attention_layernorm.weight", "D -> D"),
    Weight("blocks_{i}.mlp.W_gate_1", "model.layers.{i}.mlp.gate_proj.weight", "F D -> D F"),
    Weight("blocks_{i}.mlp.W_1", "model.layers.{i}.mlp.up_proj.weight", "F D -> D F"),
    Weight("blocks_{i}.mlp.W_2", "model.layers.{i}.mlp.down_proj.weight", "D F -> F D"),
)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    fields=(*LLAMA_FIELDS, Field("attention_bias", "attention_bias", False)),
    weights=(*LLAMA_ENDS, *LLAMA_ATTENTION, *LLAMA_MLP),
    constants=LLAMA_CONSTANTS,
    required={"mlp_bias": False},
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (LLAMA,)}
"""Families by their `model_type`."""
