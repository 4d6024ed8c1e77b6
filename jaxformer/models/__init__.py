"""Whole networks, one file each: a config and the module it builds.

To add a model, add a file to this folder that defines a subclass of `jaxformer.config.ModelConfig`.
"""

from jaxformer.models.clip import CLIP, CLIPConfig, ImageTowerConfig, TextTowerConfig
from jaxformer.models.decoder import BlockAttention, Decoder, DecoderConfig, ExpertsConfig, LatentsConfig
from jaxformer.models.encoder import (
    Classifier,
    ClassifierConfig,
    Embedder,
    EmbedderConfig,
    EncoderConfig,
    MaskedLanguageModel,
    TokenClassifier,
    TokenClassifierConfig,
)
from jaxformer.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from jaxformer.models.objective import mean_loss, next_token_nll, objective_of
from jaxformer.models.recurrent import Recurrent, RecurrentConfig
from jaxformer.models.recurrent_lm import RecurrentLM, RecurrentLMConfig
from jaxformer.models.vit import ViT, ViTConfig
from jaxformer.models.vivit import FactorisedViViT, ViViT, ViViTConfig

__all__ = [
    "CLIP",
    "BlockAttention",
    "CLIPConfig",
    "Classifier",
    "ClassifierConfig",
    "Decoder",
    "DecoderConfig",
    "Embedder",
    "EmbedderConfig",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "ExpertsConfig",
    "FactorisedViViT",
    "ImageTowerConfig",
    "LatentsConfig",
    "MaskedLanguageModel",
    "Recurrent",
    "RecurrentConfig",
    "RecurrentLM",
    "RecurrentLMConfig",
    "TextTowerConfig",
    "TokenClassifier",
    "TokenClassifierConfig",
    "ViT",
    "ViTConfig",
    "ViViT",
    "ViViTConfig",
    "mean_loss",
    "next_token_nll",
    "objective_of",
]
