"""A prefix language model of real English that trains in minutes on two CPU cores. It is `configs/moe.py:dense` with
bidirectional attention within the prefix."""

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.prefix import PrefixTextConfig
from jaxformer.models.decoder import DecoderConfig

prefix = Config(
    name="prefix",
    model=DecoderConfig(
        vocab_size=2048, context_length=128, d_model=128, d_ff=(512,), activation="squared_relu", embedding_std=0.02,
        unembedding="tied", prefix=True,
    ),
    data=PrefixTextConfig(),
    steps=1200,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=50, weight_decay=0.1, clip_norm=1.0
    ),
    train=TrainConfig(batch_size=16),
)  # fmt: skip
