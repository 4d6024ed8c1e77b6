"""A mixture of experts, and a dense model with the same FLOPs per token, which train in minutes on two CPU cores.

Each token is routed to 2 of 8 experts. An expert is slightly less than half as wide as the dense model's MLP, so that,
with the router, both models have the same number of active parameters per token.
"""

from dataclasses import replace

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.models.decoder import DecoderConfig, ExpertsConfig

model = DecoderConfig(
    vocab_size=2048, context_length=128, d_model=128, d_ff=(512,), activation="squared_relu", embedding_std=0.02,
    unembedding="tied",
)  # fmt: skip

dense = Config(
    name="dense",
    model=model,
    data=TextConfig(),
    steps=1200,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=50, weight_decay=0.1, clip_norm=1.0
    ),
    train=TrainConfig(batch_size=16),
)

moe = replace(
    dense,
    name="moe",
    model=replace(model, d_ff=(254,), experts=ExpertsConfig(n_experts=8, per_token=2, capacity_factor=1.25)),
)
