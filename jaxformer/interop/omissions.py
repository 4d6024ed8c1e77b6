"""What a run knows and its export does not hold, found by reading the export again; and how to load an export."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxformer.data.tokenizer import END_IDS, Tokenizer
from jaxformer.interop.folder import CONFIG, MODULES, ModelFolder, read_object
from jaxformer.interop.formats import Format
from jaxformer.interop.gguf_file import GgufFile
from jaxformer.interop.sampling import lost
from jaxformer.runs.run import TOKENIZER, Run, read_sampling

LENGTH = "model_max_length"
"""Setting that is written from the model, whatever the tokenizer's own."""
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""Parts of a tokenizer around its model."""
OFFSETS = ("trim_offsets", "add_prefix_space", "use_regex")
"""Settings of a byte-level decoder or post-processor, which change no text."""


def omissions(run: Run, file_format: Format, path: Path) -> list[str]:
    """Return what a run knows and its export at a path does not hold, one phrase each."""
    found = [] if file_format == "safetensors" else ["the settings of training"]
    if (tokenizer := run.tokenizer) is None:
        return found
    if file_format in ("gguf", "hf"):
        gguf = file_format == "gguf"
        published = GgufFile.open(path) if gguf else ModelFolder(path, read_object(path / CONFIG), {})
        again, sampling = published.tokenizer(), published.sampling()
    else:
        again, sampling = Tokenizer.load(path / TOKENIZER), read_sampling(path)
    settings = [f"the sampling setting {name} {value}" for name, value in lost(run.sampling, sampling).items()]
    return found + settings + tokenizer_omissions(tokenizer, again)


def tokenizer_omissions(ours: Tokenizer, again: Tokenizer) -> list[str]:
    """Return what a tokenizer has and another, which was read from its export, has not."""
    texts, found = ours.special_texts, []
    if ends := [texts.get(i, str(i)) for i in ours.ends_of_text if i not in again.ends_of_text]:
        found.append(f"that {' and '.join(ends)} {'ends' if len(ends) == 1 else 'end'} a text")
    if ours.begin_of_text != again.begin_of_text:
        first = "no token" if ours.begin_of_text is None else texts.get(ours.begin_of_text, str(ours.begin_of_text))
        found.append(f"that {first} precedes a text")
    special = {name: text for name, text in ours.special_tokens.items() if again.special_tokens.get(name) != text}
    found += [f"the {name} {text}" for name, text in special.items()]
    templates, theirs = ours.chat_templates, again.chat_templates
    found += [f"the chat template {name}" for name, template in templates.items() if theirs.get(name) != template]
    known = {END_IDS, LENGTH, "chat_template", "add_bos_token", *ours.special_tokens}
    settings = [key for key in ours.config if key not in known and again.config.get(key) != ours.config[key]]
    if settings:
        found.append(f"the settings {', '.join(settings)} of the tokenizer")
    contents = json.loads(ours.as_json()), json.loads(again.as_json())
    return found if contents[0] == contents[1] else [*found, *(f"the tokenizer's {part}" for part in _parts(*contents))]


def _parts(ours: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts that differ between the contents of two `tokenizer.json` of BPE models, in what they do to
    texts."""
    for step in STEPS:
        if (steps := _steps(ours[step], step)) != _steps(again[step], step):
            yield f"{step} {', '.join(kind for kind, _ in steps) or 'none'}"
    model, other = ours["model"], again["model"]
    for name in sorted((model.keys() | other.keys()) - {"vocab", "merges"}):
        if (model.get(name) or None) != (other.get(name) or None):
            yield f"{name} {model.get(name)!r}"
    if not model["vocab"].items() <= other["vocab"].items() or _pairs(model) != _pairs(other):
        yield "vocabulary"
    rules = {token["content"]: token for token in again["added_tokens"]}
    if changed := [token["content"] for token in ours["added_tokens"] if rules.get(token["content"]) != token]:
        yield f"rules for {' and '.join(changed)}"


def _steps(part: Mapping[str, Any] | None, step: str) -> list[tuple[str, Any]]:
    """Return the types and settings of a tokenizer's part, without settings that change no text."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        inner = next(value for key, value in part.items() if key != "type")
        return [one for other in inner for one in _steps(other, step)]
    if part["type"] == "ByteLevel" and step == "post_processor":
        return []
    if part["type"] == "TemplateProcessing":  # of which the token before a text is compared by itself
        added = [token["SpecialToken"]["id"] for token in part["single"] if "SpecialToken" in token]
        first = "Sequence" not in part["single"][0] if part["single"] else False
        return [(part["type"], tuple(added[1:]))] if added[1:] or not first else []
    dropped = OFFSETS if step == "decoder" else OFFSETS[:1]
    return [(part["type"], {key: x for key, x in part.items() if key not in dropped})]


def _pairs(model: Mapping[str, Any]) -> list[list[str]]:
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or []]


def loading(file_format: Format, path: Path) -> str:
    """Return how to load an export at a path elsewhere: a command or an expression in Python."""
    if file_format == "gguf":
        return f"llama-cli -m {path}"
    if file_format == "stablehlo":
        return f"the program in {path / 'README.md'}"
    if file_format == "safetensors":
        return f'safetensors.numpy.load_file("{path / "model.safetensors"}")'
    if (path / MODULES).exists():
        return f'sentence_transformers.SentenceTransformer("{path}")'
    (name,) = read_object(path / CONFIG)["architectures"]
    return f'transformers.{name}.from_pretrained("{path}")'
