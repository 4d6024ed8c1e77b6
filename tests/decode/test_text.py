"""Text in, text out: what `generate` returns is what sample.py prints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import jaxformer
from jaxformer import UserError, generate, load_run
from jaxformer.cli import sample
from tests.runs.random_runs import saved_run

PROMPTS = ["The cat", "A king sees the"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_run(tmp_path_factory.mktemp("runs") / "a", ["The cat sees the king. A king sees the sea."])


@pytest.fixture(scope="module")
def run(path: Path) -> jaxformer.Run:
    return load_run(path)


@pytest.mark.slow
def test_generated_texts_are_those_of_the_command(run, path, capsys):
    texts = generate(run, PROMPTS, max_new_tokens=7, seed=3, top_p=0.9)
    options = ["--run", str(path), "--seed", "3", "--max-new-tokens", "7", "--top-p", "0.9", "--jsonl"]
    assert sample.main([*options, "--prompt", *PROMPTS]) == 0
    assert texts == [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_settings_of_a_run_are_used_unless_given(run):
    greedy = generate(run, PROMPTS[0], max_new_tokens=7, temperature=0)
    assert generate(replace(run, sampling={"temperature": 0}), PROMPTS[0], max_new_tokens=7, seed=1) == greedy
    assert generate(run, PROMPTS[0], max_new_tokens=7, seed=1) != greedy


def test_wrong_options_are_named(run):
    with pytest.raises(TypeError, match=r"generate\(\) has no option 'temprature'; did you mean 'temperature'"):
        generate(run, "a", temprature=0.5)
    with pytest.raises(TypeError, match=r"expected a run, got a str; generate\(load_run\(path\), text\)"):
        generate("runs/quick", "The cat")
    with pytest.raises(UserError, match="system has no effect without a chat; omit it, or give chat=True"):
        generate(run, "The cat", system="Be brief.")
    for temperature in ("0.5", True):
        with pytest.raises(UserError, match=f"temperature`? is {temperature}; it must be at least 0"):
            generate(run, "The cat", temperature=temperature)
    with pytest.raises(UserError, match="`max_new_tokens` is 0; it must be at least 1"):
        generate(run, "a", max_new_tokens=0)
    with pytest.raises(UserError, match="prompt 2 is empty"):
        generate(run, ["a", ""])
    with pytest.raises(TypeError, match="a prompt must be a text, got int; for tokens, see"):
        generate(run, [5, 6])
    assert generate(run, []) == []
    with pytest.raises(TypeError, match="a draft is 'lookup' here"):
        generate(run, "a", draft="runs/b")
