"""Studies: what they compute, and that pages show what they stored."""

import hashlib
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
from configs import ladder as ladder_rungs
from jaxformer.cli import train
from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import CommandLine
from jaxformer.cli.train import Arguments
from jaxformer.config import TokenModelConfig
from jaxformer.config.files import load_module
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.runs.run import create_run
from jaxformer.train.log import read_metrics
from studies import books, heads, margins, modalities, recipe, sources, width_transfer
from studies import ladder as reduced_ladder
from studies.divergence import judge
from studies.ladder import Row, Study, studies
from studies.width_transfer import FACTOR, best_rate, config_at, outcomes, section
from tests.helpers import ROOT, write_books

RESULTS = ROOT / "studies/results"
LAST = [*ladder_rungs.RECIPE][-1]
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
def test_outcomes_of_another_size_are_not_stored_as_the_sources(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sources.py", "--data.path", "books", "--steps", "4"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers are those of the tests
    monkeypatch.setattr(sources, "train", lambda *_: pytest.fail("training began"))
    assert sources.main() == 2 and "steps 4" in capsys.readouterr().err


def test_rung_that_has_not_gone_on_keeps_its_outcome():
    outcome = lambda steps, device: {"steps": steps, "ended": steps == 90, "device": device}  # noqa: E731
    stored = {"residual": outcome(90, "gpu"), "multihead": outcome(50, "gpu")}
    new = {"mlp_concat": outcome(3, "cpu"), "residual": outcome(90, "cpu"), "multihead": outcome(60, "cpu")}
    merged = sources.merge(stored, new, ["mlp_concat", "residual", "multihead", "rmsnorm"])
    assert [(name, x["device"]) for name, x in merged.items()] == [
        ("mlp_concat", "cpu"), ("residual", "gpu"), ("multihead", "cpu"),
    ]  # fmt: skip


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


def test_books_are_copied_when_all_are_those_listed(tmp_path, monkeypatch, capsys):
    corpus, digest = tmp_path / "corpora/19C", hashlib.sha256(b"text").hexdigest()
    corpus.mkdir(parents=True)
    (corpus / "a.txt").write_bytes(b"text")
    listed = tmp_path / "books.tsv"
    rows = f"val\t19C/a.txt\t4\t{digest}\ntrain\t19C/b.txt\t4\t{digest}\n"
    listed.write_text(f"split\tsource_path\tbytes\tsha256\n{rows}")
    monkeypatch.setattr(books, "LIST", listed)
    monkeypatch.setattr(sys, "argv", ["books", str(tmp_path / "corpora"), str(tmp_path / "books")])
    for content, said in ((None, "is missing; name a clone"), (b"texs", "has 4 bytes that are not those listed")):
        if content:
            (corpus / "b.txt").write_bytes(content)
        assert books.main() == 2
        assert said in capsys.readouterr().err and not (tmp_path / "books").exists()
    (corpus / "b.txt").write_bytes(b"text")
    assert books.main() == 0
    assert all((tmp_path / "books" / name).read_bytes() == b"text" for name in ("val/19C-a.txt", "train/19C-b.txt"))


@pytest.mark.slow
def test_rows_of_the_studies_of_the_ladder_are_runs():
    small = load_module("ladder_small")
    for name, study in studies().items():
        for label, row in study.rows.items():
            arguments = Arguments(load_config(row.config_option))
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


def test_variance_of_weights_is_explained_by_what_determines_them():
    rng = np.random.default_rng(0)
    group_N, half_N = rng.integers(5, size=4000), rng.random(4000) < 0.5
    weights_N = np.arange(5.0)[group_N]
    assert heads.explained(weights_N, group_N, half_N) == pytest.approx(1)
    assert heads.explained(weights_N + rng.normal(0, 2**0.5, 4000), group_N, half_N) == pytest.approx(0.5, abs=0.05)
    assert abs(heads.explained(rng.normal(size=4000), group_N, half_N)) < 0.01
    assert heads.preferred(weights_N, group_N, at_least=1, n=2) == [(4, 4.0), (3, 3.0)]
    assert [heads.CLASSES[heads.token_class(text)] for text in (" the", "ing", '."', "\n")] == [
        "begins a word", "continues a word", "punctuation", "punctuation",
    ]  # fmt: skip


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


def test_gains_are_of_the_same_seeds():
    def rung(before: str | None = None, **losses: float) -> dict:
        seeds = {s: [[400, 9.0], [800, x]] for s, x in losses.items()}
        return {"change": "", "before": before, "parameters": 1000, "seeds": seeds, "ended": {}}

    rungs = {"a": rung(s0=5.0, s1=5.2), "b": rung("a", s0=4.0, s1=4.4, s2=1.0), "d": rung("c", s0=3.5)}
    lines = recipe.table({"rungs": rungs, "ms_per_1000_targets": {"a": [3.0, 1.0, 2.0]}}).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[5:-1]] for line in lines]  # seeds, loss, gain, time
    assert cells == [
        ["2", "5.100 ± 0.141", "-", "2"], ["3", "3.133 ± 1.858", "0.900 ± 0.141", "-"], ["1", "3.500", "-", "-"],
    ]  # fmt: skip


@pytest.mark.slow
def test_outcomes_are_those_of_ended_runs(tmp_path: Path) -> None:
    def write(seed: int, *rows: dict) -> None:
        config = replace(load_config(f"ladder:{LAST}"), seed=seed)
        run = create_run(tmp_path / f"seed-{seed}" / LAST, config, Tokenizer.train([], 257), allow_suffix=False)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if rows[-1]["step"] == config.steps:
            (run / f"checkpoints/{config.steps}").mkdir(parents=True)

    last = load_config(f"ladder:{LAST}")
    model: Any = last.model
    steps, per_step = last.steps, last.train.batch_size * model.context_length
    write(0, {"step": 2, "val_loss": 5.5}, {"step": steps, "val_loss": 4.5})
    write(1, {"step": 2, "val_loss": 5.6})
    assert recipe.outcomes(tmp_path)[LAST]["seeds"] == {"0": [[2 * per_step, 5.5], [steps * per_step, 4.5]]}
    write(2, {"step": 7, "diverged": {"began": 3}})
    with pytest.raises(UserError, match=f"seed-2/{LAST} diverged at step 3, which no rung"):
        recipe.outcomes(tmp_path)


def test_widths_have_heads_of_one_width_and_mlps_in_proportion() -> None:
    wide, same, narrow = (config_at(width, "scaled", "books", None, 0) for width in (256, 128, 64))
    rung: Any = load_config(width_transfer.RUNG)
    for config, factor in ((wide, 2), (same, 1), (narrow, 1 / 2)):
        model: Any = config.model
        assert (model.width_of_head, model.n_heads) == (64, 2 * factor)
        assert model.d_ff == (1680 * factor,) and model.unembedding_std == pytest.approx(128**-0.5 / factor)
        fixed = config_at(model.d_model, "fixed", "books", None, 0)
        assert fixed == replace(
            config, optimizer=replace(config.optimizer, base_width=None), model=replace(model, unembedding_std=None)
        )
    assert (wide.optimizer.base_width, same.optimizer.base_width) == (rung.model.d_model, None)
    with pytest.raises(UserError, match="the width 100 is no multiple of 64"):
        config_at(100, "fixed", "books", None, 0)


def test_best_learning_rate_is_the_minimum_of_the_parabola() -> None:
    losses = {0.01 * FACTOR**k: 4 + 0.3 * (log(FACTOR**k) - 0.1) ** 2 for k in range(-1, 2)}
    expected = pytest.approx((0.01 * 2.718281828**0.1, 4))
    assert best_rate(losses) == best_rate(losses | {0.1: 9.8, 1.0: None}) == expected
    assert best_rate(dict(list(losses.items())[:2])) is best_rate({1.0: None}) is None
    diverged = {rate: None if rate > 0.0101 else value for rate, value in losses.items()}
    assert best_rate(diverged) == (0.01, losses[0.01])
    assert best_rate(dict.fromkeys((1.0, 2.0, 3.0, 4.0), 5.0) | {1.0: 6.0}) is not None


def test_best_of_each_seed_and_the_largest_ratio_of_widths_are_stored():
    def pieces(rule: str, width: int, seed: int, best: float) -> list[dict[str, Any]]:
        rates = (0.9 * best * FACTOR**k for k in (-1, 0, 1))
        x = {"rule": rule, "width": width, "seed": seed, "parameters": 9}
        return [x | {"learning_rate": rate, "loss": 4 + log(rate / best) ** 2} for rate in rates]

    measured = [
        *pieces("fixed", 64, 0, 0.02), *pieces("fixed", 128, 0, 0.005), *pieces("fixed", 128, 1, 0.02),
        *pieces("scaled", 64, 0, 0.008), *pieces("scaled", 256, 0, 0.008)[:2],
    ]  # fmt: skip
    rules = outcomes(measured, base_width=128)["rules"]
    assert list(rules["scaled"]["widths"]) == ["64", "128"]  # 256 is incomplete; the base width has one rule
    assert rules["fixed"]["widths"]["128"]["mean"] == pytest.approx(0.01)  # of 0.005 and 0.02
    assert [rules[name]["ratio"] for name in ("fixed", "scaled")] == pytest.approx([2, 1.25])


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


@pytest.mark.parametrize(
    ("diverges", "losses", "noticed", "outcome"),
    [
        (True, [5.0, 9.0, 9.0], 3, "detected in time"),
        (True, [5.0, *[9.0] * 30], 30, "WRONG"),
        (True, [5.0, 9.0, 9.0], None, "WRONG"),
        (True, [5.0, 5.1, 4.9], None, "did not diverge"),
        (True, [5.0, 5.1, 4.9], 2, "WRONG"),
        (False, [5.0, 5.1, 4.9], None, "not stopped"),
        (False, [5.0, 9.0, 4.9], 2, "WRONG"),
    ],
)
def test_a_run_that_never_diverged_is_not_counted_as_noticed(diverges, losses, noticed, outcome):
    notices = [] if noticed is None else [{"step": noticed, "reason": ""}]
    piece = {"rows": [[x, 1.0, 1.0] for x in losses], "not_finite": None, "noticed": notices, "diverges": diverges}
    assert judge(piece)["outcome"] == outcome
