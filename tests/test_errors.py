"""Messages name commands that work for the user."""

import sys

import pytest

from jaxformer.errors import command
from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("program", "train", "inspect"),
    [
        ("train.py", "python train.py", "python -m jaxformer inspect"),
        ("sample.py", "python train.py", "python -m jaxformer inspect"),
        (f"{ROOT}/train.py", f"python {ROOT}/train.py", "python -m jaxformer inspect"),
        ("/usr/bin/jaxformer", "jaxformer train", "jaxformer inspect"),
        ("jaxformer.exe", "jaxformer train", "jaxformer inspect"),
        (f"{ROOT}/jaxformer/__main__.py", "python -m jaxformer train", "python -m jaxformer inspect"),
        ("", "python -m jaxformer train", "python -m jaxformer inspect"),  # an interactive interpreter
        ("-c", "python -m jaxformer train", "python -m jaxformer inspect"),
    ],
)
def test_commands_are_named_as_the_program_was_started(monkeypatch, program, train, inspect):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program])
    assert (command("train"), command("inspect")) == (train, inspect)


def test_a_script_of_the_users_own_is_not_taken_for_ours(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "sample.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert command("train") == "python -m jaxformer train"


def test_a_path_with_spaces_is_quoted(monkeypatch, tmp_path):
    (tmp_path / "my code").symlink_to(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{tmp_path}/my code/train.py"])
    assert command("sample") == f"python '{tmp_path}/my code/sample.py'"
