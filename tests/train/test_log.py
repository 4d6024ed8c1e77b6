"""Metrics on disk."""

import json

from jaxformer.runs import METRICS
from jaxformer.train.log import Log, cut_log, plot, read_metrics

ROW = {"step": 0, "epoch": 0.0, "tokens": 0, "val_loss": 2.0, "val_ppl": 7.4, "val_bpb": 1.0, "entropy": [[1.0, 0.5]]}


def test_rows_come_back_and_numbers_json_cannot_hold_are_null(tmp_path):
    with Log(tmp_path / METRICS, 0, 3) as log:
        log.row(ROW)
        log.row({"step": 1, "loss": float("inf")})
    assert read_metrics(tmp_path) == [ROW, {"step": 1, "loss": None}]


def test_cutting_keeps_rows_and_samples_up_to_the_step_and_drops_a_torn_line(tmp_path):
    rows = [{"step": s, "loss": 1 / 3 / (s + 1)} for s in (0, 10, 2000, 2010)]
    text = "".join(json.dumps(r) + "\n" for r in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 2020, "lo')
    entries = [f"[step {s:,}, temperature 0.5] once\n\nupon\n\n" for s in (10, 2000, 2010)]
    (tmp_path / "samples.txt").write_text("".join(entries))
    cut_log(tmp_path, 2000)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(text.splitlines(keepends=True)[:3])
    assert (tmp_path / "samples.txt").read_text() == "".join(entries[:2])


def test_plots_are_pictures(tmp_path):
    with Log(tmp_path / METRICS, 0, 2) as log:
        log.row(ROW)
        log.row(ROW | {"step": 1, "loss": 1.5, "ppl": 4.48})
    plot(tmp_path)
    for name in ("loss", "entropy"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
