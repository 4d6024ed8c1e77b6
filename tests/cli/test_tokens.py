"""`jaxformer tokens`."""

import io
import json
from types import SimpleNamespace

import pytest

from jaxformer.cli import tokens
from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.runs.run import create_run
from tests.arrays import plain_decoder

TEXT = "the cat, the caté 日\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = Tokenizer.train(["the cat the cat"], 260)
    config = Config("t", plain_decoder(260, 4, 8, n_blocks=1), TextConfig(), steps=1)
    return create_run(tmp_path_factory.mktemp("runs") / "t", config, tokenizer, allow_suffix=False)


def piece(line: str) -> bytes:
    """Return the bytes that a line shows."""
    shown = line.split(maxsplit=2)[2]
    return json.loads(shown).encode() if shown[0] == '"' else bytes.fromhex(shown[2:-1].replace("\\x", ""))


@pytest.mark.parametrize("by", ["--run", "--tokenizer"])
def test_lines_hold_the_tokens_and_their_bytes_are_the_text(folder, capsys, by):
    assert tokens.main([TEXT, by, str(folder)]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    ids = Tokenizer.load(folder / "tokenizer.json").encode(TEXT)
    assert [line.split()[:2] for line in lines] == [[str(i), str(token)] for i, token in enumerate(ids)]
    assert b"".join(map(piece, lines)) == TEXT.encode()
    n = len(TEXT.encode())
    assert (
        total == f"{len(ids)} tokens of 260 for {len(TEXT)} characters, {n} bytes: {n / len(ids):.2f} bytes per token"
    )


def test_a_text_of_which_the_tokenizer_leaves_nothing_has_no_tokens(folder, tmp_path, capsys):
    form = json.loads((folder / "tokenizer.json").read_text())
    form["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(form))
    assert tokens.main([" ", "--tokenizer", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 tokens of 260 for 1 characters, 1 bytes\n"


def test_standard_input_is_read_without_a_text(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"cat")))
    assert tokens.main(["--run", str(folder)]) == 0
    assert b"".join(map(piece, capsys.readouterr().out.splitlines()[:-1])) == b"cat"


@pytest.mark.parametrize(
    ("stdin", "arguments", "message"),
    [
        (b"", [], "the text is empty"),
        (b"a\xff", [], "the text has a lone surrogate, U+DCFF, at character 1"),
        (b"", ["a", "--tokenizer", "b"], "--run and --tokenizer both name a tokenizer"),
    ],
)
def test_bad_input_is_one_sentence(folder, capsys, monkeypatch, stdin, arguments, message):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(stdin)))
    assert tokens.main(["--run", str(folder), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
