"""verify-resume: an exact resume passes, another one fails."""

import re

import pytest

from jaxformer.cli import verify_resume
from tests.helpers import ROOT, tiny, write_books


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
def test_a_killed_and_resumed_run_is_bit_identical(tmp_path, capfd, as_a_user):
    write_books(tmp_path / "books")
    without_reports = ("--train.report-every", "0")
    options = [*tiny(tmp_path / "books", 20, *without_reports), "--kill-at", "11", "--folder", str(tmp_path / "kept")]
    assert verify_resume.main(options) == 0
    lines = capfd.readouterr().out.splitlines()
    told = r"killed after step (\d+); resuming from the checkpoint of step (\d+)"
    killed, resumed = map(int, re.fullmatch(told, lines[2]).groups())
    assert 5 <= resumed <= killed and killed >= 11
    assert lines[-1].startswith("bit-identical: 10 rows of metrics over 20 steps, and ")


def test_a_difference_is_printed_and_is_status_1(tmp_path, capsys, monkeypatch):
    from jaxformer.inspect import comparison

    monkeypatch.setattr(comparison, "exact_differences", lambda *_: ["loss at step 3: 1.0 and 2.0"])
    assert verify_resume._compare(tmp_path / "uninterrupted", tmp_path / "resumed") == 1
    assert capsys.readouterr().out == "loss at step 3: 1.0 and 2.0\n"


@pytest.mark.slow
def test_a_failed_training_is_one_sentence(tmp_path, capfd, as_a_user):
    assert verify_resume.main([*tiny(tmp_path / "nowhere"), "--kill-at", "5"]) == 2
    assert "training ended with status 2: no data at" in capfd.readouterr().err
