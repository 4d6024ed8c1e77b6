"""`python -m jaxformer diff`."""

import json
import re
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
from jaxformer.runs.checkpoints import CheckpointManager, CheckpointReader
from jaxformer.runs.run import create_run
from tests.arrays import plain_decoder

CONFIG = Config("run", plain_decoder(257, 8, 4, d_ff=(6,)), TextConfig("books"), steps=3)
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
    verdict, *others = capsys.readouterr().out.splitlines()
    assert verdict == f"no run is better: {one} has no evaluation with a held-out loss"
    same = ["configs: the same", "logs: the same", "checkpoints: the same"]
    assert others == [*same, f"curves: {Path(one).parent / 'diff.html'}; open it in a browser"]


def evaluated(*losses: float, bpb: float = 1.0) -> list[dict]:
    return [{"step": step, "loss": 3.0, "val_loss": loss, "val_bpb": bpb} for step, loss in enumerate(losses)]


OTHER_TEXT = {"config": replace(CONFIG, data=replace(CONFIG.data, path="songs")), "fingerprint": "other"}
MORE_TOKENS = replace(CONFIG, model=replace(CONFIG.model, vocab_size=300))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rows": evaluated(5.0, 4.0)},
            "other is better: held-out loss 4.0000 at step 1, 1.0000 (20.0%) less than a (5.0000 at step 1), on the "
            "same data, books",
        ),
        (
            {"rows": evaluated(5.5, 5.25, 5.125)},
            "a is better: held-out loss 5.0000 at step 1, 0.1250 (2.4%) less than other (5.1250 at step 2), on the "
            "same data, books; at step 1, the last with an evaluation of both, 5.0000 and 5.2500",
        ),
        ({"rows": evaluated(5.0, None)}, "a is better: held-out loss 5.0000 at step 1; of other (not finite at "),
        ({"rows": evaluated(7.0, 5.0)}, "no run is better: held-out loss 5.0000 of all, on the same data, books"),
        ({"rows": evaluated(1.0), **OTHER_TEXT}, "no run is better: their data differ (books, songs)"),
        ({"rows": evaluated(1.0), "fingerprint": "other"}, "no run is better: their data differ (books), so"),
        (
            {"rows": evaluated(9.0, bpb=0.5), "config": MORE_TOKENS, "fingerprint": "other"},
            "other is better: held-out bits per byte 0.5000 at step 0, 0.5000 (50.0%) less than a (1.0000 at step 1)",
        ),
        ({"rows": ROWS}, "no run is better: other has no evaluation with a held-out loss"),
    ],
)  # fmt: skip
def test_the_first_line_says_which_run_is_better_by_how_much_on_what_data(tmp_path, monkeypatch, capsys, changes, said):
    monkeypatch.chdir(tmp_path)
    fingerprint = changes.pop("fingerprint", "data")
    prints = {Path("a"): "data", Path("other"): fingerprint}
    monkeypatch.setattr(CheckpointReader, "fingerprint", lambda self, _: prints[self._folder])
    make(Path("a"), rows=evaluated(6.0, 5.0))
    make(Path("other"), **changes)
    assert diff.main(["a", "other"]) == 1
    assert capsys.readouterr().out.startswith(said)


def test_several_runs_are_ranked_and_share_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, loss in {"a": 5.0, "b": 4.0, "c": 4.5}.items():
        make(Path(name), replace(CONFIG, seed=len(name + name * (name == "b"))), evaluated(6.0, loss))
    assert diff.main(["a", "b", "c", "--page", "all.html"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "b is better: held-out loss 4.0000 at step 1, 0.5000 (11.1%) less than c (4.5000 at step 1)"
    )
    assert lines[1:4] == ["b: 4.0000 at step 1", "c: 4.5000 at step 1", "a: 5.0000 at step 1"]
    assert lines[4:] == ["configs:", "  seed: 1 and 2 and 1", "curves: all.html; open it in a browser"]
    page = Path("all.html").read_text()
    assert "Held-out loss" in page and "Training loss" in page
    assert all(
        len(re.findall(rf"name&quot;:\W*&quot;{name}&quot;|\"name\":\W*\"{name}\"", page)) == 3 for name in "abc"
    )
    assert diff.main(["a", "b", "--page", "none"]) == 1 and not Path("diff.html").exists()


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
    assert capsys.readouterr().out.partition("\n")[2] == f"configs: the same\n{expected}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give two runs"),
        (["runs/one"], "give two runs"),
        (["nowhere", "elsewhere"], "nowhere does not exist"),
        (["a", "b", "--tolerance", "2"], "--tolerance is 2.0; it must be at least 0 and below 1"),
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
