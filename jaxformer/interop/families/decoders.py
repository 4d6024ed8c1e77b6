"""Families of decoders."""

from __future__ import annotations

import re
from dataclasses import replace
from math import log, sqrt
from typing import Any

from jaxformer.interop.families.tables import (
    ACTIVATIONS,
    ALWAYS,
    LAST_LAYERS,
    TIED,
    Family,
    Field,
    PublishedConfig,
    Weight,
    Windows,
    all_but_every_sixth,
    only_width,
    to_widths,
    with_defaults,
)
from jaxformer.ops.positions import yarn_amplitude

EXPERTS, THEIR_EXPERTS = "blocks_{i}.mlp.experts", "model.layers.{i}.block_sparse_moe.experts.{e}"
LLAMA_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("max_context", "max_position_embeddings", 2048),
    Field("d_model", "hidden_size"),
    Field("n_blocks", "num_hidden_layers"),
    Field("n_heads", "num_attention_heads"),
    Field("n_kv_heads", "num_key_value_heads", None, is_optional=True),
    Field("head_dim", "head_dim", None, is_optional=True),
    Field("d_ff", "intermediate_size", read=to_widths, write=only_width),
    Field("activation", "hidden_act", "silu", {"silu": "swiglu", "swish": "swiglu"}),
    Field("norm_eps", "rms_norm_eps", 1e-6),
    Field("unembedding", "tie_word_embeddings", False, TIED),
    Field("embedding_std", "initializer_range", 0.02),
)
LLAMA_CONSTANTS = {"norm": "rmsnorm", "final_norm": True, "positions": "none", "bias": False}

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

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=with_defaults(LLAMA_FIELDS, n_kv_heads=8, max_context=131_072),
    required={},
    windows=ALWAYS,
)

QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=with_defaults(LLAMA_FIELDS, n_kv_heads=32, max_context=32_768),
    constants={**LLAMA_CONSTANTS, "attention_bias": True, "output_bias": False},
    required={},
    windows=LAST_LAYERS,
)

QK_NORM = (
    Weight("blocks_{i}.attention.gamma_Q", "model.layers.{i}.self_attn.q_norm.weight", "K -> K"),
    Weight("blocks_{i}.attention.gamma_K", "model.layers.{i}.self_attn.k_norm.weight", "K -> K"),
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=with_defaults(LLAMA.fields, n_kv_heads=32, head_dim=128, max_context=32_768),
    weights=(*LLAMA.weights, *QK_NORM),
    constants={**LLAMA_CONSTANTS, "qk_norm": True},
    required={},
    windows=LAST_LAYERS,
)

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("max_context", "n_positions", 1024),
        Field("d_model", "n_embd"),
        Field("n_blocks", "n_layer"),
        Field("n_heads", "n_head"),
        Field("d_ff", "n_inner", lambda theirs: 4 * theirs["n_embd"], read=to_widths, write=only_width),
        Field(
            "activation",
            "activation_function",
            "gelu_new",
            ACTIVATIONS,
        ),
        Field("norm_eps", "layer_norm_epsilon", 1e-5),
        Field("unembedding", "tie_word_embeddings", True, TIED),
        Field("embedding_std", "initializer_range", 0.02),
    ),
    weights=(
        Weight("embedding.W_E", "transformer.wte.weight", "V D -> V D"),
        Weight("embedding.W_pos", "transformer.wpe.weight", "P D -> P D"),
        Weight("blocks_{i}.attention_norm.gamma", "transformer.h.{i}.ln_1.weight", "D -> D"),
        Weight("blocks_{i}.attention_norm.beta", "transformer.h.{i}.ln_1.bias", "D -> D"),
        Weight("blocks_{i}.attention.W_Q", "transformer.h.{i}.attn.c_attn.weight", "D (3 H K) -> D H K", part=0),
        Weight("blocks_{i}.attention.W_K", "transformer.h.{i}.attn.c_attn.weight", "D (3 H K) -> D H K", part=1),
        Weight("blocks_{i}.attention.W_V", "transformer.h.{i}.attn.c_attn.weight", "D (3 H K) -> D H K", part=2),
        Weight("blocks_{i}.attention.b_Q", "transformer.h.{i}.attn.c_attn.bias", "(3 H K) -> H 1 K", part=0),
        Weight("blocks_{i}.attention.b_K", "transformer.h.{i}.attn.c_attn.bias", "(3 H K) -> H 1 K", part=1),
        Weight("blocks_{i}.attention.b_V", "transformer.h.{i}.attn.c_attn.bias", "(3 H K) -> H 1 K", part=2),
        Weight("blocks_{i}.attention.W_O", "transformer.h.{i}.attn.c_proj.weight", "(H K) D -> H K D"),
        Weight("blocks_{i}.attention.b_O", "transformer.h.{i}.attn.c_proj.bias", "D -> D"),
        Weight("blocks_{i}.mlp_norm.gamma", "transformer.h.{i}.ln_2.weight", "D -> D"),
        Weight("blocks_{i}.mlp_norm.beta", "transformer.h.{i}.ln_2.bias", "D -> D"),
        Weight("blocks_{i}.mlp.W_1", "transformer.h.{i}.mlp.c_fc.weight", "D F -> D F"),
        Weight("blocks_{i}.mlp.b_1", "transformer.h.{i}.mlp.c_fc.bias", "F -> F"),
        Weight("blocks_{i}.mlp.W_2", "transformer.h.{i}.mlp.c_proj.weight", "F D -> F D"),
        Weight("blocks_{i}.mlp.b_2", "transformer.h.{i}.mlp.c_proj.bias", "D -> D"),
        Weight("final_norm.gamma", "transformer.ln_f.weight", "D -> D"),
        Weight("final_norm.beta", "transformer.ln_f.bias", "D -> D"),
        Weight("W_out", "lm_head.weight", "V D -> D V"),
    ),
    constants={
        "norm": "layernorm",
        "final_norm": True,
        "positions": "learned",
        "bias": True,
        "attention_bias": True,
    },
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    rope_base=None,
    prefix="transformer.",
    ignored=(r"attn\.(masked_)?bias$",),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)

EMBEDDING_SCALE = Field("embedding_scale", "hidden_size", read=sqrt, write=lambda scale: round(scale**2))
GEMMA2_DEFAULTS = {"max_context": 8192, "score_soft_cap": 50.0, "logit_soft_cap": 30.0}
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    fields=(
        EMBEDDING_SCALE,
        *with_defaults(
            tuple(row for row in LLAMA_FIELDS if row.ours != "activation"),
            max_context=131_072,
            n_kv_heads=4,
            head_dim=256,
            unembedding=True,
        ),
        Field("activation", "hidden_activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu"}),
        Field("attention_bias", "attention_bias", False),
        Field("score_scale", "query_pre_attn_scalar", 256, read=lambda n: n**-0.5, write=lambda s: round(s**-2)),
        Field("logit_soft_cap", "final_logit_softcapping", None),
    ),
    weights=(
        *(weight for weight in LLAMA_ENDS if weight.ours != "final_norm.gamma"),
        Weight("final_norm.gamma", "model.norm.weight", "D -> D", offset=1),
        *(weight for weight in LLAMA_ATTENTION if not weight.ours.endswith("gamma")),
        *(weight._replace(offset=1) for weight in QK_NORM),
        *(weight for weight in LLAMA_MLP if not weight.ours.endswith("gamma")),
        *(
            Weight(f"blocks_{{i}}.{ours}.gamma", f"model.layers.{{i}}.{theirs}.weight", "D -> D", offset=1)
            for ours, theirs in (
                ("attention_norm", "input_layernorm"),
                ("attention_post_norm", "post_attention_layernorm"),
                ("mlp_norm", "pre_feedforward_layernorm"),
                ("mlp_post_norm", "post_feedforward_layernorm"),
            )
        ),
    ),
    constants={**LLAMA_CONSTANTS, "norm_placement": "both", "qk_norm": True},
    required={"use_bidirectional_attention": False, "attn_logit_softcapping": None},  # which it does not use
    rope_base=1e6,
    local_rope_base=1e4,
    windows=Windows(all_but_every_sixth),
)
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""Sizes that published configs of models with images leave out where they are these."""
GEMMA3_WITH_IMAGES = replace(
    GEMMA3,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    weights=tuple(
        weight._replace(
            theirs=re.sub("^model", "language_model.model", re.sub("^lm_head", "language_model.lm_head", weight.theirs))
        )
        for weight in GEMMA3.weights
    ),
    read=lambda theirs: {
        **theirs,
        **GEMMA3_DEFAULTS,
        **theirs["text_config"],
        "tie_word_embeddings": theirs.get("tie_word_embeddings", True),
    },
    write=lambda theirs: {**theirs, "text_config": theirs | {"model_type": GEMMA3.model_type}},
    prefix="",
    unread=r"^(model\.)?(vision_tower|multi_modal_projector)\.",
)
"""Of models of texts and images, the part for texts."""

GEMMA = replace(
    GEMMA3,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fields=(
        EMBEDDING_SCALE,
        *with_defaults(
            tuple(row for row in LLAMA_FIELDS if row.ours != "activation"),
            max_context=8192,
            n_kv_heads=16,
            head_dim=256,
            unembedding=True,
        ),
        # Released configs say gelu, and mean this, as transformers knows.
        Field("activation", "hidden_act", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}),
        Field("attention_bias", "attention_bias", False),
    ),
    weights=tuple(weight._replace(offset=float(weight.ours.endswith("gamma"))) for weight in LLAMA.weights),
    constants=LLAMA_CONSTANTS,
    required={"use_bidirectional_attention": False},
    rope_base=1e4,
    local_rope_base=None,
    windows=None,
)

GEMMA2 = replace(
    GEMMA3,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=tuple(
        row._replace(default=GEMMA2_DEFAULTS.get(row.ours, row.default), is_optional="soft_cap" in row.ours)
        for row in (*GEMMA3.fields, Field("score_soft_cap", "attn_logit_softcapping"))
    ),
    weights=tuple(weight for weight in GEMMA3.weights if ".gamma_" not in weight.ours),
    constants={**LLAMA_CONSTANTS, "norm_placement": "both"},
    required={"use_bidirectional_attention": False},
    rope_base=1e4,
    local_rope_base=None,
    windows=Windows(lambda theirs, i, window: i % 2 == 0),
)

MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *with_defaults(LLAMA_FIELDS, n_kv_heads=8, max_context=131_072, norm_eps=1e-5),
        Field("experts.n_experts", "num_local_experts", 8),
        Field("experts.per_token", "num_experts_per_tok", 2),
        Field("experts.balance_weight", "router_aux_loss_coef", 0.001),
    ),
    weights=(
        *LLAMA_ENDS,
        *LLAMA_ATTENTION,
        *(weight for weight in LLAMA_MLP if weight.ours.endswith("gamma")),
        Weight("blocks_{i}.mlp.W_router", "model.layers.{i}.block_sparse_moe.gate.weight", "E D -> D E"),
        Weight(f"{EXPERTS}.W_gate_1", f"{THEIR_EXPERTS}.w1.weight", "F D -> D F"),
        Weight(f"{EXPERTS}.W_1", f"{THEIR_EXPERTS}.w3.weight", "F D -> D F"),
        Weight(f"{EXPERTS}.W_2", f"{THEIR_EXPERTS}.w2.weight", "D F -> F D"),
    ),
    constants={**LLAMA_CONSTANTS, "experts.renormalize": True},
    required={},
    rope_base=1e6,
    windows=ALWAYS._replace(default=None),
    aliases={"num_experts": "num_local_experts"},
)

MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    windows=ALWAYS._replace(by_layer=True),
)

NO_PADDING = {"pad_token_id": None}
"""What a config must have if its class has a default token for padding, which may be beyond the vocabulary."""
OLMO = replace(
    LLAMA,
    model_type="olmo",
    architecture="OlmoForCausalLM",
    fields=tuple(row for row in LLAMA.fields if row.ours != "norm_eps"),
    weights=tuple(weight for weight in LLAMA.weights if not weight.ours.endswith("gamma")),
    constants={**LLAMA_CONSTANTS, "norm": "layernorm_no_parameters", "norm_eps": 1e-5},
    required={"clip_qkv": None},
    write=lambda theirs: theirs | NO_PADDING,
)

OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fields=with_defaults(LLAMA.fields, norm_eps=1e-5),
    weights=(
        *LLAMA_ENDS,
        *(weight for weight in (*LLAMA_ATTENTION, *LLAMA_MLP) if not weight.ours.endswith("gamma")),
        Weight("blocks_{i}.attention_post_norm.gamma", "model.layers.{i}.post_attention_layernorm.weight", "D -> D"),
        Weight("blocks_{i}.mlp_post_norm.gamma", "model.layers.{i}.post_feedforward_layernorm.weight", "D -> D"),
        Weight("blocks_{i}.attention.gamma_Q", "model.layers.{i}.self_attn.q_norm.weight", "(H K) -> H K"),
        Weight("blocks_{i}.attention.gamma_K", "model.layers.{i}.self_attn.k_norm.weight", "(G K) -> G K"),
    ),
    constants={**LLAMA_CONSTANTS, "norm_placement": "output", "qk_norm": True, "qk_norm_kind": "width"},
    required={},
    write=lambda theirs: theirs | NO_PADDING,
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    read=lambda theirs: {name: value for name, value in theirs.items() if name != "rope_local_base_freq"},
    rope_base=5e5,
    local_rope_base=5e5,
    windows=Windows(lambda theirs, i, window: (i + 1) % 4 != 0),
)


def smollm3_has_rope(theirs: PublishedConfig, i: int, is_local: bool = False) -> bool:
    """Return True for a block that rotates queries and keys."""
    if (layers := theirs.get("no_rope_layers")) is None:
        return (i + 1) % int(theirs.get("no_rope_layer_interval", 4)) != 0
    return bool(layers[i])


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=with_defaults(LLAMA.fields, n_kv_heads=4, max_context=32_768, unembedding=True),
    write=lambda theirs: {**theirs, **NO_PADDING, "use_sliding_window": theirs["sliding_window"] is not None},
    rope_base=2e6,
    windows=Windows(
        lambda theirs, i, window: (
            bool(theirs.get("use_sliding_window")) and window is not None and not smollm3_has_rope(theirs, i)
        ),
        default=None,
    ),
    has_rope=smollm3_has_rope,
)

GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=(
        *LLAMA.fields,
        Field("embedding_scale", "embedding_multiplier", 1.0),
        Field("score_scale", "attention_multiplier", 1.0),
        Field("residual_scale", "residual_multiplier", 1.0),
        Field("logit_scale", "logits_scaling", 1.0, read=lambda x: 1 / x, write=lambda x: 1 / x),
    ),
)

FUSED_MLP = (
    Weight("blocks_{i}.mlp.W_gate_1", "model.layers.{i}.mlp.gate_up_proj.weight", "(2 F) D -> D F", part=0),
    Weight("blocks_{i}.mlp.W_1", "model.layers.{i}.mlp.gate_up_proj.weight", "(2 F) D -> D F", part=1),
    Weight("blocks_{i}.mlp.W_2", "model.layers.{i}.mlp.down_proj.weight", "D F -> F D"),
)
ORIGINAL = "original_max_position_embeddings"


def read_phi3(theirs: PublishedConfig) -> PublishedConfig:
    """Return their config with the training context that it has by default, and older names of LongRoPE as they are
    now."""
    ropes = {name: dict(theirs[name]) for name in ("rope_parameters", "rope_scaling") if theirs.get(name)}
    for rope in ropes.values():
        kind = rope.get("rope_type", rope.get("type", "default"))
        rope["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
    return {ORIGINAL: 4096, **theirs, **ropes}


PHI3 = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=with_defaults(LLAMA_FIELDS, max_context=4096, norm_eps=1e-5),
    weights=(
        *LLAMA_ENDS,
        *(weight for weight in (*LLAMA_ATTENTION, *LLAMA_MLP) if weight.ours.endswith(("gamma", "W_O"))),
        *(
            Weight(
                f"blocks_{{i}}.attention.W_{name}",
                "model.layers.{i}.self_attn.qkv_proj.weight",
                f"(H+G+G K) D -> D {heads} K",
                part=part,
            )
            for part, (name, heads) in enumerate((("Q", "H"), ("K", "G"), ("V", "G")))
        ),
        *FUSED_MLP,
    ),
    required={},
    read=read_phi3,
    write=lambda theirs: {**theirs, **NO_PADDING, ORIGINAL: theirs["rope_parameters"].get(ORIGINAL, 4096)},
    rope_fraction=1.0,
    rope_types=("default", "longrope"),
    windows=ALWAYS._replace(default=None),
)

GLM4 = replace(
    LLAMA,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    fields=(
        *with_defaults(LLAMA_FIELDS, n_kv_heads=2, head_dim=128, max_context=131_072, norm_eps=1.5625e-7),
        Field("attention_bias", "attention_bias", True),
    ),
    weights=(
        *LLAMA_ENDS,
        *(weight for weight in (*LLAMA_ATTENTION, *LLAMA_MLP) if ".mlp." not in weight.ours),
        Weight("blocks_{i}.attention_post_norm.gamma", "model.layers.{i}.post_self_attn_layernorm.weight", "D -> D"),
        Weight("blocks_{i}.mlp_post_norm.gamma", "model.layers.{i}.post_mlp_layernorm.weight", "D -> D"),
        *FUSED_MLP,
    ),
    constants={**LLAMA_CONSTANTS, "norm_placement": "both", "output_bias": False},
    required={},
    write=lambda theirs: theirs | NO_PADDING,
    rope_fraction=0.5,
    interleaved=True,
)

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=(
        *with_defaults(
            tuple(row for row in LLAMA.fields if row.ours != "d_ff"), n_kv_heads=4, max_context=32_768, norm_eps=1e-6
        ),
        Field("d_ff", "moe_intermediate_size", 768, read=to_widths, write=only_width),
        Field("experts.n_experts", "num_experts", 128),
        Field("experts.per_token", "num_experts_per_tok", 8),
        Field("experts.renormalize", "norm_topk_prob", False),
        Field("experts.balance_weight", "router_aux_loss_coef", 0.001),
    ),
    weights=(
        *LLAMA_ENDS,
        *LLAMA_ATTENTION,
        *QK_NORM,
        *(weight for weight in LLAMA_MLP if weight.ours.endswith("gamma")),
        Weight("blocks_{i}.mlp.W_router", "model.layers.{i}.mlp.gate.weight", "E D -> D E"),
        Weight(f"{EXPERTS}.W_gate_1", "model.layers.{i}.mlp.experts.{e}.gate_proj.weight", "F D -> D F"),
        Weight(f"{EXPERTS}.W_1", "model.layers.{i}.mlp.experts.{e}.up_proj.weight", "F D -> D F"),
        Weight(f"{EXPERTS}.W_2", "model.layers.{i}.mlp.experts.{e}.down_proj.weight", "D F -> F D"),
    ),
    required={"mlp_only_layers": None, "decoder_sparse_step": 1},
    windows=ALWAYS._replace(enabled_by="use_sliding_window"),
    aliases={"num_local_experts": "num_experts"},
)

SHARED, THEIR_SHARED = "blocks_{i}.mlp.shared", "model.layers.{i}.mlp.shared_expert"
QWEN2_MOE = replace(
    QWEN3_MOE,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fields=(
        *with_defaults(
            tuple(row for row in QWEN3_MOE.fields if row.ours != "attention_bias"),
            **{"n_kv_heads": 16, "d_ff": 1408, "experts.n_experts": 60, "experts.per_token": 4},
        ),
        Field("attention_bias", "qkv_bias", True),
        Field("experts.shared_width", "shared_expert_intermediate_size", 5632),
    ),
    weights=(
        *(weight for weight in QWEN3_MOE.weights if ".gamma_" not in weight.ours),
        Weight("blocks_{i}.mlp.W_shared_gate", "model.layers.{i}.mlp.shared_expert_gate.weight", "1 D -> D 1", 0),
        Weight(f"{SHARED}.W_gate_1", f"{THEIR_SHARED}.gate_proj.weight", "U D -> D U"),
        Weight(f"{SHARED}.W_1", f"{THEIR_SHARED}.up_proj.weight", "U D -> D U"),
        Weight(f"{SHARED}.W_2", f"{THEIR_SHARED}.down_proj.weight", "D U -> U D"),
    ),
    constants={
        **LLAMA_CONSTANTS,
        "output_bias": False,
        "experts.shared_expert": True,
        "experts.shared_gate": True,
    },
    windows=Windows(
        lambda theirs, i, window: window is not None and i % 2 == 0 and bool(i < theirs.get("max_window_layers", 28)),
        enabled_by="use_sliding_window",
    ),
    aliases={},
)

YARN = {"rope_type": "yarn", "factor": 32.0, ORIGINAL: 4096, "truncate": False}
"""Scaling of GPT-OSS by default."""
GPT_OSS_EXPERTS = "model.layers.{i}.mlp.experts"
GPT_OSS = replace(
    MIXTRAL,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    fields=(
        *with_defaults(
            tuple(row for row in MIXTRAL.fields if row.ours != "activation"),
            **{"head_dim": 64, "experts.n_experts": 128, "experts.per_token": 4},
        ),
        Field("activation", "hidden_act", "silu", {"silu": "clamped_swiglu"}),
        Field("attention_bias", "attention_bias", True),
    ),
    weights=(
        *(*LLAMA_ENDS, *LLAMA_ATTENTION),
        *(weight for weight in LLAMA_MLP if weight.ours.endswith("gamma")),
        Weight("blocks_{i}.attention.sinks", "model.layers.{i}.self_attn.sinks", "H -> H"),
        Weight("blocks_{i}.mlp.W_router", "model.layers.{i}.mlp.router.weight", "E D -> D E"),
        Weight("blocks_{i}.mlp.b_router", "model.layers.{i}.mlp.router.bias", "E -> E"),
        Weight(f"{EXPERTS}.W_gate_1", f"{GPT_OSS_EXPERTS}.gate_up_proj", "E D (F 2) -> E D F", part=0),
        Weight(f"{EXPERTS}.W_1", f"{GPT_OSS_EXPERTS}.gate_up_proj", "E D (F 2) -> E D F", part=1),
        Weight(f"{EXPERTS}.b_gate_1", f"{GPT_OSS_EXPERTS}.gate_up_proj_bias", "E (F 2) -> E F", part=0),
        Weight(f"{EXPERTS}.b_1", f"{GPT_OSS_EXPERTS}.gate_up_proj_bias", "E (F 2) -> E F", part=1),
        Weight(f"{EXPERTS}.W_2", f"{GPT_OSS_EXPERTS}.down_proj", "E F D -> E F D"),
        Weight(f"{EXPERTS}.b_2", f"{GPT_OSS_EXPERTS}.down_proj_bias", "E D -> E D"),
    ),
    constants={**MIXTRAL.constants, "experts.bias": True, "sinks": True},
    required={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    read=lambda theirs: (
        theirs if theirs.get("rope_parameters") or theirs.get("rope_scaling") else {**theirs, "rope_scaling": YARN}
    ),
    rope_base=150_000.0,
    windows=Windows(lambda theirs, i, window: i % 2 == 0, 128),
)


def read_deepseek(theirs: PublishedConfig) -> PublishedConfig:
    """Return their config with the widths of a head and of the shared expert, of dense blocks if there are any, and
    the factor of the scores, which `mscale_all_dim` of RoPE's scaling changes."""
    width = theirs.get("qk_nope_head_dim", 128) + theirs.get("qk_rope_head_dim", 64)
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    amplitude = yarn_amplitude(rope["factor"], rope.get("mscale_all_dim") or 0.0) if is_scaled else 1.0
    shared = theirs.get("n_shared_experts", 1) * theirs.get("moe_intermediate_size", 2048)
    computed = {"qk_head_dim": width, "shared_width": shared, "score_scale": width**-0.5 * amplitude**2}
    unset = {} if theirs.get("num_key_value_heads") else {"num_key_value_heads": theirs["num_attention_heads"]}
    dense = {"intermediate_size": None} if theirs.get("first_k_dense_replace") == 0 else {}
    return {**theirs, **computed, **unset, **dense}


def write_deepseek(theirs: dict[str, Any]) -> dict[str, Any]:
    """Return the inverse of `read_deepseek`."""
    width, scale, shared = (theirs.pop(name) for name in ("qk_head_dim", "score_scale", "shared_width"))
    hidden, rope = theirs["moe_intermediate_size"], theirs["rope_parameters"]
    if (factor := rope.get("factor", 1.0)) > 1:
        rope["mscale_all_dim"] = round((sqrt(scale * sqrt(width)) - 1) / (0.1 * log(factor)), 9)
    return theirs | {
        "qk_nope_head_dim": width - theirs["qk_rope_head_dim"],
        "n_shared_experts": max(shared // hidden, 1),
        "intermediate_size": theirs["intermediate_size"] or hidden,
        "rope_scaling": rope if theirs["rope_scaling"] else None,
        "num_nextn_predict_layers": 0,
    }


THEIR_ATTENTION = "model.layers.{i}.self_attn"
DEEPSEEK_V3 = replace(
    QWEN2_MOE,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    fields=(
        *(
            row
            for row in with_defaults(LLAMA_FIELDS, max_context=4096)
            if row.ours not in ("n_kv_heads", "head_dim", "d_ff")
        ),
        Field("head_dim", "qk_head_dim"),
        Field("score_scale", "score_scale"),
        Field("latents.width", "kv_lora_rank", 512),
        Field("latents.query_width", "q_lora_rank", 1536, is_optional=True),
        Field("latents.rope_width", "qk_rope_head_dim", 64),
        Field("latents.value_width", "v_head_dim", 128),
        Field("d_ff", "moe_intermediate_size", 2048, read=to_widths, write=only_width),
        Field("experts.n_experts", "n_routed_experts", 256),
        Field("experts.per_token", "num_experts_per_tok", 8),
        Field("experts.renormalize", "norm_topk_prob", True, read=bool, is_optional=True),
        Field("experts.n_groups", "n_group", 8),
        Field("experts.groups_per_token", "topk_group", 4),
        Field("experts.weight_factor", "routed_scaling_factor", 2.5),
        Field("experts.balance_weight", "aux_loss_alpha", 0.0),
        Field("experts.shared_width", "shared_width"),
        Field("experts.dense_blocks", "first_k_dense_replace", 3),
        Field("experts.dense_width", "intermediate_size", 18_432, is_optional=True),
    ),
    weights=(
        *LLAMA_ENDS,
        *(row for row in (*LLAMA_ATTENTION, *LLAMA_MLP) if row.ours.endswith("gamma")),
        Weight("blocks_{i}.attention.W_DQ", f"{THEIR_ATTENTION}.q_a_proj.weight", "q D -> D q"),
        Weight("blocks_{i}.attention.gamma_DQ", f"{THEIR_ATTENTION}.q_a_layernorm.weight", "q -> q"),
        *(
            Weight(
                "blocks_{i}.attention.W_Q",
                f"{THEIR_ATTENTION}.{name}.weight",
                f"(H K) {axis} -> {axis} H K",
                when=("has_query_latents", has),
            )
            for name, axis, has in (("q_b_proj", "q", True), ("q_proj", "D", False))
        ),
        Weight("blocks_{i}.attention.W_DKV", f"{THEIR_ATTENTION}.kv_a_proj_with_mqa.weight", "c+r D -> D c", part=0),
        Weight("blocks_{i}.attention.W_KR", f"{THEIR_ATTENTION}.kv_a_proj_with_mqa.weight", "c+r D -> D r", part=1),
        Weight("blocks_{i}.attention.gamma_DKV", f"{THEIR_ATTENTION}.kv_a_layernorm.weight", "c -> c"),
        Weight("blocks_{i}.attention.W_K", f"{THEIR_ATTENTION}.kv_b_proj.weight", "(H n+v) c -> c H n", part=0),
        Weight("blocks_{i}.attention.W_V", f"{THEIR_ATTENTION}.kv_b_proj.weight", "(H n+v) c -> c H v", part=1),
        Weight("blocks_{i}.attention.W_O", f"{THEIR_ATTENTION}.o_proj.weight", "D (H v) -> H v D"),
        *(row for row in QWEN3_MOE.weights if ".mlp." in row.ours),
        *(row._replace(layout=row.layout.replace("F", "f")) for row in LLAMA_MLP if ".mlp." in row.ours),
        *(
            row._replace(theirs=row.theirs.replace("expert.", "experts."))
            for row in QWEN2_MOE.weights
            if "shared." in row.ours
        ),
        Weight("blocks_{i}.mlp.b_correction", "model.layers.{i}.mlp.gate.e_score_correction_bias", "E -> E"),
    ),
    constants={**LLAMA_CONSTANTS, "experts.shared_expert": True, "experts.router": "sigmoid"},
    required={
        "attention_bias": False,
        "rope_interleave": True,
        "num_key_value_heads": lambda theirs: theirs["num_attention_heads"],
    },
    read=read_deepseek,
    write=write_deepseek,
    interleaved=True,
    rope_types=("default", "yarn"),
    windows=None,
    ignored=(*LLAMA.ignored, r"^model\.layers\.61\."),  # of the prediction of further tokens
    aliases={"num_local_experts": "n_routed_experts"},
)

ALL = (
    *(LLAMA, QWEN3, GPT2, QWEN2, MISTRAL, GEMMA3, MIXTRAL, GEMMA, GEMMA2, GEMMA3_WITH_IMAGES, MINISTRAL),
    *(OLMO, OLMO2, OLMO3, SMOLLM3, GRANITE, PHI3, GLM4, QWEN3_MOE, QWEN2_MOE, GPT_OSS, DEEPSEEK_V3),
)
"""All families of decoders, in the order of preference for export."""
