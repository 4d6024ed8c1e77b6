"""Stability margins of the configs are measured by `studies/margins.py`."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks import record
from jaxformer.cli import machine
from jaxformer.train import log
from studies import margins
from tests.helpers import write_books

TINY = """
from dataclasses import replace
from jaxformer.cli.arguments import load_config

config = load_config("quick:modern")
shape = {"vocab_size": 280, "context_length": 16, "d_model": 16, "n_blocks": 1, "n_heads": 2, "d_ff": (32,)}
tiny = replace(config, model=replace(config.model, **shape))
"""


@pytest.mark.slow
def test_a_piece_is_trained_at_twice_the_learning_rate_and_interrupted(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.py").write_text(TINY)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "commit", lambda: "abc")
    monkeypatch.setattr(machine, "set_up", lambda *_: None)
    monkeypatch.setattr(log.console, "quiet", True)
    n = jax.device_count()
    data = str(write_books(tmp_path / "books"))
    margins.train_piece(margins.Piece("tiny.py:tiny", 0, n, 2.0, 20, data, None), tmp_path)
    piece = json.loads((tmp_path / f"tiny-tiny-seed0-{n}x-lr2.json").read_text())
    assert (piece["status"], piece["of"], piece["learning_rate"]) == ("interrupted", 1200, 0.006)
    assert 20 <= piece["steps"] <= 22 and piece["excursion"] <= margins.SPIKE_NATS
    assert piece["last_loss"] < piece["first_loss"]
