"""verify-resume: it sees what is the same, and it can see that something is not."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxformer.checkpoints import CheckpointManager
from jaxformer.cli import verify_resume
from jaxformer.cli.verify_resume import parting
from tests.helpers import ROOT, run, tiny, write_books

ROWS = [
    {"step": 0, "val_loss": 5.5, "entropy": [[1.0, 0.5]], "step_ms": 7.0},
    {"step": 10, "loss": 4.5, "lr": 0.1, "tokens_per_s": 900.0},
    {"step": 20, "loss": 4.25, "lr": 0.1, "data_wait_ms": 0.1},
]
PARAMS = {"W": np.float32([0.0, 1.0, np.nan]), "b": np.float32([3.0])}


def made(folder, rows=ROWS, params=PARAMS, step=20):
    """A run's folder with a log and a checkpoint."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with CheckpointManager(folder) as checkpoints:
        values = {name: jnp.asarray(value) for name, value in params.items()}
        checkpoints.save(step, values, {"momentum": jnp.ones(2)}, {}, None)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run to compare others with."""
    return made(tmp_path_factory.mktemp("runs") / "a")


@pytest.fixture
def as_a_user(monkeypatch):
    """Without the devices that tests pretend to have; where `python -m jaxformer` finds this package."""
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.chdir(ROOT)


def changed(step: int, **metrics) -> list[dict]:
    return [row | metrics if row["step"] == step else row for row in ROWS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"rows": changed(10, tokens_per_s=1.0)}, []),  # time does not count
        ({"rows": changed(20, loss=4.250000000000001)}, ["the logs part at step 20, in loss: 4.25 and 4.2500000000"]),
        ({"rows": changed(0, entropy=[[1.0, 0.25]])}, ["the logs part at step 0, in entropy: [[1.0, 0.5]] and [[1"]),
        ({"rows": changed(10, grads=1)}, ["the logs part at step 10, in grads: nothing and 1"]),
        ({"rows": ROWS[:2]}, ["the logs part at step 20, in step: 20 and nothing"]),
        ({"step": 15}, ["the last checkpoints are of steps 20 and 15"]),
        ({"params": {"W": PARAMS["W"]}}, ["part in 1 of 3 arrays, first in params/b: only one has it"]),
        ({"params": PARAMS | {"b": np.float32([3.5])}}, ["in 1 of 3 arrays, first in params/b: the largest differe"]),
        ({"params": PARAMS | {"b": np.float32([[3.0]])}}, ["in params/b: float32 (1,) and float32 (1, 1)"]),
        ({"params": PARAMS | {"W": np.float32([-0.0, 1.0, np.nan])}}, ["in params/W: the largest difference is"]),
    ],
)  # fmt: skip
def test_where_two_runs_part(one, tmp_path, other, said):
    found = parting(one, made(tmp_path / "b", **other))
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--kill-at 20 --steps 20", "kill-at is 20; it must be at least 1 and below the 20 steps"),
        ("--kill-at 5 --train.checkpoint-every 9", "there is no checkpoint to resume from at step 5; leave it out"),
        ("--kill-at 0", "kill-at is 0; it must be at least 1"),
        ("--kil-at 5", "unknown option --kil-at; did you mean --kill-at?"),
        ("--kill-at many", "--kill-at"),
        ("--kill-at", "--kill-at"),
        ("--folder .", ". exists; choose another --folder"),
        ("--config nowhere.py", "no config file nowhere.py"),
    ],
)
def test_wrong_input_is_one_sentence(capsys, monkeypatch, options, said):
    monkeypatch.chdir(ROOT)
    assert verify_resume.main(options.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and said in printed.err
    assert not printed.out


@pytest.mark.exhaustive
def test_a_killed_run_ends_as_if_nothing_had_happened_and_a_tampered_one_does_not(tmp_path, capfd, as_a_user):
    write_books(tmp_path / "books")
    options = [*tiny(tmp_path / "books"), "--kill-at", "11", "--folder", str(tmp_path / "kept")]
    assert verify_resume.main(options) == 0
    lines = capfd.readouterr().out.splitlines()
    told = r"killed after step (\d+); resuming from the checkpoint of step (\d+)"
    killed, resumed = map(int, re.fullmatch(told, lines[2]).groups())
    assert 5 <= resumed <= killed and killed >= 11
    assert lines[-1].startswith("identical to the last bit: 10 rows of metrics over 20 steps, and ")

    # The same run again from its checkpoint at step 15, of which one number is another.
    kept = tmp_path / "kept/resumed"
    shutil.rmtree(kept / "checkpoints/20")
    tamper(kept, 15)
    result = run("train.py", "--resume", "--run", str(kept), cwd=tmp_path)
    assert result.returncode == 0 and not result.stderr, result.stderr
    log, checkpoint = parting(tmp_path / "kept/straight", kept)
    assert log.startswith("the logs part at step 18, in loss: ")  # the first row after step 15
    assert re.match(r"the checkpoints of step 20 part in \d+ of 31 arrays, first in params/.*: the largest", checkpoint)


def tamper(folder, step: int) -> None:
    """Change one parameter of the last checkpoint by a thousandth, and save that in its place."""
    checkpoint, reader = folder / "checkpoints" / str(step), ocp.PyTreeCheckpointer()

    def restored(item: str):
        tree = reader.metadata(checkpoint / item).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return jax.tree.map(jnp.asarray, reader.restore(checkpoint / item, restore_args=args))

    params, opt_state = restored("params"), restored("opt_state")
    position = json.loads((checkpoint / "position/metadata").read_text())
    params["final_norm"]["gamma"] = params["final_norm"]["gamma"].at[0].add(1e-3)
    shutil.rmtree(checkpoint)
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(step, params, opt_state, position, None)


@pytest.mark.slow
def test_a_run_that_cannot_be_trained_is_one_sentence(tmp_path, capfd, as_a_user):
    assert verify_resume.main([*tiny(tmp_path / "nowhere"), "--kill-at", "5"]) == 2
    assert "training ended with status 2: no data at" in capfd.readouterr().err
