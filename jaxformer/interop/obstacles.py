"""Parts of a config that a format has no equivalent for, with the values that have one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from contextlib import suppress
from math import isclose
from typing import Any, NamedTuple

from jaxformer.config import Config, ModelConfig, Resizing
from jaxformer.config.fields import differences, shortest_period
from jaxformer.errors import UserError
from jaxformer.interop.configs import read_config, write_config
from jaxformer.interop.families import ENCODER_DECODERS, ENCODERS, FAMILIES, GGUF_FAMILIES
from jaxformer.interop.families.encoder_decoders import M2M_100
from jaxformer.interop.families.gguf import exported
from jaxformer.interop.families.tables import Family, ImportedConfig
from jaxformer.interop.formats import Format
from jaxformer.models.blocks import head_width
from jaxformer.models.clip import CLIPConfig
from jaxformer.models.decoder import BlockAttention, DecoderConfig, ExpertsConfig, LatentsConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.nn.norms import NORMS, epsilon
from jaxformer.ops.positions import RoPE

NESTED = ("experts", "latents", "vision", "text")
"""Fields that hold the fields of a part."""
PARTS: Mapping[str, type] = {"experts": ExpertsConfig, "latents": LatentsConfig}
"""Parts that a decoder may have."""
TRAINING_FIELDS = {
    *("context_length", "embedding_std", "unembedding_std"),
    *("dropout", "experts.capacity_factor", "experts.balance_weight", "experts.router_z_weight"),
    *("vision.dropout", "text.dropout", "text.embedding_std", "temperature"),
}
"""Fields that do not affect the outputs of a trained model."""
FAMILIES_BY_FORMAT: Mapping[str, Mapping[str, Family]] = {
    "hf": {
        **FAMILIES,
        **{name: family for name, family in ENCODERS.items() if family.is_exported},
        **{name: family for name, family in ENCODER_DECODERS.items() if family is not M2M_100},
    },
    "gguf": {name: exported(x) for name, x in GGUF_FAMILIES.items() if x.windows is None and x.has_rope is None},
}
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
    found: dict[str, tuple[bool, list[Obstacle]]] = {}
    if (known := as_known(model)) is not None:
        for name in (name for name, family in families.items() if same_kind(family.model, type(known))):
            found[name] = _obstacles(known, families[name])
            if not found[name][1]:
                break
    if not found:
        return next(iter(families)), [Obstacle("model", type(model).__name__, DecoderConfig.__name__)]
    nearest = min(found, key=lambda name: (found[name][0], len(found[name][1])))
    return nearest, found[nearest][1]


def as_known(model: ModelConfig) -> ImportedConfig | None:
    """Return the config of the same model that families describe: a decoder's, an encoder's or an encoder-decoder's.
    None if there is none, such as for a subclass, which may change the computation."""
    if isinstance(model, DecoderConfig):
        values = {f.name: getattr(model, f.name) for f in dataclasses.fields(DecoderConfig)}
        with suppress(UserError):  # a subclass may permit other values
            known = DecoderConfig(**values)
            return known if type(model) is DecoderConfig or model.is_same_model(known) else None
    others = {family.model for family in (*ENCODERS.values(), *ENCODER_DECODERS.values())}
    return model if type(model) in others else None  # type: ignore[return-value]


def same_kind(a: type, b: type) -> bool:
    """Return True for two classes of decoders, or the same class of other models."""
    return a is b or (issubclass(a, DecoderConfig) and issubclass(b, DecoderConfig))


def _obstacles(model: ImportedConfig, family: Family) -> tuple[bool, list[Obstacle]]:
    """Return the obstacles of a model, `as_known`, in a family of its kind, and True before them if there are more, as
    values that have an equivalent exclude each other."""
    changed, before = model, {f.name: getattr(model, f.name) for f in dataclasses.fields(model)} | values_of(model)
    found: dict[str, Obstacle] = {}
    # Some fields are compared only once all others have an equivalent.
    while lacking := unmatched(resolved(changed, family), family):
        needed: dict[str, Any] = {}
        for name, allowed in lacking.items():
            needed[name] = _first_that_fits(changed, family, name, allowed)
            for field, value, fitting in _by_field(f"model.{name}", before.get(name), needed[name]):
                found[field] = Obstacle(field, value, fitting)
        try:
            again = with_values(changed, needed)
        except UserError:  # such as d_model and n_heads without a common head width
            return True, list(found.values())
        if again == changed:
            return True, list(found.values())
        changed = again
    return False, list(found.values())


def _first_that_fits(model: ImportedConfig, family: Family, name: str, allowed: Collection[Any]) -> Any:
    """Return None for a field that by default follows from others, if that has an equivalent, or else the default if it
    is one of the `allowed` values, or their first."""
    defaults = values_of(type(model)())
    default = defaults[name] if name in defaults else _parts_defaults()[name]
    if default is None:
        with suppress(UserError):
            if name not in unmatched(resolved(with_values(model, {name: None}), family), family):
                return None
    return default if default in allowed else next(iter(allowed))


def _parts_defaults() -> dict[str, Any]:
    """Return the defaults of the fields of `PARTS`, with dotted names."""
    return {f"{part}.{f.name}": f.default for part, kind in PARTS.items() for f in dataclasses.fields(kind)}


def values_of(model: ImportedConfig) -> dict[str, Any]:
    """Return the fields of a config, with dotted names for those of its experts and towers."""
    values = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
    for name in NESTED:
        if (nested := values.get(name)) is not None:
            del values[name]
            values |= {f"{name}.{f.name}": getattr(nested, f.name) for f in dataclasses.fields(nested)}
    return values


def with_values(model: ImportedConfig, changes: Mapping[str, Any]) -> ImportedConfig:
    """Return a config with some values, named as in `values_of`."""
    own = {name: value for name, value in changes.items() if "." not in name}
    for name in NESTED:
        below = {field.removeprefix(f"{name}."): x for field, x in changes.items() if field.startswith(f"{name}.")}
        if below and name not in own:
            own[name] = dataclasses.replace(getattr(model, name), **below)
    return dataclasses.replace(model, **own)


def _by_field(name: str, value: Any, needed: Any) -> list[tuple[str, Any, Any]]:
    """Return the fields in which two values differ, also of a dataclass or of a single one in a tuple. A field of a
    nested dataclass that is missing stands for the whole."""
    if value is None and dataclasses.is_dataclass(needed):
        first = dataclasses.fields(needed)[0].name
        return [(f"{name}.{first}", None, getattr(needed, first))]
    if isinstance(value, tuple) and len(value) == len(needed) == 1 and dataclasses.is_dataclass(value[0]):
        (value,), (needed,) = value, needed
    return differences(value, needed, name) or [(name, value, needed)]


def resolved(model: ImportedConfig, family: Family | None = None) -> ImportedConfig:
    """Return a config, `as_known`, with default fields of None as their values, which published configs state; of an
    encoder, also with a segment, unless the family has none."""
    if isinstance(model, EncoderConfig):
        # One segment, whose embedding is 0, is the same as none.
        has_segments = family is None or any(field.ours == "n_segments" for field in family.fields)
        return dataclasses.replace(
            model,
            head_dim=model.width_of_head,
            norm_eps=epsilon(model.norm, model.norm_eps),
            n_segments=model.n_segments or int(has_segments),
            embedding_dim=model.width_of_embedding,
            head_activation=model.activation_of_head,
            attention=_resolved_attentions(model),
        )
    if isinstance(model, EncoderDecoderConfig):
        scale = None if model.embedding_scale == model.d_model**0.5 else model.embedding_scale
        return dataclasses.replace(
            model,
            head_dim=model.width_of_head,
            norm_eps=epsilon(model.norm, model.norm_eps),
            score_scale=model.width_of_head**-0.5 if model.score_scale is None else model.score_scale,
            embedding_scale=scale,
            max_distance=model.max_distance if model.position_buckets else EncoderDecoderConfig.max_distance,
        )
    if isinstance(model, ViTConfig):
        mean, std = (x * model.channels if len(x) == 1 else x for x in (model.mean, model.std))
        return dataclasses.replace(_with_defaults(model), mean=mean, std=std)
    if isinstance(model, CLIPConfig):
        return dataclasses.replace(model, vision=_with_defaults(model.vision), text=_with_defaults(model.text))
    config = as_known(model)
    assert isinstance(config, DecoderConfig)
    if (experts := config.experts) is not None:
        renormalize = experts.per_token > 1 if experts.renormalize is None else experts.renormalize
        shared_width = experts.shared_width or config.d_ff[0] if experts.shared_expert else None
        dense_width = experts.dense_width or config.d_ff[0] if experts.dense_blocks else None
        experts = dataclasses.replace(
            experts, renormalize=renormalize, shared_width=shared_width, dense_width=dense_width
        )
    latents = config.latents
    return dataclasses.replace(
        config,
        n_kv_heads=config.kv_heads,
        head_dim=config.width_of_head,
        max_context=config.n_positions,
        norm_eps=epsilon(config.norm, config.norm_eps) if config.norm in NORMS else config.norm_eps,
        output_bias=config.attention_bias if config.output_bias is None else config.output_bias,
        score_scale=config.scale,
        experts=experts,
        latents=None if latents is None else dataclasses.replace(latents, value_width=config.width_of_values),
        attention=_resolved_attentions(config),
    )


def _resolved_attentions(config: DecoderConfig | EncoderConfig) -> tuple[BlockAttention, ...]:
    """Return the attention of each block, with a RoPE only if it is not the model's, in their shortest period."""
    ropes = [config.block_rope(i) for i in range(config.n_blocks)]
    own = [None if rope == config.rope else rope for rope in ropes]
    uses_rope = [rope is not None or config.rope is None for rope in ropes]
    windows = [config.block_attention(i).window for i in range(config.n_blocks)]
    return shortest_period([*map(BlockAttention, windows, own, uses_rope)])


def _with_defaults(part: Any) -> Any:
    """Return the config of an image encoder, or of a tower, with the width of heads and ε, and with `resizing` None for
    one that is the default."""
    plain = Resizing(part.image_size) if hasattr(part, "image_size") else None
    own = {"resizing": None} if plain is not None and part.resizing == plain else {}
    return dataclasses.replace(part, head_dim=head_width(part), norm_eps=epsilon(part.norm, part.norm_eps), **own)


def unmatched(config: ImportedConfig, family: Family) -> dict[str, Collection[Any]]:
    """Return the fields of a `resolved` config for which a family has no equivalent, with the values that have one."""
    values = values_of(config)
    defaults = {name: value for name, value in values_of(type(config)()).items() if name in values}
    of_rope: dict[str, Collection[Any]] = {}
    own: dict[str, Any] = {}  # defaults that follow from other fields
    if isinstance(config, EncoderConfig):
        default = dataclasses.replace(config, head_activation=None, embedding_dim=None)
        own = {"head_activation": default.activation_of_head, "embedding_dim": default.width_of_embedding}
    if isinstance(config, DecoderConfig):
        for part, kind in PARTS.items():
            has_part = any(field.ours.startswith(f"{part}.") for field in family.fields)
            if (getattr(config, part) is None) == has_part:
                return {part: (kind() if has_part else None,)}
        defaults |= {name: value for name, value in _parts_defaults().items() if name in values}
    if isinstance(config, DecoderConfig | EncoderConfig):
        if (config.rope is None) == (family.rope_base is not None):
            of_rope = {"rope": (RoPE() if config.rope is None else None,)}
        elif config.rope is not None:
            fraction = 1.0 if family.rope_fraction is None else config.rope.fraction
            of_family = dataclasses.replace(config.rope, fraction=fraction, interleaved=family.interleaved)
            of_rope = {"rope": (of_family,)} if of_family != config.rope else {}
        defaults["rope"] = config.rope
        same: dict[str, Any] = {} if family.local_rope_base is not None else {"rope": None}
        same |= {} if family.has_rope is not None else {"use_rope": True}
        plain = tuple(dataclasses.replace(kind, **same) for kind in config.attention)
        if plain != config.attention:
            return {"attention": (shortest_period(plain),)}
    if not isinstance(config, ViTConfig | CLIPConfig):
        own |= {
            "n_kv_heads": config.n_heads,
            "output_bias": config.attention_bias,
            "score_scale": config.width_of_head**-0.5,
        }
    parts: dict[str, Any] = {f"{tower}.": getattr(config, tower) for tower in family.towers} or {"": config}
    widths = {f"{prefix}head_dim": part.d_model // part.n_heads for prefix, part in parts.items()}
    fixed = {**defaults, **own, **widths, **family.constants}
    expected: dict[str, Collection[Any]] = {name: (value,) for name, value in fixed.items()}
    for field in family.fields:
        expected[field.ours] = (values[field.ours],) if field.values is None else field.values.values()
    for prefix, part in parts.items():
        if len(part.d_ff) != 1:
            expected[f"{prefix}d_ff"] = (part.d_ff[:1],)
    ignored = TRAINING_FIELDS | (set() if family.windows is None else {"attention"})
    lacking = [name for name in values if name not in ignored and values[name] not in expected[name]]
    if not lacking and not of_rope:  # conversions that combine several fields may still differ
        try:
            length = None if isinstance(config, ViTConfig | CLIPConfig) else config.context_length
            back_config = read_config(write_config(config, family), length, family)
            again = values_of(resolved(back_config, family))
        except UserError:
            if (rope := getattr(config, "rope", None)) is None or rope.scaling == 1:
                raise
            return {"rope": (dataclasses.replace(rope, scaling=1.0),)}  # the family has no such scaling
        for name in values.keys() - TRAINING_FIELDS:
            ours, back = values[name], again[name]
            are_floats = isinstance(ours, float) and isinstance(back, float)
            if not (isclose(ours, back, rel_tol=1e-12) if are_floats else ours == back):  # a conversion may round
                expected[name] = (back,)
                lacking.append(name)
    return of_rope | {name: expected[name] for name in values if name in lacking}
