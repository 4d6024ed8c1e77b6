"""Studies: what they compute, and that pages show what they stored."""

import json
import shlex
import signal
import sys
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import record
from jaxformer.cli import train
from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import CommandLine
from jaxformer.cli.train import Arguments
from jaxformer.config import TokenModelConfig
from jaxformer.config.files import load_module
from jaxformer.train.log import read_metrics
from studies import ladder as reduced_ladder
from studies import margins, modalities, recipe, sources, width_transfer
from studies.ladder import Row, Study, studies
from studies.width_transfer import FACTOR, best_rate, section
from tests.helpers import ROOT, write_books

RESULTS = ROOT / "studies/results"
MARKS = "<!-- outcomes of studies/sources.py -->\n", "<!-- end of outcomes -->\n"


@pytest.mark.parametrize(
    ("page", "marks", "expected"),
    [
        ("alternatives", MARKS, lambda: sources.table(sources.read_outcomes(RESULTS / "sources.json"))),
        (
            "alternatives", (recipe.BEGIN, recipe.END),
            lambda: recipe.section(recipe.read("recipe"), recipe.read("recipe_trials")),
        ),
        ("measurements", (width_transfer.BEGIN, width_transfer.END), lambda: section(recipe.read("width_transfer"))),
    ],
    ids=["sources", "recipe", "width_transfer"],
)  # fmt: skip
def test_pages_show_the_stored_outcomes(page, marks, expected):
    shown = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split(marks[0])[1].split(marks[1])[0]
    assert shown == f"\n{expected()}\n"


@pytest.mark.slow
def test_outcomes_of_the_sources_size_are_stored_and_fill_the_page(tmp_path, monkeypatch):
    page = tmp_path / "alternatives.md"
    page.write_text(f"before\n{''.join(MARKS)}after\n")
    run, options = tmp_path / "runs/mlp_rowwise", [
        "--data.path", str(write_books(tmp_path / "books")), "--model.vocab-size", "280", "--model.context-length", "8",
        "--model.d-model", "8", "--model.d-ff", "8", "--train.batch-size", "32", "--train.eval-examples", "8",
        "--train.report-every", "0", "--train.eval-every", "2", "--steps", "2",
    ]  # fmt: skip
    here = lambda *_: train.main(["--config", "ladder:mlp_rowwise", "--run", str(run), *options])  # noqa: E731
    monkeypatch.setattr(sources, "train", here)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers are those of the tests
    own = ["--folder", str(run.parent), "--results", str(tmp_path), "--rungs", "mlp_rowwise"]
    monkeypatch.setattr(sys, "argv", ["sources.py", *own, *options])
    assert sources.main() == 0
    rungs = json.loads((tmp_path / "sources.json").read_text())["figures"]["rungs"]
    ended = {name: (x["steps"], x["ended"], x["device"]) for name, x in rungs.items()}
    assert ended == {"mlp_rowwise": (2, True, "cpu, float32")}
    last = read_metrics(run)[-1]
    assert f"| {last['val_ppl']:.2f} | {last['val_bpb']:.3f} |" in page.read_text()
    assert page.read_text() == f"before\n{MARKS[0]}\n{sources.table(rungs)}\n{MARKS[1]}after\n"


@pytest.mark.slow
def test_rows_of_the_studies_of_the_ladder_are_runs():
    small = load_module("ladder_small")
    for name, study in studies().items():
        for label, row in study.rows.items():
            arguments = Arguments(load_config(f"ladder:{row.config}"))
            words = shlex.split(f"{study.options} {row.options}")
            config = CommandLine(words).parse(arguments, "ladder", "").run_config
            assert isinstance(config.model, TokenModelConfig) and config.model.vocab_size == 512, (name, label)
            assert config != arguments.run_config
            if name == "ladder":
                assert config == getattr(small, row.config)


@pytest.mark.slow
def test_outcomes_of_a_study_are_stored_and_trained_once(tmp_path, monkeypatch):
    options = (
        "--model.vocab-size 280 --model.context-length 8 --model.d-model 8 --model.d-ff 12 --train.batch-size 32 "
        "--train.eval-examples 4 --train.sample-tokens 2 --steps 2 --train.eval-every 1 --train.report-every 1"
    )
    later = Row("residual", "--train.skip-batches 1", "later batches", "1.txt")  # of programs that are compiled already
    study = Study(options, {"books": Row("residual"), "later": later}, continues=True, curves=True)
    here = lambda command: SimpleNamespace(returncode=train.main(command[4:]))  # noqa: E731
    monkeypatch.setattr(reduced_ladder, "subprocess", SimpleNamespace(run=here))
    monkeypatch.setattr(reduced_ladder, "studies", lambda: {"ladder": study})
    monkeypatch.setattr("sys.argv", [
        "ladder", "--seeds", "0", "--folder", str(tmp_path / "runs"), "--results", str(tmp_path),
        "--data.path", str(write_books(tmp_path / "books")),
    ])  # fmt: skip
    assert reduced_ladder.main() == 0
    stored = json.loads((tmp_path / "ladder.json").read_text())["figures"]
    rows = stored["ladder"]["rows"]
    assert list(rows) == ["books", "later"] and rows["later"]["0"]["change"] == "later batches"
    assert rows["books"]["0"]["loss"] != rows["later"]["0"]["loss"] and rows["books"]["0"]["steps"] == 2
    assert len(stored["ladder"]["continuations"]["later"]) == 6
    counts = {name: row["0"]["loss"] for name, row in stored["counts"]["rows"].items()}
    assert 0 < counts["pairs"] < counts["tokens"] < np.log(280)
    assert [point["step"] for point in rows["later"]["0"]["curve"]] == [1, 2]
    tokenizers = {(tmp_path / f"runs/ladder/seed-0/{row}/tokenizer.json").read_bytes() for row in rows}
    assert len(tokenizers) == 1  # one book is read in the tokens of all, so that losses can be compared
    monkeypatch.setattr(reduced_ladder, "has_ended", lambda _: True)
    monkeypatch.setattr(reduced_ladder, "subprocess", None)  # by which it would be trained again
    assert reduced_ladder.main() == 0


def test_counts_are_probabilities_and_know_what_was_counted():
    train = np.array([0, 1, 2] * 20 + [0, 1, 1])
    p = np.stack([modalities.ngrams(3, 3, train, np.array([0, 1, x]))((3, 2.0))[2] for x in range(3)])
    np.testing.assert_allclose(p.sum(), 1)
    unigram = (np.array([21, 22, 20]) + 2 / 3) / 65
    bigram = (np.array([0, 2, 20]) + 2 * unigram) / 24  # after 1; the last 1 is followed by nothing
    assert p.argmax() == 2 and bigram[2] < p[2] < 1
    lagged = modalities.repetition(3, train, np.array([0, 1, 2, 0, 1, 2]))(3)
    assert (lagged[3:] > 0.9).all()


@pytest.mark.slow
def test_a_block_is_measured_beside_counts_on_a_periodic_sequence(monkeypatch):
    monkeypatch.setattr(modalities, "BLOCKS", replace(modalities.BLOCKS, n_blocks=1))
    tokens = np.where(np.arange(4000) % 5, np.random.default_rng(0).integers(3, size=4000), 3)
    data = modalities.sequences([tokens])
    assert len(data.train) == 3201 and len(data.held_out) == 801 and data.held_out[0] == data.vocab_size - 1 == 4
    figures = modalities.measure(modalities.Modality(lambda: data, 5), steps=5, seeds=1)
    assert figures["options"]["lag"] % 5 == 0 and figures["training_tokens"] == 2800
    assert figures["bits"]["repeat"] < figures["bits"]["unigram"] and len(figures["model"]) == 1
    assert len(figures["reading"]["map"]) == 16 and len(figures["reading"]["map"][0]) == modalities.T


def test_windows_of_pieces_begin_with_a_separator_and_score_all_tokens():
    pieces = [np.full(modalities.T, i % 3) for i in range(10)]
    data = modalities.sequences(pieces, np.arange(4) - 0.5, windows_are_pieces=True)
    indices, is_scored = modalities.windows(data.held_out, data.piece)
    assert (data.held_out[indices][:, 0] == 3).all() and len(indices) == 2 and is_scored.all()
    indices, is_scored = modalities.windows(np.arange(1000), 0)
    assert (np.diff(indices[:, 0]) == modalities.T // 2).all() and is_scored.sum() == modalities.T // 2


def test_best_learning_rate_is_the_minimum_of_the_parabola() -> None:
    losses = {0.01 * FACTOR**k: 4 + 0.3 * (log(FACTOR**k) - 0.1) ** 2 for k in range(-1, 2)}
    expected = pytest.approx((0.01 * 2.718281828**0.1, 4))
    assert best_rate(losses) == best_rate(losses | {0.1: 9.8, 1.0: None}) == expected
    assert best_rate(dict(list(losses.items())[:2])) is best_rate({1.0: None}) is None
    diverged = {rate: None if rate > 0.0101 else value for rate, value in losses.items()}
    assert best_rate(diverged) == (0.01, losses[0.01])
    assert best_rate(dict.fromkeys((1.0, 2.0, 3.0, 4.0), 5.0) | {1.0: 6.0}) is not None


@pytest.mark.slow
def test_trainings_are_stored_once_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rung: Any = load_config(width_transfer.RUNG)
    model = replace(rung.model, vocab_size=280, context_length=8, d_model=8, n_heads=2, d_ff=(12,))
    rung = replace(rung, model=model, optimizer=replace(rung.optimizer, learning_rate=0.1))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/measurements.md"
    page.write_text(width_transfer.BEGIN + width_transfer.END)
    monkeypatch.setattr(width_transfer.machine, "set_up", lambda: None)
    monkeypatch.setattr(width_transfer, "load_config", lambda _: rung)
    monkeypatch.setattr(width_transfer, "STEPS", 6)
    monkeypatch.setattr(width_transfer, "HELD_OUT", 8)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "abc")
    monkeypatch.setattr(record, "STUDY_RESULTS", tmp_path)
    folder = tmp_path / "runs"
    own = ["--data.path", str(write_books(tmp_path / "books")), "--widths", "8", "--seeds", "1"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["width_transfer", "train", "--folder", str(folder), *own])
        assert width_transfer.main() == 0
    lines = capsys.readouterr().out.splitlines()
    files = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert len([line for line in lines if "seed 0" in line]) == len(files) >= 3
    assert {(x["rule"], x["width"]) for x in files} == {("fixed", 8)}
    assert {x["targets"] for x in files} == {6 * 8 * 8}
    monkeypatch.setattr(sys, "argv", ["width_transfer", "write", "--folder", str(folder)])
    assert width_transfer.main() == 0
    figures = json.loads((tmp_path / "width_transfer.json").read_text())["figures"]
    assert section(figures) in page.read_text()
    widths = figures["rules"]["scaled"]["widths"]
    assert widths.keys() == {"8"} and all(x["loss"] < 3 for x in widths.values())  # log(280) is 5.63


def test_excursion_is_measured_from_the_smallest_mean_before_it() -> None:
    excursion = margins.excursion
    losses = np.array([9.0, 5.0, 8.0, 4.0, 4.5, 3.0, 3.75])
    assert excursion(losses, 1, 0) == 3.0  # 8 after 5
    assert excursion(losses, 1, 2) == 0.75  # 3.75 after 3; before, 4.5 after 4
    assert excursion(losses, 2, 1) == 0.0  # means 6.5, 6, 4.25, 3.75, 3.375
    assert excursion(losses, 1, 4) == 3.0  # a warm-up that ends too late to leave half of the steps counts, too
    assert excursion(np.array([3.0, np.nan, 2.0]), 1, 0) == np.inf
