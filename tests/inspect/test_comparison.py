"""Differences between the logs of two runs."""

import json
from pathlib import Path

from jaxformer.inspect.comparison import log_differences


def write_log(folder: Path, *rows: dict) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_first_and_last_differences_are_told_and_timings_are_not(tmp_path):
    rows = [{"step": step, "loss": 4.0 - step, "step_ms": 1.0} for step in range(3)]
    a = write_log(tmp_path / "a", *rows)
    slower = write_log(tmp_path / "slower", *({**row, "step_ms": 9.0} for row in rows))
    assert list(log_differences(a, slower)) == []
    b = write_log(tmp_path / "b", rows[0], {**rows[1], "loss": 3.5}, {**rows[2], "loss": 2.002}, {"step": 3, "loss": 1})
    found = list(log_differences(a, b))
    assert found[0].startswith("steps logged by one run only: 1, first step 3 of")
    assert found[1:] == [
        "first difference at step 1, in loss: 3 and 3.5",
        "step 1, loss: 3 and 3.5",
        "step 2, loss: 2 and 2.002",
    ]
    assert [text for text in log_differences(a, b, tolerance=0.01) if "step 2" in text] == []
