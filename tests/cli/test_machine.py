"""Settings of the machine."""

import pytest

from jaxformer.cli import machine


@pytest.mark.parametrize(
    ("cores", "batch_size", "devices"), [(2, 16, 2), (2, 15, 1), (8, 12, 6), (64, 4096, 16), (1, 7, 1)]
)
def test_devices_are_as_many_as_cores_as_far_as_the_batch_splits(monkeypatch, cores, batch_size, devices):
    monkeypatch.setattr(machine, "cores", lambda: cores)
    assert machine.cpu_devices(batch_size) == devices


def test_there_is_a_core():
    assert machine.cores() >= 1
