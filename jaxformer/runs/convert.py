"""Reading of configs that earlier versions stored; goes at version 0.1.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED = {"jaxformer.models.rungs": "jaxformer.ladder.rungs", "jaxformer.models.mlp": "jaxformer.ladder.mlp"}
"""Modules of classes that are now in another one."""
PLAIN: Mapping[str, Any] = {
    "value_dim": None, "scaled": True, "projection_std": None, "output_projection": True, "residual": True,
    "value_embedding": False,
}  # fmt: skip
"""Fields that only decoders of the ladder still have, with the values of all others."""
EXPERTS = (
    "n_experts", "experts_per_token", "renormalize_experts", "capacity_factor", "shared_expert", "balance_weight",
    "router_z_weight",
)  # fmt: skip
"""Fields that only mixtures of experts still have."""

EARLIER_SNAPSHOTS = "film"
"""Earlier name of the folder of snapshots in a run's folder."""


def convert_train(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `TrainConfig` as JSON, of which an earlier one is replaced."""
    if values.pop("film", False):
        values["snapshots"] = "doubling"
    return values


def convert(field: str, kind: str, stored: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a config's class, see `config.files.kind_of`, and its fields as JSON, as they are stored now.

    Args:
      field: field of the run's config: model, data or optimizer.
    """
    values = dict(stored)
    if "rope_low_periods" in values:
        values["rope_periods"] = [values.pop("rope_low_periods"), values.pop("rope_high_periods")]
    if ":" not in kind:  # file.Class
        file, _, name = kind.rpartition(".")
        kind = f"jaxformer.{'models' if field == 'model' else field}.{file}:{name}"
    if kind == "jaxformer.models.decoder:DecoderConfig" and "output_projection" in values:  # one class of all decoders
        if values.get("unembedding") == "mlp" or any(values.get(name, x) != x for name, x in PLAIN.items()):
            return "jaxformer.ladder.rungs:RungDecoderConfig", values
        has_experts = values.get("n_experts") is not None
        values = {name: x for name, x in values.items() if not (name in PLAIN or (name in EXPERTS and not has_experts))}
        return "jaxformer.models.moe:MoEConfig" if has_experts else kind, values
    module, _, name = kind.rpartition(":")
    return f"{MOVED.get(module, module)}:{name}", values
