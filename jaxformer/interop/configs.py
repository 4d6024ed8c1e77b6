"""Conversion between configs of published models and ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxformer.config.fields import from_dict
from jaxformer.errors import UserError, abbreviate
from jaxformer.interop.families import FAMILIES, REQUIRED, Family, Field, Rope, always, never
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.rungs import RungDecoderConfig

MAX_TRAINING_CONTEXT = 2048
"""Default maximum training sequence length of an imported model, in tokens; its own maximum context is kept."""


def family_of(theirs: Mapping[str, Any]) -> Family:
    """Return the model family of a config. Raises `UserError` if it is unknown, or the checkpoint is quantised."""
    known = ", ".join(FAMILIES)
    model_type, architectures = theirs.get("model_type"), theirs.get("architectures") or []
    if (quantization := theirs.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        problem = f"the checkpoint is quantised ({abbreviate(method)}), and quantised weights are not supported"
        raise UserError(f"{problem}; use the bfloat16 or float32 checkpoint that it was made from.")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        limit = f"supported are {known}"
        raise UserError(f"the model_type is {abbreviate(model_type)}, which is not supported; {limit}.")
    if not isinstance(architectures, list):
        raise UserError(f"architectures is {abbreviate(architectures)}, which is not a list; restore the config.json.")
    if architectures and family.architecture not in architectures:
        problem = f"the architecture is {abbreviate(architectures[0])}, not the family's language model"
        raise UserError(f"{problem} {family.architecture}; use a checkpoint of that.")
    return family


def read_config(theirs: Mapping[str, Any], context_length: int | None = None) -> DecoderConfig:
    """Return our config for the content of a published `config.json`, with training sequences of `context_length`
    tokens; None for at most `MAX_TRAINING_CONTEXT`. Raises `UserError` if the family is unknown, or a field is missing
    or has a value without an equivalent."""
    family = family_of(theirs)
    for name, expected in family.required.items():
        if (value := theirs.get(name, expected)) != expected and (expected or value):
            remedy = f"{family.model_type} supports {expected} only"
            raise UserError(f"{name} is {abbreviate(value)}, which has no equivalent; {remedy}.")
    try:
        values = {**family.constants, **{field.ours: _read_field(field, theirs) for field in family.fields}}
        longest = values["max_context"]
        values["context_length"] = min(longest, MAX_TRAINING_CONTEXT) if context_length is None else context_length
        if values["context_length"] > longest:
            raise UserError(f"the context length is {context_length}; the model has at most {longest} positions.")
        # Verify types and sizes before allocating one entry per block.
        values |= read_windows(family, theirs, from_dict(RungDecoderConfig, values, "the model").n_blocks)
        if family.rope is not None:
            values |= read_rope(family.rope, theirs, values.get("window"))
    except (TypeError, ValueError, ArithmeticError, KeyError) as error:
        problem = (
            f"config.json is not a valid {family.model_type} config: a value is missing or has the wrong type ({error})"
        )
        raise UserError(f"{problem}; restore the published one.") from error
    return from_dict(RungDecoderConfig, values, "the model").simplest()


def _read_field(field: Field, theirs: Mapping[str, Any]) -> Any:
    """Return our value for a field."""
    value = theirs.get(field.theirs)
    if value is None:  # null also means the default
        value = field.default(theirs) if callable(field.default) else field.default
    if value is REQUIRED:
        raise UserError(f"there is no {field.theirs}; restore the config.json that was published with the weights.")
    if field.values is not None:
        if not isinstance(value, str | bool) or value not in field.values:
            known = ", ".join(map(repr, field.values))
            raise UserError(f"{field.theirs} is {abbreviate(value)}, which has no equivalent; known: {known}.")
        return field.values[value]
    return field.read(value)


def write_config(config: RungDecoderConfig, family: Family) -> dict[str, Any]:
    """Return the published form of our config. Raises `UserError` if a field has no equivalent in the family."""
    theirs: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture]}
    theirs |= family.required
    for field in family.fields:
        value = getattr(config, field.ours)
        if field.values is None:
            theirs[field.theirs] = field.write(value)
            continue
        inverse = {ours: name for name, ours in reversed([*field.values.items()])}  # the first of equals
        if value not in inverse:
            limit = f"known: {', '.join(inverse)}"
            raise UserError(f"{field.ours} {value!r} has no equivalent in {family.model_type}; {limit}.")
        theirs[field.theirs] = inverse[value]
    for name, expected in family.constants.items():
        if (value := getattr(config, name)) != expected:
            raise UserError(f"{name} {value!r} has no equivalent in {family.model_type}, which has {expected!r}.")
    return theirs | write_windows(config, family) | (write_rope(config) if family.rope is not None else {})


def read_windows(family: Family, theirs: Mapping[str, Any], n_blocks: int) -> dict[str, Any]:
    """Return our fields for attention windows; none without a window. Raises `UserError` if a block has another kind of
    layer than attention, or `sliding_window` is missing."""
    kinds = theirs.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if family.has_window(theirs, i) else "full_attention" for i in range(n_blocks)]
    if not isinstance(kinds, list) or len(kinds) != n_blocks:
        raise UserError(f"layer_types is {abbreviate(kinds)}; it must have an entry for each of {n_blocks} blocks.")
    for i, kind in enumerate(kinds):
        if kind not in ("sliding_attention", "full_attention"):
            remedy = "layers must be sliding_attention or full_attention"
            raise UserError(f"layer {i} is {abbreviate(kind)}, which has no equivalent; {remedy}.")
    if "sliding_attention" not in kinds:
        return {}
    if theirs.get("sliding_window") is None:
        raise UserError("layers have sliding_attention, but there is no sliding_window; restore the config.json.")
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return {"window": theirs["sliding_window"], "global_blocks": full}


def write_windows(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return their fields for our attention windows. Raises `UserError` if the family has no such windows."""
    if family.has_window is never:
        return {}
    kinds = [
        "full_attention" if config.window is None or i in config.global_blocks else "sliding_attention"
        for i in range(config.n_blocks)
    ]
    theirs: dict[str, Any] = {"sliding_window": config.window}
    if family.has_window is not always:
        theirs |= {"layer_types": kinds, "use_sliding_window": config.window is not None}
    elif config.global_blocks:
        raise UserError(f"global_blocks {config.global_blocks} has no equivalent in {family.model_type}.")
    return theirs


def read_rope(rope: Rope, theirs: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """Return our RoPE fields: the base, the scaling, and the base for blocks with a window. Version 5 of transformers
    nests them in `rope_parameters`, where they may differ by layer type; before, bases were fields of the config, and
    the scaling was in `rope_scaling`. Raises `UserError` if the scaling has no equivalent."""
    scaling: Any = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    local_base = None if rope.local_base is None else theirs.get("rope_local_base_freq", rope.local_base)
    if isinstance(scaling, Mapping) and "full_attention" in scaling:
        local, scaling = scaling.get("sliding_attention", {}), scaling["full_attention"]
        if isinstance(local, Mapping):
            local_base = local.get("rope_theta", local_base)
            _check_rope_type(local, ("default",))
    if not isinstance(scaling, Mapping):
        raise UserError(f"the scaling of RoPE is {abbreviate(scaling)}; it must be an object with a rope_type.")
    values = {"rope_base": scaling.get("rope_theta", theirs.get("rope_theta", rope.base))}
    kind = _check_rope_type(scaling, ROPE_FIELDS)
    for ours, name in ROPE_FIELDS[kind].items():
        if name not in scaling:
            raise UserError(f"the scaling of RoPE, {kind}, has no {name}; restore the published config.json.")
        values[ours] = scaling[name]
    return values if local_base is None or window is None else values | {"local_rope_base": local_base}


def _check_rope_type(scaling: Mapping[str, Any], known: Collection[str]) -> str:
    """Return the type of a RoPE scaling. Raises `UserError` if it is not in `known`."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in known:
        limit = f"known: {', '.join(known)}"
        raise UserError(f"the rope_type is {abbreviate(kind)}, which has no equivalent; {limit}.")
    return kind


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """Return their fields for our RoPE, both for versions of transformers before 5 and from 5 on."""
    kind = "default" if config.rope_scaling == 1 else "linear" if config.rope_original_context is None else "llama3"
    scaling = {"rope_type": kind} | {name: getattr(config, ours) for ours, name in ROPE_FIELDS[kind].items()}
    theirs = {"rope_theta": config.rope_base, "rope_scaling": None if kind == "default" else scaling}
    nested: dict[str, Any] = {"rope_theta": config.rope_base, **scaling}
    if config.local_rope_base is not None:
        local = {"rope_theta": config.local_rope_base, "rope_type": "default"}
        theirs |= {"rope_local_base_freq": config.local_rope_base}
        nested = {"full_attention": nested, "sliding_attention": local}
    return {**theirs, "rope_parameters": nested}


ROPE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"rope_scaling": "factor"},
    "llama3": {
        "rope_scaling": "factor",
        "rope_low_periods": "low_freq_factor",
        "rope_high_periods": "high_freq_factor",
        "rope_original_context": "original_max_position_embeddings",
    },
}
"""Our fields and theirs, by type of RoPE scaling."""
