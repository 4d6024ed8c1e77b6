"""Small recurrent models that convert dates in many languages to ISO 8601, trained in minutes on two CPU cores and
without a download: `python train.py --config configs/dates.py:bahdanau`
"""

from dataclasses import replace

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.dates import DatesConfig
from jaxformer.models.recurrent import RecurrentConfig

# Attention to the source at each target token (Bahdanau et al. 2015).
attending = RecurrentConfig(
    vocab_size=257, context_length=64, cell="gru", d_embedding=64, d_model=128, attention="additive"
)  # fmt: skip

bahdanau = Config(
    name="dates-bahdanau",
    model=attending,
    data=DatesConfig(),
    steps=600,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=3e-3, schedule="cosine", warmup_steps=50, b2=0.98, clip_norm=1.0
    ),
    train=TrainConfig(batch_size=64, eval_examples=256, report_every=1000),
)

# One vector for the source instead of attention (Cho et al. 2014).
fixed = replace(bahdanau, name="dates-fixed", model=replace(attending, attention="none"))
