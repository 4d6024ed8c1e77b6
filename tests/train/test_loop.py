"""The training loop."""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
from jaxformer.nn.parameter_norms import row_names
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.checkpoints import CheckpointReader
from jaxformer.runs.run import create_run, load_run, read_config
from jaxformer.runs.snapshots import load_snapshot, snapshot_steps
from jaxformer.train import log, loop, pending
from jaxformer.train.log import read_metrics, without_timings
from jaxformer.train.loop import Callback, Outcome, is_doubled, is_due, train
from jaxformer.train.metric_writers import WANDB_ID
from jaxformer.train.optimizer import make_schedule
from jaxformer.train.resume import Resume, Rollback, Start
from jaxformer.train.setup import TrainSetup, TrainState
from jaxformer.train.signals import ReceivedSignal
from jaxformer.train.step import CompiledStep, StepMetrics
from tests.arrays import plain_decoder
from tests.helpers import write_books

MODEL = plain_decoder(280, 16, 16, n_blocks=1, n_heads=2, d_ff=(24,), norm="rmsnorm")
TRAIN = TrainConfig(batch_size=8, log_every=1, eval_every=10, eval_examples=16, checkpoint_every=5)


@pytest.fixture(scope="module", autouse=True)
def compiled_in_half_the_time() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Numbered:
    """Data whose batch at a step has the step's number in every row."""

    def batch(self, step: int, rows: np.ndarray) -> Batch:
        return Batch((np.full((8, 2), step)[rows],))

    def stream(self, start: int, stop: int, rows: np.ndarray) -> Iterator[Batch]:
        return (self.batch(step, rows) for step in range(start, stop))


@pytest.mark.parametrize(("taken", "expected"), [(0, [3, 4, 5, 6, 7, 8]), (4, [7, 8])])
def test_each_step_reads_its_own_batch_on_resuming_too(taken, expected):
    """Step k, counted from 1, trains on batch k - 1, after the batches that the config skips."""
    config = Config("test", MODEL, TextConfig(), steps=6, train=replace(TRAIN, skip_batches=3))
    setup, data = TrainSetup(config, make_mesh("", jax.devices()[:1])), Numbered()
    start = Start(config, taken, None, None)
    first, batches = loop.read_batches(setup, data, start, loop.Throughput(taken, data))
    read = [int(batch.inputs[0][0, 0]) for _, batch in zip(expected, batches, strict=False)]
    assert [int(first.inputs[0][0, 0]), read] == [expected[0], expected]


def test_callbacks_are_due_at_their_intervals():
    samples, check = Callback(500, print, also_at=(100,)), Callback(20, print, at_start=True)
    assert [step for step in range(1001) if samples.is_due(step)] == [100, 500, 1000]
    assert [step for step in range(50) if check.is_due(step)] == [0, 20, 40]
    assert not any(is_due(0, step) for step in range(10))
    assert [step for step in range(90) if is_doubled(10, step)] == [10, 20, 40, 80]


@pytest.fixture
def caught(monkeypatch) -> ReceivedSignal:
    """A signal that a test gives itself."""
    caught = ReceivedSignal()

    @contextmanager
    def catch(*_: object) -> Iterator[ReceivedSignal]:
        yield caught

    monkeypatch.setattr(loop, "record_signals", catch)
    return caught


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> str:
    return str(write_books(tmp_path_factory.mktemp("text") / "books"))


load = cache(lambda data: data.load(MODEL, TRAIN.batch_size, 0))


def config_of(books: str, steps: int, **fields: object) -> Config:
    """Some steps without evaluations, at a rate that falls with every step."""
    return Config(
        "test", MODEL, steps=steps, data=TextConfig(books), train=replace(TRAIN, eval_every=0, **fields),
        optimizer=OptimizerConfig(learning_rate=0.1, schedule="cosine"),
    )  # fmt: skip


def run_on_one(config: Config, folder: Path, resume: Resume | None = None) -> Outcome:
    folder.mkdir(exist_ok=True)
    return train(TrainSetup(config, make_mesh("", jax.devices()[:1])), load(config.data), folder, [], resume)


@pytest.fixture
def step_by_hand(monkeypatch, caught) -> Callable[..., None]:
    """What replaces the step by one that nothing is compiled for: W_out moves by the rate and the batch, the loss falls
    slowly. It may be told other losses by step, the step of a signal, and where to note the batch of each step and
    W_out after it."""

    def replace_step(
        losses: Mapping[int, float] = MappingProxyType({}), interrupted: int = 0, noted: dict[int, Any] | None = None
    ) -> None:
        caught.number = 0

        class ByHand(CompiledStep):
            def compile(self, batch: Batch) -> str:
                return ""

            def __call__(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, StepMetrics]:
                tokens, W_out, rate = batch.inputs[0], state.params["W_out"], float(self._setup.schedule(step))
                moved = jax.device_put(np.asarray(W_out) - np.float32(rate * np.mean(tokens)), W_out.sharding)
                if noted is not None:
                    noted[step + 1] = np.asarray(tokens), np.asarray(moved)
                caught.number = 2 if step + 1 == interrupted else caught.number
                loss, one = np.float32(losses.get(step + 1, 5 - 0.01 * step)), np.float32(1)
                norms_3R = np.ones((3, len(row_names(state.params))), np.float32)
                metrics = StepMetrics(loss, np.bool_(True), np.float32(rate), one, one, norms_3R)
                return state._replace(params={**state.params, "W_out": moved}), metrics

        monkeypatch.setattr(loop, "CompiledStep", ByHand)

    return replace_step


@pytest.mark.slow
def test_evaluations_and_checkpoints_can_be_switched_off(books, step_by_hand, tmp_path):
    step_by_hand()
    config = config_of(books, 10, report_every=0, gradients_every=0)
    config = replace(config, train=replace(config.train, log_every=4, checkpoint_every=0))
    assert run_on_one(config, tmp_path).evaluation is None
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 4, 8, 10]
    assert not any("val_loss" in row for row in rows)
    assert CheckpointReader(tmp_path).steps() == [10]


def break_steps(monkeypatch, steps: set[int], caught: ReceivedSignal, interrupted: int | None = None) -> None:
    """Let some steps meet a parameter that is not finite, and one a signal."""
    caught.number = 0

    class Breaking(CompiledStep):
        def __call__(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, StepMetrics]:
            caught.number = 2 if step + 1 == interrupted else caught.number
            if step + 1 not in steps:
                return super().__call__(state, batch, step)
            params = jax.tree.map(jnp.copy, state.params)
            broken = {**state.params, "W_out": state.params["W_out"] * jnp.nan}
            state, metrics = super().__call__(state._replace(params=broken), batch, step)
            return state._replace(params=params), metrics

    monkeypatch.setattr(loop, "CompiledStep", Breaking)


@pytest.mark.slow
def test_skipped_steps_leave_their_learning_rates_to_the_next_and_are_logged_after_an_interruption(
    books, monkeypatch, tmp_path, caught
):
    config = config_of(books, 10, non_finite="skip")
    config = replace(config, train=replace(config.train, log_every=9, checkpoint_every=20))
    break_steps(monkeypatch, {3, 4}, caught, interrupted=5)
    interrupted = run_on_one(config, tmp_path / "run")
    assert interrupted.status == "interrupted" and interrupted.step in (5, 6)  # a signal is seen a step later
    break_steps(monkeypatch, {8}, caught)
    assert run_on_one(config, tmp_path / "run", Resume()).status == "done"
    rows, schedule = {row["step"]: row for row in read_metrics(tmp_path / "run")}, make_schedule(config.optimizer, 10)
    assert rows[9]["skipped"] == 3 and "skipped" not in rows[10]
    assert [rows[step]["lr"] for step in (9, 10)] == pytest.approx([float(schedule(count)) for count in (5, 6)])


@pytest.mark.slow
def test_a_signal_during_a_slow_step_ends_training_after_it(books, step_by_hand, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pending, "SLOW_STEP_MS", 0)
    monkeypatch.setattr(log, "LITTLE_SECONDS", 0)
    step_by_hand(interrupted=5)
    interrupted = run_on_one(config_of(books, 10), tmp_path / "run")
    assert (interrupted.status, interrupted.step) == ("interrupted", 5)
    assert CheckpointReader(tmp_path / "run").steps() == [5]
    (estimate,) = [line for line in capsys.readouterr().out.splitlines() if "per step" in line]
    assert re.fullmatch(r"step       2  \S+ s per step, about .+ left", estimate)


@pytest.mark.slow
def test_snapshots_have_the_parameters_of_doubled_steps_and_follow_resumes_and_rollbacks(books, step_by_hand, tmp_path):
    noted: dict[int, Any] = {}
    step_by_hand(noted=noted)
    config = config_of(books, 10, snapshots="doubling")
    folder = create_run(tmp_path / "run", config, load(config.data).tokenizer, False)

    def snapshots() -> dict[int, np.ndarray]:
        return {step: np.asarray(load_snapshot(load_run(folder), step)["W_out"]) for step in snapshot_steps(folder)}

    run_on_one(config, folder)
    whole = snapshots()
    assert list(whole) == [0, 1, 2, 4, 8, 10]
    assert all(np.array_equal(whole[step], noted[step][1]) for step in whole if step)

    shutil.rmtree(folder / "checkpoints/10")  # killed after snapshot 8, while snapshot 10 was being saved
    (folder / "snapshots/10").rename(folder / "snapshots/10.orbax-checkpoint-tmp")
    (folder / "snapshots").rename(folder / "film")  # the rest is that of an earlier version
    stored = json.loads((folder / "config.json").read_text())
    del stored["train"]["snapshots"]
    stored["train"]["film"] = True
    (folder / "config.json").write_text(json.dumps(stored))
    assert read_config(folder) == config
    slower = replace(config, optimizer=replace(config.optimizer, learning_rate=0.05))
    step_by_hand(interrupted=6)
    run_on_one(slower, folder, Resume(rollback=Rollback(5)))
    assert snapshot_steps(folder) == [0, 1, 2, 4]
    step_by_hand()
    run_on_one(slower, folder, Resume())
    again = snapshots()
    assert list(again) == list(whole) and not list(folder.glob("film/*tmp*"))
    assert [np.array_equal(again[step], whole[step]) for step in again] == [True, True, True, True, False, False]


LOST = dict.fromkeys(range(12, 31), 20.0)
"""Of the losses of steps: from step 12 on worse than knowing nothing, which is noticed at step 17."""


@pytest.mark.slow
def test_divergence_stops_training_and_a_rollback_with_other_options_survives_a_resume(books, step_by_hand, tmp_path):
    config, noted = config_of(books, 30), dict[int, Any]()
    step_by_hand(LOST)
    outcome = run_on_one(config, tmp_path / "run")
    assert (outcome.status, outcome.step, outcome.healthy) == ("diverged", 17, 10)
    assert outcome.divergence.began == 12
    stored = CheckpointReader(tmp_path / "run")
    assert {step: stored.is_healthy(step) for step in stored.steps()} == {5: True, 10: True, 15: False}
    last = read_metrics(tmp_path / "run")[-1]
    assert last["step"] == 17 and (last["diverged"]["began"], last["diverged"]["loss"]) == (12, 20.0)
    assert last["loss"] == 20 and last["grad_norm"] > 0 and last["update_norm"] > 0

    shutil.copytree(tmp_path / "run", tmp_path / "stopped")
    other = replace(config, optimizer=replace(config.optimizer, clip_norm=0.5, learning_rate=0.02))
    rollback = Rollback(10, skip_batches=3, changes="optimizer.clip_norm 0.5 instead of None")
    step_by_hand(noted=noted)
    assert run_on_one(other, tmp_path / "run", Resume(rollback=rollback)).status == "done"
    np.testing.assert_array_equal(noted[11][0], load(config.data).batch(13).inputs[0])  # the batch of step 14
    rows = read_metrics(tmp_path / "run")
    (note,) = [row for row in rows if "note" in row]
    assert note == {
        "step": 10,
        "note": "rolled back to step 10; optimizer.clip_norm 0.5 instead of None; 3 batches skipped, 3 in all; "
        "checkpoints removed: 15",
    }
    assert not any("diverged" in row for row in rows)

    # Stopped before its first checkpoint, and resumed without a word of the rollback.
    step_by_hand(interrupted=12)
    folder = tmp_path / "stopped"
    assert run_on_one(other, folder, Resume(rollback=rollback)).status == "interrupted"
    for step in (step for step in CheckpointReader(folder).steps() if step > 10):
        shutil.rmtree(folder / f"checkpoints/{step}")
    step_by_hand()
    assert read_config(folder).train.skip_batches == 3
    assert run_on_one(read_config(folder), folder, Resume()).status == "done"
    a, b = (CheckpointReader(tmp_path / name).arrays(30) for name in ("run", "stopped"))
    assert all(np.array_equal(a[name], b[name]) for name in {**a, **b})


@pytest.mark.slow
def test_rollback_to_the_start_removes_all_checkpoints(books, step_by_hand, tmp_path):
    step_by_hand()
    config, folder = config_of(books, 10), tmp_path / "run"
    run_on_one(config, folder)
    first = read_metrics(folder)
    (folder / "wandb").mkdir()
    (folder / WANDB_ID).write_text("old\n")
    assert run_on_one(config, folder, Resume(rollback=Rollback(0))).status == "done"
    assert not (folder / WANDB_ID).exists()  # what follows is another run there
    rows = read_metrics(folder)
    assert rows[0]["note"] == "rolled back to step 0; checkpoints removed: 5, 10"
    assert [without_timings(row) for row in rows[1:]] == [without_timings(row) for row in first]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"has no checkpoint 7; it has \[5, 10\]"):
        run_on_one(config, folder, Resume(rollback=Rollback(7)))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_divergence_that_recovers_is_a_warning_and_a_note_and_the_last_is_in_the_outcome(
    books, step_by_hand, tmp_path
):
    step_by_hand(dict.fromkeys(range(12, 20), 20.0))
    config = config_of(books, 30, divergence="warn", checkpoint_every=0)
    outcome = run_on_one(config, tmp_path / "run")
    assert (outcome.status, outcome.diverging_since) == ("done", 0)
    rows = read_metrics(tmp_path / "run")
    (warned,), back = ([(row["step"], row[kind]) for row in rows if kind in row] for kind in ("warning", "note"))
    assert warned[0] == 17 and warned[1].startswith("the loss has been diverging since step 12: 20 at step 17")
    assert back == [(29, "the loss has recovered to near its minimum")]
    step_by_hand(LOST)
    assert run_on_one(replace(config, steps=20), tmp_path / "last").diverging_since == 12
