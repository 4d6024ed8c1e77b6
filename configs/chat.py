"""Fine-tuning on conversations: --init-from names the pretrained model, whose config replaces the one in this file, and
--data.path the conversations. With --lora.rank 8, --optimizer.learning-rate 2e-4 is usual."""

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.chat import ChatConfig
from jaxformer.models.decoder import DecoderConfig

chat = Config(
    name="chat",
    model=DecoderConfig(context_length=512, n_blocks=1, n_heads=1, activation="relu", bias=True, final_norm=False),
    data=ChatConfig(),
    steps=300,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=2e-5, schedule="cosine", warmup_steps=20, weight_decay=0.0, clip_norm=1.0
    ),
    train=TrainConfig(batch_size=8, eval_every=50, checkpoint_every=50),
)
