"""The ladder's own models, forecasts of their training, and the report of its results. Nothing else uses them; the
ladder is `configs/ladder.py`, and `jaxformer.cli.ladder` trains it."""

from typing import TYPE_CHECKING

from jaxformer import lazy_names

if TYPE_CHECKING:
    from jaxformer.ladder.forecasts import Forecast, forecast
    from jaxformer.ladder.mlp import MLPConfig, MLPLanguageModel
    from jaxformer.ladder.rungs import RungDecoder, RungDecoderConfig

__all__ = ["Forecast", "MLPConfig", "MLPLanguageModel", "RungDecoder", "RungDecoderConfig", "forecast"]
_NAMES = {
    "forecasts": ("Forecast", "forecast"), "mlp": ("MLPConfig", "MLPLanguageModel"),
    "rungs": ("RungDecoder", "RungDecoderConfig"),
}  # fmt: skip
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
