"""Classification of images and synthetic videos of Fashion-MNIST (Xiao et al. 2017); --data.path names its folder of
four files. Other folders of images also work; see `--help`.

`vit` classifies images. The others classify videos in which the same images move: `vivit` by direction (one of eight),
and `vivit_class` by image.
"""

from dataclasses import replace

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.images import ImagesConfig
from jaxformer.data.videos import MovingImagesConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.models.vivit import ViViTConfig

# On `vit`, Muon reaches in 500 steps about what AdamW reaches in 1,500: 82.3% and 82.8% validation accuracy.
muon = OptimizerConfig(
    name="muon", learning_rate=2e-3, schedule="cosine", warmup_steps=100, weight_decay=0.1, clip_norm=1.0
)

vit = Config(
    name="vit",
    model=ViTConfig(
        image_size=(28, 28), channels=1, n_classes=10, patch_size=(7, 7), pooling="mean", mean=(0.286,), std=(0.353,),
        d_model=96, n_heads=3, n_blocks=4, d_ff=(384,), dropout=0.0,
    ),
    data=ImagesConfig(flip=True),
    steps=6000,
    optimizer=muon,
    train=TrainConfig(batch_size=64, log_every=50, eval_every=500, eval_examples=2000, checkpoint_every=500),
)  # fmt: skip

video = ViViTConfig(
    image_size=(42, 42), channels=1, n_classes=8, patch_size=(14, 14), pooling="mean", mean=(0.127,), std=(0.275,),
    d_model=96, n_heads=3, n_blocks=4, d_ff=(384,), dropout=0.0, n_frames=8,
)  # fmt: skip

vivit = replace(vit, name="vivit", model=video, data=MovingImagesConfig(), steps=1000)

vivit_class = replace(
    vivit,
    name="vivit_class",
    model=replace(video, n_classes=10),
    data=MovingImagesConfig(label="class"),
    steps=4000,
)
