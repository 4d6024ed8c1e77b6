"""A text classifier that trains in minutes on two CPU cores. `python train.py --config classify --data.path reviews`
reads reviews.train.tsv and reviews.val.tsv, with lines TEXT<TAB>LABEL.
"""

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.labelled import LabelledTextConfig
from jaxformer.models.encoder import ClassifierConfig

classify = Config(
    name="classify",
    model=ClassifierConfig(
        vocab_size=2048, context_length=128, d_model=64, n_blocks=2, n_heads=4, d_ff=(256,), pooling="mean", dropout=0.2
    ),
    data=LabelledTextConfig(),
    steps=600,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=1e-3, schedule="cosine", warmup_steps=50, weight_decay=0.1, clip_norm=1.0
    ),
    train=TrainConfig(batch_size=32, eval_examples=512),
)
