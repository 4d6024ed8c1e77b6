"""The best learning rate by width, and the table of its outcomes."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf, log
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from jaxformer.cli.arguments import load_config
from jaxformer.errors import UserError
from studies import width_transfer
from studies.recipe import read
from studies.width_transfer import FACTOR, best_rate, config_at, outcomes, search, section
from tests.helpers import ROOT, write_books


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


def bowl(center: float) -> Callable[[int], float]:
    """Losses that grow on either side of an exponent, infinite from 7 on."""
    return lambda k: 4 + 0.01 * (k - center) ** 2 if k < 7 else inf


@pytest.mark.parametrize(("center", "start", "exponents"), [(0.2, 0, (-1, 1)), (4.8, -1, (-2, 6)), (-3, 0, (-4, 1))])
def test_search_ends_when_the_best_has_a_neighbour_on_either_side(center, start, exponents) -> None:
    losses = search(bowl(center), start)
    best = round(center)
    assert {*range(best - 1, best + 2)} <= losses.keys() <= {*range(exponents[0], exponents[1] + 1)}


def test_best_learning_rate_is_the_minimum_of_the_parabola() -> None:
    losses = {0.01 * FACTOR**k: 4 + 0.3 * (log(FACTOR**k) - 0.1) ** 2 for k in range(-1, 2)}
    expected = pytest.approx((0.01 * 2.718281828**0.1, 4))
    assert best_rate(losses) == best_rate(losses | {0.1: 9.8, 1.0: None}) == expected
    assert best_rate(dict(list(losses.items())[:2])) is best_rate({1.0: None}) is None
    diverged = {rate: None if rate > 0.0101 else value for rate, value in losses.items()}
    assert best_rate(diverged) == (0.01, losses[0.01])
    assert best_rate(dict.fromkeys((1.0, 2.0, 3.0, 4.0), 5.0) | {1.0: 6.0}) is not None


def pieces(rule: str, width: int, seed: int, best: float) -> list[dict[str, Any]]:
    """Trainings whose losses have their minimum, 4, at `best`, next to the one in the middle."""
    return [
        {"rule": rule, "width": width, "seed": seed, "learning_rate": rate, "targets": 61_440, "parameters": 9,
         "loss": 4 + log(rate / best) ** 2}
        for rate in (0.9 * best * FACTOR**k for k in (-1, 0, 1))
    ]  # fmt: skip


def test_table_has_the_best_of_each_seed_and_the_largest_ratio() -> None:
    measured = [
        *pieces("fixed", 64, 0, 0.02), *pieces("fixed", 128, 0, 0.005), *pieces("fixed", 128, 1, 0.02),
        *pieces("scaled", 64, 0, 0.008), *pieces("scaled", 256, 0, 0.008)[:2],
    ]  # fmt: skip
    figures = outcomes(measured, base_width=128)
    assert section(json.loads(json.dumps(figures))).splitlines() == [
        "| learning rates | width | parameters | best learning rate by seed | mean | held-out loss at best |",
        "|---|---:|---:|---|---:|---:|",
        "| fixed | 64 | 9 | 0.0200 | 0.0200 | 4.000 |",
        "| fixed | 128 | 9 | 0.0050, 0.0200 | 0.0100 | 4.000 |",
        "| scaled | 64 | 9 | 0.0080 | 0.0080 | 4.000 |",
        "| scaled | 128 | 9 | 0.0050, 0.0200 | 0.0100 | 4.000 |",
        "",
        "Ratio of the largest to the smallest mean: 2.00 (fixed) and 1.25 (scaled); "
        "14 training runs of 61,440 targets each.",
    ]


def test_page_of_training_shows_the_stored_outcomes() -> None:
    page = (ROOT / "docs/training.md").read_text()
    shown = page.split(width_transfer.BEGIN)[1].split(width_transfer.END)[0]
    assert shown == f"\n{section(read('width_transfer'))}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train"], "--data.path is missing; name the folder of the books"),
        (["train", "--widths", "64", "-64"], "--widths is -64; it must be 1 or more"),
        (["train", "--data.path", "books", "--widths", "96"], "the width 96 is no multiple of 64"),
        (["write"], "holds no training that has ended; train first"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, options, message) -> None:
    monkeypatch.setattr(width_transfer.machine, "set_up", lambda: None)
    monkeypatch.setattr(sys, "argv", ["width_transfer", *options, "--folder", str(tmp_path)])
    try:
        status = width_transfer.main()
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_trainings_are_stored_once_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rung: Any = load_config(width_transfer.RUNG)
    model = replace(rung.model, vocab_size=280, context_length=8, d_model=8, n_heads=2, d_ff=(12,))
    rung = replace(rung, model=model, optimizer=replace(rung.optimizer, learning_rate=0.1))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/training.md"
    page.write_text(width_transfer.BEGIN + width_transfer.END)
    monkeypatch.setattr(width_transfer.machine, "set_up", lambda: None)
    monkeypatch.setattr(width_transfer, "load_config", lambda _: rung)
    monkeypatch.setattr(width_transfer, "STEPS", 6)
    monkeypatch.setattr(width_transfer, "HELD_OUT", 8)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "abc")
    monkeypatch.setattr(record, "STUDY_RESULTS", tmp_path)
    folder = tmp_path / "runs"
    own = ["--data.path", str(write_books(tmp_path / "books")), "--widths", "8", "16", "--seeds", "1"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["width_transfer", "train", "--folder", str(folder), *own])
        assert width_transfer.main() == 0
    lines = capsys.readouterr().out.splitlines()
    files = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert len([line for line in lines if "seed 0" in line]) == len(files) >= 9
    assert {(x["rule"], x["width"]) for x in files} == {("fixed", 8), ("fixed", 16), ("scaled", 16)}
    assert {x["targets"] for x in files} == {6 * 8 * 8}
    monkeypatch.setattr(sys, "argv", ["width_transfer", "write", "--folder", str(folder)])
    assert width_transfer.main() == 0
    figures = json.loads((tmp_path / "width_transfer.json").read_text())["figures"]
    assert section(figures) in page.read_text()
    widths = figures["rules"]["scaled"]["widths"]
    assert widths.keys() == {"8", "16"} and all(x["loss"] < 3 for x in widths.values())  # log(280) is 5.63
