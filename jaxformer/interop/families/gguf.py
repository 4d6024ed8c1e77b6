"""Architectures of GGUF, the format of llama.cpp, as families: keys of metadata in the place of a config's fields.

All of them share the names of keys, here without the architecture that precedes each, and of tensors. Which parts a
model has follows from the tensors in its file, so that the name of some tensors is a field, True if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

from jaxformer.interop.families import decoders, layernorm_decoders
from jaxformer.interop.families.layernorm_decoders import attention_rows, end_rows, linear_rows, mlp_rows
from jaxformer.interop.families.tables import (
    REQUIRED,
    Family,
    Field,
    PublishedConfig,
    Weight,
    Windows,
    norm_rows,
    only_width,
    to_widths,
)

ARCHITECTURE = "general.architecture"
"""Key of the architecture, in full."""
PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
"""Keys that may have a value for each block, which must be equal."""


def head_width(keys: PublishedConfig) -> Any:
    """Return the width of a head."""
    return keys.get("attention.key_length", keys["embedding_length"] // keys["attention.head_count"])


def same_base(keys: PublishedConfig) -> float:
    """Return the base of RoPE, of all blocks."""
    base: float = keys.get("rope.freq_base", 10_000.0)
    return base


def is_tensor(key: str) -> bool:
    """Return True for a field that says whether there is a tensor."""
    return key.endswith((".weight", ".bias"))


def read_keys(keys: PublishedConfig, by_layer: bool = False) -> PublishedConfig:
    """Return the keys of a file with those of RoPE as fields of published configs, by kind of block if they differ
    `by_layer`."""
    if "rope_parameters" in keys:
        return keys
    lists = {name: keys[name] for name in PER_LAYER if isinstance(keys.get(name), list)}
    keys = {**keys, **{name: values[0] for name, values in lists.items() if len({*values}) == 1}}
    kind = keys.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type is {kind!r}, and only none or linear has an equivalent")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0))
    width = head_width(keys)
    rope: dict[str, Any] = {
        "rope_type": "default" if kind == "none" or factor in (0, 1) else kind,
        "rope_theta": same_base(keys),
        "factor": factor,
        "partial_rotary_factor": keys.get("rope.dimension_count", width) / width,
    }
    if not by_layer:
        return {**keys, "rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", rope["rope_theta"])}
    return {**keys, "rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def window_pattern(
    period: int, default: Any = None, read: Callable[[int], int | None] = lambda length: length or None
) -> Windows:
    """Return the windows of an architecture in which every so many blocks one has none, by default. A length of 0 is no
    window, unless `read` says otherwise."""

    def is_local(keys: PublishedConfig, i: int, window: int | None) -> bool:
        pattern = keys.get("attention.sliding_window_pattern", period)
        is_one = bool(pattern[i]) if isinstance(pattern, list) else not pattern or (i + 1) % pattern > 0
        return window is not None and is_one

    return Windows(is_local, default, by_layer=False, name="attention.sliding_window", read=read)


SIZES = (
    Field("vocab_size", "vocab_size"),
    Field("max_context", "context_length"),
    Field("d_model", "embedding_length"),
    Field("n_blocks", "block_count"),
    Field("d_ff", "feed_forward_length", read=to_widths, write=only_width),
    Field("n_heads", "attention.head_count"),
    Field("n_kv_heads", "attention.head_count_kv", lambda keys: keys["attention.head_count"]),
    Field("head_dim", "attention.key_length", head_width),
    Field("head_dim", "attention.value_length", head_width),
)
ROTATED = Field("head_dim", "rope.dimension_count", head_width)
"""Field of models in which RoPE rotates all features of a head."""
RMS = Field("norm_eps", "attention.layer_norm_rms_epsilon")
LAYER_NORM = Field("norm_eps", "attention.layer_norm_epsilon")
UNEMBEDDING = Field("unembedding", "output.weight", False, {True: "linear", False: "tied"})
BIAS = Field("attention_bias", "blk.0.attn_q.bias", False)
OUTPUT_BIAS = Field("output_bias", "blk.0.attn_output.bias", False)
EXPERTS = (
    Field("experts.n_experts", "expert_count"),
    Field("experts.per_token", "expert_used_count"),
    Field(
        "d_ff",
        "expert_feed_forward_length",
        lambda keys: keys["feed_forward_length"] // keys["expert_used_count"],
        read=to_widths,
        write=only_width,
    ),
)

RENORMALIZED: dict[str, Any] = {"experts.renormalize": True, "experts.balance_weight": 0.001}

BLOCK, MLP, ATTENTION = "blk.{i}", "blocks_{i}.mlp", "blocks_{i}.attention"
TENSORS = (
    *(row._replace(theirs=row.theirs.replace("lm_head", "output")) for row in end_rows("token_embd", "output_norm")),
    Weight("embedding.W_pos", "position_embd.weight", "P D -> P D"),
    *norm_rows("embedding_norm", "token_embd_norm"),
    *norm_rows("blocks_{i}.attention_norm", f"{BLOCK}.attn_norm"),
    *attention_rows(BLOCK, "attn_q", "attn_k", "attn_v", "attn_output"),
    Weight("blocks_{i}.attention_post_norm.gamma", f"{BLOCK}.post_attention_norm.weight", "D -> D"),
    *norm_rows("blocks_{i}.mlp_norm", f"{BLOCK}.ffn_norm"),
    Weight(f"{MLP}.W_gate_1", f"{BLOCK}.ffn_gate.weight", "F D -> D F"),
    *mlp_rows(f"{BLOCK}.", "ffn_up", "ffn_down"),
    Weight("blocks_{i}.mlp_post_norm.gamma", f"{BLOCK}.post_ffw_norm.weight", "D -> D"),
    Weight(f"{ATTENTION}.gamma_Q", f"{BLOCK}.attn_q_norm.weight", "K -> K"),
    Weight(f"{ATTENTION}.gamma_K", f"{BLOCK}.attn_k_norm.weight", "K -> K"),
    Weight(f"{MLP}.W_router", f"{BLOCK}.ffn_gate_inp.weight", "E D -> D E"),
    Weight(f"{MLP}.experts.W_gate_1", f"{BLOCK}.ffn_gate_exps.weight", "E F D -> E D F"),
    Weight(f"{MLP}.experts.W_1", f"{BLOCK}.ffn_up_exps.weight", "E F D -> E D F"),
    Weight(f"{MLP}.experts.W_2", f"{BLOCK}.ffn_down_exps.weight", "E D F -> E F D"),
    Weight(f"{MLP}.W_shared_gate", f"{BLOCK}.ffn_gate_inp_shexp.weight", "D -> D 1"),
    Weight(f"{MLP}.shared.W_gate_1", f"{BLOCK}.ffn_gate_shexp.weight", "U D -> D U"),
    Weight(f"{MLP}.shared.W_1", f"{BLOCK}.ffn_up_shexp.weight", "U D -> D U"),
    Weight(f"{MLP}.shared.W_2", f"{BLOCK}.ffn_down_shexp.weight", "D U -> U D"),
)
"""Rows of all architectures, of which each model has some."""
ADJACENT = (
    *linear_rows(f"{ATTENTION}.W_Q", f"{BLOCK}.attn_q", "(H Z A) D -> D H (A Z)", "(H Z A) -> H 1 (A Z)"),
    *linear_rows(f"{ATTENTION}.W_K", f"{BLOCK}.attn_k", "(G Z A) D -> D G (A Z)", "(G Z A) -> G 1 (A Z)"),
)
"""Queries and keys of Llama and those like it: features 2i and 2i + 1, which RoPE rotates, are i and i + K/2 in
published folders."""
FUSED = tuple(
    row
    for part, (name, heads) in enumerate((("Q", "H"), ("K", "G"), ("V", "G")))
    for row in linear_rows(
        f"{ATTENTION}.W_{name}", f"{BLOCK}.attn_qkv", f"(H+G+G K) D -> D {heads} K", f"(H+G+G K) -> {heads} 1 K", part
    )
)
FUSED_GATE = (
    Weight(f"{MLP}.W_gate_1", f"{BLOCK}.ffn_up.weight", "(2 F) D -> D F", part=0),
    Weight(f"{MLP}.W_1", f"{BLOCK}.ffn_up.weight", "(2 F) D -> D F", part=1),
)
WHOLE_WIDTH = (
    Weight(f"{ATTENTION}.gamma_Q", f"{BLOCK}.attn_q_norm.weight", "(H K) -> H K"),
    Weight(f"{ATTENTION}.gamma_K", f"{BLOCK}.attn_k_norm.weight", "(G K) -> G K"),
)
FALCON_NORMS = tuple(
    row._replace(when=("norm_placement", placement))
    for placement, ours, theirs in (
        ("parallel", "attention_norm", "attn_norm"),
        ("parallel_two", "attention_norm", "attn_norm_2"),
        ("parallel_two", "mlp_norm", "attn_norm"),
    )
    for row in norm_rows(f"blocks_{{i}}.{ours}", f"{BLOCK}.{theirs}")
)


def architecture(
    name: str, family: Family, *fields: Field, rows: tuple[Weight, ...] = (), norm: tuple[Field, ...] = (RMS,),
    required: Mapping[str, Any] | None = None, **changes: Any,
) -> Family:  # fmt: skip
    """Return the family of an architecture: that of the published folders with keys for its fields, `fields` besides
    those that most have, and with the rows of `TENSORS`, of which `rows` replace those of the same parameters. Further
    arguments are other attributes of the family, or constants of the model."""
    attributes = {key: changes.pop(key) for key in ("read", "rope_types", "windows", "has_rope") if key in changes}
    rotates_all = family.rope_base is not None and family.rope_fraction is None
    common = (*SIZES, *((ROTATED,) if rotates_all else ()), *norm, UNEMBEDDING, BIAS, OUTPUT_BIAS)
    given, own = {row.ours for row in fields} | changes.keys(), {row.ours for row in rows}
    values = {"attention.causal": True, "rope.scaling.attn_factor": 1, "expert_count": 0, **(required or {})}
    if "windows" in attributes:
        values["rope.dimension_count_swa"] = head_width
    names = {row.theirs for row in fields}
    return replace(
        family,
        model_type=name,
        architecture=name,
        fields=(*(row for row in common if row.ours not in given), *fields),
        weights=(*(row for row in TENSORS if row.ours not in own), *rows),
        constants={**family.constants, "embedding_std": 0.02, **changes},
        required={key: value for key, value in values.items() if key not in names},
        write=dict,
        prefix="",
        unread=None,
        older_names=(),
        aliases={},
        **{"read": read_keys, "rope_types": ("default", "linear"), "windows": None, "has_rope": None, **attributes},
    )


def gemma_scale(n_blocks_of_27b: int) -> Field:
    """Return the row of the scale of scores, which llama.cpp finds out from the number of blocks."""

    def scale(keys: PublishedConfig) -> float:
        of_model = keys["embedding_length"] // keys["attention.head_count"]
        width: float = of_model if keys["block_count"] == n_blocks_of_27b else head_width(keys)
        return width**-0.5

    return Field("score_scale", "score_scale", scale)


def reciprocal(x: float) -> float:
    """Return 1 / x."""
    return 1 / x


EMBEDDING_SCALE = Field("embedding_scale", "embedding_length", read=sqrt, write=lambda scale: round(scale**2))
FUSED_BIAS = Field("attention_bias", "blk.0.attn_qkv.bias", False)
LOGIT_SCALE = Field("logit_scale", "logit_scale")
ALL = (
    architecture(
        "llama", decoders.LLAMA, rows=ADJACENT, activation="swiglu", rope_types=("default", "linear", "llama3")
    ),
    architecture("qwen3", decoders.QWEN3, activation="swiglu"),
    architecture("qwen2", decoders.QWEN2, activation="swiglu"),
    architecture("gemma", decoders.GEMMA, EMBEDDING_SCALE, activation="geglu"),
    architecture(
        "gemma2",
        decoders.GEMMA2,
        EMBEDDING_SCALE,
        gemma_scale(46),
        Field("score_soft_cap", "attn_logit_softcapping", 50.0),
        Field("logit_soft_cap", "final_logit_softcapping", 30.0),
        activation="geglu",
        required={"rope.freq_base_swa": same_base},
        windows=window_pattern(2, 4096, int),
    ),
    architecture(
        "gemma3",
        decoders.GEMMA3,
        EMBEDDING_SCALE,
        gemma_scale(62),
        Field("logit_soft_cap", "final_logit_softcapping", None, read=lambda cap: cap or None),  # 0 is none
        activation="geglu",
        read=lambda keys: read_keys({"rope.freq_base_swa": 10_000.0, **keys}, by_layer=True),
        windows=window_pattern(6),
    ),
    architecture("qwen3moe", decoders.QWEN3_MOE, *EXPERTS, activation="swiglu", **RENORMALIZED),
    architecture(
        "qwen2moe",
        decoders.QWEN2_MOE,
        *EXPERTS,
        Field("experts.shared_width", "expert_shared_feed_forward_length", lambda keys: keys["feed_forward_length"]),
        activation="swiglu",
        **{**RENORMALIZED, "experts.renormalize": False},
    ),
    architecture("phi3", decoders.PHI3, FUSED_BIAS, rows=(*FUSED, *FUSED_GATE), activation="swiglu"),
    architecture(
        "olmo2",
        decoders.OLMO3,
        rows=WHOLE_WIDTH,
        activation="swiglu",
        required={"rope.freq_base_swa": same_base},
        read=partial(read_keys, by_layer=True),
        windows=window_pattern(4),
    ),
    architecture(
        "granite",
        decoders.GRANITE,
        Field("embedding_scale", "embedding_scale", 0.0, read=lambda scale: scale or 1.0),
        Field("residual_scale", "residual_scale", 0.0, read=lambda scale: scale or 1.0),
        Field("score_scale", "attention.scale", lambda keys: head_width(keys) ** -0.5),
        LOGIT_SCALE._replace(read=reciprocal, write=reciprocal),
        rows=ADJACENT,
        activation="swiglu",
        required={"rope.scaling.finetuned": True},  # without which there is no RoPE
        rope_types=("default", "linear", "llama3"),
    ),
    architecture(
        "smollm3",
        decoders.SMOLLM3,
        rows=ADJACENT,
        activation="swiglu",
        required={"attention.scale": lambda keys: head_width(keys) ** -0.5},
        has_rope=lambda keys, i, is_local: (i + 1) % 4 > 0,
    ),
    architecture("starcoder2", layernorm_decoders.STARCODER2, norm=(LAYER_NORM,), activation="gelu", bias=True),
    architecture(
        "gptneox",
        layernorm_decoders.GPT_NEOX,
        Field("norm_placement", "use_parallel_residual", values={True: "parallel_two", False: "pre"}),
        FUSED_BIAS,
        rows=FUSED,
        norm=(LAYER_NORM,),
        activation="gelu_exact",
    ),
    architecture(
        "falcon",
        layernorm_decoders.FALCON,
        Field("norm_placement", "blk.0.attn_norm_2.weight", False, {True: "parallel_two", False: "parallel"}),
        rows=(*FALCON_NORMS, *FUSED),
        norm=(LAYER_NORM,),
        activation="gelu_exact",
        bias=False,
        attention_bias=False,
    ),
    architecture(
        "stablelm",
        layernorm_decoders.STABLELM,
        Field("norm_placement", "blk.0.ffn_norm.weight", False, {True: "pre", False: "parallel"}),
        norm=(LAYER_NORM,),
        activation="swiglu",
    ),
    architecture("phi2", layernorm_decoders.PHI, norm=(LAYER_NORM,), activation="gelu"),
    architecture(
        "glm4",
        decoders.GLM4,
        rows=FUSED_GATE,
        activation="swiglu",
        required={"rope.dimension_sections": None},  # with which queries and keys are stored in halves
    ),
    architecture(
        "command-r", layernorm_decoders.COHERE, LOGIT_SCALE, norm=(LAYER_NORM,), activation="swiglu", qk_norm=False
    ),
    architecture(
        "cohere2",
        layernorm_decoders.COHERE2,
        LOGIT_SCALE,
        norm=(LAYER_NORM,),
        activation="swiglu",
        windows=window_pattern(4, REQUIRED, int),
        has_rope=lambda keys, i, is_local: is_local,
    ),
    architecture(
        "olmo",
        decoders.OLMO,
        rows=ADJACENT,
        norm=(LAYER_NORM,),
        activation="swiglu",
        required={"attention.clamp_kqv": 0},
    ),
    architecture("gpt2", decoders.GPT2, FUSED_BIAS, rows=FUSED, norm=(LAYER_NORM,), activation="gelu"),
    architecture("bloom", layernorm_decoders.BLOOM, FUSED_BIAS, rows=FUSED, norm=(LAYER_NORM,)),
)
"""All architectures, in the order of preference for export."""

BIASED, PLAIN = {"attention_bias": True, "output_bias": True}, {"output_bias": False}
LINEAR, TIED = {"unembedding": "linear"}, {"unembedding": "tied"}
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"attention_bias": False} | PLAIN,
    **dict.fromkeys(("qwen2", "qwen3moe", "phi3", "falcon", "glm4", "olmo"), PLAIN),
    **dict.fromkeys(("gemma", "command-r"), TIED | PLAIN),
    **dict.fromkeys(("qwen2moe", "stablelm"), LINEAR | PLAIN),
    **dict.fromkeys(("gpt2", "bloom"), BIASED),
    "gptneox": LINEAR | BIASED,
    "phi2": LINEAR | {"output_bias": True},
    "starcoder2": {"output_bias": True},
}
"""Values without which a file has more or fewer tensors than llama.cpp expects of its architecture."""
ANY_WIDTH = ("llama", "granite", "qwen3", "qwen3moe", "gemma", "glm4")
"""Architectures whose heads may have another width than the model's, divided by their number."""


def exported(family: Family) -> Family:
    """Return the family of those models of an architecture that llama.cpp loads."""
    needed = NEEDED.get(family.model_type, {})
    fixed = {*needed} | (set() if family.model_type in ANY_WIDTH else {"head_dim"})
    fields = tuple(row for row in family.fields if row.ours not in fixed)
    return replace(family, fields=fields, constants={**family.constants, **needed})
