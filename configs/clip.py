"""CLIP trained from scratch on about a thousand images with captions, in minutes on two CPU cores.

    python train.py --config configs/clip.py --data.path FOLDER

FOLDER contains images.zip, with images of 64 by 64 pixels, and captions.tsv; see `jaxformer.data.captions`.
"""

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.captions import CaptionsConfig
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig

clip = Config(
    name="clip",
    model=CLIPConfig(
        vision=ImageTowerConfig(
            image_size=(64, 64), patch_size=(8, 8), mean=(0.85, 0.79, 0.72), std=(0.26, 0.27, 0.35),
            d_model=96, n_blocks=3, n_heads=3, d_ff=(384,),
        ),
        # Captions have three words whose order does not matter, so there are no positions. With a vocabulary of mostly
        # full words, captions share tokens.
        text=TextTowerConfig(
            vocab_size=2400, context_length=18, d_model=128, n_blocks=1, n_heads=4, d_ff=(512,), positions="none",
            embedding_std=0.1,
        ),
        d_joint=128,
    ),
    # Data augmentation and word dropout against overfitting to a thousand pairs; adding dropout was worse.
    data=CaptionsConfig(shift=6, scale=0.15, rotate=10.0, flip=True, jitter=0.3, drop_words=0.3),
    steps=1200,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=3e-3, b2=0.98, schedule="cosine", warmup_steps=50, weight_decay=1.0, clip_norm=1.0
    ),
    # The contrastive loss depends on the batch size, which sets the number of negatives.
    train=TrainConfig(batch_size=128, eval_every=100),
)  # fmt: skip
