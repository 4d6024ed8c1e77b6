"""`python -m jaxformer diff`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.checkpoints import CheckpointManager
from jaxformer.cli import diff
from jaxformer.config import Config
from jaxformer.data.corpus import TextConfig
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.models.decoder import DecoderConfig
from jaxformer.runs import create_run

CONFIG = Config("run", DecoderConfig(257, 8, 4, d_ff=(6,)), TextConfig("books"), steps=3)
TABLE = [
    {"name": "W_E", "g": 1.0, "w": 2.0, "u": 0.5, "update": 0.5},
    {"name": "blocks.0.mlp.W_1", "g": 0.5, "w": 0.25, "u": 2.0, "update": 2.0},
]
ROWS: list[dict[str, Any]] = [
    {"step": 0, "loss": 5.0, "entropy": [[1.0, 0.5]]},
    {"step": 1, "loss": 4.0, "entropy": [[0.9, 0.4]], "step_ms": 3.0, "gradients": TABLE},
    {"step": 2, "loss": 3.0},
]
PARAMS = {"W": np.float32([3.0, 4.0]), "b": np.float32([1.0])}


SAVED: dict[tuple, Path] = {}
"""A run that has the checkpoint, by its parameters and step: saving takes longer than copying."""


def make(folder: Path, config: Config = CONFIG, rows: list[dict] = ROWS, params=PARAMS, step: int = 2) -> str:
    place = create_run(folder, config, Tokenizer.train([], 257), allow_suffix=False)
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    key = (step, *((name, *value.tolist()) for name, value in params.items()))
    if key in SAVED and SAVED[key].exists():
        shutil.copytree(SAVED[key] / "checkpoints", place / "checkpoints", dirs_exist_ok=True)
        return str(place)
    with CheckpointManager(place) as checkpoints:
        values = {name: jnp.asarray(value) for name, value in params.items()}
        checkpoints.save(step, values, {"momentum": jnp.ones(1)}, {}, None)
    if folder.name == "one":  # which no test changes
        SAVED[key] = place
    return str(place)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("runs") / "one")


def row(step: int, **changes: Any) -> list[dict]:
    return [r | changes if r["step"] == step else r for r in ROWS]


def test_a_run_and_its_like_are_the_same_whatever_time_they_took(one: str, tmp_path: Path, capsys) -> None:
    assert diff.main([one, make(tmp_path / "other", rows=row(1, step_ms=9.0))]) == 0
    assert capsys.readouterr().out == "configs: the same\nlogs: the same\ncheckpoints: the same\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"config": replace(CONFIG, seed=3, model=replace(CONFIG.model, d_ff=(6, 7)))},
            ["model.d_ff: (6,) and (6, 7)", "seed: 0 and 3"],
        ),
        ({"rows": row(2, loss=3.5)}, ["they part at step 2, in loss: 3 and 3.5"]),
        ({"rows": row(0, entropy=[[1.0, 0.25]])}, ["they part at step 0, in entropy.0.1: 0.5 and 0.25"]),
        ({"rows": row(1, gradients=[TABLE[0], TABLE[1] | {"g": 0.75}])},
         ["they part at step 1, in gradients.blocks.0.mlp.W_1.g: 0.5 and 0.75",
          "the first parameter they tell apart, at step 1, is blocks.0.mlp.W_1, in g: 0.5 and 0.75"]),
        ({"rows": row(2, extra=1)}, ["only ", " has logged extra, first at step 2"]),
        ({"rows": row(2, loss=float("nan"))}, ["they part at step 2, in loss: 3 and nan"]),
        ({"rows": ROWS[:2]}, ["steps that one of them alone has logged: 1, first step 2 of "]),
        ({"params": PARAMS | {"W": np.float32([3.0, 4.5])}}, ["step 2, params/W: apart by 9.25e-02 of its norm"]),
        ({"params": PARAMS | {"b": np.float32([1.0, 1.0])}}, ["step 2, params/b: float32 (1,) and float32 (2,)"]),
        ({"params": {"W": PARAMS["W"]}}, ["step 2, params/b: only "]),
        ({"step": 1}, ["no step has a checkpoint of both"]),
    ],
)  # fmt: skip
def test_what_differs_is_said(one: str, tmp_path: Path, capsys, changes: dict, said: list[str]) -> None:
    assert diff.main([one, make(tmp_path / "other", **changes)]) == 1
    printed = capsys.readouterr().out
    assert all(line in printed for line in said), printed


def test_a_tolerance_passes_over_rounding(one: str, tmp_path: Path, capsys) -> None:
    near = make(tmp_path / "other", rows=row(2, loss=3.0001), params=PARAMS | {"W": np.float32([3.0, 4.0001])})
    assert diff.main([one, near]) == 1
    assert diff.main([one, near, "--tolerance", "1e-3"]) == 0
    assert diff.main([one, near, "--tolerance", "1e-6"]) == 1


def test_only_some_lines_of_many_are_shown(one: str, tmp_path: Path, capsys) -> None:
    ours, theirs = ({f"m{i}": i + shift for i in range(30)} for shift in (0, 1))
    a, b = (make(tmp_path / name, rows=row(0, **more)) for name, more in (("a", ours), ("b", theirs)))
    assert diff.main([a, b]) == 1
    assert "  … and 19 more\n" in capsys.readouterr().out  # 12 of a headline and 30 values are shown


def test_what_one_alone_has_logged_is_no_parting(one: str, tmp_path: Path, capsys) -> None:
    assert diff.main([one, make(tmp_path / "other", rows=row(0, first={"a": 1, "b": 2, "c": 3, "d": 4}))]) == 1
    printed = capsys.readouterr().out
    assert "part at" not in printed and "has logged first.a, first at step 0" in printed
    assert "and 1 more that one of them alone has logged" in printed


def test_a_note_is_no_other_row(one: str, tmp_path: Path, capsys) -> None:
    noted = [*ROWS[:2], {"step": 1, "note": "the data has changed"}, ROWS[2]]
    assert diff.main([one, make(tmp_path / "other", rows=noted)]) == 1
    printed = capsys.readouterr().out
    assert "part at" not in printed and "has logged note, first at step 1" in printed


def test_a_damaged_checkpoint_is_no_difference(one: str, tmp_path: Path, capsys) -> None:
    other = Path(make(tmp_path / "other"))
    file = max((f for f in (other / "checkpoints/2/params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert diff.main([one, str(other)]) == 2
    assert "checkpoint 2" in capsys.readouterr().err


def test_runs_without_logs_and_checkpoints_are_not_called_the_same(tmp_path: Path, capsys) -> None:
    places = [create_run(tmp_path / name, CONFIG, Tokenizer.train([], 257), allow_suffix=False) for name in "ab"]
    assert diff.main([str(place) for place in places]) == 1
    assert capsys.readouterr().out == "configs: the same\nlogs:\n  neither has any\ncheckpoints:\n  neither has any\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give two runs"),
        (["runs/one"], "give two runs"),
        (["nowhere", "elsewhere"], "nowhere does not exist"),
        (["a", "b", "--tolerance", "2"], "tolerance is 2.0; it must be at least 0 and below 1"),
        (["a", "b", "--tolerances", "2"], "did you mean --tolerance?"),
    ],
)
def test_wrong_input_is_one_sentence(options: list[str], said: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert diff.main(options) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out
