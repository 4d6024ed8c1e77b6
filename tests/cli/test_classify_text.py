"""A classifier of texts from training to labels, by the commands."""

import json
from pathlib import Path

import pytest

from jaxformer.cli import eval as evaluate
from jaxformer.cli import sample, train
from jaxformer.inspect.pages.model import _example
from jaxformer.runs.run import load_data, load_run, read_config

SMALL = [
    "--config", "classify", "--data.path", "x", "--model.context-length", "16", "--model.d-model", "16",
    "--model.n-blocks", "1", "--model.n-heads", "2", "--model.d-ff", "16", "--model.dropout", "0",
    "--model.vocab-size", "270", "--train.batch-size", "8", "--steps", "30", "--optimizer.learning-rate", "0.01",
    "--optimizer.warmup-steps", "5", "--train.report-every", "0", "--train.eval-every", "0", "--run", "runs/x",
]  # fmt: skip


@pytest.mark.slow
def test_a_classifier_learns_evaluates_and_labels(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{i} is {'good' if i % 2 else 'bad'}\t{'yes' if i % 2 else 'no'}\n" for i in range(60)]
    Path("x.train.tsv").write_text("".join(lines[:40]))
    Path("x.val.tsv").write_text("".join(lines[40:]))
    assert train.main(SMALL) == 0
    assert "n_classes" not in capsys.readouterr().out  # two, as the config says
    assert evaluate.main(["--run", "runs/x"]) == 0
    assert "  100.0000% accuracy  20 targets" in capsys.readouterr().out

    assert sample.main(["--run", "runs/x", "--prompt", "99 is good", "98 is bad"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("99 is good: yes 0.9") and second.startswith("98 is bad: no 0.9")
    assert sample.main(["--run", "runs/x", "--prompt", "99 is good", "--jsonl"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["line"], row["prompt"], [name for name, _ in row["labels"]]) == (1, "99 is good", ["yes", "no"])
    assert sum(p for _, p in row["labels"]) == pytest.approx(1, abs=1e-3)

    tokens_T, valid_T = _example(load_run("runs/x"), "99 is good", None)  # of the page of inspect
    (inputs_BT, valid_BT), *_ = next(load_data(Path("runs/x"), read_config(Path("runs/x"))).val_batches(1))
    assert valid_T.all() and valid_BT[0, 0] and tokens_T[0] == inputs_BT[0, 0]

    for options, said in (
        ([], "there is nothing for text classification; give --prompt or --prompts-file"),
        (["--prompt", "good " * 16], "tokens; it may have at most 16, one before the text included"),
        (["--prompt", "good", "--temperature", "0"], "--temperature does not apply to text classification"),
    ):
        assert sample.main(["--run", "runs/x", *options]) == 2
        printed = capsys.readouterr()
        assert said in printed.err and printed.err.count("\n") == 1


@pytest.mark.slow
def test_a_token_classifier_learns_evaluates_and_labels_each_token(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [("Anna B" if i % 2 else "he O", "Rome B" if i % 3 else "it O") for i in range(60)]
    texts = [f"{first}\nsaw O\n{last}\n\n" for first, last in words]
    Path("x.train.tsv").write_text("".join(texts[:40]))
    Path("x.val.tsv").write_text("".join(texts[40:]))
    options = ["classify:tokens" if option == "classify" else option for option in SMALL]
    assert train.main(options) == 0
    assert evaluate.main(["--run", "runs/x"]) == 0
    assert "  100.0000% accuracy  60 targets" in capsys.readouterr().out
    assert sample.main(["--run", "runs/x", "--prompt", "he saw Rome", "--jsonl"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert "".join(text for text, _ in row["tokens"]) == "he saw Rome"
    best = {text.strip(): ranking[0][0] for text, ranking in row["tokens"]}
    assert best == {"he": "O", "saw": "O", "Rome": "B"} and len(row["tokens"][0][1]) == 2
    assert sample.main(["--run", "runs/x", "--prompt", "he saw it"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "he saw it" and [line.split()[-2] for line in lines[1:]] == ["O"] * 3
    assert sample.main(["--run", "runs/x", "--prompt", "he", "--temperature", "0"]) == 2
    assert "--temperature does not apply to token classification" in capsys.readouterr().err
