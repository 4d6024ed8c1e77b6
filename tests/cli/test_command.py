"""Commands: exit statuses, one-sentence errors, warnings on one line, and commands to type."""

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import jax
import pytest

from jaxformer.cli import sample, train
from jaxformer.cli.command import _OneLine, as_command, command, interruptible
from jaxformer.errors import UserError
from tests.helpers import ROOT


def test_control_characters_of_a_path_are_escaped(capsys):
    assert sample.main(["--run", "no\nrun\x1b[2J"]) == 2
    assert capsys.readouterr().err.startswith("error: no␤run␛[2J does not exist")


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_a_missing_platform_is_named(capsys, monkeypatch, error):
    def no_devices():
        raise error

    monkeypatch.setattr(jax, "devices", no_devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert as_command()(lambda _: len(jax.devices()))([]) == 2
    assert capsys.readouterr().err == (
        "error: JAX_PLATFORMS is 'cuda', but jax finds no such device; unset it, or set it to cpu.\n"
    )
    monkeypatch.undo()
    with pytest.raises(error):  # of something else
        as_command()(lambda _: no_devices())([])


def test_ctrl_c_ends_what_does_not_listen_to_it(capsys):
    """The compiler hears of a signal when it returns, after up to half a minute."""
    ended = threading.Event()

    def compile_program() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        for _ in range(100):
            with suppress(KeyboardInterrupt):
                if ended.wait(0.1):
                    return

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background of a shell
    try:
        assert as_command()(lambda _: interruptible(compile_program) or 0)([]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
        ended.set()
    assert capsys.readouterr().err == "interrupted\n"


def test_debug_raises_the_error():
    with pytest.raises(UserError):
        train.main(["--debug", "--steps", "0"])


def test_a_warning_is_one_line_above_its_traceback():
    record = logging.makeLogRecord({"msg": "tokens in %s; again", "args": ("a\nb\x1b",), "levelname": "WARNING"})
    formatter = _OneLine("%(levelname)s: %(message)s")
    assert formatter.format(record) == "WARNING: tokens in a␤b␛; again"
    record.exc_text = "Traceback\n  line 1"
    assert formatter.format(record).split("\n") == ["WARNING: tokens in a␤b␛; again", "Traceback", "  line 1"]


def test_an_exception_that_is_logged_as_a_message_is_printed():
    error = ValueError("no such file")
    record = logging.LogRecord("orbax", logging.ERROR, "", 0, error, (), (ValueError, error, None))
    assert _OneLine("%(levelname)s: %(message)s").format(record).startswith("ERROR: no such file")


def test_a_plugin_that_cannot_be_used_is_one_line_with_the_reason():
    """The record is that of jax, `discover_pjrt_plugins` in `jax/_src/xla_bridge.py`."""
    record = logging.makeLogRecord({"args": ("xla_cuda13",), "levelname": "ERROR", "exc_info": True})
    record.msg = "Jax plugin configuration error: Exception when calling %s.initialize()"
    record.exc_info = (RuntimeError, RuntimeError("Unable to load cuDNN. Is it installed?"), None)
    assert _OneLine("%(levelname)s: %(message)s").format(record) == (
        "WARNING: Jax plugin configuration error: Exception when calling xla_cuda13.initialize(): Unable to load "
        "cuDNN. Is it installed? JAX_PLATFORMS=cpu uses no plugin."
    )


def test_an_interrupted_program_ends_at_once_and_prints_what_it_has_said():
    """A thread of Orbax waits for a save that an interruption has cut off, and the interpreter would wait for it."""
    program = (
        "import threading\nfrom jaxformer.cli.command import exit_program\n"
        "threading.Thread(target=threading.Event().wait).start()\nprint('saved')\nexit_program(130)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "saved\n", "")


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
