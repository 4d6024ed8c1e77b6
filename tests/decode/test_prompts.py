"""Prompts in files: every line is a prompt or one sentence with its number."""

import pytest

from jaxformer.decode.prompts import Prompt, read_prompts, sample_seeds
from jaxformer.errors import UserError


def read(path, content: bytes) -> list:
    path.write_bytes(content)
    return [str(p) if isinstance(p, UserError) else (p.text, p.seed, p.id) for p in read_prompts(str(path))]


def test_a_line_is_a_prompt_with_its_spaces(tmp_path):
    results = read(tmp_path / "p.txt", '\ufeffThe \r\n  a\tb\n{"prompt": 1}\né🙂'.encode())
    assert results == [(text, None, None) for text in ("The ", "  a\tb", '{"prompt": 1}', "é🙂")]


def test_a_json_object_is_a_prompt_with_its_seed_and_id(tmp_path):
    content = b'{"prompt": "a\\nb", "id": [1, {"x": null}]}\n{"seed": 4294967295, "prompt": "\\u00e9", "id": "n"}\n'
    assert read(tmp_path / "p.jsonl", content) == [("a\nb", None, [1, {"x": None}]), ("é", 2**32 - 1, "n")]
    assert read(tmp_path / "p.jsonl", b'{"prompt": "a", "seed": null}') == [("a", None, None)]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("p.txt", b"", "is empty; give it at least one character."),
        ("p.txt", b"caf\xe9", "is not UTF-8: byte 0xe9 at offset 3."),
        ("p.jsonl", b"", "is not valid JSON: Expecting value: line 1 column 1"),
        ("p.jsonl", b'{"prompt": "a"', "is not valid JSON: Expecting ',' delimiter: line 1 column 15"),
        ("p.jsonl", b"[" * 100_000, "is not valid JSON"),
        ("p.jsonl", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        ("p.jsonl", b'["a"]', 'is ["a"]; give an object with a text, such as {"prompt": "The"}.'),
        ("p.jsonl", b'{"seed": 1}', 'is {"seed": 1}; give an object with a text'),
        ("p.jsonl", b'{"prompt": ["a"]}', 'is {"prompt": ["a"]}; give an object with a text'),
        ("p.jsonl", b'{"prompt": "a", "sed": 3}', "has a field 'sed'; the known ones are prompt, seed, id."),
        ("p.jsonl", b'{"prompt": ""}', "is empty; give it at least one character."),
        ("p.jsonl", b'{"prompt": "a\\ud800"}', "contains bytes that are not UTF-8, at character 1."),
        ("p.jsonl", b'{"prompt": "a\xff"}', "is not UTF-8: byte 0xff at offset 13."),
        ("p.jsonl", b'{"prompt": "a", "seed": -1}', "has the seed -1; it must be a whole number, at least 0"),
        ("p.jsonl", b'{"prompt": "a", "seed": 4294967296}', "has the seed 4294967296"),
        ("p.jsonl", b'{"prompt": "a", "seed": true}', "has the seed True; it must be a whole number"),
        ("p.jsonl", b'{"prompt": "a", "seed": 1.5}', "has the seed 1.5; it must be a whole number"),
    ],
    ids=lambda x: None if isinstance(x, bytes) and len(x) > 100 else x,
)
def test_an_invalid_line_is_an_error_and_the_others_are_prompts(tmp_path, name, line, message):
    good = b'{"prompt": "x"}'
    first, broken, last = read(tmp_path / name, b"\n".join([good, line, good]))
    assert first == last and isinstance(first, tuple)
    assert broken.startswith(f"{tmp_path / name}, line 2, {message}") and "\n" not in broken


def test_an_empty_file_has_an_invalid_line_and_a_missing_one_is_refused(tmp_path):
    (error,) = read(tmp_path / "empty", b"")
    assert "line 1, is empty" in error
    for name, message in (("nowhere", "be read: No such file"), (".", "be read: Is a")):
        with pytest.raises(UserError, match=message):
            read_prompts(str(tmp_path / name))


@pytest.mark.parametrize(("text", "message"), [("", "the prompt is empty"), ("a\udcff", "not UTF-8, at character 1")])
def test_an_empty_or_undecodable_prompt_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        Prompt(text, "the prompt")


def test_seeds_of_samples_are_consecutive_modulo_32_bits():
    assert sample_seeds(7, 3) == [7, 8, 9] and sample_seeds(2**32 - 2, 3) == [2**32 - 2, 2**32 - 1, 0]


def test_a_prompt_without_tokens_or_with_too_many_is_refused():
    prompt = Prompt("~", "prompt 2")
    prompt.check_length(1, 4, "4")
    with pytest.raises(UserError, match="prompt 2 has 0 tokens; it must have at least one"):
        prompt.check_length(0, 4, "4")
    with pytest.raises(UserError, match="prompt 2 has 5 tokens; it may have at most 4"):
        prompt.check_length(5, 4, "4")
