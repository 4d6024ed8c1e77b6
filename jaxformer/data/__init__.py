"""Datasets: from files to batches, with numpy, tokenizers and grain."""

from jaxformer.data.captions import CaptionsConfig
from jaxformer.data.dataset import VALIDATION_SEED, Batch, Dataset, step_rng
from jaxformer.data.dates import DatesConfig
from jaxformer.data.images import ImagesConfig
from jaxformer.data.labelled import LabelledTextConfig
from jaxformer.data.labelled_tokens import LabelledTokensConfig
from jaxformer.data.masked import MaskedTextConfig
from jaxformer.data.pairs import PairsConfig
from jaxformer.data.prefix import PrefixTextConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.videos import MovingImagesConfig
from jaxformer.data.windows import TextConfig, next_token_batch

__all__ = [
    "VALIDATION_SEED", "Batch", "CaptionsConfig", "Dataset", "DatesConfig", "ImagesConfig", "LabelledTextConfig",
    "LabelledTokensConfig", "MaskedTextConfig", "MovingImagesConfig", "PairsConfig", "PrefixTextConfig", "TextConfig",
    "Tokenizer", "next_token_batch", "step_rng",
]  # fmt: skip
