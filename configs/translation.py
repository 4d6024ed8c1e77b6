"""Translation from pairs of sentences: models of about 8.3 million parameters on the same pairs, and the Transformer of
2017 in its original size.

`python train.py --config configs/translation.py:transformer --data.path data/en-fr` reads data/en-fr.train.tsv and
data/en-fr.val.tsv, one pair SOURCE<TAB>TARGET per line. All but `base` are meant for some 34,000 pairs of a dozen
words, on which each trains in about half an hour on two CPU cores; `base` is for millions of pairs and an accelerator.
"""

from dataclasses import replace

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.pairs import PairsConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.recurrent import RecurrentConfig
from jaxformer.ops import RoPE

# Section 5.3 of Vaswani et al. 2017, with a shorter warm-up for fewer steps.
optimizer = OptimizerConfig(
    name="adamw", learning_rate=1e-3, schedule="inverse_sqrt", warmup_steps=400, b2=0.98, clip_norm=1.0
)

# One vector for the source instead of attention (Cho et al. 2014).
one_vector = RecurrentConfig(
    vocab_size=4096, context_length=64, d_embedding=256, d_model=544, attention="none", tied=True, dropout=0.1
)  # fmt: skip
gru = Config(
    name="translation-gru",
    model=one_vector,
    data=PairsConfig(),
    steps=2000,
    optimizer=optimizer,
    train=TrainConfig(
        batch_size=64, log_every=50, eval_every=500, eval_examples=256, report_every=2000, checkpoint_every=250,
        label_smoothing=0.1,
    ),
)  # fmt: skip

# Attention to the source at each target token (Bahdanau et al. 2015), with its parameters offset by a smaller width.
attending = replace(one_vector, d_model=512, attention="additive")
bahdanau = replace(gru, name="translation-bahdanau", model=attending)

# A pre-norm Transformer, which needs no long warm-up.
pre_norm = EncoderDecoderConfig(
    vocab_size=4096, context_length=64, d_model=256, n_heads=4, d_ff=(1024,), n_encoder_blocks=4, n_decoder_blocks=4,
    norm_placement="pre",
)  # fmt: skip
transformer = replace(gru, name="translation-transformer", model=pre_norm)

# As in the paper, a norm after each residual connection.
post_norm = replace(pre_norm, norm_placement="post")
transformer_2017 = replace(gru, name="translation-transformer-2017", model=post_norm)

# Changes that let a Transformer learn from so few pairs: heads that initially attend to neighbouring tokens and, in
# cross-attention, around their own position, because a sentence and its translation have similar word order; RoPE,
# RMSNorm and squared ReLU; and twice as many steps with half the batch size, with a learning rate that ends at 0.
modern = replace(
    pre_norm, norm="rmsnorm", positions="none", rope=RoPE(), attention_bias=True, local_heads=2, diagonal_heads=2,
    activation="squared_relu", bias=False,
)  # fmt: skip
transformer_modern = replace(
    gru,
    name="translation-transformer-modern",
    model=modern,
    steps=4000,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=1.5e-3, schedule="cosine", warmup_steps=100, weight_decay=0.1, clip_norm=1.0
    ),
    train=replace(gru.train, batch_size=32),
)

# `base` of the paper: 65 million parameters in its table 3, and about 25,000 tokens per side and batch.
base = Config(
    name="translation-base",
    model=EncoderDecoderConfig(vocab_size=37_000, context_length=256),
    data=PairsConfig(),
    steps=100_000,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=(512 * 4000) ** -0.5, schedule="inverse_sqrt", warmup_steps=4000, b2=0.98
    ),
    train=TrainConfig(
        batch_size=1024, log_every=100, eval_every=1000, eval_examples=2048, report_every=10_000,
        checkpoint_every=1000, label_smoothing=0.1,
    ),
)  # fmt: skip
