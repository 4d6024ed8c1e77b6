"""Google Cloud's notice that a machine is about to be preempted."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jaxformer.signals import ReceivedSignal

METADATA_HOST = "GCE_METADATA_HOST"
"""Environment variable with the host of the metadata server, which Google's libraries also read."""
PRODUCT_NAME = Path("/sys/class/dmi/id/product_name")
"""Linux file in which Google's machines name their manufacturer."""
POLL_SECONDS, UNREACHABLE_SECONDS, TIMEOUT_SECONDS = 1.0, 30.0, 2.0
"""Interval between requests, interval after a failed one, and timeout of each."""


@contextmanager
def watch_preemption(received: ReceivedSignal, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Record SIGTERM as soon as the metadata server announces that this machine is preempted, before the system sends
    it; on other machines, do nothing."""
    host = _metadata_host(environment)
    if host is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(host, received, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(TIMEOUT_SECONDS)


def _metadata_host(environment: Mapping[str, str]) -> str | None:
    """Return the host of the metadata server; None if this is not a Google Cloud machine."""
    if host := environment.get(METADATA_HOST):
        return host
    try:
        is_google = PRODUCT_NAME.read_text(encoding="utf-8").startswith("Google")
    except (OSError, ValueError):
        return None
    return "metadata.google.internal" if is_google else None


def _watch(host: str, received: ReceivedSignal, stop: threading.Event) -> None:
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is local: no proxy
    seconds = 0.0
    while not stop.wait(seconds) and not received.is_set():
        try:
            with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                is_preempted = answer.read(16).strip() == b"TRUE"
        except (OSError, ValueError, http.client.HTTPException):
            seconds = UNREACHABLE_SECONDS
            continue
        seconds = POLL_SECONDS
        if is_preempted:
            logging.getLogger(__name__).warning("this machine is being preempted; saving a checkpoint")
            received.number = received.number or signal.SIGTERM
