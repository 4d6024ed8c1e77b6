"""Families of encoders, in the forms that are published."""

from __future__ import annotations

from dataclasses import replace

from jaxformer.interop.families.tables import (
    ACTIVATIONS,
    NORMALIZE,
    POOLING,
    Family,
    Field,
    PublishedConfig,
    Weight,
    Windows,
    norm_rows,
    only_width,
    to_widths,
)
from jaxformer.models.encoder import ClassifierConfig, EmbedderConfig, EncoderConfig, TokenClassifierConfig


def renamed(weights: tuple[Weight, ...], *names: tuple[str, str]) -> tuple[Weight, ...]:
    """Return rows in whose names of tensors parts are replaced by others, one after the other."""
    for old, new in names:
        weights = tuple(row._replace(theirs=row.theirs.replace(old, new)) for row in weights)
    return weights


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
        Weight("embedding.W_E", "bert.embeddings.word_embeddings.weight", "V M -> V M"),
        Weight("embedding.W_pos", "bert.embeddings.position_embeddings.weight", "P M -> P M"),
        Weight("W_segment", "bert.embeddings.token_type_embeddings.weight", "S M -> S M"),
        *norm_rows("embedding_norm", "bert.embeddings.LayerNorm", "M"),
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
        *norm_rows(f"{BERT_BLOCK}.attention_norm", f"{THEIR_LAYER}.attention.output.LayerNorm"),
        Weight(f"{BERT_BLOCK}.mlp.W_1", f"{THEIR_LAYER}.intermediate.dense.weight", "F D -> D F"),
        Weight(f"{BERT_BLOCK}.mlp.b_1", f"{THEIR_LAYER}.intermediate.dense.bias", "F -> F"),
        Weight(f"{BERT_BLOCK}.mlp.W_2", f"{THEIR_LAYER}.output.dense.weight", "D F -> F D"),
        Weight(f"{BERT_BLOCK}.mlp.b_2", f"{THEIR_LAYER}.output.dense.bias", "D -> D"),
        *norm_rows(f"{BERT_BLOCK}.mlp_norm", f"{THEIR_LAYER}.output.LayerNorm"),
    ),
    constants={"positions": "learned"},
    required={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    rope_base=None,
    model=EmbedderConfig,
    prefix="bert.",
    ignored=(r"position_ids$", r"pooler\.dense\.", r"^cls\."),
    older_names=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
)


def masked_head(dense: str, norm: str, bias: str) -> tuple[Weight, ...]:
    """Return the rows of the head of a masked language model."""
    return (
        Weight("head.W_1", f"{dense}.weight", "M D -> D M"),
        Weight("head.b_1", f"{dense}.bias", "M -> M"),
        *norm_rows("head_norm", norm, "M"),
        Weight("b_out", bias, "V -> V"),
    )


def classifier_head(dense: str, out: str) -> tuple[Weight, ...]:
    """Return the rows of the head of a classifier with a hidden layer."""
    return (
        Weight("head.W_1", f"{dense}.weight", "O D -> D O"),
        Weight("head.b_1", f"{dense}.bias", "D -> D"),
        Weight("head.W_2", f"{out}.weight", "C D -> D C"),
        Weight("head.b_2", f"{out}.bias", "C -> C"),
    )


BERT_MASKED = replace(
    BERT,
    architecture="BertForMaskedLM",
    fields=tuple(row for row in BERT.fields if row not in POOLED),
    weights=(
        *BERT.weights,
        *masked_head("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
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


def at_least_two(names: list[str]) -> int:
    """Return the number of classes. Raises `ValueError` for one, which is no class but a score."""
    if len(names) < 2:
        raise ValueError("a single output is a score, and only classifiers are supported")
    return len(names)


def single_label(theirs: PublishedConfig) -> str | None:
    """Return the `problem_type` of a classifier whose probabilities are a softmax, the default of one without."""
    kind = "single_label_classification"
    return kind if theirs.get("problem_type") == kind else None


N_CLASSES = Field(
    "n_classes",
    "id2label",
    unnamed_classes,
    read=lambda names: at_least_two(class_names({"id2label": names})),
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
        *classifier_head("bert.pooler.dense", "classifier"),
    ),
    required={**BERT.required, "problem_type": single_label},
    model=ClassifierConfig,
    ignored=BERT.ignored[:1],
)
TOKEN_HEAD = (Weight("head.W_1", "classifier.weight", "C D -> D C"), Weight("head.b_1", "classifier.bias", "C -> C"))
"""Rows of the head of a token classifier."""


def token_classifier(bare: Family, classifier: Family, ignored: tuple[str, ...]) -> Family:
    """Return the family of token classifiers with a linear head, given those without a head and of texts."""
    return replace(
        bare,
        architecture=classifier.architecture.replace("Sequence", "Token"),
        fields=classifier.fields,
        weights=(*bare.weights, *TOKEN_HEAD),
        model=TokenClassifierConfig,
        ignored=ignored,
    )


BERT_TOKENS = token_classifier(BERT, BERT_CLASSIFIER, BERT.ignored[:2])
POOLED_CLASSIFIER = replace(
    BERT_CLASSIFIER,
    architecture="SentenceTransformer",
    fields=(*BERT_CLASSIFIER.fields, Field("pooling", POOLING, values={"mean": "mean"})),
    weights=(
        *BERT.weights,
        *classifier_head("2_Dense.linear", "3_Dense.linear"),
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
        row._replace(first_row=ROBERTA_OFFSET) if row.ours == "embedding.W_pos" else row
        for row in renamed(BERT.weights, ("bert.", "roberta."))
    ),
    required={**BERT.required, "pad_token_id": 1},
    prefix="roberta.",
    ignored=(*BERT.ignored[:2], r"^lm_head\."),
)
ROBERTA_MASKED = replace(
    ROBERTA,
    architecture="RobertaForMaskedLM",
    fields=ROBERTA_FIELDS,
    weights=(*ROBERTA.weights, *masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")),
    constants={**ROBERTA.constants, "head_activation": "gelu_exact"},
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
        *classifier_head("classifier.dense", "classifier.out_proj"),
    ),
    required={**ROBERTA.required, "problem_type": single_label},
    model=ClassifierConfig,
    ignored=BERT.ignored[:2],
)
ROBERTA_TOKENS = token_classifier(ROBERTA, ROBERTA_CLASSIFIER, BERT.ignored[:2])
XLM_ROBERTA = tuple(
    replace(family, model_type="xlm-roberta", architecture=f"XLM{family.architecture}")
    for family in (ROBERTA, ROBERTA_MASKED, ROBERTA_CLASSIFIER, ROBERTA_TOKENS)
)

DISTILBERT = replace(
    BERT,
    model_type="distilbert",
    architecture="DistilBertModel",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("context_length", "max_position_embeddings", 512),
        Field("d_model", "dim"),
        Field("n_blocks", "n_layers"),
        Field("n_heads", "n_heads"),
        Field("d_ff", "hidden_dim", read=to_widths, write=only_width),
        Field("activation", "activation", "gelu", ACTIVATIONS),
        Field("embedding_std", "initializer_range", 0.02),
        Field("dropout", "dropout", 0.1),
        *POOLED,
    ),
    weights=renamed(
        tuple(row for row in BERT.weights if row.ours != "W_segment"),
        ("bert.encoder.", "distilbert.transformer."),
        ("bert.embeddings.", "distilbert.embeddings."),
        ("attention.self.query", "attention.q_lin"),
        ("attention.self.key", "attention.k_lin"),
        ("attention.self.value", "attention.v_lin"),
        ("attention.output.dense", "attention.out_lin"),
        ("attention.output.LayerNorm", "sa_layer_norm"),
        ("intermediate.dense", "ffn.lin1"),
        ("output.dense", "ffn.lin2"),
        ("output.LayerNorm", "output_layer_norm"),
    ),
    constants={"positions": "learned", "norm_eps": 1e-12},
    required={},
    prefix="distilbert.",
    ignored=(r"position_ids$", r"^vocab_"),
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)
DISTILBERT_MASKED = replace(
    DISTILBERT,
    architecture="DistilBertForMaskedLM",
    fields=DISTILBERT.fields[: -len(POOLED)],
    weights=(*DISTILBERT.weights, *masked_head("vocab_transform", "vocab_layer_norm", "vocab_projector.bias")),
    required={"tie_word_embeddings": True},
    model=EncoderConfig,
    ignored=DISTILBERT.ignored[:1],
    copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
)
DISTILBERT_CLASSIFIER = replace(
    DISTILBERT,
    architecture="DistilBertForSequenceClassification",
    fields=(*DISTILBERT_MASKED.fields, N_CLASSES),
    weights=(*DISTILBERT.weights, *classifier_head("pre_classifier", "classifier")),
    constants={**DISTILBERT.constants, "head_activation": "relu"},
    required={**DISTILBERT.required, "problem_type": single_label},
    model=ClassifierConfig,
    ignored=DISTILBERT.ignored[:1],
)
DISTILBERT_TOKENS = token_classifier(DISTILBERT, DISTILBERT_CLASSIFIER, DISTILBERT.ignored[:1])

ELECTRA_FIELDS = (*BERT_MASKED.fields, Field("embedding_dim", "embedding_size", 128))
ELECTRA = replace(
    BERT,
    model_type="electra",
    architecture="ElectraModel",
    fields=(*ELECTRA_FIELDS, *POOLED),
    weights=(
        *renamed(BERT.weights, ("bert.", "electra.")),
        Weight("embedding_projection.W_1", "electra.embeddings_project.weight", "D M -> M D"),
        Weight("embedding_projection.b_1", "electra.embeddings_project.bias", "D -> D"),
    ),
    prefix="electra.",
    ignored=(r"position_ids$", r"^discriminator_predictions\.", r"^generator_"),
)
ELECTRA_PRETRAINED = replace(ELECTRA, architecture="ElectraForPreTraining")
"""The discriminator, as it is published, without its head, which tells replaced tokens from others."""
ELECTRA_MASKED = replace(
    ELECTRA,
    architecture="ElectraForMaskedLM",
    fields=ELECTRA_FIELDS,
    weights=(
        *ELECTRA.weights,
        *masked_head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
    ),
    constants={**ELECTRA.constants, "head_activation": "gelu_exact"},
    required={**BERT.required, "tie_word_embeddings": True},
    model=EncoderConfig,
    ignored=ELECTRA.ignored[:1],
    copies={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
)
ELECTRA_CLASSIFIER = replace(
    ELECTRA,
    architecture="ElectraForSequenceClassification",
    fields=(*ELECTRA_FIELDS, N_CLASSES),
    weights=(*ELECTRA.weights, *classifier_head("classifier.dense", "classifier.out_proj")),
    constants={**ELECTRA.constants, "head_activation": "gelu_exact"},
    required={**ELECTRA.required, "problem_type": single_label},
    model=ClassifierConfig,
    ignored=ELECTRA.ignored[:1],
)
ELECTRA_TOKENS = token_classifier(ELECTRA, ELECTRA_CLASSIFIER, ELECTRA.ignored[:1])

ALBERT_DEFAULTS = {"hidden_act": "gelu_new", "hidden_dropout_prob": 0.0}
ALBERT_FIELDS = tuple(row._replace(default=ALBERT_DEFAULTS.get(row.theirs, row.default)) for row in ELECTRA_FIELDS)
ALBERT = replace(
    BERT,
    model_type="albert",
    architecture="AlbertModel",
    fields=(*ALBERT_FIELDS, *POOLED),
    weights=(
        *renamed(
            BERT.weights,
            ("bert.encoder.layer.{i}", "albert.encoder.albert_layer_groups.0.albert_layers.0"),
            ("bert.embeddings.", "albert.embeddings."),
            ("attention.self.", "attention."),
            ("attention.output.", "attention."),
            ("intermediate.dense", "ffn"),
            ("output.dense", "ffn_output"),
            ("output.LayerNorm", "full_layer_layer_norm"),
        ),
        Weight("embedding_projection.W_1", "albert.encoder.embedding_hidden_mapping_in.weight", "D M -> M D"),
        Weight("embedding_projection.b_1", "albert.encoder.embedding_hidden_mapping_in.bias", "D -> D"),
    ),
    required={**BERT.required, "num_hidden_groups": 1, "inner_group_num": 1},
    prefix="albert.",
    ignored=(r"position_ids$", r"pooler\.", r"^predictions\.", r"^sop_classifier\."),
)
"""ALBERT, whose one block is repeated (Lan et al. 2020): every block has a copy of its own."""
ALBERT_MASKED = replace(
    ALBERT,
    architecture="AlbertForMaskedLM",
    fields=ALBERT_FIELDS,
    weights=(
        *ALBERT.weights,
        *masked_head("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
    ),
    required={**ALBERT.required, "tie_word_embeddings": True},
    model=EncoderConfig,
    ignored=(*ALBERT.ignored[:2], ALBERT.ignored[3]),
    copies={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
)
ALBERT_CLASSIFIER = replace(
    ALBERT,
    architecture="AlbertForSequenceClassification",
    fields=(*ALBERT_FIELDS, N_CLASSES),
    weights=(*ALBERT.weights, *classifier_head("albert.pooler", "classifier")),
    required={**ALBERT.required, "problem_type": single_label},
    model=ClassifierConfig,
    ignored=ALBERT.ignored[:1],
)
ALBERT_TOKENS = token_classifier(ALBERT, ALBERT_CLASSIFIER, ALBERT.ignored[:2])


def all_but_every_third(theirs: PublishedConfig, i: int, window: int | None) -> bool:
    """Return False for every third block from the first on, or with another period from their config."""
    return bool(i % theirs.get("global_attn_every_n_layers", 3))


MODERN_LAYER = "model.layers.{i}"
MODERNBERT = Family(
    "modernbert",
    "ModernBertModel",
    fields=(
        Field("vocab_size", "vocab_size"),
        Field("context_length", "max_position_embeddings", 8192),
        Field("d_model", "hidden_size"),
        Field("n_blocks", "num_hidden_layers"),
        Field("n_heads", "num_attention_heads"),
        Field("d_ff", "intermediate_size", read=to_widths, write=only_width),
        Field("activation", "hidden_activation", "gelu", {"gelu": "geglu_exact", "gelu_pytorch_tanh": "geglu"}),
        Field("attention_bias", "attention_bias", False),
        Field("norm", "norm_bias", False, {False: "layernorm_no_bias", True: "layernorm"}),
        Field("norm_eps", "norm_eps", 1e-5),
        Field("embedding_std", "initializer_range", 0.02),
        Field("dropout", "embedding_dropout", 0.0),
        *POOLED,
    ),
    weights=(
        Weight("embedding.W_E", "model.embeddings.tok_embeddings.weight", "V D -> V D"),
        *norm_rows("embedding_norm", "model.embeddings.norm"),
        *norm_rows(f"{BERT_BLOCK}.attention_norm", f"{MODERN_LAYER}.attn_norm"),
        *(
            Weight(f"{BERT_BLOCK}.attention.{ours}_{name}", f"{MODERN_LAYER}.attn.Wqkv.{theirs}", layout, part)
            for ours, theirs, layout in (("W", "weight", "(3 H K) D -> D H K"), ("b", "bias", "(3 H K) -> H 1 K"))
            for part, name in enumerate("QKV")
        ),
        Weight(f"{BERT_BLOCK}.attention.W_O", f"{MODERN_LAYER}.attn.Wo.weight", "D (H K) -> H K D"),
        Weight(f"{BERT_BLOCK}.attention.b_O", f"{MODERN_LAYER}.attn.Wo.bias", "D -> D"),
        *norm_rows(f"{BERT_BLOCK}.mlp_norm", f"{MODERN_LAYER}.mlp_norm"),
        Weight(f"{BERT_BLOCK}.mlp.W_gate_1", f"{MODERN_LAYER}.mlp.Wi.weight", "(2 F) D -> D F", 0),
        Weight(f"{BERT_BLOCK}.mlp.W_1", f"{MODERN_LAYER}.mlp.Wi.weight", "(2 F) D -> D F", 1),
        Weight(f"{BERT_BLOCK}.mlp.W_2", f"{MODERN_LAYER}.mlp.Wo.weight", "D F -> F D"),
        *norm_rows("final_norm", "model.final_norm"),
    ),
    constants={"positions": "none", "norm_placement": "pre", "first_norm": False, "bias": False},
    required={"mlp_bias": False, "rope_scaling": None},
    rope_base=160_000.0,
    local_rope_base=10_000.0,
    windows=Windows(
        all_but_every_third, 128, name="local_attention", read=lambda n: n // 2 + 1, write=lambda n: 2 * (n - 1)
    ),
    # Their window is an integer, also where no block has one.
    write=lambda theirs: {
        name: x for name, x in theirs.items() if name != "rope_scaling" and (name, x) != ("local_attention", None)
    },
    aliases={"global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq"},
    model=EmbedderConfig,
    ignored=(r"^(head|decoder|classifier)\.",),
)
MODERN_HEAD = (
    Weight("head.W_1", "head.dense.weight", "O D -> D O"),
    Weight("head.b_1", "head.dense.bias", "D -> D"),
    *norm_rows("head_norm", "head.norm"),
)
MODERNBERT_MASKED = replace(
    MODERNBERT,
    architecture="ModernBertForMaskedLM",
    fields=(
        *MODERNBERT.fields[: -len(POOLED)],
        Field("head_activation", "classifier_activation", "gelu", ACTIVATIONS),
        Field("head_bias", "classifier_bias", False),
    ),
    weights=(*MODERNBERT.weights, *MODERN_HEAD, Weight("b_out", "decoder.bias", "V -> V")),
    required={**MODERNBERT.required, "decoder_bias": True, "tie_word_embeddings": True},
    model=EncoderConfig,
    ignored=(),
    copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)
MODERNBERT_TOKENS = replace(
    MODERNBERT,
    architecture="ModernBertForTokenClassification",
    fields=(*MODERNBERT_MASKED.fields, N_CLASSES),
    weights=(*MODERNBERT.weights, *MODERN_HEAD, *(row._replace(ours=f"head_out{row.ours[4:]}") for row in TOKEN_HEAD)),
    constants={**MODERNBERT.constants, "head": "mlp_norm"},
    model=TokenClassifierConfig,
    ignored=(),
)
MODERNBERT_CLASSIFIER = replace(
    MODERNBERT_TOKENS,
    architecture="ModernBertForSequenceClassification",
    fields=(
        *MODERNBERT_TOKENS.fields,
        Field("pooling", "classifier_pooling", "cls", {"cls": "first", "mean": "mean"}),
    ),
    required={**MODERNBERT_TOKENS.required, "problem_type": single_label},
    model=ClassifierConfig,
)

ALL = (
    *(BERT, BERT_MASKED, BERT_CLASSIFIER, BERT_TOKENS, POOLED_CLASSIFIER),
    *(ROBERTA, ROBERTA_MASKED, ROBERTA_CLASSIFIER, ROBERTA_TOKENS, *XLM_ROBERTA),
    *(DISTILBERT, DISTILBERT_MASKED, DISTILBERT_CLASSIFIER, DISTILBERT_TOKENS),
    *(ELECTRA, ELECTRA_PRETRAINED, ELECTRA_MASKED, ELECTRA_CLASSIFIER, ELECTRA_TOKENS),
    *(ALBERT, ALBERT_MASKED, ALBERT_CLASSIFIER, ALBERT_TOKENS),
    *(MODERNBERT, MODERNBERT_MASKED, MODERNBERT_CLASSIFIER, MODERNBERT_TOKENS),
)
"""All families of encoders, in the order of preference for export."""
