"""Conversion between configs of published models and ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config.fields import from_dict
from jaxformer.errors import UserError, abbreviate
from jaxformer.interop.families import (
    ENCODERS,
    FAMILIES,
    NONE_OF,
    POOLED_CLASSIFIER,
    REQUIRED,
    Family,
    Field,
    ImportedConfig,
    PublishedConfig,
)
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import EncoderConfig

MAX_TRAINING_CONTEXT = 2048
"""Default maximum training sequence length of an imported model, in tokens; its own maximum context is kept."""

ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
"""Fields of RoPE scalings that may also stand outside of `rope_parameters`."""
ROPE = "rope_parameters or rope_scaling"
"""Fields that hold the type of RoPE scaling and its numbers."""
LAYER_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers, in `layer_types` and in `rope_parameters` that differ by layer."""
OTHER_NAMES = {
    "window": "sliding_window",
    "global_blocks": "layer_types",
    "rope_base": "rope_theta",
    "local_rope_base": "rope_local_base_freq or rope_theta",
    "rope_scaling": f"the factor of {ROPE}",
    "rope_original_context": ORIGINAL,
    "rope_periods": f"low_freq_factor and high_freq_factor of {ROPE}",
}
"""Their names of our fields that are not in the tables of `families`."""
ROPE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"rope_scaling": "factor"},
    "llama3": {"rope_scaling": "factor", "rope_original_context": ORIGINAL},
}
"""Our fields and theirs, by type of RoPE scaling."""
ROPE_PERIODS = ("low_freq_factor", "high_freq_factor")
"""Their fields for `rope_periods`."""


def family_of(theirs: PublishedConfig) -> Family:
    """Return the model family of a config. Raises `UserError` if it is unknown, or the checkpoint is quantised."""
    if theirs.get("quantization_config") is not None:
        raise UserError("the checkpoint is quantised, which is not supported; use the one that it was made from.")
    model_type, architectures = str(theirs.get("model_type")), theirs.get("architectures")
    all_families = (*FAMILIES.values(), *ENCODERS.values())
    families = {family.architecture: family for family in all_families if family.model_type == model_type}
    if not families:
        known = ", ".join(dict.fromkeys(family.model_type for family in all_families))
        raise UserError(f"the model_type is {abbreviate(model_type)}, which is not supported; supported are {known}.")
    names = architectures or list(families)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"the architectures are {abbreviate(names)}, which are no names; restore the published config.")
    if not (matching := [name for name in names if name in families]):
        published = [name for name in families if name != POOLED_CLASSIFIER.architecture]
        remedy = f"use a checkpoint of {' or '.join(published)}"
        raise UserError(f"the first of architectures is {abbreviate(names[0])}, which is not supported; {remedy}.")
    return families[matching[0]]


def read_config(theirs: PublishedConfig, context_length: int | None = None) -> ImportedConfig:
    """Return our config for the content of a published `config.json`, with training sequences of `context_length`
    tokens; None for at most `MAX_TRAINING_CONTEXT`, and for an encoder its number of positions. Raises `UserError` if
    the family is unknown, or a field is missing or has a value without an equivalent."""
    family = family_of(theirs)
    is_encoder = issubclass(family.model, EncoderConfig)
    theirs = {**theirs, **{name: theirs[alias] for alias, name in family.aliases.items() if alias in theirs}}
    try:
        for name, expected in {**NONE_OF, **({} if is_encoder else {"is_causal": True}), **family.required}.items():
            if (value := theirs.get(name, expected)) != expected and (expected or value):
                raise ValueError(f"{name} is {abbreviate(value)}, and only {expected} has an equivalent")
        values = {**family.constants, **{field.ours: _read_field(field, theirs) for field in family.fields}}
        longest = values["context_length" if is_encoder else "max_context"]
        if context_length is not None and not (longest if is_encoder else 0) <= context_length <= longest:
            limit = f"the model has {longest} positions{', all of which an encoder takes' if is_encoder else ''}"
            raise UserError(f"`context_length` is {context_length}; {limit}; omit it.")
        if is_encoder:
            return _checked(family, values)
        values["context_length"] = context_length or min(longest, MAX_TRAINING_CONTEXT)
        # Verify types and sizes before allocating one entry per block.
        values |= read_windows(family, theirs, _checked(family, values).n_blocks)
        if family.rope_base is not None:
            values |= read_rope(family, theirs, values)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        problem = f"the config has no equivalent as a {family.model_type}: {type(error).__name__}: {error}"
        raise UserError(f"{problem}; restore the published one, or choose another model.") from error
    return _checked(family, values)


def _checked(family: Family, values: Mapping[str, Any]) -> ImportedConfig:
    """Return our config. Raises `UserError`, with their names of the fields, if a value has another type or is out of
    range."""
    try:
        return from_dict(family.model, values, "the model")
    except UserError as error:
        names = {field.ours: field.theirs for field in family.fields} | OTHER_NAMES
        given = [f"{ours} is {theirs}" for ours, theirs in names.items() if re.search(rf"\b{ours}\b", str(error))]
        raise UserError(f"{str(error).rstrip('.')}; in the published config, {', '.join(given)}.") from error


def _read_field(field: Field, theirs: PublishedConfig) -> Any:
    """Return our value for a field."""
    value = theirs.get(field.theirs)
    if value is None and not (field.is_optional and field.theirs in theirs):
        value = field.default(theirs) if callable(field.default) else field.default
    if value is REQUIRED:
        raise ValueError(f"there is no {field.theirs}")
    try:
        if field.values is None:
            return field.read(value)
        if value in field.values:
            return field.values[value]
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:  # such as for the root of a text
        raise ValueError(f"{field.theirs} is {abbreviate(value)} ({error})") from error
    raise ValueError(f"{field.theirs} is {abbreviate(value)}, not one of {', '.join(map(repr, field.values))}")


def write_config(config: ImportedConfig, family: Family) -> dict[str, Any]:
    """Return the published form of our config, every field of which must have an equivalent in the family; see
    `obstacles`."""
    theirs: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture]}
    theirs |= family.required
    for field in family.fields:
        value = getattr(config, field.ours)
        if field.values is None:
            theirs[field.theirs] = field.write(value)
        else:
            theirs[field.theirs] = next(name for name, ours in field.values.items() if ours == value)
    if isinstance(config, EncoderConfig):
        return theirs
    theirs |= write_windows(config, family)
    return theirs if family.rope_base is None else theirs | write_rope(config)


def read_windows(family: Family, theirs: PublishedConfig, n_blocks: int) -> dict[str, Any]:
    """Return our fields for attention windows; none without a window. Raises `ValueError` if the number of blocks is
    another, or a block has another kind of layer than attention."""
    if (windows := family.windows) is None:
        return {}
    window = theirs.get("sliding_window", windows.default)
    if windows.enabled_by is not None and not theirs.get(windows.enabled_by):
        window = None
    kinds = theirs.get("layer_types") if windows.by_layer else None
    if kinds is None:
        is_local = [windows.is_local(theirs, i, window) for i in range(n_blocks)]
        kinds = ["sliding_attention" if local else "full_attention" for local in is_local]
    if len(kinds) != n_blocks or not {*kinds} <= LAYER_KINDS:
        limit = f"{n_blocks} of sliding_attention or full_attention"
        raise ValueError(f"layer_types is {abbreviate(kinds)}; it must have {limit}")
    if "sliding_attention" not in kinds:
        return {}
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    if window is None:
        raise ValueError("layer_types has sliding_attention, but there is no sliding_window")
    return {"window": window, "global_blocks": full}


def write_windows(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return their fields for our attention windows."""
    if (windows := family.windows) is None:
        return {}
    theirs: dict[str, Any] = {"sliding_window": config.window}
    if windows.by_layer:
        is_full = [config.window is None or i in config.global_blocks for i in range(config.n_blocks)]
        theirs["layer_types"] = ["full_attention" if full else "sliding_attention" for full in is_full]
    if windows.enabled_by is not None:
        theirs[windows.enabled_by] = config.window is not None
    return theirs


def read_rope(family: Family, theirs: PublishedConfig, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return our RoPE fields: the base, the scaling, and the base for blocks with a window, given our other fields.
    Version 5 of transformers nests them in `rope_parameters`; before, bases were fields of the config, and the scaling
    was in `rope_scaling`, which takes precedence. Raises `ValueError` if the scaling has no equivalent."""
    given, older = theirs.get("rope_parameters"), theirs.get("rope_scaling") or {}
    rope, values = {"rope_theta": theirs.get("rope_theta", family.rope_base)}, {}
    if family.local_rope_base is None:
        rope |= older or given or {}
        if nested := sorted(LAYER_KINDS & rope.keys()):
            raise ValueError(f"{ROPE} has {' and '.join(nested)}, and only gemma3_text differs by layer")
    else:  # by kind of layer, where the older field changes that of layers without a window
        kinds = {kind: {"rope_type": "default"} for kind in LAYER_KINDS} if given is None else given
        rope |= (kinds.get("full_attention") or {}) | older
        local = {"rope_theta": theirs.get("rope_local_base_freq", family.local_rope_base)}
        local |= kinds.get("sliding_attention") or {}
        _rope_type(local, ["default"])
        if ours.get("window") is not None:
            values["local_rope_base"] = local["rope_theta"]
    kind = _rope_type(rope, ROPE_FIELDS)
    if (part := rope.get(PARTIAL, theirs.get(PARTIAL))) not in (None, 1) and kind != "default":
        raise ValueError(f"the {PARTIAL} of {ROPE} is {abbreviate(part)}, and only 1 has an equivalent")
    if kind == "llama3":
        rope = {ORIGINAL: ours["max_context"]} | rope
        if ORIGINAL in theirs and family.local_rope_base is None:
            rope[ORIGINAL] = theirs[ORIGINAL]
        values["rope_periods"] = [rope[name] for name in ROPE_PERIODS]
    values["rope_base"] = rope["rope_theta"]
    return values | {ours: rope[name] for ours, name in ROPE_FIELDS[kind].items()}


def _rope_type(rope: PublishedConfig, known: Collection[str]) -> str:
    """Return the type of a RoPE scaling, which must be among those `known`."""
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    if kind not in known:
        raise ValueError(f"the rope_type of {ROPE} is {abbreviate(kind)}, not one of {', '.join(known)}")
    return kind


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """Return their fields for our RoPE, both for versions of transformers before 5 and from 5 on."""
    kind = "default" if config.rope_scaling == 1 else "linear" if config.rope_original_context is None else "llama3"
    scaling = {"rope_type": kind} | {name: getattr(config, ours) for ours, name in ROPE_FIELDS[kind].items()}
    if kind == "llama3":
        scaling |= zip(ROPE_PERIODS, config.rope_periods, strict=True)
    theirs = {"rope_theta": config.rope_base, "rope_scaling": None if kind == "default" else scaling}
    nested: dict[str, Any] = {"rope_theta": config.rope_base, **scaling}
    if config.local_rope_base is not None:
        local = {"rope_theta": config.local_rope_base, "rope_type": "default"}
        theirs |= {"rope_local_base_freq": config.local_rope_base}
        nested = {"full_attention": nested, "sliding_attention": local}
    return {**theirs, "rope_parameters": nested}
