"""Text classifiers that train in minutes on two CPU cores. `python train.py --config classify --data.path reviews`
reads reviews.train.tsv and reviews.val.tsv, with lines TEXT<TAB>LABEL.

A few thousand texts are soon known by heart: hence one block, whole words as tokens, much dropout and few epochs;
`--data.drop-tokens 0.2` hides a fifth of the tokens as well.
`classify` is for sentences, and `classify:presidents` for passages of 60 words by 18 authors. `classify:tokens` labels
words, such as named entities: its files have a word and its label per line, and an empty line after each text.
"""

from dataclasses import replace

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.labelled import LabelledTextConfig
from jaxformer.data.labelled_tokens import LabelledTokensConfig
from jaxformer.models.encoder import ClassifierConfig, TokenClassifierConfig
from jaxformer.ops import RoPE

model = ClassifierConfig(
    vocab_size=8192, context_length=64, d_model=128, n_blocks=1, n_heads=4, d_ff=(256,), pooling="mean", dropout=0.5
)
classify = Config(
    name="classify",
    model=model,
    data=LabelledTextConfig(),
    steps=800,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=1e-3, schedule="cosine", warmup_steps=50, weight_decay=0.1, clip_norm=1.0
    ),
    train=TrainConfig(batch_size=32, eval_examples=512),
)
presidents = replace(
    classify,
    name="classify_presidents",
    model=replace(model, context_length=128, positions="none", rope=RoPE(), dropout=0.6),
    optimizer=replace(classify.optimizer, learning_rate=2e-3),
)
tokens = replace(
    classify,
    name="classify_tokens",
    model=TokenClassifierConfig(
        vocab_size=8192, context_length=64, d_model=128, n_blocks=2, n_heads=4, d_ff=(256,), dropout=0.5
    ),
    data=LabelledTokensConfig(),
)
