"""Families of encoder-decoders: the transformer of 2017 as Marian translates with it, BART and T5."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from jaxformer.interop.families.tables import (
    ACTIVATIONS,
    TIED,
    Family,
    Field,
    PublishedConfig,
    Weight,
    norm_rows,
    only_width,
    to_widths,
    with_defaults,
)
from jaxformer.models.encoder_decoder import EncoderDecoderConfig

LETTERS = {"Q": "q", "K": "k", "V": "v", "O": "o"}
SCALED = {True: None, False: 1.0}
"""Our factor of the embedding, √D by default, by their `scale_embedding`."""


def attention_rows(
    ours: str, theirs: str, names: Mapping[str, str] = LETTERS, bias: bool = False
) -> tuple[Weight, ...]:
    """Return the rows of attention, in which their projections are stored as matrices `(out, in)`, with these names."""
    weights = [
        Weight(f"{ours}.W_{x}", f"{theirs}.{names[x]}.weight", "D (H K) -> H K D" if x == "O" else "(H K) D -> D H K")
        for x in LETTERS
    ]
    biases = [
        Weight(f"{ours}.b_{x}", f"{theirs}.{names[x]}.bias", "D -> D" if x == "O" else "(H K) -> H 1 K")
        for x in LETTERS
    ]
    return (*weights, *(biases if bias else ()))


def marian_blocks(stack: str) -> tuple[Weight, ...]:
    """Return the rows of the blocks of Marian's or BART's encoder or decoder."""
    ours, theirs = f"{stack}_blocks_{{i}}", f"model.{stack}.layers.{{i}}"
    names = {"Q": "q_proj", "K": "k_proj", "V": "v_proj", "O": "out_proj"}
    crossing = (
        *attention_rows(f"{ours}.cross_attention", f"{theirs}.encoder_attn", names, bias=True),
        *norm_rows(f"{ours}.cross_attention_norm", f"{theirs}.encoder_attn_layer_norm"),
    )
    return (
        *attention_rows(f"{ours}.attention", f"{theirs}.self_attn", names, bias=True),
        *norm_rows(f"{ours}.attention_norm", f"{theirs}.self_attn_layer_norm"),
        *(crossing if stack == "decoder" else ()),
        Weight(f"{ours}.mlp.W_1", f"{theirs}.fc1.weight", "F D -> D F"),
        Weight(f"{ours}.mlp.b_1", f"{theirs}.fc1.bias", "F -> F"),
        Weight(f"{ours}.mlp.W_2", f"{theirs}.fc2.weight", "D F -> F D"),
        Weight(f"{ours}.mlp.b_2", f"{theirs}.fc2.bias", "D -> D"),
        *norm_rows(f"{ours}.mlp_norm", f"{theirs}.final_layer_norm"),
    )


def copies_of(embedding: str, *names: str) -> dict[str, str]:
    """Return the names of copies of the embedding, with and without the prefix of a model with a head."""
    return {name: embedding for full in names for name in (full, full.removeprefix("model."))}


MARIAN = Family(
    "marian",
    "MarianMTModel",
    fields=(
        Field("vocab_size", "vocab_size", 58_101),
        Field("vocab_size", "decoder_vocab_size", lambda theirs: theirs.get("vocab_size", 58_101)),
        Field("context_length", "max_position_embeddings", 1024),
        Field("d_model", "d_model", 1024),
        Field("n_encoder_blocks", "encoder_layers", 12),
        Field("n_decoder_blocks", "decoder_layers", 12),
        Field("n_heads", "encoder_attention_heads", 16),
        Field("n_heads", "decoder_attention_heads", 16),
        Field("d_ff", "encoder_ffn_dim", 4096, read=to_widths, write=only_width),
        Field("d_ff", "decoder_ffn_dim", 4096, read=to_widths, write=only_width),
        Field("activation", "activation_function", "gelu", {**ACTIVATIONS, "silu": "silu", "swish": "silu"}),
        Field("embedding_scale", "scale_embedding", False, SCALED),
        Field("dropout", "dropout", 0.1),
    ),
    weights=(
        Weight("embedding.W_E", "model.shared.weight", "V D -> V D"),
        *marian_blocks("encoder"),
        *marian_blocks("decoder"),
        Weight("b_out", "final_logits_bias", "1 V -> V", part=0),
    ),
    constants={
        "attention_bias": True,
        "norm_eps": 1e-5,
        "positions": "sinusoidal",
        "interleaved_sinusoids": False,
        "unembedding_bias": True,
    },
    required={
        "is_encoder_decoder": True,
        "is_decoder": False,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
    },
    rope_base=None,
    model=EncoderDecoderConfig,
    ignored=(),
    sinusoids=("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
    copies=copies_of(
        "model.shared.weight",
        "lm_head.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
    ),
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    },
)

BART_OFFSET = 2
"""Row of BART's first position."""
BART = replace(
    MARIAN,
    model_type="bart",
    architecture="BartForConditionalGeneration",
    fields=(
        Field("vocab_size", "vocab_size", 50_265),
        *(row for row in MARIAN.fields if row.ours != "vocab_size"),
    ),
    weights=(
        *MARIAN.weights,
        Weight("embedding.W_pos", "model.encoder.embed_positions.weight", "P D -> P D", first_row=BART_OFFSET),
        Weight("W_pos_target", "model.decoder.embed_positions.weight", "P D -> P D", first_row=BART_OFFSET),
        *norm_rows("encoder_embedding_norm", "model.encoder.layernorm_embedding"),
        *norm_rows("decoder_embedding_norm", "model.decoder.layernorm_embedding"),
    ),
    constants={
        "attention_bias": True,
        "norm_eps": 1e-5,
        "positions": "learned",
        "target_positions": True,
        "embedding_norm": True,
        "unembedding_bias": True,
    },
    required={"is_encoder_decoder": True, "is_decoder": False, "tie_word_embeddings": True},
    sinusoids=(),
)
BART_WITHOUT_BIAS = replace(BART, architecture="BartModel", constants={**BART.constants, "unembedding_bias": False})
"""BART as it was pretrained, such as facebook/bart-base."""

M2M_100 = replace(
    BART,
    model_type="m2m_100",
    architecture="M2M100ForConditionalGeneration",
    fields=with_defaults(BART.fields, vocab_size=128_112, activation="relu", embedding_scale=True),
    weights=(
        *(row for row in MARIAN.weights if row.ours != "b_out"),
        *norm_rows("encoder_norm", "model.encoder.layer_norm"),
        *norm_rows("decoder_norm", "model.decoder.layer_norm"),
    ),
    constants={
        "attention_bias": True,
        "norm_eps": 1e-5,
        "norm_placement": "pre",
        "positions": "sinusoidal",
        "interleaved_sinusoids": False,
        "fairseq_sinusoids": True,
    },
    required={**BART.required, "pad_token_id": 1},  # after which positions begin
    ignored=(r"embed_positions\.weights$",),
)
"""M2M100 and NLLB. They are not exported: transformers would count positions from the id of our tokenizer's padding."""

T5_ACTIVATIONS = {
    **ACTIVATIONS,
    "silu": "silu",
    "swish": "silu",
    "gated-gelu": "geglu",
    "gated-gelu_new": "geglu",
    "gated-gelu_pytorch_tanh": "geglu",
    "gated-silu": "swiglu",
    "gated-swish": "swiglu",
}
"""Our activation by their `feed_forward_proj`."""


def t5_blocks(stack: str) -> tuple[Weight, ...]:
    """Return the rows of the blocks of T5's encoder or decoder, and of the bias of their scores."""
    ours, theirs = f"{stack}_blocks_{{i}}", f"{stack}.block.{{i}}.layer"
    crossing = (
        *attention_rows(f"{ours}.cross_attention", f"{theirs}.1.EncDecAttention"),
        Weight(f"{ours}.cross_attention_norm.gamma", f"{theirs}.1.layer_norm.weight", "D -> D"),
    )
    last = f"{theirs}.2" if stack == "decoder" else f"{theirs}.1"
    bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        Weight(f"{stack}_bias", bias, "N H -> N H"),
        *attention_rows(f"{ours}.attention", f"{theirs}.0.SelfAttention"),
        Weight(f"{ours}.attention_norm.gamma", f"{theirs}.0.layer_norm.weight", "D -> D"),
        *(crossing if stack == "decoder" else ()),
        Weight(f"{ours}.mlp_norm.gamma", f"{last}.layer_norm.weight", "D -> D"),
        Weight(f"{ours}.mlp.W_gate_1", f"{last}.DenseReluDense.wi_0.weight", "F D -> D F"),
        Weight(f"{ours}.mlp.W_1", f"{last}.DenseReluDense.wi{{gated}}.weight", "F D -> D F"),
        Weight(f"{ours}.mlp.W_2", f"{last}.DenseReluDense.wo.weight", "D F -> F D"),
        Weight(f"{stack}_norm.gamma", f"{stack}.final_layer_norm.weight", "D -> D"),
    )


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    fields=(
        Field("vocab_size", "vocab_size", 32_128),
        Field("context_length", "n_positions", 512),
        Field("d_model", "d_model", 512),
        Field("n_encoder_blocks", "num_layers", 6),
        Field("n_decoder_blocks", "num_decoder_layers", lambda theirs: theirs.get("num_layers", 6)),
        Field("n_heads", "num_heads", 8),
        Field("head_dim", "d_kv", 64),
        Field("d_ff", "d_ff", 2048, read=to_widths, write=only_width),
        Field("activation", "feed_forward_proj", "relu", T5_ACTIVATIONS),
        Field("norm_eps", "layer_norm_epsilon", 1e-6),
        Field("position_buckets", "relative_attention_num_buckets", 32, write=lambda n: n or 32),  # none has no buckets
        Field("max_distance", "relative_attention_max_distance", 128),
        Field("unembedding", "tie_word_embeddings", True, TIED),
        Field("scale_logits", "scale_decoder_outputs", lambda theirs: theirs.get("tie_word_embeddings") is not False),
        Field("dropout", "dropout_rate", 0.1),
    ),
    weights=(
        Weight("embedding.W_E", "shared.weight", "V D -> V D"),
        *t5_blocks("encoder"),
        *t5_blocks("decoder"),
        Weight("W_out", "lm_head.weight", "V D -> D V"),
    ),
    constants={
        "bias": False,
        "norm": "rmsnorm",
        "norm_placement": "pre",
        "positions": "none",
        "score_scale": 1.0,
        "embedding_scale": 1.0,
    },
    required={
        "is_encoder_decoder": True,
        "is_decoder": False,
        "is_gated_act": lambda theirs: theirs.get("feed_forward_proj", "relu").startswith("gated-"),
        "dense_act_fn": lambda theirs: t5_activation(theirs.get("feed_forward_proj", "relu")),
    },
    rope_base=None,
    model=EncoderDecoderConfig,
    prefix="",
    # Of cross-attention, which has no positions in common, it is never read.
    ignored=(r"EncDecAttention\.relative_attention_bias\.weight$",),
    copies=copies_of("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
)


def t5_activation(feed_forward: str) -> str:
    """Return the activation function of T5's MLP without its gate: that of gated-gelu is the tanh approximation."""
    return "gelu_new" if feed_forward == "gated-gelu" else feed_forward.removeprefix("gated-")


def with_stored_head(theirs: PublishedConfig, names: Collection[str]) -> PublishedConfig:
    """Return the config of a T5 that says whether the logits have a matrix of their own as the file does: version 5 of
    transformers writes that they are tied even if they are not, as those of Flan-T5."""
    if theirs.get("model_type") != T5.model_type:
        return theirs
    (scaled,) = (row.default(theirs) for row in T5.fields if row.ours == "scale_logits")
    return {"scale_decoder_outputs": scaled, **theirs, "tie_word_embeddings": "lm_head.weight" not in names}


GENERATION_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "marian": {"decoder_start_token_id": 58_100, "forced_eos_token_id": 0},
    "bart": {"decoder_start_token_id": 2, "forced_eos_token_id": 2},
    "m2m_100": {"decoder_start_token_id": 2},
    "t5": {},
}
"""Tokens of targets that their classes in transformers have for configs without, by family."""

ALL = (MARIAN, BART, BART_WITHOUT_BIAS, T5, M2M_100)
"""All families of encoder-decoders, in the order of preference for export."""
