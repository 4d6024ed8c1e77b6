"""Training the ladder from the command line."""

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxformer.cli import ladder
from jaxformer.inspect.pages.page import as_preformatted
from tests.helpers import ROOT, Here, write_books

SMALL = [
    "--model.vocab-size", "280", "--model.context-length", "8", "--model.d-model", "8", "--model.d-ff", "12",
    "--train.batch-size", "8", "--train.eval-examples", "8", "--train.sample-tokens", "2", "--steps", "4",
    "--train.log-every", "2", "--train.eval-every", "2", "--train.checkpoint-every", "2", "--train.report-every", "0",
]  # fmt: skip


@pytest.mark.slow
def test_rungs_are_trained_once_and_outcomes_are_written(tmp_path, monkeypatch, capfd):
    write_books(tmp_path / "books")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "subprocess", SimpleNamespace(Popen=Here))
    options = ["--rungs", "residual", "mlp_rowwise", "--data.path", "books", *SMALL]
    jax.config.update("jax_platforms", None)
    assert ladder.main(options) == 0
    assert jax.config.values["jax_platforms"] == "cpu"  # an accelerator is left to the processes that train
    said = capfd.readouterr().out
    assert said.index("mlp_rowwise: training in runs/ladder/mlp_rowwise") < said.index("residual: training in")
    table = {row["rung"]: row for row in csv.DictReader(Path("runs/ladder/ladder.csv").read_text().splitlines())}
    assert set(table) == {"mlp_rowwise", "residual"} and all(row["steps"] == "4" for row in table.values())
    assert 2 < float(table["residual"]["loss"]) < 7
    forecasts = json.loads(Path("runs/ladder/forecast.json").read_text())
    low, high = forecasts["residual"]["forecast"]["first_loss"]
    outcome, hit = forecasts["residual"]["score"]["first_loss"]
    assert said.index("residual: forecast: entropy") < said.index("residual: training in")
    assert hit is (low <= outcome <= high) and forecasts["mlp_rowwise"]["forecast"]["entropy"] == []
    assert f"{low:.4g} to {high:.4g}" in said and "Forecasts" in Path("runs/ladder/ladder.html").read_text()
    texts = [json.loads(Path("runs/ladder", rung, "continuations.json").read_text()) for rung in sorted(table)]
    prompts = [[(row["prompt"], row["temperature"]) for row in rows] for rows in texts]
    assert prompts[0] == prompts[1] and [t for _, t in prompts[0]] == [0.5] * 3 + [0.0] * 3
    books = " ".join(" ".join(file.read_text() for file in Path("books").iterdir()).split())
    assert all(prompt in books for prompt, _ in prompts[0]) and all(row["text"] for rows in texts for row in rows)
    assert as_preformatted(texts[1][0]["text"]) in Path("runs/ladder/ladder.html").read_text()

    assert ladder.main(options) == 0
    again = capfd.readouterr().out
    assert "residual: already trained" in again and "training in" not in again
    assert again.splitlines()[-8:] == said.splitlines()[-8:]

    more = [*options[: -len(SMALL)], *SMALL, "--optimizer.learning-rate", "0.5"]
    assert ladder.main(more) == 2
    said = capfd.readouterr().err
    assert "mlp_rowwise was trained with optimizer.learning_rate 0.1, not 0.5; choose another --folder" in said
    write_books(tmp_path / "others").joinpath("another.txt").write_text("The end. " * 50)
    assert ladder.main([word.replace("books", "others") for word in options]) == 2
    assert "the data differs from what this run was trained on" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rungs", "residul"], "--rungs is residul; name some of mlp_rowwise"),
        (["--config", "configs/quick.py"], "--config is set by the ladder for each rung"),
        (
            ["--folder", "configs/quick.py"],
            "--folder is 'configs/quick.py'; it must be a local folder, such as runs/mine.",
        ),
        (["--run=x"], "--run is set by the ladder for each rung"),
        (["--rungs"], "--rungs is empty; name some of mlp_rowwise"),
        (["--size", "large"], "--size is 'large'; it must be one of small, sources."),
        (["--rungs", "squared_relu", "--model.n-heads", "3"], "n_heads 3"),
    ],
)
def test_wrong_input_is_one_sentence(options, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert ladder.main(options) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]


def test_a_signal_ends_the_ladder_though_the_rung_has_reached_its_last_step(tmp_path, monkeypatch):
    ends_well = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); "
    ends_well += "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _: start([sys.executable, "-c", ends_well]))
    assert ladder._train(tmp_path / "rung", "", []) == 128 + signal.SIGTERM
