"""`sample.py` on a small run."""

import dataclasses
import io
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import load_run
from jaxformer.cli import sample
from jaxformer.cli.options import CommandLine
from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.decode import GeneratedText
from jaxformer.decode.completion import Completer, Completion, CompletionOptions, encode_bad_words, encode_logit_bias
from jaxformer.decode.prompts import Prompt
from jaxformer.errors import UserError
from jaxformer.ladder.mlp import MLPConfig
from jaxformer.runs.run import Run
from tests.arrays import plain_decoder
from tests.helpers import small_run, start_in_terminal, write_books

BYTES = Tokenizer.train(["a b"], 257)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    write_books(folder / "books")
    texts = [file.read_text() for file in sorted((folder / "books").iterdir())]
    small_run(folder / "runs/quick", texts)
    return folder


@pytest.fixture(autouse=True)
def _there(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr("jaxformer.cli.load.echo", lambda *_: None)  # which run is taken


@pytest.fixture(scope="module")
def logprobs(here):
    """Return the logprobs `(N, V)` of one full pass at each of N new tokens of a prompt."""
    run = load_run(here / "runs/quick")
    forward = jax.jit(lambda tokens_T: jax.nn.log_softmax(run.model.apply({"params": run.params}, tokens_T)))

    def call(prompt: str, completion: list[int]) -> np.ndarray:
        before = run.tokenizer.encode(prompt)
        tokens = before + completion
        padding = [0] * (run.text_model()[0].context_length - len(tokens))  # no token sees what comes after it
        return np.asarray(forward(jnp.array(tokens + padding)))[len(before) - 1 : len(tokens) - 1]

    return call


@pytest.fixture
def rows(capsys):
    """Return the rows of JSON that sample.py writes."""

    def call(*options: str, status: int = 0) -> list[dict]:
        length = () if "--max-new-tokens" in options else ("--max-new-tokens", "12")
        assert sample.main(["--jsonl", *length, *options]) == status
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


# Programs are compiled for each number of rows, bucket of prompt lengths and sampling: tests share what they can.
GREEDY = ("--temperature", "0", "--top-logprobs", "3")
ALONE = ("--batch-size", "1")


@pytest.mark.slow
def test_prompts_of_a_file_are_completed_and_invalid_lines_named(here, rows, capsys):
    lines = [
        {"prompt": "The cat sees", "id": 1, "seed": 4},
        {"prompt": "A", "id": {"x": 2}},
        {"prompt": ""},
        {"prompt": "The cat sees", "id": "3"},
        {"prompt": "many words " * 9},
        {"prompt": "The king"},
    ]
    (here / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    completion = rows("--prompts-file", "p.jsonl", "--batch-size", "3", "--seed", "9", status=2)
    results = sorted(completion, key=lambda row: row["line"])
    assert [row["line"] for row in results] == [1, 2, 4, 6]
    assert [row["id"] for row in results] == [1, {"x": 2}, "3", None]
    assert [row["seed"] for row in results] == [4, 9, 9, 9]
    (alone,) = rows("--prompt", "The cat sees", "--seed", "4")
    assert (alone["text"], alone["tokens"]) == (results[0]["text"], results[0]["tokens"])
    np.testing.assert_allclose(alone["logprobs"], results[0]["logprobs"], atol=1e-4)  # the padding differs

    assert sample.main(["--prompts-file", "p.jsonl", "--max-new-tokens", "2", "--batch-size", "3"]) == 2
    out, err = capsys.readouterr()
    printed = re.findall(r"^\[(\d)\] (The cat sees|A|The king)", out, re.MULTILINE)
    assert printed == [("1", "The cat sees"), ("2", "A"), ("4", "The cat sees"), ("6", "The king")]
    first, second, speed = err.splitlines()
    assert first == "error: p.jsonl, line 3, is empty; give it at least one character."
    assert re.fullmatch(r"error: p\.jsonl, line 5, has \d+ tokens; it may have at most the context's 16\.", second)
    assert re.fullmatch(
        r"time to first token [\d.]+ s \(the mean of 2 batches\); [\d,]+ tokens/s \(4 in [\d.]+ s\)"
        r"(; [\d.]+ s of compilation excluded)?",
        speed,
    )


@pytest.mark.parametrize("json_rows", [False, True])
def test_completions_before_a_failure_are_printed(here, monkeypatch, capsys, json_rows):
    """The shortest prompts go first, so texts of the third and the second line wait for that of the first."""
    (here / "long_first.txt").write_text("The king sees\nThe cat\nA\n")
    n_calls = 0

    def fails_at_the_third(self, prompts, n_prompts, interrupted, show):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.")
        return [Completion(prompt, 0, 0, GeneratedText(BYTES)) for prompt, _ in prompts]

    monkeypatch.setattr(Completer, "_complete_batch", fails_at_the_third)
    assert sample.main(["--prompts-file", "long_first.txt", *ALONE, *(["--jsonl"] if json_rows else [])]) == 2
    out, err = capsys.readouterr()
    if json_rows:
        assert [json.loads(line)["line"] for line in out.splitlines()] == [3, 2]  # each as soon as it is made
    else:
        assert out == "[2] The cat\n\n[3] A\n\n"
    assert err == (
        "error: 1 texts at once do not fit into the memory; lower --batch-size, --num-samples, --num-beams or "
        "--max-new-tokens.\n"
    )


@pytest.mark.slow
def test_a_completion_ends_at_a_stop_string_and_has_the_logprobs_of_a_full_pass(rows, logprobs):
    (full,) = rows("--prompt", "The", *GREEDY)
    expected_TV = logprobs("The", full["tokens"])
    chosen = expected_TV[np.arange(12), full["tokens"]]
    np.testing.assert_allclose(full["logprobs"], chosen, atol=1e-4)
    for likeliest, e in zip(full["top_logprobs"], expected_TV, strict=True):
        assert [t for t, _ in likeliest] == np.argsort(-e)[:3].tolist()
        np.testing.assert_allclose([x for _, x in likeliest], np.sort(e)[::-1][:3], atol=1e-4)
    tokenizer = load_run("runs/quick").tokenizer
    assert full["ended"] == "length" and tokenizer.decode(full["tokens"]) == full["text"]
    assert 0 < full["first_token_s"] <= full["seconds"]

    first = tokenizer.decode(full["tokens"][:1])
    spanning = full["text"][len(first) - 1 : len(first) + 1]  # the last character of one token, then the next
    (stopped,) = rows("--prompt", "The", *GREEDY, "--stop", "never said", spanning)
    assert stopped["ended"] == "stop string" and stopped["text"] == full["text"].partition(spanning)[0]
    assert full["tokens"][: len(stopped["tokens"])] == stopped["tokens"]


@pytest.mark.slow
def test_samples_of_a_prompt_have_consecutive_seeds(rows):
    together = rows("--prompt", "The", "A cat", "--num-samples", "2", "--seed", "3")
    assert [(row["line"], row["prompt"], row["sample"], row["seed"]) for row in together] == [
        (1, "The", 0, 3), (1, "The", 1, 4), (2, "A cat", 0, 3), (2, "A cat", 1, 4),
    ]  # fmt: skip
    assert together[0]["tokens"] != together[1]["tokens"]


@pytest.mark.slow
def test_bad_words_logit_bias_and_stop_tokens_are_applied(rows):
    """The bias makes q likeliest, then z; after one q another is banned; z ends the text and is not shown."""
    q, z = (load_run("runs/quick").tokenizer.encode(letter)[0] for letter in "qz")
    (row,) = rows(
        "--prompt", "The", "--logit-bias", "q=100", "z=50", "--bad-words", "qq", "--stop-tokens", str(z), *GREEDY
    )
    assert (row["tokens"], row["text"], row["ended"]) == ([q, z], "q", "stop token")


@pytest.mark.slow
def test_beam_search_prints_the_best_beams_with_their_scores(rows, logprobs):
    results = rows("--prompt", "The", "A cat", "--num-beams", "3", "--num-samples", "2", "--max-new-tokens", "6")
    assert [(row["prompt"], row["sample"]) for row in results] == [("The", 0), ("The", 1), ("A cat", 0), ("A cat", 1)]
    for best, second in (results[:2], results[2:]):
        assert best["score"] >= second["score"] and best["tokens"] != second["tokens"]
        chosen = logprobs(best["prompt"], best["tokens"])[np.arange(len(best["tokens"])), best["tokens"]]
        np.testing.assert_allclose(best["score"], chosen.mean(), atol=1e-4)  # a length penalty of 1
    assert "logprobs" not in results[0]


@pytest.mark.slow
def test_a_draft_changes_no_greedy_token(rows, capsys):
    given = ("--prompt", "The cat", "A king", "--max-new-tokens", "8", *GREEDY)
    expected = [row["tokens"] for row in rows(*given, *ALONE)]
    assert sample.main(["--jsonl", *given, "--draft", "runs/quick", "--mesh", "data=8", "--draft-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    results = [json.loads(line)["tokens"] for line in out.splitlines()]
    assert results == expected and len(results) == 2 and len(results[0]) == 8
    assert "; 4.00 tokens per pass" in err  # a run agrees with itself


@pytest.mark.parametrize(
    ("run", "options", "most"),
    [
        ("endless", ["--draft", "16"], 16 - 5),  # its draft ends
        ("16", ["--draft", "12"], 12 - 5),  # and this one earlier
        ("16", ["--draft", "lookup"], 16 - 5),
        ("16", ["--num-beams", "2"], 16 - 5),
        ("endless", ["--draft", "lookup"], 16),  # what a prompt may have in any case
    ],
)
def test_a_prompt_too_long_for_a_draft_or_beam_search_is_refused(monkeypatch, run, options, most):
    def open_run(options, convert, meanwhile):
        length, positions = (16, "none") if options.run == "endless" else (int(options.run), "learned")
        model = plain_decoder(vocab_size=257, context_length=length, positions=positions)
        config = Config("a", model, data=TextConfig(), steps=1)
        return Run(Path(options.run), config, config.model.build(), {}, BYTES, 0)

    monkeypatch.setattr(sample, "open_run", open_run)
    given = ["--run", run, "--max-new-tokens", "6", *options]
    completer = sample.make_completer(CommandLine(given).parse(sample.Arguments(), "", ""))
    letters = "q" * 17  # a token each
    assert len(completer.encode(Prompt(letters[:most], "it"))) == most
    with pytest.raises(UserError, match=f"it has {most + 1} tokens; it may have at most (the context's )?{most}"):
        completer.encode(Prompt(letters[: most + 1], "it"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logit-bias", "qz=1"], "--logit-bias 'qz' is 2 tokens of this run, 'q', 'z'; give one of them."),
        (["--logit-bias", "q=inf"], "it must be finite"),
        (["--bad-words", ""], "it must be words of at least 1 token each"),
        (["--stop-tokens", "280"], "a stop token is 280; it must be from 0 to 279"),
        (["--top-logprobs", "281"], "--top-logprobs is 281; it must be at most the vocabulary's 280"),
        (["--draft", ""], "--draft is ''; it must be a local folder"),
        (["--prompt", "A", "many words " * 9], "prompt 2 has"),
        (["--num-beams", "2", "--max-new-tokens", "17"], "at most 0, as beam search cannot exceed"),
    ],
)
def test_an_option_that_does_not_fit_the_run_is_a_one_sentence_error(capsys, options, message):
    assert sample.main(options) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err and not out


@pytest.mark.parametrize(
    "options",
    [("--num-beams", "2"), ("--draft", "lookup"), ("--cache-dtype", "int8"), ("--prefill-chunk", "8")],
    ids=lambda options: options[0],
)
def test_options_that_need_a_cache_are_refused_without_one(monkeypatch, capsys, options):
    config = Config("a", MLPConfig(vocab_size=257, context_length=8, mixing="concatenate"), data=TextConfig(), steps=1)
    monkeypatch.setattr(sample, "model_of", lambda _: config.model.build())
    monkeypatch.setattr(
        sample, "open_run", lambda *_, **__: Run(Path("it"), config, config.model.build(), {}, BYTES, 0)
    )
    assert sample.main(["--prompt", "a", *options]) == 2
    assert f"it has a model without a KV cache, which {options[0]} needs; omit {options[0]}." in capsys.readouterr().err


def test_a_seed_of_a_prompt_is_refused_with_beams():
    options = CompletionOptions(num_beams=2, max_new_tokens=2)
    completer = sample.make_completer(sample.Arguments(completion=options))
    with pytest.raises(UserError, match="p, line 2, has a seed, but beam search does not sample"):
        completer.encode(Prompt("a", "p, line 2,", seed=3))


@pytest.mark.slow
def test_ctrl_c_prints_the_tokens_so_far(monkeypatch, capsys):
    """Pressed after the first piece: the first text is shown as far as it went; a second batch does not begin."""
    complete_batch = Completer._complete_batch

    def pressing(self, prompts, n_prompts, interrupted, show):
        press = lambda *args: (signal.raise_signal(signal.SIGINT), append(*args))[1]  # noqa: E731
        monkeypatch.setattr(GeneratedText, "append", press)
        return complete_batch(self, prompts, n_prompts, interrupted, show)

    append = GeneratedText.append
    monkeypatch.setattr(Completer, "_complete_batch", pressing)
    assert sample.main(["--prompt", "The cat", "The dog", *ALONE, "--max-new-tokens", "5000"]) == 130
    out, err = capsys.readouterr()
    assert out.removeprefix("[1] ").startswith("The cat") and "The dog" not in out and out.endswith("\n")
    assert err.splitlines()[0].startswith("time to first token") and err.splitlines()[-1] == "interrupted"


@pytest.mark.slow
def test_a_closed_pipe_ends_it_quietly(monkeypatch, capsys):
    """As `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert sample.main(["--prompt", "The", "--max-new-tokens", "1000000"]) == 128 + signal.SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for the flush as it is closed
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_an_interactive_session_in_a_terminal(here, request):
    """Ctrl-C clears a line, stops a text, and at an empty prompt leaves; arrow up brings a prompt back."""
    process, terminal = start_in_terminal("sample.py", "--interactive", "--max-new-tokens", "1000000", cwd=here)
    request.addfinalizer(lambda: (process.kill(), process.wait()))

    def read() -> str:
        if not select.select([terminal], [], [], 0.2)[0]:
            return ""
        try:
            return os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other side has closed
            return ""

    def until(pattern: str) -> str:
        output, limit = "", time.monotonic() + 120
        while not re.search(pattern, output):
            assert time.monotonic() < limit and process.poll() is None, output
            output += read()
        return output

    def type_in(text: str) -> None:
        os.write(terminal, text.encode())

    def interrupt_the_prompt(done: Callable[[str], bool]) -> None:
        """Python's readline does not notice a Ctrl-C of the very moment in which it begins to wait for a key."""
        output, limit = "", time.monotonic() + 120
        while not done(output):
            assert time.monotonic() < limit, output
            type_in("\x03")
            again = time.monotonic() + 5
            while not done(output) and time.monotonic() < again:
                output += read()

    until("> ")
    type_in("not this")
    until("not this")
    interrupt_the_prompt(lambda output: "\n> " in output)
    type_in("The cat\n")
    until(r"\nThe cat[\s\S]{200}")  # it goes on and on
    type_in("\x03")
    assert "tokens/s" in until(r"\([\d,]+ in [\d.]+ s\).*\s+> ")
    type_in("many words " * 9 + "\n")
    assert "at most the context's 16" in until(r"context's 16\.\s+> ")
    type_in("\x1b[A\x1b[A\n")
    until(r"\nThe cat[\s\S]{200}")
    type_in("\x03")
    until(r"\([\d,]+ in [\d.]+ s\).*\s+> ")
    interrupt_the_prompt(lambda _: process.poll() is not None)
    assert process.returncode == 0
    os.close(terminal)


@pytest.fixture
def interact(monkeypatch, capsys):
    """Return the status, output and errors of a session whose lines come from a pipe."""

    def call(lines: bytes, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8", errors="strict"))
        return sample.main(["--interactive", *options]), *capsys.readouterr()

    return call


@pytest.mark.slow
def test_a_piped_session_reads_all_lines_and_writes_only_completions(interact):
    status, out, err = interact(b"The cat\n\nThe dog\n", "--max-new-tokens", "2")
    assert status == 0 and re.fullmatch(r"The cat.*\nThe dog.*\n", out, re.DOTALL)
    assert err.count("time to first token") == 2
    status, out, err = interact(b"The cat\ncaf\xe9\nThe dog\n", "--max-new-tokens", "2", "--jsonl")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["The cat", "The dog"]
    assert status == 2 and "error: the prompt contains bytes that are not UTF-8, at character 3.\n" in err


@pytest.mark.slow
def test_an_error_of_one_prompt_does_not_end_the_session(monkeypatch, interact):
    """Neither an option that only the search itself can refuse, nor Ctrl-C before the text begins."""
    status, out, err = interact(b"The cat\nThe dog\n", "--num-beams", "1000", "--max-new-tokens", "2")
    assert status == 2 and not out and err.count("error: n_beams is 1000; for a vocabulary of 280 it must be") == 2
    monkeypatch.setattr(Completer, "encode", lambda *_: signal.raise_signal(signal.SIGINT) or [1])
    monkeypatch.setattr(sample, "show_completions", lambda *args: print(args[-1].is_set()))
    assert interact(b"The cat\nThe dog\n")[:2] == (0, "True\nTrue\n")


def test_a_number_that_json_lacks_is_null():
    text, prompt = GeneratedText(BYTES), Prompt("p", "the prompt")
    text.tokens, text.logprobs, text.top_logprobs = [65], [-np.inf], [[(1, np.nan)]]
    row = Completion(prompt, 0, 0, text).as_row()
    assert row["logprobs"] == [None] and row["top_logprobs"] == [[(1, None)]]
    assert Completion(prompt, 0, 0, text, score=-np.inf).as_row()["score"] is None


def test_a_logit_bias_is_of_one_token():
    a, equals, space = (BYTES.encode(text)[0] for text in "a= ")
    assert encode_logit_bias(["a=1.5", "==-2", " =3"], BYTES) == ((a, 1.5), (equals, -2.0), (space, 3.0))
    for option, message in (("a", "not of the form"), ("=1", "not of the form"), ("a=b", "not of the form"),
                            ("ab=1", "'ab' is 2 tokens of this run, 'a', 'b'"), ("\udcff=1", "surrogate")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            encode_logit_bias([option], BYTES)


def test_bad_words_are_banned_with_and_without_a_leading_space():
    assert encode_bad_words(["ab", " c", "ab"], BYTES) == tuple(tuple(BYTES.encode(t)) for t in ("ab", " ab", " c"))


def test_every_field_of_sampling_is_an_option(capsys):
    from jaxformer.decode import Sampling

    with pytest.raises(SystemExit):
        sample.main(["--help"])
    printed = capsys.readouterr().out
    for field in dataclasses.fields(Sampling):
        assert f"--{field.name.replace('_', '-')}" in printed or field.name == "n_tokens"  # the run's own


@pytest.mark.slow
def test_every_token_within_the_context_is_explained(rows, capsys):
    """The probability is the model's own, whatever the sampler did with it. This model has 16 positions."""
    options = ["--prompt", "The cat", "--explain", "--top-k", "2", "--temperature", "1.5", "--max-new-tokens", "24"]
    (row,) = rows(*options)
    explained, room = row["explained"], 16 - len(load_run("runs/quick").tokenizer.encode("The cat"))
    left_out = len(row["tokens"]) - room
    assert len(explained) == room and left_out > 0
    said = [np.log(r["probability"]) for r in explained]
    np.testing.assert_allclose(said, row["logprobs"][:room], rtol=1e-3, atol=1e-4)
    for r in explained:
        assert len(r["alternatives"]) == 3 and len(r["attended"]) >= 1
        assert 0 < r["entropy"] < np.log(280)

    assert sample.main(options) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:3] == ["token", "probability", "entropy"])
    *printed, last = lines[head + 1 :]
    assert len(printed) == room and all(line.startswith(("  '", '  "')) for line in printed)
    assert last == f"  {left_out} more, past the context, are not explained"
