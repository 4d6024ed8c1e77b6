"""What a page says of a log."""

import math

import pytest

from jaxformer.inspect.curves import LATEST, MOST_POINTS, training
from jaxformer.inspect.page import Figure, Section, Table, Texts


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
    return {section.title: section for section in training(rows, samples or [])}


def figure(title: str) -> Figure:
    found = by_title(ROWS)[title]
    assert isinstance(found, Figure)
    return found


def test_losses_are_those_of_the_log():
    batch, held = figure("Loss").traces
    assert (batch["x"], batch["y"]) == ([10, 20, 30], [5.5, 5.0, None])
    assert (held["x"], held["y"]) == ([0, 20, 30], [6.0, 5.25, 4.0])


def test_entropy_has_a_line_a_head_and_a_colour_a_layer():
    traces = figure("Entropy of attention").traces
    assert [trace["y"] for trace in traces] == [[2.0, 1.75], [1.5, None], [1.0, 0.5]]
    assert [trace["line"]["colour"] for trace in traces] == [0, 0, 1]
    assert [trace["name"] for trace in traces if trace["showlegend"]] == ["layer 0", "layer 1"]


def test_update_ratios_are_followed_by_parameter_over_all_tables():
    traces = {trace["hovertemplate"].split("<br>")[0]: trace for trace in figure("Update ratios").traces}
    assert (traces["W_out"]["x"], traces["W_out"]["y"]) == ([20, 30], [None, 0.0625])
    assert traces["blocks.0.attention.heads.1.W_Q"]["y"] == [0.5]
    kinds = [(trace["name"], trace["line"]["colour"], trace["showlegend"]) for trace in traces.values()]
    assert kinds == [("W_Q", 0, True), ("W_Q", 0, False), ("W_out", 1, True)]
    table = by_title(ROWS)["Gradients at step 30"]
    assert isinstance(table, Table) and list(table.rows) == [["W_out", 0.5, 2.0, 0.25, 0.0625]]


def test_what_else_a_log_has():
    assert [trace["y"] for trace in figure("Tokens by expert").traces] == [[0.25, 0.5], [0.75, 0.5]]
    assert figure("Learning rate").traces[0]["y"] == [0.1, 0.05, 0.0]
    table = by_title(ROWS)["Before the first step"]
    assert isinstance(table, Table)
    [[name, stream, stream_wanted, scores, scores_wanted, entropy, *rest]] = table.rows
    assert (name, stream, stream_wanted, scores, scores_wanted) == ("blocks.0", 1.1, 1.0, 4.4, 4.0)
    assert isinstance(entropy, float) and math.isnan(entropy) and rest == [1.5, 2.2, 2.0]


def test_the_latest_samples_come_first():
    texts = by_title(ROWS, [f"[step {i}] text\n\n" for i in range(LATEST + 2)])["Samples"]
    assert isinstance(texts, Texts)
    assert list(texts.texts) == [f"[step {i}] text" for i in range(LATEST + 1, 1, -1)]


def test_a_long_log_keeps_its_ends():
    found = by_title([{"step": step, "loss": 1 / (1 + step)} for step in range(5 * MOST_POINTS)])["Loss"]
    assert isinstance(found, Figure)
    batch, _ = found.traces
    assert len(batch["x"]) == MOST_POINTS and (batch["x"][0], batch["x"][-1]) == (0, 5 * MOST_POINTS - 1)
    assert batch["y"] == [1 / (1 + step) for step in batch["x"]]


@pytest.mark.parametrize("rows", [[], [{"step": 0, "note": "nothing"}]])
def test_an_empty_log_has_nothing_to_show(rows: list[dict]):
    assert training(rows) == []
