"""Reprs fit a screen; the standard streams: control characters, closed terminals, pipes and streams."""

import errno
import io
import os
import pty
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxformer.config import Config
from jaxformer.data.counts import count
from jaxformer.data.dataset import Batch
from jaxformer.data.tokens import Split
from jaxformer.data.windows import TextConfig, ValidationText
from jaxformer.decode.beam import Beams
from jaxformer.decode.samplers import Samples
from jaxformer.inspect.gradients import GradientReport
from jaxformer.inspect.influence import Causes
from jaxformer.models.decoder import DecoderConfig
from jaxformer.nn.parameter_norms import Row
from jaxformer.parallel.mesh import make_mesh
from jaxformer.terminal import _Output, echo, echo_status, escape_control
from jaxformer.train.setup import TrainSetup, TrainState
from jaxformer.train.signals import record_signals
from jaxformer.train.step import StepMetrics
from tests.helpers import ROOT

HOSTILE = "a\x1b]0;title\x07\r\x9b2J\u202e\u2066\x7f\tb\n\udcff"
SHOWN = "a␛]0;title␇␍\\x9b2J\\u202e\\u2066␡\tb\n\\udcff"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_escaped_on_a_terminal_only():
    screen, pipe = Screen(), io.StringIO()
    echo(HOSTILE, screen)
    echo(HOSTILE, pipe)
    assert screen.getvalue() == SHOWN + "\n"
    assert pipe.getvalue() == HOSTILE + "\n"
    assert escape_control("Grüße 漢字 👩‍🔬 ﷽") == "Grüße 漢字 👩‍🔬 ﷽"


def test_status_is_written_to_a_terminal_only(monkeypatch):
    for stream, shown in ((Screen(), "loading ...\n"), (io.StringIO(), "")):
        monkeypatch.setattr("sys.stderr", stream)
        echo_status("loading ...")
        assert stream.getvalue() == shown
    monkeypatch.setattr("sys.stderr", None)
    echo_status("loading ...")


def python(code: str, prefix: str = "", **env: str) -> subprocess.CompletedProcess:
    """Run code in a process with redirected streams."""
    code = f"from jaxformer.terminal import prepare_streams, echo, echo_error\n{code}"
    return subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {prefix}', sys.executable, code],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_closed_streams_become_null(tmp_path):
    done = python(
        f"prepare_streams()\nimport sys\nfile = open({str(tmp_path / 'f')!r}, 'w')\n"
        "assert file.fileno() > 2 and not sys.stdin.read()\necho('lost')\necho_error('lost')",
        "<&- >&- 2>&-",
    )
    assert done.returncode == 0
    assert (tmp_path / "f").read_text() == ""


def test_characters_outside_the_encoding_are_escaped():
    done = python("prepare_streams()\necho('é漢')\necho_error('é\\nx')", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert (done.returncode, done.stdout) == (0, "\\xe9\\u6f22\n")
    assert done.stderr == "\\xe9\\u2424x\n"


def test_closed_pipe_does_not_end_the_process():
    code = "prepare_streams(output_optional=True)\nfor i in range(20_000): echo(str(i))\necho_error('ended')"
    done = python(code, "| head -n 1")
    assert (done.stdout, done.stderr) == ("0\n", "ended\n")


def test_closed_terminal_does_not_end_the_process(tmp_path):
    parent, child = pty.openpty()
    code = (
        "import signal, sys\nfrom jaxformer.terminal import prepare_streams, echo\n"
        "prepare_streams(output_optional=True)\necho('ready')\nsys.stdin.read()\n"
        f"for i in range(3): echo('lost')\nopen({str(tmp_path / 'f')!r}, 'w').write('ended')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=child, stderr=child
    ) as process:
        os.close(child)
        assert os.read(parent, 100).startswith(b"ready")
        os.close(parent)
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "f").read_text() == "ended"


def test_full_disk_does_not_end_training():
    code = "prepare_streams(output_optional=True)\nfor i in range(3): echo(str(i))\necho_error('ended')"
    done = python(code, "> /dev/full")
    note = f"note: standard output: {os.strerror(errno.ENOSPC)}; continuing without it"
    assert (done.returncode, done.stderr.splitlines()) == (0, [note, "ended"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "status", "message"),
    [
        ("> /dev/full", 2, f"error: standard output: {os.strerror(errno.ENOSPC)}; free some space.\n"),
        ("> >(head -c 1 > /dev/null)", 128 + signal.SIGPIPE, ""),
        ("2> /dev/full", 0, ""),
        ("> /dev/full 2> /dev/full", 2, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written_is_one_sentence(streams, status, message):
    """What is not yet flushed must not fail again as Python exits."""
    code = (
        "import sys\nfrom jaxformer.cli.command import as_command\n"
        "@as_command()\n"
        "def main(line):\n"
        "    echo_error('') if '2>' in line.words()[0] else None\n"
        "    for i in range(20_000): echo(str(i))\n"
        "    return 0\n"
        f"sys.exit(main([{streams!r}]))"
    )
    done = python(code, streams)
    assert (done.returncode, done.stderr) == (status, message)


def test_eio_is_ignored_on_a_terminal_only(monkeypatch, capsys):
    parent, child = pty.openpty()
    terminal = _Output(child, is_required=False)
    monkeypatch.setattr(os, "isatty", lambda _: False)
    disk = _Output(os.dup(child), is_required=False)
    os.close(parent)
    assert terminal.write(b"x") == 1
    assert capsys.readouterr().err == ""
    assert disk.write(b"x") == 1
    assert os.strerror(errno.EIO) in capsys.readouterr().err
    os.close(child)
    os.close(disk.fileno())


@pytest.fixture
def hangup():
    """Restore the handler of SIGHUP."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def test_sighup_is_recorded_once_and_stays_ignored(hangup):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with record_signals(signal.SIGTERM, signal.SIGHUP) as caught:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # the shell sends it, too
    assert caught.number == signal.SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with record_signals(signal.SIGTERM, signal.SIGHUP) as caught:
        os.kill(os.getpid(), signal.SIGHUP)
    assert not caught.is_set()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


LONG, TOKENS = np.ones((4, 50, 5)), np.arange(2048) % 7
TREE = {f"blocks_{i}": {"W": np.ones((30, 40)), "b": np.ones(40)} for i in range(12)}
CONFIG = Config("mine", DecoderConfig(), TextConfig(), steps=1)


@pytest.mark.parametrize(
    "value",
    [
        CONFIG,
        TrainSetup(CONFIG, make_mesh("", jax.devices()[:1])),
        TrainState(TREE, (TREE, TREE), np.int32(0)),
        StepMetrics(*[np.float32(1)] * 5, np.ones((3, 400))),
        Batch((np.ones((8, 257)),), np.ones((8, 256)), np.ones((8, 256))),
        Samples(LONG[..., 0], LONG[..., 0], LONG, LONG),
        Beams(LONG, LONG[..., 0]),
        ValidationText(TOKENS, np.ones(900), 16, 16),
        count(TOKENS, TOKENS, 900),
        Causes(TOKENS, -1.0, True, LONG[0, :, 0], -9.0),
        GradientReport(tuple(Row(f"blocks.{i}.mlp.W_1", 1.0, 2.0, 0.5, 0.1) for i in range(99))),
        Split(TOKENS, 3, 4000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_repr_fits_a_screen(value):
    assert sum(-(-len(line) // 120) for line in repr(value).splitlines()) <= 24


def test_a_repr_has_dtypes_and_shapes_in_place_of_long_arrays():
    assert repr(Batch((np.ones((8, 257), np.int32),), np.arange(2))) == (
        "Batch(inputs=(int32[8, 257],), targets=array([0, 1]), weights=None)"
    )
    assert repr(TrainState(TREE, (), np.int32(3))) == (
        "TrainState(params=<24 arrays, 14,880 values>, opt_state=(), failures=np.int32(3), frozen_params=None)"
    )
