"""CLIP from nothing, on a folder of about a thousand images with captions: minutes on two CPU cores.

    python train.py --config configs/clip.py --data.path FOLDER

FOLDER holds images.zip, of 64 by 64 pixels, and captions.tsv; see `jaxformer.data.captions`.
"""

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.captions import CaptionsConfig
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig

clip = Config(
    name="clip",
    model=CLIPConfig(
        vision=ImageTowerConfig(
            image_size=64, patch_size=16, mean=(0.85, 0.79, 0.72), std=(0.26, 0.27, 0.35),
            d_model=96, n_blocks=3, n_heads=3, d_ff=(384,), dropout=0.2,
        ),
        text=TextTowerConfig(
            vocab_size=1024, context_length=18, d_model=64, n_blocks=2, n_heads=2, d_ff=(256,), embedding_std=0.1,
            dropout=0.2,
        ),
        d_joint=64,
    ),
    # A thousand pairs are soon learned by heart; dropout and moved images make what is learned fit other pairs, too.
    data=CaptionsConfig(shift=6, flip=True),
    steps=1800,
    optimizer=OptimizerConfig(
        name="adamw", learning_rate=3e-3, b2=0.98, schedule="cosine", warmup_steps=50, weight_decay=0.5, clip_norm=1.0
    ),
    # A larger batch is another loss: each pair is told from more.
    train=TrainConfig(batch_size=128, eval_every=100),
)  # fmt: skip
