"""What exports hold: everything that a run knows comes back, or is named in the line that ends the export."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers, processors

from jaxformer.data.tokenizer import Tokenizer
from jaxformer.interop.export import export_run
from jaxformer.interop.omissions import loading
from jaxformer.interop.run import import_run
from jaxformer.runs.run import Run, load_run
from tests.interop.test_gguf import random_run, small

__all__ = ["small"]  # a fixture
pytest.importorskip("gguf")
pytest.importorskip("safetensors")

TRAINING = "the settings of training"
EXTRA = ("<|im_end|>", "<|eom|>", "<|fourth|>", "<pad>", "<mask>", "<unk>", "<s>")
NAMED = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]


def with_tokenizer(run: Run, config: dict[str, Any], **parts: Any) -> Run:
    """Return a run whose tokenizer has `EXTRA` tokens, from 280 on, a config and other parts."""
    inner = tokenizers.Tokenizer.from_str(run.tokenizer.as_json())
    inner.add_special_tokens([*EXTRA])
    for name, part in parts.items():
        setattr(inner, name, part)
    return random_run(replace(run, tokenizer=Tokenizer(inner, config=config)))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "one end": ({}, {}, []),
    "three ends": ({"eos_token_ids": [0, 280, 281]}, {}, []),
    "four ends": ({"eos_token_ids": [0, 280, 281, 282]}, {}, ["that <|fourth|> ends a text"]),
    "template": ({"chat_template": "{{ messages }}"}, {}, []),
    "named templates": ({"chat_template": NAMED}, {}, []),
    "template of an odd name": (
        {"chat_template": [*NAMED, {"name": "a-b", "template": "x"}]}, {}, ["the chat template a-b"],
    ),
    "padding, mask and unknown": ({"pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}, {}, []),
    "class token": ({"cls_token": "<s>"}, {}, ["the cls_token <s>"]),
    "side of padding": ({"padding_side": "left"}, {}, ["the settings padding_side of the tokenizer"]),
    "begin": ({"bos_token": "<s>", "add_bos_token": True}, {}, []),
    "begin that is named alone": ({"bos_token": "<s>", "add_bos_token": False}, {}, []),
    "normalizer": ({}, {"normalizer": normalizers.NFC()}, ["the tokenizer's normalizer NFC"]),
    "end after a text": (
        {"bos_token": "<s>", "add_bos_token": True},
        {"post_processor": processors.TemplateProcessing(
            single="<s> $A <|im_end|>", special_tokens=[("<s>", 286), ("<|im_end|>", 280)])},
        [],
    ),
}  # fmt: skip
"""Config of the tokenizer, its other parts, and what GGUF cannot hold of it."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_gguf_cannot_hold_is_named_and_all_else_comes_back(small: Run, tmp_path: Path, case: str):
    config, parts, expected = CASES[case]
    run = with_tokenizer(small, config, **parts)
    assert export_run(run, "gguf", tmp_path / "x.gguf") == [TRAINING, *expected]
    again = load_run(import_run(tmp_path / "x.gguf", tmp_path / "run")[0]).tokenizer
    if not expected:
        for name in ("ends_of_text", "begin_of_text", "mask_token"):
            assert getattr(run.tokenizer, name) == getattr(again, name)
        assert run.tokenizer.special_tokens.items() <= again.special_tokens.items()
        assert run.tokenizer.config.get("chat_template") == again.config.get("chat_template")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case, (_, _, expected) in CASES.items() if expected])
@pytest.mark.parametrize("file_format", ["hf", "safetensors"])
def test_folders_hold_the_whole_tokenizer(small: Run, tmp_path: Path, case: str, file_format: str):
    config, parts, _ = CASES[case]
    run = with_tokenizer(small, config, **parts)
    (small.path / "tokenizer_config.json").unlink(missing_ok=True)
    for name, content in run.tokenizer.files("tokenizer.json").items():
        (small.path / name).write_text(content)
    assert export_run(run, file_format, tmp_path / "out") == [TRAINING] * (file_format == "hf")


@pytest.mark.slow
@pytest.mark.parametrize(("file_format", "omitted"), [("hf", []), ("gguf", ["the sampling setting typical_p 0.3"])])
def test_sampling_settings_come_back_or_are_named(small: Run, tmp_path: Path, file_format: Any, omitted: list[str]):
    held = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2}
    run = replace(small, sampling={**held, "typical_p": 0.3})
    path = tmp_path / f"x.{file_format}"
    assert export_run(run, file_format, path) == [TRAINING, *omitted]
    assert load_run(import_run(path, tmp_path / "run")[0]).sampling == (held if omitted else run.sampling)


def test_three_ends_of_text_are_those_of_the_file(small: Run, tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    run = with_tokenizer(small, {"eos_token_ids": [0, 280, 281], "pad_token": "<pad>"})
    assert export_run(run, "gguf", tmp_path / "x.gguf") == [TRAINING]
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot", "eom", "padding")}
    assert ids == {"eos": 0, "eot": 280, "eom": 281, "padding": 283}


def test_the_way_to_load_an_export_names_its_class(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert loading("hf", tmp_path) == f'transformers.LlamaForCausalLM.from_pretrained("{tmp_path}")'
    assert loading("gguf", Path("x.gguf")) == "llama-cli -m x.gguf"
    (tmp_path / "modules.json").write_text("[]")
    assert loading("hf", tmp_path) == f'sentence_transformers.SentenceTransformer("{tmp_path}")'
