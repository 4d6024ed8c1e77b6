"""Candidates for the recipe of the ladder, and the table of their outcomes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from configs import ladder
from jaxformer.cli.arguments import load_config
from jaxformer.config import Config
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.windows import next_token_batch
from jaxformer.errors import UserError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import abstract_params, create_run
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step
from studies import recipe
from tests.helpers import ROOT, exhaustive

LAST = [*ladder.RECIPE][-1]


@pytest.mark.slow
def test_candidates_have_at_most_a_million_parameters_and_equal_tokens() -> None:
    for name in ladder.RECIPE:
        config = load_config(f"ladder:{name}")
        model: Any = config.model
        assert config.steps * config.train.batch_size * model.context_length == pytest.approx(800_000, rel=0.002)
        sizes = jax.tree_util.tree_leaves_with_path(abstract_params(model.build()))
        inner = sum(leaf.size for path, leaf in sizes if "W_E" not in str(path) and "W_out" not in str(path))
        assert inner == pytest.approx(1e6, rel=0.02) if name != LAST else 0.8e6 < inner < 1e6


@pytest.mark.slow
@pytest.mark.parametrize("name", [exhaustive(name) if name != LAST else name for name in ladder.RECIPE])
def test_candidates_learn_a_batch_by_heart(name: str) -> None:
    config = load_config(f"ladder:{name}")
    model = replace(config.model, vocab_size=32, context_length=8, d_model=16, n_blocks=2, d_ff=(32,))
    config = replace(
        config, model=model, train=replace(config.train, batch_size=4), steps=60,
        optimizer=replace(config.optimizer, warmup_steps=0),
    )  # fmt: skip
    setup = TrainSetup(config, make_mesh(devices=jax.devices()[:1]))
    batch = next_token_batch(np.random.default_rng(0).integers(32, size=(4, 9), dtype=np.int32))
    step, state, losses = make_train_step(setup), setup.init_state(), []
    for i in range(60):
        state, metrics = step(state, batch, np.int32(i))
        losses.append(float(metrics.loss))
    assert np.isfinite(losses).all() and losses[-1] < 0.75 * losses[0]


def test_gains_are_of_the_same_seeds() -> None:
    def rung(change: str, before: str | None = None, **losses: float) -> dict:
        seeds = {s: [[400, 9.0], [800, x]] for s, x in losses.items()}
        return {"change": change, "before": before, "parameters": 1000, "seeds": seeds, "ended": {}}

    rungs = {
        "a": rung("first", s0=5.0, s1=5.2),
        "b": rung("second", "a", s0=4.0, s1=4.4, s2=1.0),
        "d": rung("fourth", "c", s0=3.5),
        "a, long": rung("", s0=3.0) | {"ended": {"1": "diverged at step 5"}},
    }
    _, rule, *lines = recipe.table({"rungs": rungs, "ms_per_1000_targets": {"a": [3.0, 1.0, 2.0]}}).splitlines()
    assert rule == "|---|---|---:|---:|---|---:|---:|---:|"
    assert lines == [
        "| `a` | first | 1,000 | 800 | 2 | 5.100 ± 0.141 | - | 2 |",
        "| `b` | second | 1,000 | 800 | 3 | 3.133 ± 1.858 | 0.900 ± 0.141 | - |",
        "| `d` | fourth | 1,000 | 800 | 1 | 3.500 | - | - |",
        "| a, long | - | 1,000 | 800 | 1, seed 1 diverged at step 5 | 3.000 | - | - |",
    ]


def test_goal_is_the_loss_of_the_first_rung_after_more_tokens() -> None:
    def rung(change: str, *curve: tuple[int, float]) -> dict:
        return {"change": change, "parameters": 1000, "seeds": {"0": [list(point) for point in curve]}}

    long = (0, 9.0), (2000, 5.0), (6000, 3.0), (8000, 2.5)
    rungs = {"a": rung("first", (800, 6.0)), "b": rung("second", (800, 4.0)), recipe._long("a"): rung("", *long)}
    times = {"a": [2.0, 4.0, 2.0], "b": [1.0, 2.0, 3.0]}
    assert recipe.goal({"rungs": rungs, "ms_per_1000_targets": times}) == (
        "After 800 targets, the held-out loss of `b` is 4.000. That of `a` is 2.500 after 8,000, and equalled that of "
        "`b` after about 4,000, 5.0 times as many. The time per target of `b` is 0.50 times that of `a`.\n"
    )
    assert recipe.targets_at([*long], 2.0) is None
    never = rungs | {"b": rung("second", (800, 2.0))}
    assert "is 2.500 after 8,000, 10.0 times as many, and still higher. The" in recipe.goal(
        {"rungs": never, "ms_per_1000_targets": times}
    )
    diverged = rungs | {recipe._long("a"): rungs["a"] | {"seeds": {}}}
    assert recipe.goal({"rungs": diverged, "ms_per_1000_targets": times}) == ""


@pytest.mark.slow
def test_outcomes_are_those_of_ended_runs(tmp_path: Path) -> None:
    def write(seed: int, *rows: dict) -> None:
        config = replace(load_config(f"ladder:{LAST}"), seed=seed)
        run = create_run(tmp_path / f"seed-{seed}" / LAST, config, Tokenizer.train([], 257), allow_suffix=False)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if rows[-1]["step"] == config.steps:
            (run / f"checkpoints/{config.steps}").mkdir(parents=True)

    last = load_config(f"ladder:{LAST}")
    model: Any = last.model
    steps, per_step = last.steps, last.train.batch_size * model.context_length
    write(0, {"step": 2, "val_loss": 5.5}, {"step": steps, "val_loss": 4.5})
    write(1, {"step": 2, "val_loss": 5.6})
    assert recipe.outcomes(tmp_path)[LAST]["seeds"] == {"0": [[2 * per_step, 5.5], [steps * per_step, 4.5]]}
    write(2, {"step": 7, "diverged": {"began": 3}})
    with pytest.raises(UserError, match=f"seed-2/{LAST} diverged at step 3, which no rung"):
        recipe.outcomes(tmp_path)


@pytest.mark.slow
def test_trials_are_described_by_the_nearest_rung(tmp_path: Path) -> None:
    rung: Any = load_config(f"ladder:{LAST}")
    optimizer = replace(rung.optimizer, learning_rate=0.5)
    targets = f"{rung.steps * rung.train.batch_size * rung.model.context_length:,}"
    runs: list[tuple[str, Config, list[dict]]] = [
        ("higher", replace(rung, optimizer=optimizer), [{"step": rung.steps, "val_loss": 4.5}]),
        ("diverged", replace(rung, optimizer=optimizer, seed=1), [{"step": 7, "diverged": {"began": 3}}]),
        ("running", rung, [{"step": 7, "loss": 5.0}]),
    ]
    for name, config, rows in runs:
        run = create_run(tmp_path / name, config, Tokenizer.train([], 257), allow_suffix=False)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / f"higher/checkpoints/{rung.steps}").mkdir(parents=True)
    outcomes = recipe.trials(tmp_path)
    assert [*outcomes] == ["diverged", "higher"]
    assert recipe.trials_table(outcomes).splitlines()[2:] == [
        f"| 4.500 | `{LAST}` | learning_rate 0.5 | {targets} |",
        f"| diverged at step 3 | `{LAST}` | learning_rate 0.5 | {targets} |",
    ]


def test_each_seed_trains_all_rungs_and_the_first_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []

    def run(command: list[str]) -> SimpleNamespace:
        commands.append(" ".join(command[4:]))
        return SimpleNamespace(returncode=0 if len(commands) < 4 else 130)

    monkeypatch.setattr(recipe.subprocess, "run", run)
    assert recipe.train(Path("out"), ["adamw", "squared_relu"], 3, True, ["--data.path", "books"]) == 130
    ends = "--train.report-every 0 --train.gradients-every 0"
    rungs = [f"--rungs adamw squared_relu --folder out/seed-{i} --seed {i} {ends} --data.path books" for i in (0, 1)]
    steps = 8_000_000 // (64 * 32) // 10 * 10
    long = [f"--rungs small --folder out/long-{i} --seed {i} {ends} --steps {steps} --data.path books" for i in (0, 1)]
    assert commands == [rungs[0], long[0], rungs[1], long[1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train"], "--data.path is missing"),
        (["time", "--stepz", "4"], "time has no option --stepz"),
        (["trials", "--folder", "none"], "none holds no run that has ended; name the folder of the trials"),
        (["write", "--folder", "none"], "none holds no run of the recipe that has ended; train them first"),
    ],
)
def test_mistakes_of_recipe_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, options: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe.py", *options])
    try:
        status = recipe.main()
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err


def test_page_of_the_ladder_shows_the_stored_recipe() -> None:
    shown = (ROOT / "docs/alternatives.md").read_text().split(recipe.BEGIN)[1].split(recipe.END)[0]
    assert shown == f"\n{recipe.section(recipe.read('recipe'), recipe.read('recipe_trials'))}\n"
