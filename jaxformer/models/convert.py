"""Reading of configs that earlier versions stored; goes at version 0.1.0."""

from __future__ import annotations

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.config.fields import from_dict
from jaxformer.models.rungs import RungDecoderConfig

EARLIER_SNAPSHOTS = "film"
"""Earlier name of the folder of snapshots in a run's folder."""


def convert_train(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `TrainConfig` as JSON, of which an earlier one is replaced."""
    if values.pop("film", False):
        values["snapshots"] = "doubling"
    return values


def convert(kind: str, values: dict[str, Any], path: str) -> ModelConfig | None:
    """Return the config of a decoder that was stored when one class had the fields of all decoders; None for another
    config, with two fields of decoders as the one that they are now.

    Args:
      kind: name of the class, see `kind_of`.
      values: fields as JSON, of which earlier names are replaced.
      path: prefix of field names in errors.
    """
    if "rope_low_periods" in values:
        values["rope_periods"] = [values.pop("rope_low_periods"), values.pop("rope_high_periods")]
    is_earlier = kind == "decoder.DecoderConfig" and "output_projection" in values
    return from_dict(RungDecoderConfig, values, path).simplest() if is_earlier else None
