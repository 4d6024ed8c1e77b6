"""`python -m jaxformer diff`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.cli import diff
from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import TextConfig
from jaxformer.inspect.comparison import exact_differences
from jaxformer.models.decoder import DecoderConfig
from jaxformer.runs.checkpoints import CheckpointManager
from jaxformer.runs.run import create_run

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
    run = create_run(folder, config, Tokenizer.train([], 257), allow_suffix=False)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    key = (step, *((name, *value.tolist()) for name, value in params.items()))
    if key in SAVED and SAVED[key].exists():
        shutil.copytree(SAVED[key] / "checkpoints", run / "checkpoints", dirs_exist_ok=True)
        return str(run)
    with CheckpointManager(run) as checkpoints:
        values = {name: jnp.asarray(value) for name, value in params.items()}
        checkpoints.save(step, values, {"momentum": jnp.ones(1)}, {}, None)
    if folder.name == "one":  # which no test changes
        SAVED[key] = run
    return str(run)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("runs") / "one")


def row(step: int, **changes: Any) -> list[dict]:
    return [r | changes if r["step"] == step else r for r in ROWS]


def test_runs_that_differ_in_timings_are_the_same(one: str, tmp_path: Path, capsys) -> None:
    assert diff.main([one, make(tmp_path / "other", rows=row(1, step_ms=9.0))]) == 0
    assert capsys.readouterr().out == "configs: the same\nlogs: the same\ncheckpoints: the same\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"config": replace(CONFIG, seed=3, model=replace(CONFIG.model, d_ff=(6, 7)))},
            ["model.d_ff: (6,) and (6, 7)", "seed: 0 and 3"],
        ),
        ({"rows": row(2, loss=3.5)}, ["first difference at step 2, in loss: 3 and 3.5"]),
        ({"rows": row(2, loss=3.0000000000000004)}, ["first difference at step 2, in loss: 3.0 and 3.000000000000000"]),
        ({"rows": row(0, entropy=[[1.0, 0.25]])}, ["first difference at step 0, in entropy.0.1: 0.5 and 0.25"]),
        ({"rows": row(1, gradients=[TABLE[0], TABLE[1] | {"g": 0.75}])},
         ["first difference at step 1, in gradients.blocks.0.mlp.W_1.g: 0.5 and 0.75",
          "first difference in a parameter at step 1, in g of blocks.0.mlp.W_1: 0.5 and 0.75"]),
        ({"rows": row(2, extra=1)}, ["only ", " has logged extra, first at step 2"]),
        ({"rows": row(2, loss=float("nan"))}, ["first difference at step 2, in loss: 3 and nan"]),
        ({"rows": ROWS[:2]}, ["steps logged by one run only: 1, first step 2 of "]),
        ({"params": PARAMS | {"W": np.float32([3.0, 4.5])}}, ["step 2, params/W: relative difference 9.25e-02"]),
        ({"params": PARAMS | {"b": np.float32([1.0, 1.0])}}, ["step 2, params/b: float32 (1,) and float32 (2,)"]),
        ({"params": {"W": PARAMS["W"]}}, ["step 2, params/b: only "]),
        ({"step": 1}, ["no step has a checkpoint of both"]),
    ],
)  # fmt: skip
def test_each_difference_is_listed(one: str, tmp_path: Path, capsys, changes: dict, said: list[str]) -> None:
    assert diff.main([one, make(tmp_path / "other", **changes)]) == 1
    printed = capsys.readouterr().out
    assert all(line in printed for line in said), printed


@pytest.mark.slow
def test_parameters_are_compared_bit_for_bit(tmp_path: Path, capsys) -> None:
    values = {"a": 0.0, "b": 0.0, "c": -0.0}
    a, b, c = (make(tmp_path / name, params={"W": np.float32([x, np.nan])}) for name, x in values.items())
    assert diff.main([a, b]) == 0 and diff.main([a, c]) == 1
    assert "step 2, params/W: relative difference nan" in capsys.readouterr().out


@pytest.mark.slow
def test_differences_within_the_tolerance_are_ignored(one: str, tmp_path: Path, capsys) -> None:
    near = make(tmp_path / "other", rows=row(2, loss=3.0001), params=PARAMS | {"W": np.float32([3.0, 4.0001])})
    assert diff.main([one, near]) == 1
    assert diff.main([one, near, "--tolerance", "1e-3"]) == 0
    assert diff.main([one, near, "--tolerance", "1e-6"]) == 1


def test_lines_beyond_the_limit_are_counted(one: str, tmp_path: Path, capsys) -> None:
    ours, theirs = ({f"m{i}": i + shift for i in range(30)} for shift in (0, 1))
    a, b = (make(tmp_path / name, rows=row(0, **more)) for name, more in (("a", ours), ("b", theirs)))
    assert diff.main([a, b]) == 1
    assert "  … and 19 more\n" in capsys.readouterr().out  # 12 of a headline and 30 values are shown


def test_a_metric_of_one_run_is_no_difference_of_values(one: str, tmp_path: Path, capsys) -> None:
    assert diff.main([one, make(tmp_path / "other", rows=row(0, first={"a": 1, "b": 2, "c": 3, "d": 4}))]) == 1
    printed = capsys.readouterr().out
    assert "difference at" not in printed and "has logged first.a, first at step 0" in printed
    assert "and 1 more that only one run has logged" in printed


def test_a_note_does_not_hide_the_row_of_its_step(one: str, tmp_path: Path, capsys) -> None:
    noted = [*ROWS[:2], {"step": 1, "note": "the data has changed"}, ROWS[2]]
    assert diff.main([one, make(tmp_path / "other", rows=noted)]) == 1
    printed = capsys.readouterr().out
    assert "difference at" not in printed and "has logged note, first at step 1" in printed


def test_a_corrupt_checkpoint_is_an_error(one: str, tmp_path: Path, capsys) -> None:
    other = Path(make(tmp_path / "other"))
    file = max((f for f in (other / "checkpoints/2/params").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert diff.main([one, str(other)]) == 2
    assert "checkpoint 2" in capsys.readouterr().err


def test_runs_without_logs_and_checkpoints_are_not_the_same(tmp_path: Path, capsys) -> None:
    runs = [create_run(tmp_path / name, CONFIG, Tokenizer.train([], 257), allow_suffix=False) for name in "ab"]
    assert diff.main([str(run) for run in runs]) == 1
    expected = "logs:\n  neither run has logged a step\ncheckpoints:\n  neither run has a checkpoint\n"
    assert capsys.readouterr().out == f"configs: the same\n{expected}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give two runs"),
        (["runs/one"], "give two runs"),
        (["nowhere", "elsewhere"], "nowhere does not exist"),
        (["a", "b", "--tolerance", "2"], "tolerance is 2.0; it must be at least 0 and below 1"),
    ],
)
def test_wrong_input_is_one_sentence(options: list[str], said: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert diff.main(options) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"rows": row(1, step_ms=9.0)}, []),
        ({"rows": [*ROWS, ROWS[2]]}, ["step 2 has 1 and 2 rows of metrics"]),
        ({"rows": ROWS[:2]}, ["steps logged by one run only: 1, first step 2 of "]),
        ({"params": PARAMS | {"b": np.float32([-1.0])}}, ["step 2, params/b: relative difference 2.00e+00"]),
        ({"step": 3}, ["the last checkpoints are of steps 2 and 3", "no step has a checkpoint of both"]),
    ],
)
def test_exact_differences_include_repeated_rows_and_the_last_step(one, tmp_path, changes, said) -> None:
    lines = exact_differences(Path(one), Path(make(tmp_path / "other", **changes)))
    assert len(lines) == len(said) and all(map(str.startswith, lines, said))
