"""Checkpoints within the grace period of a scheduler."""

import signal
import time
from collections.abc import Callable

import pytest

from jaxformer.runs.checkpoints import CheckpointReader
from tests.helpers import run, start, tiny, write_books

ENDLESS = (
    "--train.report-every", "0", "--train.eval-every", "0", "--train.gradients-every", "0", "--train.log-every", "1",
    "--train.checkpoint-every", "10",
)  # fmt: skip


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_stops(tmp_path):
    process = start("train.py", *tiny(write_books(tmp_path / "books"), 10**6, *ENDLESS), "--run", "run", cwd=tmp_path)
    wait_until(lambda: CheckpointReader(tmp_path / "run"))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    step = int(out.split("interrupted at step ")[1].split()[0].replace(",", ""))
    assert CheckpointReader(tmp_path / "run").step() == step


@pytest.mark.slow
def test_sigkill_right_after_sigterm_leaves_an_intact_checkpoint(tmp_path):
    books = write_books(tmp_path / "books")
    process = start("train.py", *tiny(books, 10**6, *ENDLESS), "--run", "run", cwd=tmp_path)
    wait_until(lambda: CheckpointReader(tmp_path / "run"))
    process.send_signal(signal.SIGTERM)  # as a scheduler without a grace period
    process.kill()
    process.communicate()
    step = CheckpointReader(tmp_path / "run").step()
    assert step % 10 == 0 or process.returncode == 128 + signal.SIGTERM
    result = run("train.py", "--resume", "--run", "run", "--steps", str(step + 2), cwd=tmp_path)
    assert result.returncode == 0 and f"final: step {step + 2:,}" in result.stdout, result.stderr
