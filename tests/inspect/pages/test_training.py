"""`report.html` while a run trains, and its sections."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.inspect.pages import training
from jaxformer.inspect.pages.charts import Grid, Line, Lines
from jaxformer.inspect.pages.page import Section, Table, Texts
from jaxformer.inspect.pages.training import (
    MAX_CHART_POINTS,
    MAX_POINTS,
    N_SAMPLES,
    page_writer,
    training_sections,
    write_training_page,
)
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig
from jaxformer.runs.run import create_run
from tests.arrays import plain_decoder
from tests.browser import embedded


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(training, "MAX_TIME_SHARE", float("inf"))
    model = plain_decoder(vocab_size=257, context_length=8, d_model=8, n_blocks=1, n_heads=2, d_ff=(8,))
    config = Config("small", model, data=TextConfig(), steps=30)
    return create_run(tmp_path / "small", config, Tokenizer.train([], 257), allow_suffix=False)


def feed(run: Path, rows: list[dict]) -> None:
    """Log rows as training does: each is in the file before a writer receives it."""
    writer = page_writer(run)
    for row in rows:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        writer(row)


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


def test_losses_are_drawn_beside_those_of_counting():
    rows = [{**ROWS[0], "count_losses": {"tokens": 5.5, "pairs": 4.25}}, *ROWS[1:]]
    section = by_title(rows)["Loss"]
    assert isinstance(section, Lines)
    flat = {line.name: (list(line.x), list(line.y)) for line in section.lines if line.name.startswith("counting")}
    assert flat == {"counting tokens": ([0, 30], [5.5, 5.5]), "counting pairs": ([0, 30], [4.25, 4.25])}
    assert "counting" in section.about and not by_title(ROWS)["Loss"].about


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
    writer = page_writer(run)
    for step in range(30):
        (run / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        writer({"step": step, "val_loss": 1.0})
        now += 10
    assert written == [0, 10, 20]


DECODER = plain_decoder(vocab_size=9, context_length=4, d_model=4, n_blocks=2, d_ff=(4,))
CLIP = CLIPConfig(
    vision=ImageTowerConfig(image_size=(8, 8), patch_size=(4, 4), d_model=8, n_heads=2, n_blocks=1),
    text=TextTowerConfig(12, 6, d_model=8, n_heads=1, n_blocks=1), d_joint=4,
)  # fmt: skip


def gradient(name: str, update: float | None) -> dict:
    return {"name": name, "g": 0.5, "w": 2.0, "u": 0.25, "update": update}


ROWS = [
    {
        "step": 0, "val_loss": 6.0, "entropy": [[2.0, 1.5], [1.0]],
        "router": {"blocks.0.mlp": {"share": [0.25, 0.75]}},
        "init_check": {
            "expected": [{"stream": 1.0, "scores": 4.0, "entropy": 1.5, "growth": 2.0}],
            "observed": [{"stream": 1.1, "scores": 4.4, "entropy": None, "growth": 2.2}],
        },
    },
    {"step": 10, "loss": 5.5, "lr": 0.1},
    {"step": 15, "note": "other data"},
    {
        "step": 20, "loss": 5.0, "lr": 0.05, "val_loss": 5.25, "entropy": [[1.75, None], [0.5]],
        "router": {"blocks.0.mlp": {"share": [0.5, 0.5]}},
        "gradients": [
            gradient("blocks.0.attention.heads.0.W_Q", 0.125), gradient("blocks.0.attention.heads.1.W_Q", 0.5),
            gradient("W_out", None),
        ],
    },
    {"step": 30, "loss": None, "lr": 0.0, "val_loss": 4.0, "gradients": [gradient("W_out", 0.0625)]},
]  # fmt: skip


def by_title(rows: list[dict], samples: list[str] | None = None) -> dict[str, Section]:
    return {section.title: section for section in training_sections(rows, DECODER, samples or [])}


def lines(title: str, rows: list[dict] = ROWS) -> list[Line]:
    section = by_title(rows)[title]
    assert isinstance(section, Lines | Grid)
    panels = [section] if isinstance(section, Lines) else section.panels
    return [line for panel in panels if isinstance(panel, Lines) for line in panel.lines]


def test_loss_chart_shows_training_and_validation_losses():
    batch, held = lines("Loss")
    assert (batch.x, batch.y) == ([10, 20, 30], [5.5, 5.0, None])
    assert (held.x, held.y) == ([0, 20, 30], [6.0, 5.25, 4.0])
    assert [line.name for line in lines("Loss", [{"step": 10, "loss": 5.5}])] == ["training batch"]


def test_entropy_chart_has_a_line_per_head_and_a_name_per_layer():
    shown = [(line.name, line.member, line.y) for line in lines("Attention entropy")]
    assert shown == [
        ("layer 0", "head 0", [2.0, 1.75]), ("layer 0", "head 1", [1.5, None]), ("layer 1", "head 0", [1.0, 0.5])
    ]  # fmt: skip
    [entropy] = (section for section in training_sections(ROWS, CLIP) if section.title == "Attention entropy")
    assert isinstance(entropy, Lines) and [line.name for line in entropy.lines] == [
        "image layer 0", "image layer 0", "text layer 0",
    ]  # fmt: skip
    others = [{"step": step, "entropy": [[1.0], [1.0], [1.0]]} for step in (0, 1)]
    assert [line.name for line in lines("Attention entropy", others)] == ["layer 0", "layer 1", "layer 2"]
    assert "Attention entropy" not in by_title(others[:1])  # a trace of the model for points without lines


def test_update_ratios_have_a_line_per_parameter():
    by_member = {line.member: line for line in lines("Update ratios")}
    assert (by_member["W_out"].x, by_member["W_out"].y) == ([20, 30], [None, None])  # not finite; at a rate of 0
    assert by_member["blocks.0.attention.heads.1.W_Q"].y == [0.5]
    assert [line.name for line in by_member.values()] == ["W_Q", "W_Q", "W_out"]
    panels = by_title(ROWS)["Update ratios"]
    assert isinstance(panels, Grid) and [panel.title for panel in panels.panels] == ["W_Q", "W_out"]
    assert {panel.y.limits for panel in panels.panels if isinstance(panel, Lines)} == {(0.125, 0.5)}  # comparable
    one = by_title(ROWS[:4])
    assert "Gradients at step 20" in one and "Update ratios" not in one
    table = by_title(ROWS)["Gradients at step 30"]
    assert isinstance(table, Table) and list(table.rows) == [["W_out", 0.5, 2.0, 0.25, 0.0625]]


def test_experts_learning_rate_and_initialisation_check_are_shown():
    assert [line.y for line in lines("Tokens per expert")] == [[0.25, 0.5], [0.75, 0.5]]
    assert lines("Tokens per expert")[0].name == "layer 0"
    assert lines("Learning rate")[0].y == [0.1, 0.05, 0.0]
    table = by_title(ROWS)["Initialisation check"]
    assert isinstance(table, Table)
    [[name, stream, stream_expected, scores, scores_expected, entropy, *rest]] = table.rows
    assert (name, stream, stream_expected, scores, scores_expected) == ("layer 0", 1.1, 1.0, 4.4, 4.0)
    assert isinstance(entropy, float) and math.isnan(entropy) and rest == [1.5, 2.2, 2.0]


def test_latest_samples_come_first():
    texts = by_title(ROWS, [f"[step {i}] text\n\n" for i in range(N_SAMPLES + 2)])["Samples"]
    assert isinstance(texts, Texts)
    assert list(texts.texts) == [f"[step {i}] text" for i in range(N_SAMPLES + 1, 1, -1)]


def test_long_log_is_thinned_and_keeps_its_ends():
    rows = [{"step": step, "loss": 1 / (1 + step)} for step in range(5 * MAX_POINTS)]
    [batch] = lines("Loss", rows)
    assert len(batch.x) == MAX_POINTS and (batch.x[0], batch.x[-1]) == (0, 5 * MAX_POINTS - 1)
    assert batch.y == [1 / (1 + step) for step in batch.x]


def test_chart_of_many_lines_has_fewer_points_of_each():
    table = [gradient(f"blocks.{i}.W", 0.5) for i in range(100)]
    updates = lines("Update ratios", [{"step": step, "gradients": table} for step in range(1000)])
    assert len(updates) == 100 and sum(len(line.x) for line in updates) <= MAX_CHART_POINTS
    assert all((line.x[0], line.x[-1]) == (0, 999) for line in updates)


@pytest.mark.parametrize("rows", [[], [{"step": 0, "note": "nothing"}]])
def test_empty_log_has_no_sections(rows: list[dict]):
    assert training_sections(rows, DECODER) == []
