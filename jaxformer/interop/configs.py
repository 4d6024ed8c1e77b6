"""Configs of published models, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxformer.errors import UserError, abbreviate
from jaxformer.fields import from_dict
from jaxformer.interop.families import FAMILIES, REQUIRED, Family, Field, Rope
from jaxformer.models.decoder import DecoderConfig

MAX_TRAINING_CONTEXT = 2048
"""Default length of training sequences of an imported model, in tokens; it still reads all that it did."""


def family_of(theirs: Mapping[str, Any]) -> Family:
    """Return the family that a config names.

    Raises:
      UserError: it is unknown, or the checkpoint is quantised.
    """
    known = ", ".join(FAMILIES)
    model_type, architectures = theirs.get("model_type"), theirs.get("architectures") or ()
    if (quantization := theirs.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UserError(
            f"the checkpoint is quantised ({abbreviate(method)}), and rounded weights are not read; take the one in "
            "bfloat16 or float32 that it was made from."
        )
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UserError(
            f"the model_type is {abbreviate(model_type)}, which is no family known here; those are {known}."
        )
    if architectures and family.architecture not in architectures:
        raise UserError(
            f"the architecture is {abbreviate(architectures[0])}, not the family's language model "
            f"{family.architecture}; take a checkpoint of that."
        )
    return family


def read_config(theirs: Mapping[str, Any], context_length: int | None = None) -> DecoderConfig:
    """Return our config of a published one.

    Args:
      theirs: content of its `config.json`.
      context_length: of training sequences, in tokens; None for at most `MAX_TRAINING_CONTEXT`.

    Raises:
      UserError: the family is unknown, or a field is missing or has a value without an equivalent.
    """
    family = family_of(theirs)
    for name, expected in family.required.items():
        if (value := theirs.get(name, expected)) != expected:
            raise UserError(
                f"{name} is {abbreviate(value)}, of which there is no equivalent; {family.model_type} is read with "
                f"{expected} only."
            )
    values = {**family.constants, **{field.ours: _read_field(field, theirs) for field in family.fields}}
    if family.rope is not None:
        values |= read_rope(family.rope, theirs)
    longest = values["max_context"]
    values["context_length"] = min(longest, MAX_TRAINING_CONTEXT) if context_length is None else context_length
    if values["context_length"] > longest:
        raise UserError(f"the context length is {context_length}; the model has at most {longest} positions.")
    return from_dict(DecoderConfig, values, "the model")


def _read_field(field: Field, theirs: Mapping[str, Any]) -> Any:
    """Return our value of a field."""
    value = theirs.get(field.theirs, field.default)
    if value is REQUIRED:
        raise UserError(f"there is no {field.theirs}; put back the config.json that was published with the weights.")
    if field.values is not None:
        if not isinstance(value, str | bool) or value not in field.values:
            known = ", ".join(map(repr, field.values))
            raise UserError(f"{field.theirs} is {abbreviate(value)}, of which there is no equivalent; known: {known}.")
        return field.values[value]
    return field.read(value)


def write_config(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the published config of ours.

    Raises:
      UserError: a field has no equivalent in the family.
    """
    theirs: dict[str, Any] = {"model_type": family.model_type, "architectures": [family.architecture]}
    theirs |= family.required
    for field in family.fields:
        value = getattr(config, field.ours)
        if field.values is None:
            theirs[field.theirs] = field.write(value)
            continue
        inverse = {ours: name for name, ours in field.values.items()}
        if value not in inverse:
            raise UserError(
                f"{field.ours} {value!r} has no equivalent in {family.model_type}; known: {', '.join(inverse)}."
            )
        theirs[field.theirs] = inverse[value]
    for name, expected in family.constants.items():
        if (value := getattr(config, name)) != expected:
            raise UserError(f"{name} {value!r} has no equivalent in {family.model_type}, which has {expected!r}.")
    return theirs | (write_rope(config) if family.rope is not None else {})


def read_rope(rope: Rope, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return our fields of a rotation: its base and its scaling.

    Version 5 of transformers nests both in `rope_parameters`; before, the base was a field of the config, and the
    scaling in `rope_scaling`.

    Raises:
      UserError: the scaling has no equivalent.
    """
    nested = theirs.get("rope_parameters")
    scaling = nested if nested is not None else theirs.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UserError(f"the scaling of RoPE is {abbreviate(scaling)}; it must be an object with a rope_type.")
    values = {"rope_base": scaling.get("rope_theta", theirs.get(rope.theirs, rope.default))}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_FIELDS:
        raise UserError(
            f"the rope_type is {abbreviate(kind)}, of which there is no equivalent; known: {', '.join(ROPE_FIELDS)}."
        )
    for ours, name in ROPE_FIELDS[kind].items():
        if name not in scaling:
            raise UserError(f"the scaling of RoPE, {kind}, has no {name}; put back the published config.json.")
        values[ours] = scaling[name]
    return values


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """Return their fields of our rotation, as versions of transformers before 5 and from 5 on read them."""
    kind = "default" if config.rope_scaling == 1 else "linear" if config.rope_original_context is None else "llama3"
    scaling = {"rope_type": kind} | {name: getattr(config, ours) for ours, name in ROPE_FIELDS[kind].items()}
    return {
        "rope_theta": config.rope_base, "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": {"rope_theta": config.rope_base, **scaling},
    }  # fmt: skip


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
"""Fields of each scaling: ours, and theirs."""
