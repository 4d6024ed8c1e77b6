"""Tokenizers of GGUF files, as the content of a `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.data.tokenizer import END_IDS, SPACE
from jaxformer.errors import UserError, abbreviate

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
Splits = tuple[tuple[str, object], ...]
PRE_TYPES: Mapping[tuple[Splits, bool], str] = {
    ((("ByteLevel", True),), False): "gpt-2",
    ((("Digits", True), ("ByteLevel", True)), False): "smollm",
    ((("Split", _WORDS + r"\p{N}{1,3}" + _OTHERS), ("ByteLevel", False)), True): "llama-bpe",
    ((("Split", _WORDS + r"\p{N}{1,3}" + _OTHERS), ("ByteLevel", False)), False): "dbrx",
    ((("Split", _WORDS + r"\p{N}" + _OTHERS), ("ByteLevel", False)), False): "qwen2",
}
"""llama.cpp's names of the pre-tokenizers that it knows, by their splits and by `ignore_merges` of their BPE. 'gpt-2'
is the regular expression of Radford et al. 2019."""
ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "stablelm2": "qwen2",
    "olmo": "gpt-2", "phi-2": "gpt-2", "refact": "smollm", "starcoder": "smollm", "command-r": "smollm",
}  # fmt: skip
"""Other names of the same pre-tokenizers."""
SETTINGS = {"ByteLevel": "use_regex", "Digits": "individual_digits"}
"""Setting that determines the splits of a pre-tokenizer, by type."""
TEMPLATE = "tokenizer.chat_template"
"""Key of the chat template; those of others follow it, after a dot, and their names are in another."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Types of tokens."""
NAMES = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator",
    "mask_token": "mask",
}  # fmt: skip
"""Special tokens in a `tokenizer_config.json`, and their names in keys."""

Metadata = Mapping[str, Any]
"""Values of a GGUF file by key."""


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """Return the content of the `tokenizer.json` of a file's tokenizer. Raises an ordinary exception if it is of an
    unknown kind, or parts are missing or do not fit together."""
    model, tokens = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if model == "gpt2":
        parts = _byte_level(metadata)
    elif model == "llama":
        tokens = [token if token.strip(" ") else token.replace(" ", SPACE) for token in tokens]
        # Runs of spaces, which may be marked as whole, are merged, as in published folders.
        types = [kind if token.strip(SPACE) else NORMAL for token, kind in zip(tokens, types, strict=True)]
        parts = _sentencepiece(metadata, tokens, types)
    else:
        known = "gpt2 (byte-level BPE) and llama (SentencePiece)"
        raise ValueError(f"it is {abbreviate(model)}, which is not supported; supported are {known}")
    rows = list(enumerate(zip(tokens, types, strict=True)))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, **flags, "special": kind != USER_DEFINED}
        for i, (token, kind) in rows
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    vocab = {token: i for i, (token, kind) in rows if kind != UNUSED}
    return {
        "version": "1.0",
        "added_tokens": added,
        **parts,
        "post_processor": _post_processor(metadata),
        "model": {"type": "BPE", "vocab": vocab, **parts["model"]},
    }


def _post_processor(metadata: Metadata) -> dict[str, Any] | None:
    """Return the post-processor that puts special tokens around a text; None without any."""
    is_llama = metadata["tokenizer.ggml.model"] == "llama" or _pre_type(metadata) == "llama-bpe"
    defaults, tokens = {"bos": is_llama, "eos": False}, metadata["tokenizer.ggml.tokens"]  # llama.cpp's
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in defaults}
    adds = {name: metadata.get(f"tokenizer.ggml.add_{name}_token", default) for name, default in defaults.items()}
    texts = {name: tokens[i] for name, i in ids.items() if adds[name] and i is not None}
    if not texts:
        return None
    around = {name: [{"SpecialToken": {"id": texts[name], "type_id": 0}}] if name in texts else [] for name in ids}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*around["bos"], first, *around["eos"]],
        "pair": [*around["bos"], first, *around["eos"], second, *around["eos"]],
        "special_tokens": {text: {"id": text, "ids": [ids[name]], "tokens": [text]} for name, text in texts.items()},
    }


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """Return the content of the `tokenizer_config.json`: special tokens and chat template. Raises as `tokenizer_json`
    does."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in (*NAMES.values(), "eot", "eom")}
    config = {name: tokens[ids[key]] for name, key in NAMES.items() if ids[key] is not None}
    default = metadata.get(TEMPLATE)
    names = {"default": TEMPLATE, **{name: f"{TEMPLATE}.{name}" for name in metadata.get(f"{TEMPLATE}s", [])}}
    templates = [{"name": name, "template": metadata[key]} for name, key in names.items() if key in metadata]
    if templates:
        config["chat_template"] = default if len(templates) == 1 and default is not None else templates
    ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    return config | ({END_IDS: ends} if ends else {})


def _pre_type(metadata: Metadata) -> object:
    name = metadata.get("tokenizer.ggml.pre")
    return ALIASES.get(name, name) if isinstance(name, str) else name


def _byte_level(metadata: Metadata) -> dict[str, Any]:
    """Return the parts of a byte-level tokenizer."""
    name, known = _pre_type(metadata), {name: key for key, name in PRE_TYPES.items()}
    if name not in known:
        supported = ", ".join([*known, *ALIASES])
        raise ValueError(f"it splits text as {abbreviate(name)}, which is not supported; supported are {supported}")
    splits, ignore_merges = known[name]
    first, *more = [_pre_tokenizer(*split) for split in splits]
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,  # as all of these were published
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [first, *more]} if more else first,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "ignore_merges": ignore_merges,
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def _pre_tokenizer(kind: str, setting: object) -> dict[str, Any]:
    """Return the pre-tokenizer of a type with the setting that determines its splits."""
    if kind == "Split":
        return {"type": kind, "pattern": {"Regex": setting}, "behavior": "Isolated", "invert": False}
    more = {"add_prefix_space": False, "trim_offsets": True} if kind == "ByteLevel" else {}
    return {"type": kind, SETTINGS[kind]: setting, **more}


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Return the parts of a SentencePiece tokenizer, whose merges are the splits of its pieces, best first."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizer: dict[str, Any] = replace
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    scores = metadata["tokenizer.ggml.scores"]
    if metadata["general.architecture"].startswith(
        "gemma"
    ):  # whose merges are in the order of the pieces, not of the scores
        scores = range(0, -len(tokens), -1)
    of_text = {
        token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (NORMAL, USER_DEFINED)
    }
    merges = []
    for token, i in of_text.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        splits = [pair for pair in halves if pair[0] in of_text and pair[1] in of_text]
        merges += [(scores[i], *pair) for pair in sorted(splits, key=lambda pair: (of_text[pair[0]], of_text[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "unk_token": tokens[types.index(UNKNOWN) if unknown is None else unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": [[left, right] for _, left, right in merges],
        },
    }


def pre_type(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of a tokenizer's pre-tokenizer, given the content of `tokenizer.json`. Raises `UserError`
    if llama.cpp has none with the same splits."""
    normalizer, pre = tokenizer.get("normalizer"), tokenizer["pre_tokenizer"] or {"type": "none"}
    parts = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    key = tuple(map(_split, parts)), bool(tokenizer["model"].get("ignore_merges"))
    changes_text = normalizer not in (None, {"type": "NFC"})  # llama.cpp reads Qwen without NFC
    if changes_text or key not in PRE_TYPES or any(part.get("add_prefix_space") for part in parts):
        steps = abbreviate([normalizer, *parts] if changes_text else parts)
        known = f"has no equivalent among llama.cpp's {', '.join(PRE_TYPES.values())}"
        problem = f"the tokenizer changes or splits text by {steps}, which {known}"
        raise UserError(f"{problem}; export it with `format='hf'`.")
    return PRE_TYPES[key]


def _split(part: Mapping[str, Any]) -> tuple[str, object]:
    """Return the type of a pre-tokenizer and the setting that determines its splits."""
    kind = part["type"]
    if kind == "Split":
        plain = part.get("behavior") == "Isolated" and not part.get("invert")
        return kind, part["pattern"].get("Regex") if plain else None
    return kind, part.get(SETTINGS.get(kind, ""))
