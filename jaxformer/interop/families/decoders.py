"""Families of decoders."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from jaxformer.interop.families.tables import (
    ACTIVATIONS,
    ALWAYS,
    LAST_LAYERS,
    TIED,
    Family,
    Field,
    Weight,
    Windows,
    all_but_every_sixth,
    only_width,
    to_widths,
    with_defaults,
)

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

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    fields=(
        *with_defaults(
            tuple(row for row in LLAMA_FIELDS if row.ours != "activation"),
            max_context=131_072,
            n_kv_heads=4,
            head_dim=256,
            unembedding=True,
        ),
        Field("activation", "hidden_activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu"}),
        Field("attention_bias", "attention_bias", False),
        Field("embedding_scale", "hidden_size", read=sqrt, write=lambda scale: round(scale**2)),
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
    required={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
    rope_base=1e6,
    local_rope_base=1e4,
    windows=Windows(all_but_every_sixth),
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


ALL = (LLAMA, QWEN3, GPT2, QWEN2, MISTRAL, GEMMA3, MIXTRAL)
"""All families of decoders, in the order of preference for export."""
