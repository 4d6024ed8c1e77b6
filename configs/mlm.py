"""A masked language model of real English that trains in minutes on two CPU cores."""

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.masked import MaskedTextConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.ops import RoPE

mlm = Config(
    name="mlm",
    model=EncoderConfig(
        vocab_size=2049, context_length=128, d_model=128, n_blocks=4, n_heads=4, d_ff=(512,), dropout=0.0,
        norm_placement="pre", norm="rmsnorm", attention_bias=False, positions="none", rope=RoPE(), embedding_norm=False,
    ),
    data=MaskedTextConfig(),
    steps=2400,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=100, weight_decay=0.1, clip_norm=1.0
    ),
    train=TrainConfig(batch_size=16),
)  # fmt: skip
