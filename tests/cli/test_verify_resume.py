"""verify-resume: an exact resume passes, another one fails."""

import re
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from jaxformer.cli import verify_resume
from tests.helpers import ROOT, Here, tiny, write_books


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
def test_a_killed_and_resumed_run_is_bit_identical(tmp_path, capsys, monkeypatch):
    """Only the training that is killed has a process of its own."""
    monkeypatch.chdir(ROOT)  # where `python -m jaxformer` finds this package
    process: Any = subprocess.Popen
    kept = str(tmp_path / "kept")
    is_killed = lambda command: "--resume" not in command and command[-1] == f"{kept}/resumed"  # noqa: E731
    start = lambda command, **streams: (process if is_killed(command) else Here)(command, **streams)  # noqa: E731
    monkeypatch.setattr(verify_resume, "subprocess", SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT))
    nothing_else = ("--train.report-every", "0", "--train.eval-every", "0", "--train.batch-size", "8")
    options = tiny(write_books(tmp_path / "books"), 20, *nothing_else)
    assert verify_resume.main([*options, "--kill-at", "11", "--folder", kept]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = r"killed after step (\d+); resuming from the checkpoint of step (\d+)"
    killed, resumed = map(int, re.fullmatch(told, lines[2]).groups())
    assert 5 <= resumed <= killed and killed >= 11
    assert re.match(r"bit-identical: \d+ rows of metrics over 20 steps, and ", lines[-1])


def test_a_difference_is_printed_and_is_status_1(tmp_path, capsys, monkeypatch):
    from jaxformer.inspect import comparison

    monkeypatch.setattr(comparison, "exact_differences", lambda *_: ["loss at step 3: 1.0 and 2.0"])
    assert verify_resume._compare(tmp_path / "uninterrupted", tmp_path / "resumed") == 1
    assert capsys.readouterr().out == "loss at step 3: 1.0 and 2.0\n"


@pytest.mark.slow
def test_a_failed_training_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify_resume, "subprocess", SimpleNamespace(Popen=Here, STDOUT=subprocess.STDOUT))
    assert verify_resume.main([*tiny(tmp_path / "nowhere", 20, "--train.batch-size", "8"), "--kill-at", "5"]) == 2
    assert "training ended with status 2: no data at" in capsys.readouterr().err
