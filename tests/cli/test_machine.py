"""Settings of the machine."""

import contextlib
import os
import platform
import subprocess
import sys

import jax
import pytest

from jaxformer.cli import machine
from jaxformer.errors import UserError
from jaxformer.files import make_private


@pytest.mark.parametrize(
    ("cores", "batch_size", "rows_per_device", "devices"),
    [(2, 16, 1, 2), (2, 15, 1, 1), (8, 12, 1, 6), (64, 4096, 1, 16), (2, 8, 8, 1), (8, 24, 8, 3), (8, 17, 8, 1)],
)
def test_devices_are_cores_that_divide_the_batch(monkeypatch, cores, batch_size, rows_per_device, devices):
    monkeypatch.setattr(machine, "cores", lambda: cores)
    assert machine.cpu_devices(batch_size, rows_per_device=rows_per_device) == devices


def test_devices_of_a_mesh_are_divided_among_processes(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.cpu_devices(16, "fsdp=4,tensor=2") == 8
    assert machine.cpu_devices(16, "fsdp=4", processes=2) == 2
    assert machine.cpu_devices(6, processes=2) == 1  # 4 would not split the 6
    assert machine.cpu_devices(16, "data=64,fsdp=64") == 1  # of a pod, on whose hosts no such CPU is made


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600 "
         "--xla_cpu_collective_call_terminate_timeout_seconds=604800"),
        ("--xla_cpu_max_isa=AVX2 --xla_cpu_collective_call_terminate_timeout_seconds=5",
         "--xla_cpu_max_isa=AVX2 --xla_cpu_collective_call_terminate_timeout_seconds=5 "
         "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600"),
        ("/etc/xla.flags", "/etc/xla.flags"),
    ],
)  # fmt: skip
def test_devices_wait_for_each_other_as_long_as_the_user_says_or_a_week(monkeypatch, given, expected):
    monkeypatch.setenv("XLA_FLAGS", given)
    machine.wait_patiently()
    machine.wait_patiently()
    assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_cache_writable_by_others_is_refused(tmp_path, mode):
    folder = tmp_path / "cache"
    assert machine.is_private(folder) and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    with pytest.raises(UserError, match=f"others can write to the cache {folder}, and put programs there; set JAXF"):
        machine.is_private(folder)
    folder.chmod(0o755)
    assert machine.is_private(folder)


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_cache_is_created_only_below_a_folder_that_others_cannot_change(tmp_path, mode, refused):
    tmp_path.chmod(mode)
    with pytest.raises(UserError, match="which others can write to") if refused else contextlib.nullcontext():
        machine.is_private(tmp_path / "a/cache")
    assert (tmp_path / "a/cache").exists() != refused


def test_a_created_cache_is_private_for_any_umask(tmp_path):
    before = os.umask(0o002)
    try:
        make_private(tmp_path / "cache/tokens")
        assert machine.is_private(tmp_path / "cache") and machine.is_private(tmp_path / "cache/tokens")
    finally:
        os.umask(before)


def test_a_cache_created_by_another_user_meanwhile_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "make_private", lambda folder: (folder.mkdir(), folder.chmod(0o777)))
    with pytest.raises(UserError, match="others can write to the cache"):
        machine.is_private(tmp_path / "cache")


def test_without_a_cache_of_its_own_a_user_has_none(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    assert not machine.is_private(tmp_path / "file/cache") and not caplog.messages
    monkeypatch.setattr(machine.os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert not machine.is_private(tmp_path)
    (message,) = caplog.messages
    assert message.startswith(
        f"compiled programs are not cached: the cache {tmp_path} belongs to another user; set JAXF"
    )


def test_a_cache_dir_of_jax_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "jax"))
    monkeypatch.setenv("JAXFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    machine.set_up()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 4), ("900000 100000", 4)]
)
def test_cores_respect_the_quota_of_a_container(monkeypatch, tmp_path, quota, cores):
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    monkeypatch.setattr(machine, "Path", lambda path: {"/sys/fs/cgroup/cpu.max": file}[path])
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert machine.cores() == cores
    file.unlink()
    assert machine.cores() == 4


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize(("calls", "returned"), [(["keep"], 0), (["keep", "return"], 49)])
def test_freed_arrays_are_kept_or_returned_to_the_system(calls: list[str], returned: int):
    """Of 50 arrays of 4 MB, 49 are freed."""
    program = """
import os, sys
from pathlib import Path
import numpy as np
from jaxformer.cli import machine
held = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 4e6
machine.keep_freed_memory()
if "return" in sys.argv:
    machine.return_freed_memory()
arrays = [np.ones(500_000) for _ in range(50)]
before = held()
del arrays[:-1]
print(before - held())
"""
    result = subprocess.run([sys.executable, "-c", program, *calls], capture_output=True, text=True, check=True)
    assert float(result.stdout) == pytest.approx(returned, abs=9)  # the system may do as it likes with some
