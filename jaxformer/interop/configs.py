"""Conversion between configs of published models and ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import inf
from operator import attrgetter
from typing import Any

from flax.traverse_util import unflatten_dict

from jaxformer.config.fields import from_dict, required_fields, shortest_period
from jaxformer.config.files import kind_of
from jaxformer.errors import UserError, abbreviate
from jaxformer.interop.families import ENCODER_DECODERS, ENCODERS, FAMILIES, GGUF_FAMILIES
from jaxformer.interop.families.decoders import GPT_OSS
from jaxformer.interop.families.encoders import POOLED_CLASSIFIER
from jaxformer.interop.families.gguf import ARCHITECTURE
from jaxformer.interop.families.tables import NONE_OF, REQUIRED, Family, Field, ImportedConfig, PublishedConfig
from jaxformer.interop.mxfp4 import METHOD as MXFP4
from jaxformer.models.clip import CLIPConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.encoder import EncoderConfig
from jaxformer.models.encoder_decoder import EncoderDecoderConfig
from jaxformer.models.vit import ViTConfig
from jaxformer.ops.positions import NTK, Llama3Scaling, LongRoPE, RoPE, Scaling, Yarn, yarn_amplitude

MAX_TRAINING_CONTEXT = 2048
"""Default maximum training sequence length of an imported model, in tokens; its own maximum context is kept."""

ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
"""Fields of RoPE scalings that may also stand outside of `rope_parameters`."""
ROPE = "rope_parameters or rope_scaling"
"""Fields that hold the type of RoPE scaling and its numbers."""
LAYER_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers, in `layer_types` and in `rope_parameters` that differ by layer."""
OTHER_NAMES = {
    "attention.window": "sliding_window",
    "attention.rope.base": "rope_local_base_freq or rope_theta",
    "rope.base": "rope_theta",
    "rope.fraction": PARTIAL,
    "rope.scaling": f"the factor of {ROPE}",
    "rope.scaling.factor": f"the factor of {ROPE}",
    "rope.scaling.low": f"the low_freq_factor of {ROPE}",
    "rope.scaling.high": f"the high_freq_factor of {ROPE}",
    "rope.scaling.original_context": ORIGINAL,
    "rope.scaling.short": f"the short_factor of {ROPE}",
    "rope.scaling.long": f"the long_factor of {ROPE}",
    **{
        f"rope.scaling.{name}": f"the {name} of {ROPE}"
        for name in ("beta_fast", "beta_slow", "attention_factor", "truncate")
    },
}
"""Their names of our fields that are not in the tables of `families`."""
SCALINGS: Mapping[str, tuple[type[Scaling], Mapping[str, str]]] = {
    "llama3": (
        Llama3Scaling,
        {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor", "original_context": ORIGINAL},
    ),
    "yarn": (
        Yarn,
        {"factor": "factor", "original_context": ORIGINAL, "attention_factor": "attention_factor"}
        | {name: name for name in ("beta_fast", "beta_slow", "truncate")},
    ),
    "dynamic": (NTK, {"factor": "factor", "original_context": "max_position_embeddings"}),
    "longrope": (
        LongRoPE,
        {"factor": "factor", "original_context": ORIGINAL, "attention_factor": "attention_factor"}
        | {"short": "short_factor", "long": "long_factor"},
    ),
}
"""Scalings by frequency, by their `rope_type`: our class, and its fields and theirs."""
ROPE_TYPES = ("default", "linear", *SCALINGS)
"""Their types of RoPE scaling."""

UNREAD = re.compile(r"_token_id$|dropout|pdrop|dtype|^_|version|^(architectures|model_type|auto_map|use_cache)$|label")
"""Fields that say nothing of a model's computation."""
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", PARTIAL, ORIGINAL)
MAX_LACKING = 6
"""Maximum number of fields that a message names."""


def family_of(theirs: PublishedConfig) -> Family:
    """Return the model family of a config. Raises `UserError` if it is unknown, or the checkpoint is quantised."""
    if (of_gguf := GGUF_FAMILIES.get(str(theirs.get(ARCHITECTURE)))) is not None:
        return of_gguf
    if (quantization := theirs.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        if method != MXFP4 or theirs.get("model_type") != GPT_OSS.model_type:
            problem = f"the checkpoint is quantised ({abbreviate(method)}), which is not supported"
            raise UserError(f"{problem}; use the one that it was made from, or one in bfloat16.")
    model_type, architectures = str(theirs.get("model_type")), theirs.get("architectures")
    all_families = (*FAMILIES.values(), *ENCODERS.values(), *ENCODER_DECODERS.values())
    families = {family.architecture: family for family in all_families if family.model_type == model_type}
    if not families:
        known = ", ".join(dict.fromkeys(family.model_type for family in all_families))
        problem = f"the model_type is {abbreviate(model_type)}, which is not supported{_nearest(theirs, all_families)}"
        raise UserError(f"{problem}; supported are {known}.")
    names = architectures or list(families)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"the architectures are {abbreviate(names)}, which are no names; restore the published config.")
    if not (matching := [name for name in names if name in families]):
        published = [name for name in families if name != POOLED_CLASSIFIER.architecture]
        remedy = f"use a checkpoint of {' or '.join(published)}"
        raise UserError(f"the first of architectures is {abbreviate(names[0])}, which is not supported; {remedy}.")
    return families[matching[0]]


def _nearest(theirs: PublishedConfig, families: Collection[Family]) -> str:
    """Return the part of a message that names the family that knows most fields of a config, and those that it lacks;
    empty for a config without fields that describe a model."""
    names = {name for name in theirs if not UNREAD.search(name)}

    def known(family: Family) -> set[str]:
        """Return the names of the fields that a family reads or requires a value of."""
        of_rope = {*ROPE_FIELDS} if family.rope_base is not None else set()
        of_windows = {"sliding_window", "layer_types"} if family.windows is not None else set()
        return {field.theirs for field in family.fields} | {*family.required, *family.aliases} | of_rope | of_windows

    nearest = max(families, key=lambda family: len(names & known(family)))
    if not names & known(nearest):
        return ""
    lacking = sorted(names - known(nearest))
    shown = ", ".join(map(abbreviate, lacking[:MAX_LACKING])) + (", …" if lacking[MAX_LACKING:] else "")
    return f"; the nearest family is {nearest.model_type}" + (f", which has no field {shown}" if lacking else "")


def read_config(
    theirs: PublishedConfig, context_length: int | None = None, family: Family | None = None
) -> ImportedConfig:
    """Return our config for the content of a published `config.json`, with training sequences of `context_length`
    tokens; None for at most `MAX_TRAINING_CONTEXT`, and for an encoder its number of positions. The family is that of
    the config, or `family`. Raises `UserError` if it is unknown, or a field is missing or has a value without an
    equivalent."""
    family = family or family_of(theirs)
    is_decoder = issubclass(family.model, DecoderConfig)
    theirs = {**theirs, **{name: theirs[alias] for alias, name in family.aliases.items() if alias in theirs}}
    try:
        theirs = family.read(theirs)
        for name, needed in {**NONE_OF, **({"is_causal": True} if is_decoder else {}), **family.required}.items():
            expected = needed(theirs) if callable(needed) else needed
            if (value := theirs.get(name, expected)) != expected and (expected or value):
                raise ValueError(f"{name} is {abbreviate(value)}, and only {expected} has an equivalent")
        values = {**family.constants, **_read_fields(family, theirs)}
        lengths = ("max_context",) if is_decoder else ("context_length", "text.context_length")
        longest = next((values[name] for name in lengths if name in values), 0)  # 0 without texts
        takes_all = not is_decoder and values.get("positions", "learned") == "learned"
        most = inf if values.get("position_buckets") else longest  # T5 has a bias for any distance
        if context_length is not None and not (longest if takes_all else 0) <= context_length <= most:
            limit = f"the model has {longest} positions{', all of which an encoder takes' if takes_all else ''}"
            raise UserError(f"`context_length` is {context_length}; {limit}; omit it.")
        if issubclass(family.model, ViTConfig | CLIPConfig):
            return _checked(family, _nested(values))
        values["context_length"] = context_length or (min(longest, MAX_TRAINING_CONTEXT) if is_decoder else longest)
        if issubclass(family.model, EncoderDecoderConfig):
            return _checked(family, values)
        rope, local_rope = read_rope(family, theirs, values) if family.rope_base is not None else (None, None)
        values["rope"] = rope
        # Verify types and sizes before allocating one entry per block.
        checked = _checked(family, _nested(values))
        assert isinstance(checked, DecoderConfig | EncoderConfig)
        window, is_local = read_windows(family, theirs, checked.n_blocks)
        values["attention"] = shortest_period(
            [
                ({"window": window, "rope": local_rope} if local else {})
                | ({} if family.has_rope is None or family.has_rope(theirs, i, local) else {"use_rope": False})
                for i, local in enumerate(is_local)
            ]
        )
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        problem = f"the config has no equivalent as a {family.model_type}: {reason}"
        raise UserError(f"{problem}; restore the published one, or choose another model.") from error
    return _checked(family, _nested(values))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return our fields, in which dotted names are those of nested fields."""
    return unflatten_dict({tuple(name.split(".")): value for name, value in values.items()})


def _checked(family: Family, values: Mapping[str, Any]) -> ImportedConfig:
    """Return our config. Raises `UserError`, with their names of the fields, if a value has another type or is out of
    range."""
    try:
        return from_dict(family.model, values, "the model")
    except UserError as error:
        names = {field.ours: field.theirs for field in family.fields} | OTHER_NAMES
        given = [
            f"{ours} is {name}" for ours, name in names.items() if re.search(rf"\b{re.escape(ours)}\b", str(error))
        ]
        raise UserError(f"{str(error).rstrip('.')}; in the published config, {', '.join(given)}.") from error


def _read_fields(family: Family, theirs: PublishedConfig) -> dict[str, Any]:
    """Return our values of all fields."""
    values, names = dict[str, Any](), dict[str, str]()
    for field in family.fields:
        value = _read_field(field, theirs)
        if field.ours in values and values[field.ours] != value:
            other = names[field.ours]
            first, second = theirs.get(other, values[field.ours]), theirs.get(field.theirs, value)
            given = f"{other} is {abbreviate(first)} and {field.theirs} {abbreviate(second)}"
            raise ValueError(f"{given}, and only equal ones have an equivalent")
        values[field.ours], names[field.ours] = value, field.theirs
    return values


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
    theirs |= {name: value for name, value in family.required.items() if not callable(value)}
    for field in family.fields:
        value = attrgetter(field.ours)(config)
        if field.values is None:
            theirs[field.theirs] = field.write(value)
        else:
            theirs[field.theirs] = next(name for name, ours in field.values.items() if ours == value)
    computed = {name: value(theirs) for name, value in family.required.items() if callable(value)}
    theirs |= {name: value for name, value in computed.items() if value is not None}
    if isinstance(config, EncoderDecoderConfig | ViTConfig | CLIPConfig):
        return family.write(theirs)
    theirs |= write_windows(config, family)
    return family.write(theirs if family.rope_base is None else theirs | write_rope(config, family))


def read_windows(family: Family, theirs: PublishedConfig, n_blocks: int) -> tuple[int | None, list[bool]]:
    """Return the attention window, and True for each block that has it. Raises `ValueError` if the number of blocks is
    another, or a block has another kind of layer than attention."""
    if (windows := family.windows) is None:
        return None, [False] * n_blocks
    window = theirs[windows.name] if windows.default is REQUIRED else theirs.get(windows.name, windows.default)
    window = None if window is None else windows.read(window)
    if windows.enabled_by is not None and not theirs.get(windows.enabled_by):
        window = None
    kinds = theirs.get("layer_types") if windows.by_layer else None
    if kinds is None:
        is_local = [windows.is_local(theirs, i, window) for i in range(n_blocks)]
        kinds = ["sliding_attention" if local else "full_attention" for local in is_local]
    if len(kinds) != n_blocks or not {*kinds} <= LAYER_KINDS:
        limit = f"{n_blocks} of sliding_attention or full_attention"
        raise ValueError(f"layer_types is {abbreviate(kinds)}; it must have {limit}")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("layer_types has sliding_attention, but there is no sliding_window")
    return window, [kind == "sliding_attention" for kind in kinds]


def write_windows(config: DecoderConfig | EncoderConfig, family: Family) -> dict[str, Any]:
    """Return their fields for our attention windows, and blocks without RoPE."""
    has_rope = [int(config.block_attention(i).use_rope) for i in range(config.n_blocks)]
    theirs: dict[str, Any] = {} if family.has_rope is None else {"no_rope_layers": has_rope}  # 1 with RoPE
    if (windows := family.windows) is None:
        return theirs
    of_block = [config.block_attention(i).window for i in range(config.n_blocks)]
    window = next((window for window in of_block if window is not None), None)
    theirs[windows.name] = None if window is None else windows.write(window)
    if windows.by_layer:
        theirs["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in of_block]
    if windows.enabled_by is not None:
        theirs[windows.enabled_by] = window is not None
    return theirs


def read_rope(
    family: Family, theirs: PublishedConfig, ours: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return our RoPE, and that of blocks with a window if it is another, given our other fields. Version 5 of
    transformers nests its fields in `rope_parameters`; before, bases were fields of the config, and the scaling was in
    `rope_scaling`, which takes precedence. Raises `ValueError` if the scaling has no equivalent."""
    given, older = theirs.get("rope_parameters"), theirs.get("rope_scaling") or {}
    rope: dict[str, Any] = {"rope_theta": theirs.get("rope_theta", family.rope_base)}
    local_rope = None
    if family.local_rope_base is None:
        rope |= older or given or {}
        if nested := sorted(LAYER_KINDS & rope.keys()):
            raise ValueError(f"{ROPE} has {' and '.join(nested)}, and {family.model_type} does not differ by layer")
    else:  # by kind of layer, where the older field changes that of layers without a window
        kinds = {kind: {"rope_type": "default"} for kind in LAYER_KINDS} if given is None else given
        rope |= (kinds.get("full_attention") or {}) | older
        rope.pop("truncate", None)  # which transformers reads where no layers differ
        local = {"rope_theta": theirs.get("rope_local_base_freq", family.local_rope_base)}
        local |= kinds.get("sliding_attention") or {}
        _rope_type(local, ["default"])
        local_rope = {"base": local["rope_theta"]}
    kind = _rope_type(rope, family.rope_types or ROPE_TYPES)
    fraction = rope.get(PARTIAL, theirs.get(PARTIAL, family.rope_fraction))
    if family.rope_fraction is None and kind != "default" and fraction not in (None, 1):  # read with a scaling only
        raise ValueError(f"the {PARTIAL} of {ROPE} is {abbreviate(fraction)}, and only 1 has an equivalent")
    if family.rope_fraction is None or fraction is None:
        fraction = 1.0
    scaling: Any = 1.0
    if kind == "linear":
        scaling = rope["factor"]
    elif kind in SCALINGS:
        longest = ours.get("max_context", ours["context_length"])
        rope = {ORIGINAL: longest} | rope | {"max_position_embeddings": longest}
        if ORIGINAL in theirs and family.local_rope_base is None:
            rope[ORIGINAL] = theirs[ORIGINAL]
        scaling = _read_scaling(kind, rope)
    ours_of_all = {"base": rope["rope_theta"], "scaling": scaling, "fraction": fraction}
    return ours_of_all | {"interleaved": family.interleaved}, local_rope


def _read_scaling(kind: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Return our scaling by frequency, one of `SCALINGS`."""
    scaling, names = SCALINGS[kind]
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = rope["max_position_embeddings"] / rope[ORIGINAL]
    if kind == "yarn" and rope.get("attention_factor") is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        own, all_dim = (yarn_amplitude(rope["factor"], rope[name]) for name in ("mscale", "mscale_all_dim"))
        rope["attention_factor"] = own / all_dim
    defaults = {name: None for name in ("beta_fast", "beta_slow") if not rope.get(name)}  # of which 0 is none
    rope = rope | defaults | ({"truncate": bool(rope["truncate"])} if "truncate" in rope else {})
    required = required_fields(scaling)
    values = {ours: rope[name] for ours, name in names.items() if ours in required or rope.get(name) is not None}
    return {"kind": kind_of(scaling), **values}


def _rope_type(rope: PublishedConfig, known: Collection[str]) -> str:
    """Return the type of a RoPE scaling, which must be among those `known`."""
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    if kind not in known:
        raise ValueError(f"the rope_type of {ROPE} is {abbreviate(kind)}, not one of {', '.join(known)}")
    return kind


def write_rope(config: DecoderConfig | EncoderConfig, family: Family) -> dict[str, Any]:
    """Return their fields for our RoPE, both for versions of transformers before 5 and from 5 on."""
    rope = config.rope or RoPE()
    scaling: dict[str, Any] = {"rope_type": "default"}
    if (kind := next((kind for kind, (cls, _) in SCALINGS.items() if type(rope.scaling) is cls), None)) is not None:
        scaling = {name: getattr(rope.scaling, ours) for ours, name in SCALINGS[kind][1].items()}
        given = {name: value for name, value in scaling.items() if value is not None}
        scaling = {"rope_type": kind} | given
    elif isinstance(rope.scaling, float) and rope.scaling != 1:
        scaling = {"rope_type": "linear", "factor": rope.scaling}
    theirs = {"rope_theta": rope.base, "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
    if family.rope_fraction is not None:
        scaling[PARTIAL] = theirs[PARTIAL] = rope.fraction
    nested: dict[str, Any] = {"rope_theta": rope.base, **scaling}
    if family.local_rope_base is not None:
        local = [i for i in range(config.n_blocks) if config.block_attention(i).window is not None]
        of_blocks = (rope.base for rope in map(config.block_rope, local) if rope is not None)
        theirs |= {"rope_local_base_freq": next(of_blocks, family.local_rope_base)}
        local_rope = {"rope_theta": theirs["rope_local_base_freq"], "rope_type": "default"}
        nested = {"full_attention": nested, "sliding_attention": local_rope}
    return {**theirs, "rope_parameters": nested}
