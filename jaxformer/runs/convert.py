"""Reading of configs that earlier versions stored; goes at version 0.1.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxformer.config.fields import shortest_period

MOVED = {
    "jaxformer.models.rungs:RungDecoderConfig": "jaxformer.ladder.rungs:RungDecoderConfig",
    "jaxformer.models.mlp:MLPConfig": "jaxformer.ladder.mlp:MLPConfig",
    "jaxformer.models.moe:MoEConfig": "jaxformer.models.decoder:DecoderConfig",
}
"""Classes that are now in another module, or fields of another class."""
RUNG_FIELDS: Mapping[str, Any] = {
    "value_dim": None, "scaled": True, "projection_std": None, "output_projection": True, "residual": True,
    "value_embedding": False,
}  # fmt: skip
"""Fields that only decoders of the ladder still have, with the values of all others."""
EXPERTS = {
    "n_experts": "n_experts", "experts_per_token": "per_token", "renormalize_experts": "renormalize",
    "capacity_factor": "capacity_factor", "shared_expert": "shared_expert", "balance_weight": "balance_weight",
    "router_z_weight": "router_z_weight",
}  # fmt: skip
"""Earlier fields of decoders that are now those of `experts`, and their names there."""

TOWERS = ("vision", "text")
"""Fields of CLIP that are models themselves."""

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
    if ":" not in kind:  # file.Class
        file, _, name = kind.rpartition(".")
        kind = f"jaxformer.{'models' if field == 'model' else field}.{file}:{name}"
    kind = MOVED.get(kind, kind)
    if kind == "jaxformer.models.decoder:DecoderConfig" and "output_projection" in values:  # one class of all decoders
        if values.get("unembedding") == "mlp" or any(values.get(name, x) != x for name, x in RUNG_FIELDS.items()):
            kind = "jaxformer.ladder.rungs:RungDecoderConfig"
        else:
            values = {name: x for name, x in values.items() if name not in RUNG_FIELDS}
    return kind, _nested(values) if field == "model" else values


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model, in which those of RoPE, of attention windows and of experts were fields of the
    model itself; also those of a tower."""
    values = {name: _nested(x) if name in TOWERS and isinstance(x, dict) else x for name, x in values.items()}
    if values.get("unembedding") == "mlp":
        values |= {"unembedding": "linear", "mlp_logits": True}
    if "experts_per_token" in values:
        experts = {now: values.pop(name) for name, now in EXPERTS.items() if name in values}
        values["experts"] = None if experts.get("n_experts") is None else experts
    if not {"rope_base", "positions", "norm_placement"} <= values.keys():  # of today, or a class of one's own
        return values
    if {"patch_size", "n_classes"} <= values.keys():  # a ViT, whose positions were always learned
        return {name: x for name, x in values.items() if name not in ("positions", "rope_base")}
    rope: dict[str, Any] = {"base": values.pop("rope_base"), "scaling": values.pop("rope_scaling", 1.0)}
    low, high = values.pop("rope_periods", (values.pop("rope_low_periods", 1.0), values.pop("rope_high_periods", 4.0)))
    if (original := values.pop("rope_original_context", None)) is not None:
        rope["scaling"] = {"factor": rope["scaling"], "low": low, "high": high, "original_context": original}
    local_base, has_rope = values.pop("local_rope_base", None), values["positions"] == "rope"
    values |= {"rope": rope, "positions": "none"} if has_rope else {"rope": None}
    if "window" in values:
        window, full = values.pop("window"), values.pop("global_blocks", ())
        local = {"window": window, "rope": {"base": local_base} if has_rope and local_base is not None else None}
        kinds = [{} if i in full or window is None else local for i in range(values["n_blocks"])]
        values["attention"] = list(shortest_period(kinds))
    return values
