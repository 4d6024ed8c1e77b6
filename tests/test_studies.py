"""Studies: what they compute, and that pages show what they stored."""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxformer.cli.arguments import load_config
from jaxformer.cli.options import CommandLine
from jaxformer.cli.train import Arguments
from jaxformer.config import TokenModelConfig
from jaxformer.config.files import load_module
from jaxformer.errors import UserError
from jaxformer.train.log import read_metrics
from studies import books, first_run, heads, modalities, sources
from studies import ladder as reduced_ladder
from studies.ladder import Row, Study, studies
from tests.helpers import ROOT, write_books

SOURCES = ROOT / "studies/sources.sh"
MARKS = "<!-- outcomes of studies/sources.py -->\n", "<!-- end of outcomes -->\n"


def own_devices() -> dict[str, str]:
    """Return the environment without the number of devices of the tests."""
    return {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}


def test_first_run_is_that_of_the_readme():
    train, sample = first_run.commands(first_run.README.read_text())
    assert train == ["train.py", "--config", "quick:modern"] and sample[:2] == ["sample.py", "--prompt"]
    log = "run a\ndata: b\nmodel: c\nstep 0 d\nupdate ratios\nstep 100 e\nstep 200 f\n"
    log += "step 300  g  1,500 tokens/s  2 min left\nfinal: h\n"
    assert first_run.shown(log) == ["data: b", "model: c", "step 0 d", "step 100 e", "step 300  g"]


def outcome(rung: str, steps: int, **changes: Any) -> dict[str, Any]:
    """Return the outcome of a rung as `sources.json` holds it."""
    return {
        "rung": rung, "parameters": 6_500_000, "steps": steps, "loss": 4.0, "perplexity": 54.598, "bits_per_byte": 2.4,
        "minutes": 12.34, "ended_early": "", "entropy": "1.17", "sources": "68.284", "of_steps": 10_644,
        "ended": steps == 10_644, "device": "NVIDIA H200",
    } | changes  # fmt: skip


def test_table_shows_what_is_stored():
    rungs = {
        "residual": outcome("residual", 10_644),
        "two_blocks": outcome("two_blocks", 3_400, perplexity=None, bits_per_byte=None, entropy=""),
        "four_blocks": outcome("four_blocks", 6, ended_early="not finite at step 6", ended=True),
    }
    _, rule, *lines = sources.table(rungs).splitlines()
    assert rule == "|" + "---|" * 9
    assert lines[0] == "| `residual` | 6,500,000 | 10,644 | 54.60 | 2.400 | 1.17 | 12.3 | NVIDIA H200 | 68.284 |"
    assert lines[1].startswith("| `two_blocks` | 6,500,000 | 3,400 of 10,644 | - | - | - |")
    assert lines[2].startswith("| `four_blocks` | 6,500,000 | not finite at step 6 |")


def test_page_of_the_ladder_shows_the_stored_outcomes_of_the_sources_size():
    page = (ROOT / "docs/alternatives.md").read_text()
    shown = page.split(MARKS[0])[1].split(MARKS[1])[0]
    assert shown == f"\n{sources.table(sources.read_outcomes(ROOT / 'studies/results/sources.json'))}\n"


def test_rung_that_has_not_gone_on_keeps_its_outcome():
    stored = {"residual": outcome("residual", 10_644), "multihead": outcome("multihead", 50)}
    new = {
        "mlp_concat": outcome("mlp_concat", 3, device="cpu"),
        "residual": outcome("residual", 10_644, device="cpu"),
        "multihead": outcome("multihead", 60, device="cpu"),
    }
    merged = sources.merge(stored, new, ["mlp_concat", "residual", "multihead", "rmsnorm"])
    assert {name: x["device"] for name, x in merged.items()} == {
        "mlp_concat": "cpu", "residual": "NVIDIA H200", "multihead": "cpu",
    }  # fmt: skip


def ladder(folder: Path, *options: str) -> subprocess.Popen:
    """Start `sources.sh` with results and a page in the folder."""
    environment = own_devices() | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [SOURCES, "--folder", folder / "runs", *options],
        env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.path", "books", "--steps", "4"], "mlp_rowwise has steps 4, the sources 10644; name a folder"),
        ([], "--data.path is missing"),
        (["--data.path", "books", "--seconds", "60"], "--seconds is 60; it must be above 60"),
        (["--data.path", "books", "--results", "wrong"], "sources.json holds no outcomes of the ladder"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(tmp_path, monkeypatch, capsys, options, message):
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong/sources.json").write_text('{"figures": {"rungs": {"residual": {"ru')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sources.py", *options])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers are those of the tests
    monkeypatch.setattr(sources, "train", lambda *_: pytest.fail("training began"))
    try:
        status = sources.main()
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "before", MARKS[0], MARKS[1] + MARKS[0]])
def test_page_without_its_marks_is_left_alone(tmp_path, text):
    page = tmp_path / "alternatives.md"
    page.write_text(text)
    with pytest.raises(UserError, match=r"alternatives\.md lacks the lines"):
        sources.fill_page(page, {})
    assert page.read_text() == text


@pytest.mark.exhaustive
def test_next_call_continues_where_the_time_was_over_and_fills_the_page(tmp_path):
    page = tmp_path / "alternatives.md"
    page.write_text(f"before\n{''.join(MARKS)}after\n")
    options = [
        "--results", str(tmp_path), "--rungs", "mlp_rowwise", "residual", "--data.path",
        str(write_books(tmp_path / "books")), "--model.vocab-size", "280", "--model.context-length", "8",
        "--model.d-model", "8", "--model.d-ff", "8", "--train.batch-size", "4", "--train.eval-examples", "8",
        "--train.report-every", "0", "--train.log-every", "1", "--train.eval-every", "10",
    ]  # fmt: skip
    first = ladder(tmp_path, "--seconds", "400", *options, "--steps", "100000")
    until, metrics = time.monotonic() + 240, tmp_path / "runs/mlp_rowwise/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 30:
        assert time.monotonic() < until and first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)  # stops as when the time is over
    out, err = first.communicate(timeout=120)
    assert first.returncode == 3, out + err
    saved = json.loads((tmp_path / "sources.json").read_text())["figures"]["rungs"]["mlp_rowwise"]["steps"]
    assert saved >= 29 and f"| `mlp_rowwise` | 4,896 | {saved:,} of 100,000 |" in page.read_text()

    second = ladder(tmp_path, "--seconds", "400", *options, "--steps", str(saved + 2))
    out, err = second.communicate(timeout=400)
    assert second.returncode == 0, out + err
    assert f"mlp_rowwise: resuming {tmp_path}/runs/mlp_rowwise" in out
    rungs = json.loads((tmp_path / "sources.json").read_text())["figures"]["rungs"]
    ended = (saved + 2, True, "cpu, float32")
    assert {name: (x["steps"], x["ended"], x["device"]) for name, x in rungs.items()} == {
        "mlp_rowwise": ended, "residual": ended,
    }  # fmt: skip
    losses = [row["loss"] for row in read_metrics(metrics.parent) if "loss" in row]
    assert len(losses) == saved + 2  # no step was lost or taken twice
    last = read_metrics(metrics.parent)[-1]
    assert f"| {last['val_ppl']:.2f} | {last['val_bpb']:.3f} |" in page.read_text()
    assert page.read_text() == f"before\n{MARKS[0]}\n{sources.table(rungs)}\n{MARKS[1]}after\n"


def test_books_are_copied_when_all_are_those_listed(tmp_path, monkeypatch, capsys):
    (tmp_path / "corpora/19C").mkdir(parents=True)
    (tmp_path / "corpora/19C/a.txt").write_bytes(b"text")
    digest = hashlib.sha256(b"text").hexdigest()
    listed = tmp_path / "books.tsv"
    listed.write_text(f"split\tsource_path\tbytes\tsha256\nval\t19C/a.txt\t4\t{digest}\n")
    monkeypatch.setattr(books, "LIST", listed)
    monkeypatch.setattr("sys.argv", ["books", str(tmp_path / "corpora"), str(tmp_path / "books")])
    assert books.main() == 0
    assert (tmp_path / "books/val/19C-a.txt").read_bytes() == b"text"
    shutil.rmtree(tmp_path / "books")
    with listed.open("a") as file:
        file.write(f"train\t19C/b.txt\t4\t{digest}\n")
    for content, said in ((None, "is missing; name a clone"), (b"text\r", "has 5 bytes that are not those listed")):
        if content:
            (tmp_path / "corpora/19C/b.txt").write_bytes(content)
        assert books.main() == 2
        assert said in capsys.readouterr().err and not (tmp_path / "books").exists()


def test_books_of_the_ladder_are_50_and_3():
    rows = books.LIST.read_text().splitlines()[1:]
    assert Counter(row.split("\t")[0] for row in rows) == {"train": 50, "val": 3}


@pytest.mark.slow
def test_rows_of_the_studies_of_the_ladder_are_runs():
    small = load_module("ladder_small")
    for name, study in studies().items():
        for label, row in study.rows.items():
            arguments = Arguments(load_config(f"ladder:{row.config}"))
            words = shlex.split(f"{study.options} {row.options}")
            config = CommandLine(words).parse(arguments, "ladder", "").fields
            assert isinstance(config.model, TokenModelConfig) and config.model.vocab_size == 512, (name, label)
            assert config != arguments.fields
            if name == "ladder":
                assert config == getattr(small, row.config)


@pytest.mark.exhaustive
def test_outcomes_of_a_study_are_stored_and_trained_once(tmp_path, monkeypatch):
    options = (
        "--model.vocab-size 280 --model.context-length 8 --model.d-model 8 --model.d-ff 12 --train.batch-size 8 "
        "--train.eval-examples 4 --train.sample-tokens 2 --steps 4 --train.eval-every 2 --train.report-every 2 "
        "--train.sharpness-every 2"
    )
    rope = Row("residual", "--model.positions rope", "RoPE", "1.txt")
    study = Study(options, {"books": Row("residual"), "rope": rope}, continues=True, curves=True, sharpness=True)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.setattr(reduced_ladder, "studies", lambda: {"ladder": study})
    monkeypatch.setattr("sys.argv", [
        "ladder", "--seeds", "0", "--folder", str(tmp_path / "runs"), "--results", str(tmp_path),
        "--data.path", str(write_books(tmp_path / "books")),
    ])  # fmt: skip
    assert reduced_ladder.main() == 0
    stored = json.loads((tmp_path / "ladder.json").read_text())["figures"]
    rows = stored["ladder"]["rows"]
    assert list(rows) == ["books", "rope"] and rows["rope"]["0"]["change"] == "RoPE"
    assert rows["books"]["0"]["loss"] != rows["rope"]["0"]["loss"] and rows["books"]["0"]["steps"] == 4
    assert len(stored["ladder"]["continuations"]["rope"]) == 6
    counts = {name: row["0"]["loss"] for name, row in stored["counts"]["rows"].items()}
    assert 0 < counts["pairs"] < counts["tokens"] < np.log(280)
    assert [point["step"] for point in rows["rope"]["0"]["curve"]] == [2, 4]
    curvature = rows["rope"]["0"]["sharpness"]
    assert list(curvature) == ["0", "2", "4"] and all(0 < value < 100 for value in curvature.values())
    tokenizers = {(tmp_path / f"runs/ladder/seed-0/{row}/tokenizer.json").read_bytes() for row in rows}
    assert len(tokenizers) == 1  # one book is read in the tokens of all, so that losses can be compared
    monkeypatch.setattr(reduced_ladder, "has_ended", lambda _: True)
    monkeypatch.setattr(reduced_ladder.sys, "executable", "no-python")  # which would be run to train again
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


def test_linear_prediction_of_a_line_is_sharp_and_sums_to_one():
    edges = np.arange(12) - 0.5
    train = np.tile(np.arange(11), 20)  # each value is one more than the one before, but for the jump back
    after = [modalities.linear(edges, train, np.array([4, 5, x]))(1)[2] for x in range(11)]
    np.testing.assert_allclose(sum(after), 0.99 + 0.01 * 11 / 12)  # the rest is the separator's
    assert 5 <= np.argmax(after) <= 7


def test_a_block_is_measured_beside_counts_on_a_periodic_sequence():
    tokens = np.where(np.arange(4000) % 5, np.random.default_rng(0).integers(3, size=4000), 3)
    data = modalities.sequences([tokens])
    assert len(data.train) == 3201 and len(data.held_out) == 801 and data.held_out[0] == data.vocab_size - 1 == 4
    figures = modalities.measure(modalities.Modality(lambda: data, 5), steps=5, seeds=2)
    assert figures["options"]["lag"] % 5 == 0 and figures["training_tokens"] == 2800
    assert figures["bits"]["repeat"] < figures["bits"]["unigram"] and len(figures["model"]) == 2
    assert len(figures["reading"]["map"]) == 16 and len(figures["reading"]["map"][0]) == modalities.T


def test_windows_of_pieces_begin_with_a_separator_and_score_all_tokens():
    pieces = [np.full(modalities.T, i % 3) for i in range(10)]
    data = modalities.sequences(pieces, np.arange(4) - 0.5, windows_are_pieces=True)
    indices, is_scored = modalities.windows(data.held_out, data.piece)
    assert (data.held_out[indices][:, 0] == 3).all() and len(indices) == 2 and is_scored.all()
    indices, is_scored = modalities.windows(np.arange(1000), 0)
    assert (np.diff(indices[:, 0]) == modalities.T // 2).all() and is_scored.sum() == modalities.T // 2
