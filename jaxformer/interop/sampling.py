"""Sampling settings of published models: `generation_config.json` as transformers reads it, and the keys
`general.sampling.*` of GGUF as llama.cpp does. Here they are fields of `decode.Sampling`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import isclose, nan
from typing import Any

from jaxformer.decode.samplers import Sampling
from jaxformer.errors import UserError

warn = logging.getLogger(__name__).warning
WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
THEIRS = (*WARPERS, "repetition_penalty")
"""Settings by their names in transformers, which are those of `Sampling`."""
DEFAULTS = {"temperature": 1.0, "top_k": 50}
"""Settings that transformers samples with if they are not given."""
NEUTRAL = {"top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "repetition_penalty": 1}
"""Values that change nothing, which `Sampling` leaves out."""
OF_TARGETS = ("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id")
"""Settings that are used for targets of encoder-decoders alone, with `decoder_start_token_id`."""
UNUSED = (
    "num_beams", "no_repeat_ngram_size", "min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens",
    "sequence_bias", *OF_TARGETS, "epsilon_cutoff", "eta_cutoff", "top_h", "exponential_decay_length_penalty",
    "guidance_scale", "stop_strings",
)  # fmt: skip
"""Other settings that change what transformers generates."""
PREFIX = "general.sampling."
GGUF_KEYS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Fields of `Sampling` by their keys in GGUF, after `PREFIX`."""
GGUF_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Settings that llama.cpp samples with if they are not given."""
GGUF_UNUSED = ("sequence", "xtc_probability", "mirostat")
"""Other keys that change what llama.cpp generates."""


def from_generation_config(values: Mapping[str, Any], source: object) -> dict[str, float]:
    """Return the settings in the values of a `generation_config.json`; empty if it has none. Warns of those that are
    not used.

    Without `do_sample`, which transformers takes for greedy decoding, a temperature or a filter is applied.

    Raises:
      UserError: a value is not a number, or out of range.
    """
    given = {name: values[name] for name in THEIRS if values.get(name) is not None}
    samples = values.get("do_sample")
    if samples is None:
        samples = any(name in given for name in WARPERS)
        if not given:
            return {}
    _warn_unused([name for name in UNUSED if values.get(name) not in (None, False, 0, 1, [], {})], source)
    if not samples:
        given = {"temperature": 0, **{name: x for name, x in given.items() if name not in WARPERS}}
    return _checked(DEFAULTS | given if samples else given, source)


def target_tokens(values: Mapping[str, Any], start: Any, source: object) -> dict[str, Any]:
    """Return the fields of `data.pairs.TargetTokens` in the values of a `generation_config.json`. Warns of other
    settings, which are not used.

    Args:
      start: the decoder's first input if these values have none.

    Raises:
      UserError: a token is no id, or the first input is unknown.
    """
    banned = values.get("bad_words_ids") or []
    ids = {"start": values.get("decoder_start_token_id", start)}
    ids |= {"first": values.get("forced_bos_token_id"), "last": values.get("forced_eos_token_id")}
    ids |= {f"bad word {i}": word[0] for i, word in enumerate(banned) if isinstance(word, list) and len(word) == 1}
    if isinstance(ids["last"], list):  # any of them; the first is end-of-text
        ids["last"] = next(iter(ids["last"]), None)
    wrong = [name for name, x in ids.items() if type(x) is not int and (x is not None or name == "start")]
    if wrong or not isinstance(banned, list) or not all(isinstance(word, list) for word in banned):
        problem = f"decoder_start_token_id is {ids['start']!r}, and {', '.join(OF_TARGETS)} are "
        problem += ", ".join(repr(values.get(name)) for name in OF_TARGETS)
        raise UserError(f"{problem} in {source}; they must be ids of tokens; restore the published file.")
    used = {*OF_TARGETS} - ({"bad_words_ids"} if any(len(word) != 1 for word in banned) else set())
    sampled = ("repetition_penalty", *(WARPERS if values.get("do_sample") else ()))
    names = [name for name in (*UNUSED, *sampled) if values.get(name) not in (None, False, 0, 1, [], {})]
    _warn_unused([name for name in names if name not in used], source)
    banned_ids = [x for name, x in ids.items() if name.startswith("bad")]
    return {**{name: ids[name] for name in ("start", "first", "last")}, "banned": banned_ids}


def as_generation_tokens(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a `generation_config.json`, of which `target_tokens` returns these."""
    names = {"start": "decoder_start_token_id", "first": "forced_bos_token_id", "last": "forced_eos_token_id"}
    given = {theirs: tokens[ours] for ours, theirs in names.items() if tokens.get(ours) is not None}
    return given | ({"bad_words_ids": [[token] for token in tokens["banned"]]} if tokens.get("banned") else {})


def from_gguf(metadata: Mapping[str, Any], source: object) -> dict[str, float]:
    """Return the settings in the metadata of a GGUF file; empty if it has none. Warns and raises as
    `from_generation_config` does."""
    values = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    given = {ours: values[key] for key, ours in GGUF_KEYS.items() if key in values}
    if not given:
        return {}
    _warn_unused([PREFIX + name for name in GGUF_UNUSED if values.get(name)], source)
    settings = {**GGUF_DEFAULTS, **given}
    for name in ("temperature", "top_k"):  # below 0, they are as at 0
        settings[name] = max(settings[name], 0) if isinstance(settings[name], int | float) else settings[name]
    return _checked(settings, source, {ours: PREFIX + key for key, ours in GGUF_KEYS.items()})


def as_generation_config(settings: Mapping[str, float]) -> dict[str, float | bool]:
    """Return the values of a `generation_config.json`, of which `from_generation_config` returns these settings."""
    if not settings:
        return {}
    if settings.get("temperature") == 0:
        return {"do_sample": False, **{name: x for name, x in settings.items() if name not in WARPERS}}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, **settings}


def as_gguf(settings: Mapping[str, float]) -> dict[str, float]:
    """Return the metadata of a GGUF file, of which `from_gguf` returns these settings, but for those without a key."""
    if not settings:
        return {}
    values = {"temperature": 1.0, **NEUTRAL, **settings}
    return {PREFIX + key: values[ours] for key, ours in GGUF_KEYS.items()}


def lost(settings: Mapping[str, float], again: Mapping[str, float]) -> dict[str, float]:
    """Return the settings that change what is sampled and that another set of them has not. At temperature 0, warpers
    change nothing."""
    unread = WARPERS[1:] if settings.get("temperature") == 0 else ()
    held = {"temperature": 1.0, **NEUTRAL, **again}
    return {
        name: x
        for name, x in settings.items()
        if name not in unread and not isclose(held.get(name, nan), x, rel_tol=1e-6)  # GGUF holds float32
    }


def _checked(settings: Mapping[str, Any], source: object, keys: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return settings without neutral ones; `keys` are their names in the source, if they differ.

    Raises:
      UserError: `Sampling` does not accept them.
    """
    keys = {} if keys is None else keys
    kept = {name: x for name, x in settings.items() if name not in NEUTRAL or x != NEUTRAL[name]}
    for name, x in kept.items():
        if type(x) is not int and (type(x) is not float or name == "top_k"):
            raise UserError(
                f"{keys.get(name, name)} in {source} is {x!r}; it must be a number; mend it, or remove it there."
            )
    try:
        Sampling(**kept)
    except UserError as error:
        reason = str(error).replace("`", "")  # no option sets it
        raise UserError(f"{source} cannot be used: {reason} Mend it, or remove it there.") from error
    return kept


def _warn_unused(names: list[str], source: object) -> None:
    if names:
        warn(f"{source} sets {', '.join(names)}, which sampling here does not use.")
