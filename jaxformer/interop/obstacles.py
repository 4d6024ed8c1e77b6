"""Parts of a config that a format has no equivalent for, with the values that have one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from contextlib import suppress
from math import isclose
from typing import Any, NamedTuple

from jaxformer.config import Config, ModelConfig
from jaxformer.errors import UserError
from jaxformer.interop.configs import ROPE_FIELDS, read_config, write_config
from jaxformer.interop.families import ENCODERS, FAMILIES, GGUF_FAMILIES, Family, ImportedConfig
from jaxformer.interop.formats import Format
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.moe import MoEConfig
from jaxformer.nn.norms import NORMS, epsilon

TRAINING_FIELDS = {
    *("context_length", "embedding_std", "unembedding_std"),
    *("dropout", "capacity_factor", "balance_weight", "router_z_weight"),
}
"""Fields that do not affect the outputs of a trained model."""
ROPE = {"rope_base", "rope_periods", *(ours for fields in ROPE_FIELDS.values() for ours in fields)}
"""Fields of RoPE."""
FAMILIES_BY_FORMAT: Mapping[str, Mapping[str, Family]] = {"hf": {**FAMILIES, **ENCODERS}, "gguf": GGUF_FAMILIES}
"""Families that a format can hold, by name; other formats hold all models."""


class Obstacle(NamedTuple):
    """A field of a config whose value has no equivalent in a format."""

    field: str
    """Path of the field, such as `model.bias`; `model` if the model is of another kind."""
    value: Any
    """Its value; for `model`, the name of its class."""
    needed: Any
    """A value that has an equivalent; for `model`, the name of such a class."""


def obstacles(config: Config, file_format: Format) -> list[Obstacle]:
    """Return all fields that prevent the export of a config's model to a format: those that the nearest family of the
    format has no equivalent for. With the `needed` values, the model can be exported."""
    if file_format not in FAMILIES_BY_FORMAT:
        return []
    return nearest_family(config.model, FAMILIES_BY_FORMAT[file_format])[1]


def nearest_family(model: ModelConfig, families: Mapping[str, Family]) -> tuple[str, list[Obstacle]]:
    """Return the name of the family with the fewest obstacles for a model, the first of equals, and these obstacles."""
    found = {}
    if (known := as_known(model)) is not None:
        same = {name: family for name, family in families.items() if same_kind(family.model, type(known))}
        found = {name: _obstacles(known, family) for name, family in same.items()}
    if not found:
        return next(iter(families)), [Obstacle("model", type(model).__name__, DecoderConfig.__name__)]
    nearest = min(found, key=lambda name: len(found[name]))
    return nearest, found[nearest]


def as_known(model: ModelConfig) -> ImportedConfig | None:
    """Return the config of the same model that families describe: a decoder's with the fields of experts, or an
    encoder's. None if there is none, such as for a subclass, which may change the computation."""
    if isinstance(model, DecoderConfig):
        values = {f.name: getattr(model, f.name) for f in dataclasses.fields(MoEConfig) if hasattr(model, f.name)}
        with suppress(UserError):  # a subclass may permit other values
            known = MoEConfig(**values)
            return known if type(model) is DecoderConfig or model.is_same_model(known) else None
    return model if type(model) in {family.model for family in ENCODERS.values()} else None  # type: ignore[return-value]


def same_kind(a: type, b: type) -> bool:
    """Return True for two classes of decoders, or the same class of encoders."""
    return a is b or (issubclass(a, DecoderConfig) and issubclass(b, DecoderConfig))


def _obstacles(model: ImportedConfig, family: Family) -> list[Obstacle]:
    """Return the obstacles of a model, `as_known`, in a family of its kind."""
    changed = model
    found: dict[str, Obstacle] = {}
    # Some fields are compared only once all others have an equivalent.
    while lacking := unmatched(resolved(changed), family):
        needed: dict[str, Any] = {}
        for name, allowed in lacking.items():
            needed[name] = _first_that_fits(changed, family, name, allowed)
            found[f"model.{name}"] = Obstacle(f"model.{name}", getattr(model, name), needed[name])
        try:
            again = dataclasses.replace(changed, **needed)
        except UserError:  # such as d_model and n_heads without a common head width
            break
        if again == changed:
            break
        changed = again
    return list(found.values())


def _first_that_fits(model: ImportedConfig, family: Family, name: str, allowed: Collection[Any]) -> Any:
    """Return the default of a field if it has an equivalent, such as None for one that follows from others, or else the
    first of the `allowed` values."""
    default: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(model) if f.name == name}
    try:
        if name not in unmatched(resolved(dataclasses.replace(model, **default)), family):
            return default[name]
    except UserError:
        pass
    return next(iter(allowed))


def resolved(model: ImportedConfig) -> ImportedConfig:
    """Return a config, `as_known`, with default fields of None as their values, which published configs state."""
    if isinstance(model, EncoderConfig):
        # One segment, whose embedding is 0, is the same as none.
        return dataclasses.replace(
            model,
            head_dim=model.width_of_head,
            norm_eps=epsilon(model.norm, model.norm_eps),
            n_segments=model.n_segments or 1,
        )
    config = as_known(model)
    assert isinstance(config, MoEConfig)
    renormalize = config.experts_per_token > 1 if config.renormalize_experts is None else config.renormalize_experts
    return dataclasses.replace(
        config,
        n_kv_heads=config.kv_heads,
        head_dim=config.width_of_head,
        max_context=config.n_positions,
        norm_eps=epsilon(config.norm, config.norm_eps) if config.norm in NORMS else config.norm_eps,
        output_bias=config.attention_bias if config.output_bias is None else config.output_bias,
        score_scale=config.scale,
        renormalize_experts=None if config.n_experts is None else renormalize,
    )


def unmatched(config: ImportedConfig, family: Family) -> dict[str, Collection[Any]]:
    """Return the fields of a `resolved` config for which a family has no equivalent, with the values that have one."""
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    fixed = {
        **defaults,
        "n_kv_heads": config.n_heads,
        "head_dim": config.d_model // config.n_heads,
        "output_bias": config.attention_bias,
        "score_scale": config.width_of_head**-0.5,
        **family.constants,
    }
    expected: dict[str, Collection[Any]] = {name: (value,) for name, value in fixed.items()}
    for field in family.fields:
        expected[field.ours] = (getattr(config, field.ours),) if field.values is None else field.values.values()
    if len(config.d_ff) != 1:
        expected["d_ff"] = (config.d_ff[:1],)
    ignored = TRAINING_FIELDS | converted_fields(config, family)
    lacking = [name for name in defaults if name not in ignored and getattr(config, name) not in expected[name]]
    if not lacking:  # conversions that combine several fields may still differ
        again = resolved(read_config(write_config(config, family), config.context_length))
        for name in defaults.keys() - TRAINING_FIELDS:
            ours, back = getattr(config, name), getattr(again, name)
            are_floats = isinstance(ours, float) and isinstance(back, float)
            if not (isclose(ours, back, rel_tol=1e-12) if are_floats else ours == back):  # a conversion may round
                expected[name] = (back,)
                lacking.append(name)
    return {name: expected[name] for name in defaults if name in lacking}


def converted_fields(config: ImportedConfig, family: Family) -> set[str]:
    """Return the fields of RoPE and windows that a family has an equivalent for, in a form other than a row."""
    fields = set(ROPE) if family.rope_base is not None or config.positions != "rope" else set()
    if family.local_rope_base is not None:
        fields.add("local_rope_base")
    if family.windows is not None:
        fields |= {"window", "global_blocks"} if family.windows.by_layer else {"window"}
    return fields
