"""Work in threads while the program waits."""

import subprocess
import sys
import threading

import pytest

from jaxformer import meanwhile as module
from jaxformer.meanwhile import meanwhile


def test_calls_are_made_beside_a_body_that_takes_long(monkeypatch):
    monkeypatch.setattr(module, "DELAY_SECONDS", 0)
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        began.set()
        assert may_end.wait(60)
        ended.set()
        raise ValueError("suppressed")

    with meanwhile(call):
        assert began.wait(60)
    assert not ended.is_set()  # the end of the body does not wait
    may_end.set()
    assert ended.wait(60)


def test_no_call_is_made_beside_a_body_that_fails_at_once(monkeypatch):
    monkeypatch.setattr(module, "DELAY_SECONDS", 0.05)
    called, before = threading.Event(), threading.active_count()
    with pytest.raises(ValueError, match="no such file"), meanwhile(called.set):
        raise ValueError("no such file")
    while threading.active_count() > before:
        pass
    assert not called.is_set()


@pytest.mark.parametrize("seconds", [0, 600])
def test_leaving_waits_for_no_call(seconds):
    program = f"""
import time
from jaxformer import meanwhile
meanwhile.DELAY_SECONDS = 0
with meanwhile.meanwhile(lambda: time.sleep({seconds})):
    time.sleep(0.2)
print("said", end="")
meanwhile.leave(3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said", "")
