"""The log: rows on disk, lines in the terminal."""

import json
import shutil

import numpy as np
import pytest

from jaxformer.data.captions import CaptionDataset
from jaxformer.errors import UserError
from jaxformer.models.objective import OBJECTIVES
from jaxformer.train.log import (
    Log,
    TimeLeft,
    duration,
    format_row,
    read_metrics,
    truncate_log,
)
from tests.helpers import mounted

ROW = {"step": 0, "epoch": 0.0, "tokens": 0, "val_loss": 2.0, "val_ppl": 7.4, "val_bpb": 1.0, "entropy": [[1.0, 0.5]]}


def test_read_metrics_returns_logged_rows_with_null_for_non_finite_numbers(tmp_path):
    with Log(tmp_path, 0, 3) as log:
        log.row(ROW)
        log.row({"step": 1, "loss": float("inf")})
    assert read_metrics(tmp_path) == [ROW, {"step": 1, "loss": None}]


def test_metric_writers_receive_the_rows_of_the_file(tmp_path):
    received: list[dict] = []
    with Log(tmp_path, 0, 3, [received.append]) as log:
        log.row(ROW)
        log.row({"step": 1, "loss": float("nan"), "entropy": [[float("inf"), 0.5]]})
    assert received == read_metrics(tmp_path) == [ROW, {"step": 1, "loss": None, "entropy": [[None, 0.5]]}]


def test_format_row_shows_losses_throughput_and_time_left():
    text = {**ROW, "loss": 1.5, "ppl": 4.48, "val_accuracy": 0.25, "step_ms": 12.3, "tokens_per_s": 1234.5}
    assert format_row(text, ["3 min left"]) == (
        "step       0  loss 1.500  held-out 2.000 (1.000 bits/byte)  1,234 tokens/s  3 min left"
    )
    images = {"step": 1200, "epoch": 1.5, "examples": 9600, "val_loss": 0.5, "val_accuracy": 0.9}
    assert format_row(images) == "step   1,200  held-out 0.500 (90.0% accuracy)"


def test_rows_wrap_between_parts_within_100_columns():
    long = {"step": 100_000, "loss": 10.123, "val_loss": 10.123, "val_bpb": 3.123, "tokens_per_s": 1_234_567.0}
    shown = format_row({**ROW, **long}, ["12 h 05 min left", "and some more text"]).split("\n")
    assert shown[1].strip() == "and some more text" and max(map(len, shown)) <= 100


def test_time_left_is_smoothed_and_omitted_for_the_first_row():
    left = TimeLeft(1000)
    assert left({"step": 0, "val_loss": 1.0}) == left({"step": 10, "step_ms": 9000.0}) == []
    assert left({"step": 100, "step_ms": 100.0}) == ["2 min left"]
    assert left({"step": 110, "step_ms": 200.0}) == ["2 min left"]  # 0.12 s per step
    assert left({"step": 1000, "step_ms": 100.0}) == []
    assert [duration(s) for s in (0.1, 59.4, 60, 3599, 7505)] == ["1 s", "59 s", "1 min", "1 h 00 min", "2 h 05 min"]


def test_format_row_shows_recall_by_the_name_of_the_objective():
    # Of two pairs with identical image and text embeddings, recall is 100 %.
    half = np.eye(2, dtype=np.float32)
    measures = {"image": half, "text": half, "log_scale": np.zeros(2), "caption": np.arange(2), "weight": np.ones(2)}
    result = {f"val_{name}": value for name, value in OBJECTIVES["contrastive"].summary(measures).items()}
    shown = format_row({"step": 0, "epoch": 0.0, CaptionDataset.unit: 0, **result})
    assert shown == "step       0  held-out 0.313 (100.0% recall at 5)"  # log(1 + 1/e)


def test_truncate_log_keeps_rows_and_samples_up_to_the_step(tmp_path):
    rows = [{"step": s, "loss": 1 / 3 / (s + 1)} for s in (0, 10, 2000, 2010)]
    text = "".join(json.dumps(r) + "\n" for r in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 2020, "lo')
    entries = [f"[step {s:,}, temperature 0.5] once\n\nupon\n\n" for s in (10, 2000, 2010)]
    (tmp_path / "samples.txt").write_text("".join(entries))
    truncate_log(tmp_path, 2000)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(text.splitlines(keepends=True)[:3])
    assert (tmp_path / "samples.txt").read_text() == "".join(entries[:2])


def test_full_disk_is_a_user_error_and_leaves_readable_metrics(tmp_path):
    with mounted(tmp_path, "64k") as disk:
        full = r"metrics.jsonl cannot be written to .*: No space left on device; free"
        with pytest.raises(UserError, match=full), Log(disk, 0, 3) as log:
            for _ in range(1000):  # 100 KB
                log.row(ROW)
        assert all(row == ROW for row in read_metrics(disk))
        with pytest.raises(UserError, match=full):
            truncate_log(disk, 0)
        assert [file.name for file in disk.iterdir()] == ["metrics.jsonl"]
        assert len(read_metrics(disk)) > 100


def test_vanished_folder_is_a_user_error(tmp_path):
    (tmp_path / "run").mkdir()
    with Log(tmp_path / "run", 0, 3) as log:
        log.row(ROW)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be written: .*run no longer exists; restore it"):
            log.row(ROW)


def test_notes_and_warnings_are_printed(tmp_path, capsys):
    with Log(tmp_path, 0, 3) as log:
        log.row({"step": 2, "note": "the wind has turned"})
        log.row({"step": 3, "warning": "a storm; go in"})
    assert capsys.readouterr().out == "step 2  note: the wind has turned\nstep 3  warning: a storm; go in\n"


def test_show_every_prints_the_loss_between_evaluations_and_at_the_last_step(tmp_path, capsys):
    with Log(tmp_path, 0, 250, show_every=100) as log:
        log.row({"step": 0, "epoch": 0.0})
        for step in range(50, 251, 50):
            log.row({"step": step, "loss": 250.5 - step, "step_ms": 1000.0, "tokens_per_s": 100.0})
    assert capsys.readouterr().out.splitlines() == [
        "step     100  loss 150.500  100 tokens/s  2 min left",
        "step     200  loss 50.500  100 tokens/s  50 s left",
        "step     250  loss 0.500  100 tokens/s",
    ]


def test_time_left_is_printed_once_as_soon_as_it_is_known(tmp_path, capsys):
    with Log(tmp_path, 0, 2000) as log:
        for step in range(10, 2000, 10):
            log.row({"step": step, "loss": 1.0, "step_ms": 100.0})
    assert capsys.readouterr().out == "step      20  0.1 s per step, about 3 min left\n"
    with Log(tmp_path, 0, 200) as log:  # little is left
        for step in range(10, 200, 10):
            log.row({"step": step, "loss": 1.0, "step_ms": 100.0})
        log.estimate(100, 75_000)  # of slow steps, one suffices
        log.estimate(101, 75_000)
    assert capsys.readouterr().out == "step     100  1 min per step, about 2 h 05 min left\n"


@pytest.mark.parametrize("line", ["3", "{", '{"loss": 1}', '{"step": "x"}', '{"step": true}', "\xff", "[" * 100_000])
def test_malformed_line_before_the_last_is_a_user_error_with_its_number(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + line.encode("latin-1") + b'\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl is not a row"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + line.encode("latin-1"))
    assert read_metrics(tmp_path) == [{"step": 0}]
