"""Families of decoders with LayerNorm, most of which compute attention and MLP in parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxformer.interop.families.tables import (
    ACTIVATIONS,
    ALWAYS,
    TIED,
    Family,
    Field,
    PublishedConfig,
    Weight,
    Windows,
    norm_rows,
    only_width,
    to_widths,
    with_defaults,
)

CONSTANTS = {"norm": "layernorm", "final_norm": True, "positions": "none", "bias": True, "attention_bias": True}
PREFIX = "model.layers.{i}"
SIZES = (
    Field("vocab_size", "vocab_size"),
    Field("max_context", "max_position_embeddings", 2048),
    Field("d_model", "hidden_size"),
    Field("n_blocks", "num_hidden_layers"),
    Field("n_heads", "num_attention_heads"),
    Field("d_ff", "intermediate_size", read=to_widths, write=only_width),
    Field("activation", "hidden_act", "gelu", ACTIVATIONS),
    Field("norm_eps", "layer_norm_eps", 1e-5),
    Field("unembedding", "tie_word_embeddings", False, TIED),
    Field("embedding_std", "initializer_range", 0.02),
)
KV_HEADS = (
    Field("n_kv_heads", "num_key_value_heads", lambda theirs: theirs["num_attention_heads"]),
    Field("head_dim", "head_dim", lambda theirs: theirs["hidden_size"] // theirs["num_attention_heads"]),
)
GATED = {"silu": "swiglu", "swish": "swiglu"}


def without(fields: tuple[Field, ...], *names: str) -> tuple[Field, ...]:
    """Return fields without some, by our names."""
    return tuple(row for row in fields if row.ours not in names)


def linear_rows(ours: str, theirs: str, layout: str, bias_layout: str, part: int | None = None) -> tuple[Weight, ...]:
    """Return the rows of a matrix, `W_…` of ours, and its bias, `b_…`."""
    return (
        Weight(ours, f"{theirs}.weight", layout, part),
        Weight(".b_".join(ours.rsplit(".W_", 1)), f"{theirs}.bias", bias_layout, part),
    )


def attention_rows(theirs: str, query: str, key: str, value: str, output: str) -> tuple[Weight, ...]:
    """Return the rows of attention with a matrix for each projection."""
    ours = "blocks_{i}.attention.W_"
    return (
        *linear_rows(f"{ours}Q", f"{theirs}.{query}", "(H K) D -> D H K", "(H K) -> H 1 K"),
        *linear_rows(f"{ours}K", f"{theirs}.{key}", "(G K) D -> D G K", "(G K) -> G 1 K"),
        *linear_rows(f"{ours}V", f"{theirs}.{value}", "(G K) D -> D G K", "(G K) -> G 1 K"),
        *linear_rows(f"{ours}O", f"{theirs}.{output}", "D (H K) -> H K D", "D -> D"),
    )


def fused_rows(theirs: str, output: str) -> tuple[Weight, ...]:
    """Return the rows of attention whose queries, keys and values are one matrix, by key/value head."""
    ours, fused = "blocks_{i}.attention.W_", f"{theirs}.query_key_value"
    return (
        *linear_rows(f"{ours}Q", fused, "(G R+1+1 K) D -> D (G R) K", "(G R+1+1 K) -> (G R) 1 K", 0),
        *linear_rows(f"{ours}K", fused, "(G R+1+1 K) D -> D G K", "(G R+1+1 K) -> G 1 K", 1),
        *linear_rows(f"{ours}V", fused, "(G R+1+1 K) D -> D G K", "(G R+1+1 K) -> G 1 K", 2),
        *linear_rows(f"{ours}O", f"{theirs}.{output}", "D (H K) -> H K D", "D -> D"),
    )


def mlp_rows(theirs: str, first: str, second: str) -> tuple[Weight, ...]:
    """Return the rows of an MLP without gates."""
    return (
        *linear_rows("blocks_{i}.mlp.W_1", f"{theirs}{first}", "F D -> D F", "F -> F"),
        *linear_rows("blocks_{i}.mlp.W_2", f"{theirs}{second}", "D F -> F D", "D -> D"),
    )


def end_rows(embedding: str, norm: str) -> tuple[Weight, ...]:
    """Return the rows of the embedding, the final norm and the unembedding."""
    return (
        Weight("embedding.W_E", f"{embedding}.weight", "V D -> V D"),
        *norm_rows("final_norm", norm),
        *(Weight("W_out", "lm_head.weight", "V D -> D V"), Weight("b_out", "lm_head.bias", "V -> V")),
    )


def read_neox(theirs: PublishedConfig) -> PublishedConfig:
    """Return a config of GPT-NeoX with its own names of RoPE's fields in `rope_parameters`."""
    own = {"rope_theta": theirs.get("rotary_emb_base", 10_000), "partial_rotary_factor": theirs.get("rotary_pct", 0.25)}
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    return {**theirs, "rope_scaling": None, "rope_parameters": own | given}


def write_neox(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return a config of GPT-NeoX with its own names of RoPE's fields as well."""
    base, fraction = theirs.pop("rope_theta"), theirs.pop("partial_rotary_factor")
    return theirs | {"rotary_emb_base": base, "rotary_pct": fraction}


LAYER = "gpt_neox.layers.{i}"
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    fields=(
        *without(SIZES, "activation"),
        Field("activation", "hidden_act", "gelu", {**ACTIVATIONS, "gelu_fast": "gelu"}),
        Field("norm_placement", "use_parallel_residual", True, {True: "parallel_two", False: "pre"}),
        Field("attention_bias", "attention_bias", True),
    ),
    weights=(
        *(
            row._replace(theirs=row.theirs.replace("lm_head", "embed_out"))
            for row in end_rows("gpt_neox.embed_in", "gpt_neox.final_layer_norm")
        ),
        *norm_rows("blocks_{i}.attention_norm", f"{LAYER}.input_layernorm"),
        *norm_rows("blocks_{i}.mlp_norm", f"{LAYER}.post_attention_layernorm"),
        *fused_rows(f"{LAYER}.attention", "dense"),
        *mlp_rows(f"{LAYER}.mlp.", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    constants=CONSTANTS,
    required={"head_dim": None},
    rope_fraction=0.25,
    read=read_neox,
    write=write_neox,
    prefix="gpt_neox.",
    ignored=(r"rotary_emb\.inv_freq$", r"attention\.(masked_)?bias$"),
    older_names=(("embed_out.weight", "lm_head.weight"),),
)


def read_gptj(theirs: PublishedConfig) -> PublishedConfig:
    """Return a config of GPT-J with the rotated features as a fraction of the width of a head."""
    theirs = {"n_embd": 4096, "n_head": 16, "rotary_dim": 64, **theirs}
    head_dim, rotary_dim = theirs["n_embd"] // theirs["n_head"], theirs["rotary_dim"]
    if type(rotary_dim) is not int or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim is {rotary_dim!r}; it must be from 1 to the width of a head, {head_dim}")
    fraction = rotary_dim / head_dim
    if int(fraction * head_dim) < rotary_dim:  # by rounding
        fraction = (rotary_dim + 0.5) / head_dim
    rope = {"rope_theta": 10_000.0, "partial_rotary_factor": fraction}
    return {**theirs, "rope_scaling": None, "rope_parameters": rope}


def write_gptj(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return a config of GPT-J with the number of rotated features."""
    fraction = theirs.pop("partial_rotary_factor")
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        del theirs[name]
    return theirs | {"rotary_dim": int(fraction * (theirs["n_embd"] // theirs["n_head"]))}


LAYER = "transformer.h.{i}"
GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    fields=(
        *without(SIZES, "max_context", "d_model", "n_blocks", "n_heads", "d_ff", "activation", "norm_eps"),
        Field("max_context", "n_positions", 2048),
        Field("d_model", "n_embd", 4096),
        Field("n_blocks", "n_layer", 28),
        Field("n_heads", "n_head", 16),
        Field("d_ff", "n_inner", lambda theirs: 4 * theirs["n_embd"], read=to_widths, write=only_width),
        Field("activation", "activation_function", "gelu_new", ACTIVATIONS),
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
    ),
    weights=(
        *end_rows("transformer.wte", "transformer.ln_f"),
        *norm_rows("blocks_{i}.attention_norm", f"{LAYER}.ln_1"),
        *attention_rows(f"{LAYER}.attn", "q_proj", "k_proj", "v_proj", "out_proj"),
        *mlp_rows(f"{LAYER}.mlp.", "fc_in", "fc_out"),
    ),
    constants={**CONSTANTS, "norm_placement": "parallel", "attention_bias": False, "unembedding_bias": True},
    rope_fraction=1.0,
    interleaved=True,
    read=read_gptj,
    write=write_gptj,
    prefix="transformer.",
    ignored=(r"attn\.(masked_)?bias$", r"attn\.embed_positions$"),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)

PHI = Family(
    "phi",
    "PhiForCausalLM",
    fields=(*with_defaults(SIZES, activation="gelu_new"), *KV_HEADS),
    weights=(
        *end_rows("model.embed_tokens", "model.final_layernorm"),
        *norm_rows("blocks_{i}.attention_norm", f"{PREFIX}.input_layernorm"),
        *attention_rows(f"{PREFIX}.self_attn", "q_proj", "k_proj", "v_proj", "dense"),
        *mlp_rows(f"{PREFIX}.mlp.", "fc1", "fc2"),
    ),
    constants={**CONSTANTS, "norm_placement": "parallel", "unembedding_bias": True},
    required={"qk_layernorm": False},
    rope_fraction=0.5,
)

STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    fields=(
        *without(with_defaults(SIZES, max_context=4096), "activation"),
        Field("n_kv_heads", "num_key_value_heads", 32),
        Field("activation", "hidden_act", "silu", GATED),
        Field("attention_bias", "use_qkv_bias", False),
        Field("norm_placement", "use_parallel_residual", False, {True: "parallel", False: "pre"}),
    ),
    weights=(
        *end_rows("model.embed_tokens", "model.norm"),
        *norm_rows("blocks_{i}.attention_norm", f"{PREFIX}.input_layernorm"),
        *norm_rows("blocks_{i}.mlp_norm", f"{PREFIX}.post_attention_layernorm"),
        *attention_rows(f"{PREFIX}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
        Weight("blocks_{i}.mlp.W_gate_1", f"{PREFIX}.mlp.gate_proj.weight", "F D -> D F"),
        *mlp_rows(f"{PREFIX}.mlp.", "up_proj", "down_proj"),
    ),
    constants={"norm": "layernorm", "final_norm": True, "positions": "none", "bias": False, "output_bias": False},
    required={"qk_layernorm": False, "head_dim": None},
    rope_fraction=0.25,
)


def read_falcon(theirs: PublishedConfig) -> PublishedConfig:
    """Return a config of Falcon with the number of key/value heads and the placement of norms, which both follow from
    several of its fields."""
    theirs = {**theirs, **({} if theirs.get("n_embed") is None else {"hidden_size": theirs["n_embed"]})}
    is_new, n_heads = bool(theirs.get("new_decoder_architecture")), theirs["num_attention_heads"]
    n_norms, n_kv_heads = theirs.get("num_ln_in_parallel_attn"), theirs.get("num_kv_heads")
    is_parallel = bool(theirs.get("parallel_attn", True))
    if not is_new and theirs.get("multi_query", True):
        n_kv_heads = 1
    elif not is_new and n_kv_heads not in (None, n_heads):
        raise ValueError(f"num_kv_heads is {n_kv_heads!r}; without multi_query it must be {n_heads} or null")
    if n_norms is None:
        n_norms = 2 if is_new else 1
    if is_parallel and n_norms not in ((1, 2) if is_new else (1,)):
        raise ValueError(f"num_ln_in_parallel_attn is {n_norms!r} with new_decoder_architecture {is_new}")
    if is_new and not is_parallel:
        raise ValueError("parallel_attn is false with new_decoder_architecture true")
    placement = ("parallel" if n_norms == 1 else "parallel_two") if is_parallel else "pre"
    return theirs | {"num_kv_heads": n_heads if n_kv_heads is None else n_kv_heads, "norm_placement": placement}


def write_falcon(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return a config of Falcon with the fields that say how many key/value heads and norms there are."""
    placement, n_kv_heads = theirs.pop("norm_placement"), theirs["num_kv_heads"]
    n_heads, is_multi_query = theirs["num_attention_heads"], n_kv_heads == 1
    is_new = placement == "parallel_two" or (placement != "pre" and 1 < n_kv_heads < n_heads)
    return theirs | {
        "new_decoder_architecture": is_new,
        "num_kv_heads": n_kv_heads if is_new or is_multi_query else n_heads,
        "multi_query": is_multi_query,
        "parallel_attn": placement != "pre",
        "num_ln_in_parallel_attn": {"parallel_two": 2, "parallel": 1, "pre": None}[placement],
    }


FALCON_NORMS = {"parallel": "input_layernorm", "pre": "input_layernorm", "parallel_two": "ln_attn"}
FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    fields=(
        *without(with_defaults(SIZES, unembedding=True), "d_ff", "activation", "norm_eps"),
        Field("n_kv_heads", "num_kv_heads"),
        Field("norm_placement", "norm_placement", values={name: name for name in FALCON_NORMS}),
        Field("d_ff", "ffn_hidden_size", lambda theirs: 4 * theirs["hidden_size"], read=to_widths, write=only_width),
        Field("activation", "activation", "gelu", ACTIVATIONS),
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
        Field("bias", "bias", False),
        Field("attention_bias", "bias", False),
    ),
    weights=(
        *end_rows("transformer.word_embeddings", "transformer.ln_f"),
        *(
            row._replace(when=("norm_placement", placement))
            for placement, name in FALCON_NORMS.items()
            for row in norm_rows("blocks_{i}.attention_norm", f"{LAYER}.{name}")
        ),
        *(
            row._replace(when=("norm_placement", placement))
            for placement, name in (("pre", "post_attention_layernorm"), ("parallel_two", "ln_mlp"))
            for row in norm_rows("blocks_{i}.mlp_norm", f"{LAYER}.{name}")
        ),
        *fused_rows(f"{LAYER}.self_attention", "dense"),
        *mlp_rows(f"{LAYER}.mlp.", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    constants={"norm": "layernorm", "final_norm": True, "positions": "none"},
    required={"alibi": False},
    read=read_falcon,
    write=write_falcon,
    prefix="transformer.",
)


def read_bloom(theirs: PublishedConfig) -> PublishedConfig:
    """Return a config of BLOOM with the width of the model by its newer name."""
    return {**theirs, **({} if theirs.get("n_embed") is None else {"hidden_size": theirs["n_embed"]})}


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    fields=(
        Field("d_ff", "hidden_size", 64, read=lambda d: (4 * d,), write=lambda widths: only_width(widths) // 4),
        *without(
            SIZES, "max_context", "d_model", "n_blocks", "n_heads", "d_ff", "activation", "norm_eps", "unembedding"
        ),
        Field("max_context", "seq_length", 2048),
        Field("d_model", "hidden_size", 64),
        Field("n_blocks", "n_layer", 2),
        Field("n_heads", "n_head", 8),
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
        Field("unembedding", "tie_word_embeddings", True, TIED),
    ),
    weights=(
        *end_rows("transformer.word_embeddings", "transformer.ln_f"),
        *norm_rows("embedding_norm", "transformer.word_embeddings_layernorm"),
        *norm_rows("blocks_{i}.attention_norm", f"{LAYER}.input_layernorm"),
        *norm_rows("blocks_{i}.mlp_norm", f"{LAYER}.post_attention_layernorm"),
        *fused_rows(f"{LAYER}.self_attention", "dense"),
        *mlp_rows(f"{LAYER}.mlp.", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    constants={**CONSTANTS, "positions": "alibi", "embedding_norm": True, "activation": "gelu"},
    required={"apply_residual_connection_post_layernorm": False},
    read=read_bloom,
    rope_base=None,
    prefix="transformer.",
    aliases={"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
)


def read_opt(theirs: PublishedConfig) -> PublishedConfig:
    """Return a config of OPT in which the final norm, which post-norm does not have, is one field."""
    if (width := theirs.get("word_embed_proj_dim")) not in (None, theirs["hidden_size"]):
        raise ValueError(f"word_embed_proj_dim is {width!r}, and only hidden_size, {theirs['hidden_size']}, has one")
    is_post = theirs.get("do_layer_norm_before", True) is False
    return {**theirs, "_remove_final_layer_norm": is_post or theirs.get("_remove_final_layer_norm", False)}


LAYER = "model.decoder.layers.{i}"
OPT = Family(
    "opt",
    "OPTForCausalLM",
    fields=(
        *without(with_defaults(SIZES, unembedding=True), "d_ff", "activation", "norm_eps", "embedding_std"),
        Field("d_ff", "ffn_dim", 3072, read=to_widths, write=only_width),
        Field("activation", "activation_function", "relu", ACTIVATIONS),
        Field("embedding_std", "init_std", 0.02),
        Field("norm", "layer_norm_elementwise_affine", True, {True: "layernorm", False: "layernorm_no_parameters"}),
        Field("norm_placement", "do_layer_norm_before", True, {True: "pre", False: "post"}),
        Field("final_norm", "_remove_final_layer_norm", False, {False: True, True: False}),
        Field("bias", "enable_bias", True),
        Field("attention_bias", "enable_bias", True),
    ),
    weights=(
        *end_rows("model.decoder.embed_tokens", "model.decoder.final_layer_norm"),
        Weight("embedding.W_pos", "model.decoder.embed_positions.weight", "P D -> P D", first_row=2),
        *norm_rows("blocks_{i}.attention_norm", f"{LAYER}.self_attn_layer_norm"),
        *attention_rows(f"{LAYER}.self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
        *norm_rows("blocks_{i}.mlp_norm", f"{LAYER}.final_layer_norm"),
        *mlp_rows(f"{LAYER}.", "fc1", "fc2"),
    ),
    constants={"positions": "learned", "norm_eps": 1e-5},
    read=read_opt,
    rope_base=None,
)

STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    fields=(
        *without(
            with_defaults(SIZES, max_context=4096, unembedding=True, embedding_std=0.018042), "norm_eps", "activation"
        ),
        *with_defaults(KV_HEADS, n_kv_heads=2),
        Field("activation", "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
        Field("norm_eps", "norm_epsilon", 1e-5),
        Field("bias", "use_bias", True),
        Field("attention_bias", "use_bias", True),
    ),
    weights=(
        *end_rows("model.embed_tokens", "model.norm"),
        *norm_rows("blocks_{i}.attention_norm", f"{PREFIX}.input_layernorm"),
        *norm_rows("blocks_{i}.mlp_norm", f"{PREFIX}.post_attention_layernorm"),
        *attention_rows(f"{PREFIX}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
        *mlp_rows(f"{PREFIX}.mlp.", "c_fc", "c_proj"),
    ),
    constants={"norm": "layernorm", "final_norm": True, "positions": "none"},
    windows=ALWAYS._replace(default=None),
)


def read_cohere(theirs: PublishedConfig) -> PublishedConfig:
    """Return a config of Cohere with the kind of norm of queries and keys, if there is one."""
    return {**theirs, "qk_norm_kind": "layernorm" if theirs.get("use_qk_norm") else "head"}


COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    fields=(
        *without(with_defaults(SIZES, max_context=8192, unembedding=True), "activation"),
        *KV_HEADS,
        Field("activation", "hidden_act", "silu", GATED),
        Field("attention_bias", "attention_bias", False),
        Field("qk_norm", "use_qk_norm", False),
        Field("qk_norm_kind", "qk_norm_kind"),
        Field("logit_scale", "logit_scale", 0.0625),
    ),
    weights=(
        *end_rows("model.embed_tokens", "model.norm"),
        *norm_rows("blocks_{i}.attention_norm", f"{PREFIX}.input_layernorm"),
        *attention_rows(f"{PREFIX}.self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
        Weight("blocks_{i}.attention.gamma_Q", f"{PREFIX}.self_attn.q_norm.weight", "H K -> H K"),
        Weight("blocks_{i}.attention.gamma_K", f"{PREFIX}.self_attn.k_norm.weight", "G K -> G K"),
        Weight("blocks_{i}.mlp.W_gate_1", f"{PREFIX}.mlp.gate_proj.weight", "F D -> D F"),
        *mlp_rows(f"{PREFIX}.mlp.", "up_proj", "down_proj"),
    ),
    constants={
        **CONSTANTS,
        "norm": "layernorm_no_bias",
        "norm_placement": "parallel",
        "bias": False,
    },
    read=read_cohere,
    write=lambda theirs: {name: value for name, value in theirs.items() if name != "qk_norm_kind"},
    rope_base=5e5,
    interleaved=True,
)

COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    fields=without(COHERE.fields, "qk_norm", "qk_norm_kind"),
    weights=tuple(weight for weight in COHERE.weights if ".gamma_" not in weight.ours),
    read=dict,
    write=lambda theirs: {name: value for name, value in theirs.items() if name != "no_rope_layers"},
    rope_base=1e4,
    windows=Windows(lambda theirs, i, window: bool((i + 1) % theirs.get("sliding_window_pattern", 4))),
    has_rope=lambda theirs, i, is_local: is_local,
)

ALL = (GPT_NEOX, GPTJ, PHI, STABLELM, FALCON, BLOOM, OPT, STARCODER2, COHERE, COHERE2)
"""All families of this file, in the order of preference for export."""
