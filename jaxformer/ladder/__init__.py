"""The ladder's own models, forecasts of their training, and the report of its results. Nothing else uses them; the
ladder is `configs/ladder.py`, and `jaxformer.cli.ladder` trains it."""

from jaxformer.ladder.mlp import MLPConfig, MLPLanguageModel
from jaxformer.ladder.rungs import RungDecoder, RungDecoderConfig

__all__ = ["MLPConfig", "MLPLanguageModel", "RungDecoder", "RungDecoderConfig"]
