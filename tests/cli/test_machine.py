"""Settings of the machine."""

import pytest

from jaxformer.cli import machine
from jaxformer.errors import UserError


@pytest.mark.parametrize(
    ("cores", "batch_size", "devices"), [(2, 16, 2), (2, 15, 1), (8, 12, 6), (64, 4096, 16), (1, 7, 1)]
)
def test_devices_are_as_many_as_cores_as_far_as_the_batch_splits(monkeypatch, cores, batch_size, devices):
    monkeypatch.setattr(machine, "cores", lambda: cores)
    assert machine.cpu_devices(batch_size) == devices


def test_a_mesh_says_how_many_devices_all_processes_have(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.cpu_devices(16, "fsdp=4,tensor=2") == 8
    assert machine.cpu_devices(16, "fsdp=4", processes=2) == 2
    assert machine.cpu_devices(6, processes=2) == 1  # 4 would not split the 6
    with pytest.raises(UserError, match="asks 99980001 devices of one process; give it at most 1024"):
        machine.cpu_devices(16, "data=9999,fsdp=9999")


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 4), ("900000 100000", 4)]
)
def test_a_container_has_the_cores_of_its_quota(monkeypatch, tmp_path, quota, cores):
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    monkeypatch.setattr(machine, "Path", lambda path: {"/sys/fs/cgroup/cpu.max": file}[path])
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert machine.cores() == cores
    file.unlink()
    assert machine.cores() == 4
