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
    norm_rows,
    only_width,
    to_widths,
)
from jaxformer.models.encoder import ClassifierConfig, EmbedderConfig, EncoderConfig

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
        *norm_rows("embedding_norm", "bert.embeddings.LayerNorm"),
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
BERT_MASKED = replace(
    BERT,
    architecture="BertForMaskedLM",
    fields=tuple(row for row in BERT.fields if row not in POOLED),
    weights=(
        *BERT.weights,
        Weight("head.W_1", "cls.predictions.transform.dense.weight", "O D -> D O"),
        Weight("head.b_1", "cls.predictions.transform.dense.bias", "D -> D"),
        *norm_rows("head_norm", "cls.predictions.transform.LayerNorm"),
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
        *norm_rows("head_norm", "lm_head.layer_norm"),
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

ALL = (BERT, BERT_MASKED, BERT_CLASSIFIER, POOLED_CLASSIFIER, ROBERTA, ROBERTA_MASKED, ROBERTA_CLASSIFIER)
"""All families of encoders, in the order of preference for export."""
