"""`python -m jaxformer ladder`."""

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.ladder import REPORTED
from jaxformer.cli import ladder
from jaxformer.cli.arguments import load_config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.runs import create_run
from tests.helpers import ROOT, exhaustive, write_books

SMALL = [
    "--model.vocab-size", "280", "--model.context-length", "8", "--model.d-model", "8", "--model.d-ff", "12",
    "--train.batch-size", "4", "--train.eval-examples", "4", "--train.sample-tokens", "2", "--steps", "4",
    "--train.log-every", "2", "--train.eval-every", "2", "--train.checkpoint-every", "2", "--train.report-every", "4",
]  # fmt: skip


def run_of(folder: Path, name: str, rows: list[dict], broken: int | None = None) -> None:
    """A rung's folder as training leaves it, without its checkpoints."""
    config = load_config(f"{ROOT}/configs/ladder.py:{name}")
    place = create_run(folder / name, config, Tokenizer.train([], 257), allow_suffix=False)
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if broken is not None:
        (place / f"autopsy/step-{broken}").mkdir(parents=True)


def test_a_table_is_what_the_logs_say(tmp_path):
    final = {
        "step": 10_644,
        "val_loss": 4.0,
        "val_ppl": math.exp(4),
        "val_bpb": 1.5,
        "entropy": [[1.2345, 0.5], [0.25]],
    }
    run_of(tmp_path, "residual", [{"step": 0, "val_loss": 8.0}, final | {"step_ms": 2.0}])
    run_of(
        tmp_path,
        "four_blocks",
        [
            {"step": 0, "val_loss": 7.0},
            {"step": 4, "note": "other data"},
            {"step": 5, "val_loss": None, "entropy": [[None, 1.0]], "step_ms": 10.0},
        ],
        broken=6,
    )
    table = [ladder.outcome(tmp_path / name, REPORTED[name]) for name in ("residual", "four_blocks")]
    residual, four = table
    assert (residual.parameters, residual.steps, residual.loss, residual.ended_early) == (6_500_608, 10_644, 4.0, "")
    assert residual.entropy == "1.23 0.5; 0.25" and residual.sources.startswith("68.284")
    assert residual.minutes == pytest.approx(10_644 * 2 / 60_000)
    assert (
        four.ended_early == "not finite at step 6"
        and math.isnan(four.loss)
        and four.steps == 5
        and four.entropy == "- 1"
    )
    assert four.minutes == pytest.approx(50 / 60_000)
    assert ladder.ended(tmp_path / "four_blocks") and not ladder.ended(tmp_path / "residual")  # nothing is saved

    ladder.write(table, tmp_path)
    rows = list(csv.DictReader((tmp_path / "ladder.csv").read_text().splitlines()))
    assert [row["rung"] for row in rows] == ["residual", "four_blocks"]
    assert float(rows[0]["perplexity"]) == pytest.approx(math.exp(4)) and rows[1]["loss"] == ""
    page = (tmp_path / "ladder.html").read_text()
    assert f'data-value="{math.exp(4)!r}">54.6<' in page and "<td>not finite at step 6</td>" in page
    assert '"y":[8.0,4.0]' in page  # the curve
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    text = ladder.as_text(table).splitlines()
    assert max(map(len, text)) <= 100 and [line.split()[0] for line in text[:3]] == ["rung", "residual", "four_blocks"]
    assert text[-2] == "residual     1.23 0.5; 0.25 | 68.284; entropy 1.16 to 1.18"
    assert text[-1] == "four_blocks  - 1 | NaN before step 100"


def test_a_rung_that_diverged_has_ended_where_it_began_to(tmp_path):
    event = {"step": 130, "diverged": {"step": 130, "began": 118, "loss": 9.0, "minimum": 5.0, "minimum_step": 117}}
    rows = [{"step": 0, "val_loss": 7.0}, {"step": 100, "val_loss": 5.5, "step_ms": 1.0}, event]
    run_of(tmp_path, "four_blocks", rows)
    four = ladder.outcome(tmp_path / "four_blocks", "")
    assert four.ended_early == "diverged at step 118" and math.isnan(four.loss) and four.steps == 130
    assert ladder.ended(tmp_path / "four_blocks")
    ladder.write([four], tmp_path)
    assert "four_blocks (diverged at step 118)" in (tmp_path / "ladder.html").read_text()


def test_a_run_on_the_way_has_not_ended(tmp_path):
    run_of(tmp_path, "residual", [{"step": 0, "val_loss": 8.0}, {"step": 50, "loss": 7.0, "step_ms": 1.0}])
    assert not ladder.ended(tmp_path / "residual")
    run_of(tmp_path, "two_blocks", [])
    assert not ladder.ended(tmp_path / "two_blocks")
    assert math.isnan(ladder.outcome(tmp_path / "two_blocks", "").loss)


@pytest.mark.slow
def test_rungs_are_trained_once_and_a_table_is_left(tmp_path, monkeypatch, capfd):
    write_books(tmp_path / "books")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    asked = ["--rungs", "residual", "mlp_rowwise", "--data.path", "books", *SMALL]
    assert ladder.main(asked) == 0
    said = capfd.readouterr().out
    assert said.index("mlp_rowwise: training in runs/ladder/mlp_rowwise") < said.index("residual: training in")
    table = {row["rung"]: row for row in csv.DictReader(Path("runs/ladder/ladder.csv").read_text().splitlines())}
    assert set(table) == {"mlp_rowwise", "residual"} and all(row["steps"] == "4" for row in table.values())
    assert 2 < float(table["residual"]["loss"]) < 7

    assert ladder.main(asked) == 0
    again = capfd.readouterr().out
    assert "residual: done before" in again and "training in" not in again
    assert again.splitlines()[-8:] == said.splitlines()[-8:]

    more = [*asked[: -len(SMALL)], *SMALL, "--optimizer.learning-rate", "0.5"]
    assert ladder.main(more) == 2
    said = capfd.readouterr().err
    assert "mlp_rowwise was trained with optimizer.learning_rate 0.05, and 0.5 is asked for now" in said
    shutil.rmtree("runs/ladder/residual/checkpoints/4")  # as if it had been killed before its last save
    assert ladder.main(asked) == 0
    assert "residual: going on in runs/ladder/residual" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rungs", "residul"], "there is no rung residul; there are mlp_rowwise"),
        (["--config", "configs/quick.py"], "the ladder says --config for each rung itself"),
        (["--folder", "configs/quick.py"], "--folder configs/quick.py is a file; name a folder."),
        (["--folder="], "--folder is empty; name a folder"),
        (["--run=x"], "the ladder says --run for each rung itself"),
        (["--name", "x"], "the ladder says --name for each rung itself"),
        (["--rungs", "residual", "--rungs", "rmsnorm"], "--rungs is given twice"),
        (["--rungs"], "--rungs"),
        (["--stepps", "3"], "unknown option --stepps; did you mean --steps?"),
        (["--rungs", "residual", "--steps", "0"], "steps is 0"),
    ],
)
def test_wrong_input_is_one_sentence(options, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert ladder.main(options) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert [place.name for place in tmp_path.iterdir()] == ["configs"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [exhaustive(signal.SIGINT), signal.SIGTERM])
def test_whoever_ends_the_ladder_ends_its_rung_which_saves(tmp_path, number):
    write_books(tmp_path / "books")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    options = [*SMALL[:-10], "--steps", "100000", "--train.checkpoint-every", "50000", "--train.eval-every", "50000"]
    command = [sys.executable, "-m", "jaxformer", "ladder", "--rungs", "residual", "--data.path", "books", *options]
    env = {name: x for name, x in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True, text=True)  # fmt: skip
    metrics, until = tmp_path / "runs/ladder/residual/metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C goes to all that the terminal started
    else:
        process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out
    assert "and saved; go on with" in out and "Traceback" not in out
    assert list((tmp_path / "runs/ladder/residual/checkpoints").glob("[0-9]*"))
