"""Notice of preemption, and checkpoints within the grace period of a scheduler."""

import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxformer import preemption
from jaxformer.checkpoints import CheckpointReader
from jaxformer.preemption import METADATA_HOST, watch_preemption
from jaxformer.signals import ReceivedSignal
from tests.helpers import run, start, tiny, write_books


class Metadata(BaseHTTPRequestHandler):
    """Google's metadata server, which refuses requests without its header."""

    answer = b"FALSE"

    def do_GET(self):
        is_known = self.path == "/computeMetadata/v1/instance/preempted" and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if is_known else 403)
        self.end_headers()
        self.wfile.write(type(self).answer if is_known else b"TRUE")

    def log_message(self, *_):
        pass


@pytest.fixture
def metadata_server(monkeypatch) -> Iterator[str]:
    monkeypatch.setattr(Metadata, "answer", b"FALSE")
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def wait_until(condition) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_preemption_is_recorded_as_sigterm(metadata_server, monkeypatch, caplog):
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for this server
    received = ReceivedSignal()
    with watch_preemption(received, {METADATA_HOST: metadata_server}):
        time.sleep(0.2)
        assert not received.is_set()
        monkeypatch.setattr(Metadata, "answer", b"TRUE")
        wait_until(received.is_set)
    assert received.number == signal.SIGTERM
    assert "this machine is being preempted; saving a checkpoint" in caplog.text


def test_signal_before_the_notice_is_not_replaced(metadata_server, monkeypatch):
    monkeypatch.setattr(Metadata, "answer", b"TRUE")
    received = ReceivedSignal()
    received.number = signal.SIGINT
    with watch_preemption(received, {METADATA_HOST: metadata_server}):
        time.sleep(0.1)
    assert received.number == signal.SIGINT


@pytest.mark.parametrize("product", ["Standard PC", None])
def test_other_machines_are_not_polled(tmp_path, monkeypatch, product):
    monkeypatch.setattr(preemption, "PRODUCT_NAME", tmp_path / "product_name")
    if product is not None:
        (tmp_path / "product_name").write_text(product)
    before = threading.active_count()
    with watch_preemption(ReceivedSignal(), {}):
        assert threading.active_count() == before


def test_unreachable_metadata_server_ends_with_the_training(monkeypatch):
    monkeypatch.setattr(preemption, "TIMEOUT_SECONDS", 0.2)
    received, began = ReceivedSignal(), time.monotonic()
    with watch_preemption(received, {METADATA_HOST: "127.0.0.1:1"}):
        time.sleep(0.1)
    assert time.monotonic() - began < 5
    assert not received.is_set()


ENDLESS = (
    "--train.report-every", "0", "--train.eval-every", "0", "--train.gradients-every", "0", "--train.log-every", "1",
    "--train.checkpoint-every", "10",
)  # fmt: skip


@pytest.mark.slow
def test_preempted_machine_saves_a_checkpoint_and_stops(tmp_path, metadata_server, monkeypatch):
    monkeypatch.setenv(METADATA_HOST, metadata_server)
    process = start("train.py", *tiny(write_books(tmp_path / "books"), 10**6, *ENDLESS), "--run", "run", cwd=tmp_path)
    wait_until(lambda: CheckpointReader(tmp_path / "run"))
    monkeypatch.setattr(Metadata, "answer", b"TRUE")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "interrupted at step " in out and "being preempted" in err
    step = int(out.split("interrupted at step ")[1].split()[0].replace(",", ""))
    assert CheckpointReader(tmp_path / "run").step() == step


@pytest.mark.exhaustive
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
