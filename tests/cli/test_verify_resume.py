"""verify-resume: an exact resume passes, a tampered one fails."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxformer.cli import verify_resume
from jaxformer.inspect.comparison import checkpoint_differences, log_differences
from jaxformer.runs.checkpoints import CheckpointManager
from tests.helpers import ROOT, run, tiny, write_books


@pytest.fixture
def as_a_user(monkeypatch):
    """Without the devices that tests pretend to have; where `python -m jaxformer` finds this package."""
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--kill-at 20 --steps 20", "--kill-at is 20; it must be at least 1 and below the 20 steps"),
        ("--kill-at 5 --train.checkpoint-every 9", "there is no checkpoint to resume from at step 5; omit it"),
        ("--folder .", ".: File exists."),
    ],
)
def test_wrong_input_is_one_sentence(capsys, monkeypatch, options, said):
    monkeypatch.chdir(ROOT)
    assert verify_resume.main(options.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and said in printed.err
    assert not printed.out


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_bit_identical_and_a_tampered_one_is_not(tmp_path, capfd, as_a_user):
    write_books(tmp_path / "books")
    without_reports = ("--train.report-every", "0")
    options = [*tiny(tmp_path / "books", 20, *without_reports), "--kill-at", "11", "--folder", str(tmp_path / "kept")]
    assert verify_resume.main(options) == 0
    lines = capfd.readouterr().out.splitlines()
    told = r"killed after step (\d+); resuming from the checkpoint of step (\d+)"
    killed, resumed = map(int, re.fullmatch(told, lines[2]).groups())
    assert 5 <= resumed <= killed and killed >= 11
    assert lines[-1].startswith("bit-identical: 10 rows of metrics over 20 steps, and ")

    # The same run again from its checkpoint at step 15, of which one number is another.
    kept = tmp_path / "kept/resumed"
    shutil.rmtree(kept / "checkpoints/20")
    tamper(kept, 15)
    result = run("train.py", "--resume", "--run", str(kept), cwd=tmp_path)
    assert result.returncode == 0 and not result.stderr, result.stderr
    runs = tmp_path / "kept/uninterrupted", kept
    assert next(log_differences(*runs)).startswith("first difference at step 18, in loss: ")  # the row after step 15
    assert re.match(r"step 20, params/.*: relative difference", next(checkpoint_differences(*runs)))


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
def test_a_failed_training_is_one_sentence(tmp_path, capfd, as_a_user):
    assert verify_resume.main([*tiny(tmp_path / "nowhere"), "--kill-at", "5"]) == 2
    assert "training ended with status 2: no data at" in capfd.readouterr().err
