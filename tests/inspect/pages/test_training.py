"""`report.html` while a run trains."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.inspect.pages import training
from jaxformer.inspect.pages.training import page_sink, write_training_page
from jaxformer.models.decoder import DecoderConfig
from jaxformer.runs import create_run
from tests.browser import embedded


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(training, "MAX_TIME_SHARE", float("inf"))
    model = DecoderConfig(vocab_size=257, context_length=8, d_model=8, n_blocks=1, n_heads=2, d_ff=(8,))
    config = Config("small", model, data=TextConfig(), steps=30)
    return create_run(tmp_path / "small", config, Tokenizer.train([], 257), allow_suffix=False)


def feed(run: Path, rows: list[dict]) -> None:
    """Log rows as training does: each is in the file before a sink receives it."""
    sink = page_sink(run)
    for row in rows:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        sink(row)


def losses(run: Path) -> list[tuple[list, list]]:
    """Return the steps and losses of training and held-out data on the page."""
    [chart] = embedded((run / "report.html").read_text(encoding="utf-8"), "Loss")
    return [(chart["positions"][line["x"]], line["y"]) for line in chart["lines"]]


def test_page_follows_the_log_also_after_a_resumption(run: Path):
    feed(run, [{"step": 0, "val_loss": 6.0}, {"step": 5, "loss": 5.5}])
    assert losses(run) == [([0], [6.0])]  # updated at evaluations
    feed(run, [{"step": 10, "loss": 5.25, "val_loss": 5.0}, {"step": 20, "loss": 4.5, "val_loss": 4.0}])  # resumed
    assert losses(run) == [([5, 10, 20], [5.5, 5.25, 4.5]), ([0, 10, 20], [6.0, 5.0, 4.0])]
    text = (run / "report.html").read_text()
    assert "<h1>small: training</h1>" in text
    assert "<p>Decoder, step 20 of 30: held-out loss 4.0000 nats.</p>" in text


def test_null_losses_leave_gaps(run: Path):
    feed(run, [{"step": 10, "loss": None, "val_loss": None}])
    assert [y for _, y in losses(run)] == [[None], [None]]
    assert "<p>Decoder, step 10 of 30.</p>" in (run / "report.html").read_text()


def test_no_rows_write_no_page(tmp_path: Path):
    assert write_training_page(tmp_path, []) and not list(tmp_path.iterdir())


def test_failed_write_does_not_end_training(run: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "write_page", full)
    feed(run, [{"step": 0, "val_loss": 6.0}, {"step": 1, "val_loss": 6.0}])
    message = "report.html cannot be written: No space left on device; training continues\n"
    assert capsys.readouterr().out == message  # once


def test_page_is_updated_within_its_share_of_the_time(run: Path, monkeypatch: pytest.MonkeyPatch):
    """A page that takes a second is written again after a hundred."""
    now, written = 0.0, []

    def write(folder: Path, rows: list[dict]) -> bool:
        nonlocal now
        written.append(rows[-1]["step"])
        now += 1
        return True

    monkeypatch.setattr(training, "write_training_page", write)
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(training, "MAX_TIME_SHARE", 0.01)
    sink = page_sink(run)
    for step in range(30):
        (run / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        sink({"step": step, "val_loss": 1.0})
        now += 10
    assert written == [0, 10, 20]
