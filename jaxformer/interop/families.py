"""Families of published models: tables that map their configs and tensors to those of `DecoderConfig`, or of encoders.

The tables are used in both directions, for import and export. Layouts are written with one letter per axis: V
vocabulary, P positions, S segments, D model width, H query heads, G key/value heads, K head width, F hidden width of
the MLP, E experts, O outputs of a head as wide as the model, C classes. Axes in parentheses are stored as one, in
row-major order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple

from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import ClassifierConfig, EmbedderConfig, EncoderConfig

PublishedConfig = Mapping[str, Any]
"""Content of a published `config.json`."""
ImportedConfig = DecoderConfig | EncoderConfig
"""Our config for it."""

POOLING, NORMALIZE = "sentence_transformers_pooling", "sentence_transformers_normalize"
"""Fields that reading adds to the config of a sentence encoder: the pooling of features, and True for unit vectors."""
MAX_TOKENS = "sentence_transformers_max_tokens"
"""Field that reading adds if texts may have fewer tokens than the model has positions: the maximum number."""
REQUIRED = object()
"""Default of a field that their config must have."""


class Field(NamedTuple):
    """One field of our config and its equivalent in theirs."""

    ours: str
    theirs: str
    """Names of the fields, ours dotted for one of `experts`. Several of ours may depend on one of theirs."""
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
    """Name of the tensor; with `{e}`, there is one tensor per expert."""
    layout: str
    """Their axes and ours, `theirs -> ours`. A number is an axis of that length."""
    part: int | None = None
    """Index along the numeric axis of their layout, for tensors that hold several parameters."""
    offset: float = 0.0
    """Offset added to their values."""
    first_row: int = 0
    """Rows of their tensor before those of ours, which are not read."""


class Windows(NamedTuple):
    """Attention windows of a family, of the length `sliding_window`."""

    is_local: Callable[[PublishedConfig, int, int | None], bool]
    """Function that returns True for a block, by index, that has a window, of this length, if there is one; for configs
    without `layer_types`."""
    default: int | None = 4096
    """Length for configs without the field; null is no window."""
    enabled_by: str | None = None
    """Field without which there are no windows, whatever the length."""
    by_layer: bool = True
    """True if the family reads `layer_types`; others ignore the field."""


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
    """Values that their fields must have if present; another value would change the computation."""
    rope_base: float | None = 10_000.0
    """Default of `rope_theta`; None for models without RoPE."""
    local_rope_base: float | None = None
    """Default of `rope_local_base_freq`, the base of blocks with a window; None if all blocks share a base."""
    windows: Windows | None = None
    """Attention windows; None for families without."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of their fields, which take precedence, and the names in `fields`."""
    model: type[ImportedConfig] = DecoderConfig
    """Class of our config."""
    prefix: str = "model."
    """Prefix of tensor names, absent if the model was saved without its head."""
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    """Patterns for names of tensors that are not parameters."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that may be stored a second time, and those of the same content."""
    older_names: tuple[tuple[str, str], ...] = ()
    """Ends of tensor names, and what they were in older checkpoints."""


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


def _norm(ours: str, theirs: str) -> tuple[Weight, Weight]:
    """Return the rows of a LayerNorm."""
    return Weight(f"{ours}.gamma", f"{theirs}.weight", "D -> D"), Weight(f"{ours}.beta", f"{theirs}.bias", "D -> D")


EXPERTS, THEIR_EXPERTS = "blocks_{i}.mlp.experts", "model.layers.{i}.block_sparse_moe.experts.{e}"
ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
"""Activations of MLPs without gates."""
TIED = {True: "tied", False: "linear"}
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

BERT_BLOCK, THEIR_LAYER = "blocks_{i}", "bert.encoder.layer.{i}"
POOLED = (
    Field("pooling", POOLING, "mean", {"mean": "mean", "cls": "first"}),
    Field("normalize", NORMALIZE, True),
)
"""Fields of the parts after a sentence encoder, which its models with a head do not have."""
BERT = Family(
    "bert",
    "BertModel",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("context_length", "max_position_embeddings", 512),
        Field("d_model", "hidden_size"),
        Field("n_blocks", "num_hidden_layers"),
        Field("n_heads", "num_attention_heads"),
        Field("d_ff", "intermediate_size", read=to_widths, write=only_width),
        Field("activation", "hidden_act", "gelu", ACTIVATIONS),
        Field("norm_eps", "layer_norm_eps", 1e-12),
        Field("n_segments", "type_vocab_size", 2),
        Field("embedding_std", "initializer_range", 0.02),
        Field("dropout", "hidden_dropout_prob", 0.1),
        *POOLED,
    ),
    weights=(
        Weight("embedding.W_E", "bert.embeddings.word_embeddings.weight", "V D -> V D"),
        Weight("embedding.W_pos", "bert.embeddings.position_embeddings.weight", "P D -> P D"),
        Weight("W_segment", "bert.embeddings.token_type_embeddings.weight", "S D -> S D"),
        *_norm("embedding_norm", "bert.embeddings.LayerNorm"),
        *(
            weight
            for ours, theirs in (("Q", "query"), ("K", "key"), ("V", "value"))
            for weight in (
                Weight(
                    f"{BERT_BLOCK}.attention.W_{ours}",
                    f"{THEIR_LAYER}.attention.self.{theirs}.weight",
                    "(H K) D -> D H K",
                ),
                Weight(
                    f"{BERT_BLOCK}.attention.b_{ours}", f"{THEIR_LAYER}.attention.self.{theirs}.bias", "(H K) -> H 1 K"
                ),
            )
        ),
        Weight(f"{BERT_BLOCK}.attention.W_O", f"{THEIR_LAYER}.attention.output.dense.weight", "D (H K) -> H K D"),
        Weight(f"{BERT_BLOCK}.attention.b_O", f"{THEIR_LAYER}.attention.output.dense.bias", "D -> D"),
        *_norm(f"{BERT_BLOCK}.attention_norm", f"{THEIR_LAYER}.attention.output.LayerNorm"),
        Weight(f"{BERT_BLOCK}.mlp.W_1", f"{THEIR_LAYER}.intermediate.dense.weight", "F D -> D F"),
        Weight(f"{BERT_BLOCK}.mlp.b_1", f"{THEIR_LAYER}.intermediate.dense.bias", "F -> F"),
        Weight(f"{BERT_BLOCK}.mlp.W_2", f"{THEIR_LAYER}.output.dense.weight", "D F -> F D"),
        Weight(f"{BERT_BLOCK}.mlp.b_2", f"{THEIR_LAYER}.output.dense.bias", "D -> D"),
        *_norm(f"{BERT_BLOCK}.mlp_norm", f"{THEIR_LAYER}.output.LayerNorm"),
    ),
    constants={"positions": "learned"},
    required={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    rope_base=None,
    model=EmbedderConfig,
    prefix="bert.",
    ignored=(r"position_ids$", r"pooler\.dense\.", r"^cls\."),
    older_names=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
)
BERT_MASKED = replace(
    BERT,
    architecture="BertForMaskedLM",
    fields=tuple(row for row in BERT.fields if row not in POOLED),
    weights=(
        *BERT.weights,
        Weight("head.W_1", "cls.predictions.transform.dense.weight", "O D -> D O"),
        Weight("head.b_1", "cls.predictions.transform.dense.bias", "D -> D"),
        *_norm("head_norm", "cls.predictions.transform.LayerNorm"),
        Weight("b_out", "cls.predictions.bias", "V -> V"),
    ),
    required={**BERT.required, "tie_word_embeddings": True},
    model=EncoderConfig,
    ignored=(*BERT.ignored[:2], r"^cls\.seq_relationship\."),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)


def unnamed_classes(theirs: PublishedConfig) -> dict[int, str]:
    """Return the names of classes by their ids for a config without."""
    return {i: f"LABEL_{i}" for i in range(theirs.get("num_labels", 2))}


def class_names(theirs: PublishedConfig) -> list[str]:
    """Return the names of a classifier's classes in the order of their ids. Raises ordinary exceptions if ids are no
    numbers."""
    names = theirs.get("id2label") or unnamed_classes(theirs)
    return [str(names[i]) for i in sorted(names, key=int)]


N_CLASSES = Field(
    "n_classes",
    "id2label",
    unnamed_classes,
    read=lambda names: len(class_names({"id2label": names})),
    write=lambda n: {str(i): f"LABEL_{i}" for i in range(n)},
)
BERT_CLASSIFIER = replace(
    BERT,
    architecture="BertForSequenceClassification",
    fields=(
        *BERT_MASKED.fields,
        N_CLASSES,
    ),
    weights=(
        *BERT.weights,
        Weight("head.W_1", "bert.pooler.dense.weight", "O D -> D O"),
        Weight("head.b_1", "bert.pooler.dense.bias", "D -> D"),
        Weight("head.W_2", "classifier.weight", "C D -> D C"),
        Weight("head.b_2", "classifier.bias", "C -> C"),
    ),
    model=ClassifierConfig,
    ignored=BERT.ignored[:1],
)
POOLED_CLASSIFIER = replace(
    BERT_CLASSIFIER,
    architecture="SentenceTransformer",
    fields=(*BERT_CLASSIFIER.fields, Field("pooling", POOLING, values={"mean": "mean"})),
    weights=(
        *BERT.weights,
        Weight("head.W_1", "2_Dense.linear.weight", "O D -> D O"),
        Weight("head.b_1", "2_Dense.linear.bias", "D -> D"),
        Weight("head.W_2", "3_Dense.linear.weight", "C D -> D C"),
        Weight("head.b_2", "3_Dense.linear.bias", "C -> C"),
    ),
)
"""For export only: modules of sentence-transformers, the vectors of which are the logits."""

ROBERTA_OFFSET = 2
"""Position of RoBERTa's first token, as positions count on from the id of padding, 1."""
ROBERTA_FIELDS = tuple(
    row._replace(read=lambda n: n - ROBERTA_OFFSET, write=lambda n: n + ROBERTA_OFFSET)
    if row.ours == "context_length"
    else row
    for row in BERT_MASKED.fields
)
ROBERTA = replace(
    BERT,
    model_type="roberta",
    architecture="RobertaModel",
    fields=(*ROBERTA_FIELDS, *POOLED),
    weights=tuple(
        row._replace(
            theirs=row.theirs.replace("bert.", "roberta."),
            first_row=ROBERTA_OFFSET if row.ours == "embedding.W_pos" else 0,
        )
        for row in BERT.weights
    ),
    required={**BERT.required, "pad_token_id": 1},
    prefix="roberta.",
    ignored=(*BERT.ignored[:2], r"^lm_head\."),
)
ROBERTA_MASKED = replace(
    ROBERTA,
    architecture="RobertaForMaskedLM",
    # The head's activation is exact GELU, whatever that of the blocks.
    fields=tuple(
        row._replace(values={"gelu": "gelu_exact"}) if row.ours == "activation" else row for row in ROBERTA_FIELDS
    ),
    weights=(
        *ROBERTA.weights,
        Weight("head.W_1", "lm_head.dense.weight", "O D -> D O"),
        Weight("head.b_1", "lm_head.dense.bias", "D -> D"),
        *_norm("head_norm", "lm_head.layer_norm"),
        Weight("b_out", "lm_head.bias", "V -> V"),
    ),
    required={**ROBERTA.required, "tie_word_embeddings": True},
    model=EncoderConfig,
    ignored=BERT.ignored[:2],
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)
ROBERTA_CLASSIFIER = replace(
    ROBERTA,
    architecture="RobertaForSequenceClassification",
    fields=(*ROBERTA_FIELDS, N_CLASSES),
    weights=(
        *ROBERTA.weights,
        Weight("head.W_1", "classifier.dense.weight", "O D -> D O"),
        Weight("head.b_1", "classifier.dense.bias", "D -> D"),
        Weight("head.W_2", "classifier.out_proj.weight", "C D -> D C"),
        Weight("head.b_2", "classifier.out_proj.bias", "C -> C"),
    ),
    model=ClassifierConfig,
    ignored=BERT.ignored[:2],
)

_ALL = (LLAMA, QWEN3, GPT2, QWEN2, MISTRAL, GEMMA3, MIXTRAL)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""Families of decoders by their `model_type`."""
_ENCODERS = (BERT, BERT_MASKED, BERT_CLASSIFIER, POOLED_CLASSIFIER, ROBERTA, ROBERTA_MASKED, ROBERTA_CLASSIFIER)
ENCODERS: Mapping[str, Family] = {family.architecture: family for family in _ENCODERS}
"""Families of encoders by their architecture; those without a head before others of their `model_type`. Export takes
the first that fits: a RoBERTa is a BERT whose positions begin at 0."""

GGUF_FAMILIES: Mapping[str, Family] = {
    family.model_type: replace(
        family,
        fields=tuple(row for row in family.fields if row.ours != "attention_bias"),
        constants={**family.constants, "attention_bias": False},
        windows=None,
    )
    for family in (LLAMA, QWEN3)
}
"""Families that are exported to GGUF, without what llama.cpp lacks in them."""
