"""`sample.py` on a small run."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import load_run
from jaxformer.cli import sample
from jaxformer.cli.prompts import Prompt
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.decode import Text
from jaxformer.errors import UserError
from tests.helpers import ROOT, start, untrained_run, write_books

IN_TERMINAL = """if True:
    import fcntl, os, signal, sys, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C is for this process
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests' own may be ignored, which is inherited
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
BYTES = Tokenizer.train(["a b"], 257)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    write_books(folder / "books")
    untrained_run(folder / "runs/quick", [file.read_text() for file in (folder / "books").iterdir()])
    return folder


@pytest.fixture
def rows(here, monkeypatch, capsys):
    """The rows of JSON that sample.py writes."""
    monkeypatch.chdir(here)

    def call(*options: str, status: int = 0) -> list[dict]:
        assert sample.main(["--jsonl", "--max-new-tokens", "12", *options]) == status
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


@pytest.mark.slow
def test_a_file_of_prompts_gives_each_its_own_text_in_order_and_names_broken_lines(here, rows, monkeypatch, capsys):
    lines = [
        {"prompt": "The cat sees the sea", "id": 1, "seed": 4},
        {"prompt": "A", "id": {"x": 2}},
        {"prompt": ""},
        {"prompt": "The cat sees the sea", "id": "3"},
        {"prompt": "many words " * 9},
        {"prompt": "The king finds"},
    ]
    (here / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = rows("--prompts-file", "p.jsonl", "--batch-size", "3", "--seed", "9", status=2)
    assert [row["id"] for row in found] == [1, {"x": 2}, "3", None]
    assert [row["seed"] for row in found] == [4, 9, 9, 9]
    for row in found[:2]:
        (alone,) = rows("--prompt", row["prompt"], "--seed", str(row["seed"]))
        assert (alone["text"], alone["tokens"]) == (row["text"], row["tokens"])
        np.testing.assert_allclose(alone["logprobs"], row["logprobs"], atol=1e-4)  # the padding differs

    monkeypatch.chdir(here)
    assert sample.main(["--prompts-file", "p.jsonl", "--max-new-tokens", "2"]) == 2
    out, err = capsys.readouterr()
    assert re.findall(r"^\[(\d)\] (.+)", out, re.MULTILINE) and out.startswith("[1] The cat sees the sea")
    first, second, speed = err.splitlines()
    assert first == "error: p.jsonl, line 3, is empty; give it at least one character."
    assert re.fullmatch(r"error: p\.jsonl, line 5, has \d+ tokens; it may have at most the context's 16\.", second)
    assert re.fullmatch(r"time to first token [\d.]+ s; then [\d,]+ tokens/s \(4 in [\d.]+ s\)", speed)


@pytest.mark.slow
def test_log_probabilities_are_the_models_own(here, rows):
    (row,) = rows("--prompt", "The", "--top-logprobs", "3", "--temperature", "0.4", "--max-new-tokens", "8")
    run = load_run(here / "runs/quick")
    prompt = run.tokenizer.encode("The")
    logits_TV = run.model.apply({"params": run.params}, jnp.array(prompt + row["tokens"]))
    expected_TV = jax.nn.log_softmax(logits_TV)[len(prompt) - 1 : -1]
    np.testing.assert_allclose(
        row["logprobs"], [e[t] for e, t in zip(expected_TV, row["tokens"], strict=True)], atol=1e-4
    )
    for likeliest, e in zip(row["top_logprobs"], expected_TV, strict=True):
        assert [t for t, _ in likeliest] == np.argsort(-e)[:3].tolist()
        np.testing.assert_allclose([x for _, x in likeliest], np.sort(e)[::-1][:3], atol=1e-4)
    assert row["ended"] == "length" and run.tokenizer.decode(row["tokens"]) == row["text"]
    assert 0 < row["first_token_s"] <= row["seconds"]


@pytest.mark.slow
def test_stop_strings_and_tokens_end_a_text_and_are_not_shown(here, rows):
    options = ("--prompt", "The", "--temperature", "0", "--max-new-tokens", "30")
    (whole,) = rows(*options)
    tokenizer = load_run(here / "runs/quick").tokenizer
    pieces = [tokenizer.decode([t]) for t in whole["tokens"]]
    spanning = whole["text"][len(pieces[0]) - 1 : len(pieces[0]) + 1]  # the last character of one token, then the next
    (stopped,) = rows(*options, "--stop", "never said", spanning)
    assert stopped["ended"] == "stop string" and stopped["text"] == whole["text"].partition(spanning)[0]
    assert whole["tokens"][: len(stopped["tokens"])] == stopped["tokens"]

    token = whole["tokens"][5]
    (stopped,) = rows(*options, "--stop-tokens", str(token))
    assert stopped["ended"] == "stop token"
    assert stopped["tokens"] == whole["tokens"][: whole["tokens"].index(token) + 1]
    assert stopped["text"] == tokenizer.decode(stopped["tokens"][:-1])


@pytest.mark.slow
def test_samples_of_a_prompt_are_what_the_next_seeds_give(rows):
    together = rows("--prompt", "The", "A cat", "--num-samples", "2", "--seed", "3", "--temperature", "1.5")
    assert [(row["prompt"], row["sample"], row["seed"]) for row in together] == [
        ("The", 0, 3), ("The", 1, 4), ("A cat", 0, 3), ("A cat", 1, 4),
    ]  # fmt: skip
    alone = rows("--prompt", "The", "A cat", "--seed", "4", "--temperature", "1.5")
    assert [row["tokens"] for row in together[1::2]] == [row["tokens"] for row in alone]
    assert together[0]["tokens"] != together[1]["tokens"]


@pytest.mark.slow
def test_words_and_biases_are_given_as_text(rows):
    (forced,) = rows("--prompt", "The", "--logit-bias", "q=100", "z=50", "--temperature", "0")
    assert forced["text"] == "q" * 12
    (banned,) = rows("--prompt", "The", "--logit-bias", "q=100", "z=50", "--bad-words", "q", "--temperature", "0")
    assert banned["text"] == "z" * 12
    (banned,) = rows("--prompt", "The", "--logit-bias", "q=100", "z=50", "--bad-words", "qq", "--temperature", "0")
    assert banned["text"] == "qz" * 6


@pytest.mark.slow
def test_beams_are_searched_and_the_best_shown_with_their_scores(here, rows):
    found = rows("--prompt", "The", "A cat", "--num-beams", "3", "--num-samples", "2", "--max-new-tokens", "6")
    assert [(row["prompt"], row["sample"]) for row in found] == [("The", 0), ("The", 1), ("A cat", 0), ("A cat", 1)]
    run = load_run(here / "runs/quick")
    for best, second in (found[:2], found[2:]):
        assert best["score"] >= second["score"] and best["tokens"] != second["tokens"]
        prompt = run.tokenizer.encode(best["prompt"])
        logits_TV = run.model.apply({"params": run.params}, jnp.array(prompt + best["tokens"]))[len(prompt) - 1 : -1]
        logprobs = jax.nn.log_softmax(logits_TV)[np.arange(len(best["tokens"])), np.array(best["tokens"])]
        np.testing.assert_allclose(best["score"], logprobs.mean(), atol=1e-4)  # a length penalty of 1
    assert "logprobs" not in found[0]


@pytest.mark.slow
def test_a_draft_changes_how_fast_it_is_and_no_token(here, rows, capsys):
    given = ("--prompt", "The cat", "--prompt", "A king", "--temperature", "0", "--max-new-tokens", "8")
    wanted = [row["tokens"] for row in rows(*given)]
    for draft in ("lookup", "runs/quick"):
        assert [row["tokens"] for row in rows(*given, "--draft", draft)] == wanted
    assert sample.main([*given, "--draft", "runs/quick", "--draft-tokens", "3"]) == 0
    assert capsys.readouterr().err.endswith("; 4.00 tokens a pass\n")  # a run agrees with itself


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_smaller_weights_say_nearly_the_same(here, rows, weights):
    given = ("--prompt", "The cat", "--temperature", "0", "--max-new-tokens", "1")
    (exact,), (rounded,) = rows(*given), rows(*given, "--weights", weights)
    assert 0 < abs(exact["logprobs"][0] - rounded["logprobs"][0]) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--logit-bias", "qz=1"], "--logit-bias 'qz' is 2 tokens of this run, 'q', 'z'; give one of them."),
        (["--logit-bias", "q=inf"], "it must be finite"),
        (["--stop-tokens", "280"], "a stop token is 280; it must be from 0 to 279"),
        (["--top-logprobs", "281"], "top-logprobs is 281; it must be at most the vocabulary's 280"),
        (["--prompt", "many words " * 9], "at most the context's 16"),
        (["--prompt", "A", "many words " * 9], "prompt 2 has"),
        (["--num-beams", "2", "--max-new-tokens", "17"], "it may have at most 0, for beam search does not go past"),
    ],
)
def test_what_does_not_fit_the_run_is_one_sentence(here, monkeypatch, capsys, options, said):
    monkeypatch.chdir(here)
    assert sample.main(options) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err and not out


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_ctrl_c_shows_what_was_made(here, monkeypatch, capsys, several):
    """Pressed after the first piece: the first text is shown as far as it went; a second batch does not begin."""
    monkeypatch.chdir(here)
    take = sample.Sampler._continue

    def pressing(self, prompts, n_prompts, streams, pressed):
        monkeypatch.setattr(
            "jaxformer.decode.texts.Text.take", lambda *args: (signal.raise_signal(signal.SIGINT), real(*args))[1]
        )
        return take(self, prompts, n_prompts, streams, pressed)

    real = Text.take
    monkeypatch.setattr(sample.Sampler, "_continue", pressing)
    prompts = ["The cat", "The dog"] if several else ["The cat"]
    assert sample.main(["--prompt", *prompts, "--batch-size", "1", "--max-new-tokens", "5000"]) == 130
    out, err = capsys.readouterr()
    assert out.removeprefix("[1] ").startswith("The cat") and "The dog" not in out and out.endswith("\n")
    assert err.splitlines()[0].startswith("time to first token") and err.splitlines()[-1] == "interrupted"


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_quietly(here):
    process = start("sample.py", "--prompt", "The", "--max-new-tokens", "1000000", cwd=here)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(20).startswith("The")
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.slow
def test_a_conversation_in_a_terminal(here):
    """Ctrl-C clears a line, stops a text, and at an empty prompt leaves; arrow up brings a prompt back."""
    terminal, its_side = pty.openpty()
    command = [
        sys.executable,
        "-c",
        IN_TERMINAL,
        str(ROOT / "sample.py"),
        "--interactive",
        "--max-new-tokens",
        "1000000",
    ]
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    process = subprocess.Popen(
        command, cwd=here, env=env, stdin=its_side, stdout=its_side, stderr=its_side, start_new_session=True
    )
    os.close(its_side)

    def read() -> str:
        if not select.select([terminal], [], [], 0.2)[0]:
            return ""
        try:
            return os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other side has closed
            return ""

    def until(pattern: str) -> str:
        seen, limit = "", time.monotonic() + 120
        while not re.search(pattern, seen):
            assert time.monotonic() < limit and process.poll() is None, seen
            seen += read()
        return seen

    def type_in(text: str) -> None:
        os.write(terminal, text.encode())

    until("> ")
    type_in("not this")
    until("not this")
    type_in("\x03")
    until("\n> ")
    type_in("The cat\n")
    until(r"\nThe cat[\s\S]{200}")  # it goes on and on
    type_in("\x03")
    assert "tokens/s" in until(r"\([\d,]+ in [\d.]+ s\)\s+> ")
    type_in("many words " * 9 + "\n")
    assert "at most the context's 16" in until(r"context's 16\.\s+> ")
    type_in("\x1b[A\x1b[A\n")
    until(r"\nThe cat[\s\S]{200}")
    type_in("\x03")
    until(r"\([\d,]+ in [\d.]+ s\)\s+> ")
    type_in("\x03")
    limit = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < limit:
        read()  # it waits until its last words are read
    assert process.returncode == 0
    os.close(terminal)


@pytest.mark.slow
def test_without_a_terminal_a_conversation_reads_lines_until_they_end(here):
    done = subprocess.run(
        [sys.executable, str(ROOT / "sample.py"), "--interactive", "--max-new-tokens", "2", "--temperature", "0"],
        cwd=here, input="The cat\n\nThe dog\n", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "The cat" in done.stdout and "The dog" in done.stdout
    assert done.stderr.count("time to first token") == 2


def test_a_number_that_json_does_not_know_is_null():
    text = Text(BYTES)
    text.tokens, text.logprobs, text.top_logprobs = [65], [-np.inf], [[(1, np.nan)]]
    row = sample.Answer(Prompt("p", "the prompt"), 0, 0, text).as_row()
    assert row["logprobs"] == [None] and row["top_logprobs"] == [[(1, None)]]


def test_biases_are_of_one_token():
    assert sample.biases(["a=1.5", "==-2", " =3"], BYTES) == ((BYTES.encode("a")[0], 1.5), (BYTES.encode("=")[0], -2.0),
                                                              (BYTES.encode(" ")[0], 3.0))  # fmt: skip
    for option, said in (("a", "not of the form"), ("=1", "not of the form"), ("a=b", "not of the form"),
                         ("ab=1", "'ab' is 2 tokens of this run, 'a', 'b'"), ("\udcff=1", "not UTF-8")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            sample.biases([option], BYTES)


def test_words_are_banned_with_and_without_a_space_before_them():
    assert sample.words(["ab", " c", "ab"], BYTES) == tuple(tuple(BYTES.encode(t)) for t in ("ab", " ab", " c"))
    with pytest.raises(UserError, match="empty"):
        sample.words(["a", ""], BYTES)


def test_a_stop_string_that_no_tokens_make_is_refused():
    sample.check_stop_strings(["é🙂", "<|endoftext|>"], BYTES)  # any text can be made of bytes

    class FewTokens:
        token_bytes = (b"", b"ab", b"c")

    sample.check_stop_strings(["abc"], FewTokens())
    with pytest.raises(UserError, match="stop string 'bad' can never occur: no token of this run makes 'd'"):
        sample.check_stop_strings(["bad"], FewTokens())


def test_every_field_of_sampling_is_an_option(capsys):
    import dataclasses

    from jaxformer.decode import Sampling

    with pytest.raises(SystemExit):
        sample.main(["--help"])
    shown = capsys.readouterr().out
    for field in dataclasses.fields(Sampling):
        assert f"--{field.name.replace('_', '-')}" in shown
