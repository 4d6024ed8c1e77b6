"""The default of `python train.py`: a small model of real English that trains in minutes on two CPU cores.

`quick` trains with every seed and number of devices in docs/margins.md, even at twice its learning rate. This margin is
due to gradient clipping, which bounds the update of Nesterov SGD to learning_rate · clip_norm / (1 - momentum), here 5;
at four times that, 11 of 12 runs diverged.

`llama` is for export. It is limited to the features of a Llama: no RMS-normalised queries and keys, and a gated MLP
with about as many parameters as that of `modern`.
"""

from dataclasses import replace

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig
from jaxformer.models.decoder import DecoderConfig

model = DecoderConfig(
    vocab_size=2048, context_length=128, d_model=128, n_blocks=4, n_heads=4, qk_norm=True, d_ff=(512,),
    activation="relu", bias=True, unembedding_std=0.03,
)  # fmt: skip

quick = Config(
    name="quick",
    model=model,
    data=TextConfig(),
    steps=1200,
    optimizer=OptimizerConfig(
        name="nesterov_sgd", learning_rate=1.0, schedule="cosine", warmup_steps=50, clip_norm=0.5
    ),
    train=TrainConfig(batch_size=8),
)

# The improvements of `ladder:best`: local heads, small embeddings, linear decay, and a long average of squared
# gradients.
modern = replace(
    quick,
    name="modern",
    model=replace(
        model, activation="squared_relu", bias=False, attention_bias=True, local_heads=2, embedding_std=0.08,
        embedding_scale=12.0,
    ),
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=3e-3, schedule="linear", warmup_steps=50, b2=0.99, weight_decay=0.1, clip_norm=1.0
    ),
)  # fmt: skip

llama = replace(
    modern,
    name="llama",
    model=replace(model, activation="swiglu", bias=False, d_ff=(352,), qk_norm=False),
    optimizer=replace(modern.optimizer, learning_rate=5e-3),
)
