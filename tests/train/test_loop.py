"""The training loop."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Config, OptimizerConfig, TrainConfig
from jaxformer.data.dataset import Batch
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError
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


@pytest.mark.slow
def test_evaluations_and_checkpoints_can_be_switched_off(tmp_path):
    off = replace(TRAIN, log_every=4, eval_every=0, report_every=0, gradients_every=0, checkpoint_every=0)
    config = Config("test", MODEL, steps=10, data=TextConfig(str(write_books(tmp_path / "books"))), train=off)
    data = config.data.load(MODEL, off.batch_size, config.seed)
    outcome = train(TrainSetup(config, make_mesh("", jax.devices()[:1])), data, tmp_path)
    assert outcome.evaluation is None
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 4, 8, 10]
    assert not any("val_loss" in row for row in rows)
    assert CheckpointReader(tmp_path).steps() == [10]


@pytest.fixture
def caught(monkeypatch) -> ReceivedSignal:
    """A signal that a test gives itself."""
    caught = ReceivedSignal()

    @contextmanager
    def catch(*_: object) -> Iterator[ReceivedSignal]:
        yield caught

    monkeypatch.setattr(loop, "record_signals", catch)
    return caught


def skipping(data: Path, **fields: object) -> Config:
    """Ten steps that leave out what is not finite, at a rate that falls with every step."""
    return Config(
        "test", MODEL, steps=10, data=TextConfig(str(write_books(data))),
        train=replace(TRAIN, non_finite="skip", eval_every=20, checkpoint_every=20, **fields),
        optimizer=OptimizerConfig(learning_rate=0.1, schedule="cosine"),
    )  # fmt: skip


def breaking(monkeypatch, steps: set[int], caught: ReceivedSignal, interrupted: int | None = None) -> None:
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


def run_on_one(config: Config, folder: Path, resume: Resume | None = None) -> Outcome:
    folder.mkdir(exist_ok=True)
    data = config.data.load(MODEL, config.train.batch_size, config.seed)
    return train(TrainSetup(config, make_mesh("", jax.devices()[:1])), data, folder, [], resume)


@pytest.mark.slow
def test_skipped_step_leaves_its_learning_rate_to_the_next(monkeypatch, tmp_path, caught):
    config = skipping(tmp_path / "books")
    breaking(monkeypatch, {3, 4, 7}, caught)
    run_on_one(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    # Steps 3 and 4 and the next are tried at the third rate, 7 and the next at the fifth.
    used = [0, 1, 2, 2, 2, 3, 4, 4, 5, 6]
    schedule = make_schedule(config.optimizer, config.steps)
    assert len({float(schedule(count)) for count in used}) == 7
    np.testing.assert_allclose([row["lr"] for row in rows], [schedule(count) for count in used], rtol=1e-6)
    assert [row.get("skipped", 0) for row in rows] == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0]


@pytest.mark.slow
def test_a_signal_during_a_slow_step_ends_training_after_it(monkeypatch, tmp_path, caught, capsys):
    monkeypatch.setattr(pending, "SLOW_STEP_MS", 0)
    monkeypatch.setattr(log, "LITTLE_SECONDS", 0)
    breaking(monkeypatch, set(), caught, interrupted=5)
    interrupted = run_on_one(skipping(tmp_path / "books"), tmp_path / "run")
    assert (interrupted.status, interrupted.step) == ("interrupted", 5)
    assert CheckpointReader(tmp_path / "run").steps() == [5]
    (estimate,) = [line for line in capsys.readouterr().out.splitlines() if "per step" in line]
    assert re.fullmatch(r"step       2  \S+ s per step, about .+ left", estimate)


@pytest.mark.slow
def test_steps_skipped_before_an_interruption_are_logged_after_it(monkeypatch, tmp_path, caught):
    config = skipping(tmp_path / "books", log_every=9)
    breaking(monkeypatch, {3, 4}, caught, interrupted=5)
    interrupted = run_on_one(config, tmp_path / "run")
    assert interrupted.status == "interrupted" and interrupted.step in (5, 6)  # a signal is seen a step later
    breaking(monkeypatch, {8}, caught)
    assert run_on_one(config, tmp_path / "run", Resume()).status == "done"
    rows = {row["step"]: row for row in read_metrics(tmp_path / "run")}
    assert rows[9]["skipped"] == 3
    assert "skipped" not in rows[10]


@pytest.mark.slow
def test_snapshots_have_the_parameters_of_doubled_steps_and_follow_resumes_and_rollbacks(monkeypatch, tmp_path, caught):
    plain = replace(skipping(tmp_path / "books"), train=replace(TRAIN, log_every=20, eval_every=0, checkpoint_every=5))
    config, trained = replace(plain, train=replace(plain.train, snapshots="doubling")), dict[int, np.ndarray]()

    class Noting(CompiledStep):
        def __call__(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, StepMetrics]:
            trained[step] = np.asarray(state.params["W_out"])
            caught.number = 2 if step + 1 == interrupted else caught.number
            return super().__call__(state, batch, step)

    def snapshots() -> dict[int, np.ndarray]:
        run = load_run(tmp_path / "run")
        return {step: np.asarray(load_snapshot(run, step)["W_out"]) for step in snapshot_steps(tmp_path / "run")}

    monkeypatch.setattr(loop, "CompiledStep", Noting)
    interrupted = 0
    last = run_on_one(plain, tmp_path / "plain").state.params
    folder = create_run(tmp_path / "run", config, config.data.load(MODEL, 8, 0).tokenizer, False)
    trained[10] = np.asarray(run_on_one(config, folder).state.params["W_out"])
    assert jax.tree.all(jax.tree.map(np.array_equal, load_snapshot(load_run(folder), 10), last))
    whole = snapshots()
    assert list(whole) == [0, 1, 2, 4, 8, 10]
    assert all(np.array_equal(whole[step], trained[step]) for step in whole)

    shutil.rmtree(folder / "checkpoints/10")  # killed after snapshot 8, while snapshot 10 was being saved
    (folder / "snapshots/10").rename(folder / "snapshots/10.orbax-checkpoint-tmp")
    (folder / "snapshots").rename(folder / "film")  # the rest is that of an earlier version
    stored = json.loads((folder / "config.json").read_text())
    del stored["train"]["snapshots"]
    stored["train"]["film"] = True
    (folder / "config.json").write_text(json.dumps(stored))
    assert read_config(folder) == config
    slower = replace(config, optimizer=replace(config.optimizer, learning_rate=0.05))
    interrupted = 6
    run_on_one(slower, folder, Resume(rollback=Rollback(5)))
    assert snapshot_steps(folder) == [0, 1, 2, 4]
    caught.number = interrupted = 0
    run_on_one(slower, folder, Resume())
    again = snapshots()
    assert list(again) == list(whole) and not list(folder.glob("film/*tmp*"))
    assert [np.array_equal(again[step], whole[step]) for step in again] == [True, True, True, True, False, False]


def diverging(monkeypatch, losses: Mapping[int, float], batches: dict[int, np.ndarray] | None = None) -> None:
    """Let the steps tell these losses, whatever they are, and note what they are given."""

    class Diverging(CompiledStep):
        def __call__(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, StepMetrics]:
            if batches is not None:
                batches[step + 1] = np.asarray(batch.inputs[0])
            state, metrics = super().__call__(state, batch, step)
            return state, metrics._replace(loss=np.float32(losses.get(step + 1, metrics.loss)))

    monkeypatch.setattr(loop, "CompiledStep", Diverging)


def falling(data: Path, steps: int = 30, **fields: object) -> Config:
    train = replace(TRAIN, log_every=10, checkpoint_every=5, eval_every=40, **fields)
    return Config("test", MODEL, steps=steps, data=TextConfig(str(write_books(data))), train=train)


LOST = dict.fromkeys(range(12, 31), 20.0)
"""Of the losses of steps: from step 12 on worse than knowing nothing, which is noticed at step 17."""


@pytest.mark.slow
def test_divergence_stops_training_and_retains_the_checkpoint_before_it(monkeypatch, tmp_path):
    diverging(monkeypatch, LOST)
    outcome = run_on_one(falling(tmp_path / "books"), tmp_path / "run")
    assert (outcome.status, outcome.step, outcome.healthy) == ("diverged", 17, 10)
    assert outcome.divergence.began == 12
    stored = CheckpointReader(tmp_path / "run")
    assert {step: stored.is_healthy(step) for step in stored.steps()} == {5: True, 10: True, 15: False}
    last = read_metrics(tmp_path / "run")[-1]
    assert last["step"] == 17 and (last["diverged"]["began"], last["diverged"]["loss"]) == (12, 20.0)
    assert last["loss"] == 20 and last["grad_norm"] > 0 and last["update_norm"] > 0


@pytest.mark.slow
def test_rollback_with_other_options_survives_a_resume(monkeypatch, tmp_path, caught):
    config, batches = falling(tmp_path / "books"), dict[int, np.ndarray]()
    diverging(monkeypatch, LOST)
    run_on_one(config, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "stopped")
    other = replace(config, optimizer=replace(config.optimizer, clip_norm=0.5, learning_rate=0.02))
    rollback = Rollback(10, skip_batches=3, changes="optimizer.clip_norm 0.5 instead of None")

    diverging(monkeypatch, {}, batches)
    assert run_on_one(other, tmp_path / "run", Resume(rollback=rollback)).status == "done"
    data = config.data.load(MODEL, config.train.batch_size, config.seed)
    np.testing.assert_array_equal(batches[11], data.batch(13).inputs[0])  # the batch of step 14
    rows = read_metrics(tmp_path / "run")
    (note,) = [row for row in rows if "note" in row]
    assert note == {
        "step": 10,
        "note": "rolled back to step 10; optimizer.clip_norm 0.5 instead of None; 3 batches skipped, 3 in all; "
        "checkpoints removed: 15",
    }
    assert not any("diverged" in row for row in rows)

    # Stopped before its first checkpoint, and resumed without a word of the rollback.
    breaking(monkeypatch, set(), caught, interrupted=12)
    folder = tmp_path / "stopped"
    assert run_on_one(other, folder, Resume(rollback=rollback)).status == "interrupted"
    for step in (step for step in CheckpointReader(folder).steps() if step > 10):
        shutil.rmtree(folder / f"checkpoints/{step}")
    breaking(monkeypatch, set(), caught)
    assert read_config(folder).train.skip_batches == 3
    assert run_on_one(read_config(folder), folder, Resume()).status == "done"
    a, b = (CheckpointReader(tmp_path / name).arrays(30) for name in ("run", "stopped"))
    assert all(np.array_equal(a[name], b[name]) for name in {**a, **b})


@pytest.mark.slow
def test_rollback_to_the_start_removes_all_checkpoints(monkeypatch, tmp_path):
    config = falling(tmp_path / "books", steps=10)
    run_on_one(config, tmp_path / "run")
    first = read_metrics(tmp_path / "run")
    (tmp_path / "run/wandb").mkdir()
    (tmp_path / "run" / WANDB_ID).write_text("old\n")
    assert run_on_one(config, tmp_path / "run", Resume(rollback=Rollback(0))).status == "done"
    assert not (tmp_path / "run" / WANDB_ID).exists()  # what follows is another run there
    rows = read_metrics(tmp_path / "run")
    assert rows[0]["note"] == "rolled back to step 0; checkpoints removed: 5, 10"
    assert [without_timings(row) for row in rows[1:]] == [without_timings(row) for row in first]
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"has no checkpoint 7; it has \[5, 10\]"):
        run_on_one(config, tmp_path / "run", Resume(rollback=Rollback(7)))
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_divergence_that_recovers_is_a_warning_and_a_note(monkeypatch, tmp_path):
    diverging(monkeypatch, dict.fromkeys(range(12, 20), 20.0))
    outcome = run_on_one(falling(tmp_path / "books", divergence="warn"), tmp_path / "run")
    assert (outcome.status, outcome.diverging_since) == ("done", 0)
    rows = read_metrics(tmp_path / "run")
    (warned,), back = ([(row["step"], row[kind]) for row in rows if kind in row] for kind in ("warning", "note"))
    assert warned[0] == 17 and warned[1].startswith("the loss has been diverging since step 12: 20 at step 17")
    assert back == [(27, "the loss has recovered to near its minimum")]


@pytest.mark.slow
def test_divergence_at_the_last_step_is_in_the_outcome(monkeypatch, tmp_path):
    diverging(monkeypatch, LOST)
    outcome = run_on_one(falling(tmp_path / "books", divergence="warn"), tmp_path / "run")
    assert (outcome.status, outcome.diverging_since) == ("done", 12)
