"""Memory of compiled programs and of devices."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxformer.errors import UserError
from jaxformer.parallel import memory
from jaxformer.parallel.memory import check_memory, format_bytes, gpu_pool_share, memory_capacity, memory_needed

N = 2**20
X = jax.ShapeDtypeStruct((N,), jnp.float32)


def test_memory_needed_covers_arguments_results_and_temporaries():
    code = 2**16  # at most, for a program of one operation
    assert 8 * N <= memory_needed(jax.jit(lambda x: x + 1).lower(X).compile()) <= 8 * N + code
    matrix = jax.ShapeDtypeStruct((2**10, 2**10), jnp.float32)
    chain = jax.jit(lambda a: jnp.sin(a @ a) @ a).lower(matrix).compile()  # the argument, the result, sin(a @ a)
    assert memory_needed(chain) >= 12 * N


def test_donated_buffers_count_once():
    donated = jax.jit(lambda x: x + 1, donate_argnums=0).lower(X).compile()
    assert 4 * N <= memory_needed(donated) <= 4 * N + 2**16


def test_virtual_devices_share_the_memory_of_the_machine():
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    has = memory_capacity(jax.devices()[0])
    assert has is not None and 0 < has <= machine // jax.local_device_count()


def test_accelerator_capacity_is_its_byte_limit():
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 5, "bytes_in_use": 1})
    assert memory_capacity(gpu) == 5
    assert memory_capacity(SimpleNamespace(platform="tpu", memory_stats=lambda: None)) is None


def test_container_limit_bounds_the_machine_memory(monkeypatch, tmp_path):
    limit, none = tmp_path / "limit", tmp_path / "none"
    limit.write_text("1000000\n")
    none.write_text("max\n")
    real = memory._machine_memory()
    monkeypatch.setattr(memory, "Path", lambda path: none)
    assert memory._machine_memory() >= real
    monkeypatch.setattr(memory, "Path", lambda path: limit)
    assert memory._machine_memory() == 1_000_000


@pytest.mark.parametrize(
    ("platform", "has", "n", "expected"),
    [
        ("gpu", None, 8, "memory per device: 8 MiB"),
        ("gpu", 2**30, 8, "memory per device: 8 MiB of 1 GiB"),
        (
            "cpu",
            2**30,
            8,
            "memory per device: 8 MiB of 1 GiB, 64 MiB on all 8 devices, besides Python, ",
        ),
        ("cpu", 2**30, 1, "memory per device: 8 MiB of 1 GiB, besides Python, compiled programs and evaluations"),
    ],
)
def test_check_memory_reports_need_and_capacity_and_what_a_process_holds(monkeypatch, platform, has, n, expected):
    monkeypatch.setattr(memory, "memory_needed", lambda compiled: 2**23)
    monkeypatch.setattr(memory, "memory_capacity", lambda device: has)
    monkeypatch.setattr(jax, "local_device_count", lambda: n)
    line = check_memory(None, SimpleNamespace(platform=platform))
    assert line == expected if n == 1 or platform == "gpu" else line.startswith(expected)


def test_step_that_does_not_fit_is_refused_with_remedies(monkeypatch):
    monkeypatch.setattr(memory, "memory_needed", lambda compiled: 2**30 + 1)
    monkeypatch.setattr(memory, "memory_capacity", lambda device: 2**30)
    with pytest.raises(
        UserError, match=r"needs 1 GiB .* lower `train\.batch_size`, raise `compute\.grad_accumulation_steps`"
    ):
        check_memory(None, jax.devices()[0])


def test_step_that_other_programs_leave_no_memory_for_is_refused(monkeypatch, tmp_path):
    free = tmp_path / "meminfo"
    free.write_text("MemTotal: 99999999 kB\nMemAvailable:    1024 kB\nSwapFree:   512 kB\nRssAnon:  512 kB\n")
    monkeypatch.setattr(memory, "memory_capacity", lambda device: 2**30)
    monkeypatch.setattr(memory, "Path", lambda *path: free)
    device, share = jax.devices()[0], 2**21 // jax.local_device_count()
    monkeypatch.setattr(memory, "memory_needed", lambda compiled: share)
    assert check_memory(None, device).startswith("memory per device: 256 KiB of 1 GiB, 2 MiB on all 8 devices")
    monkeypatch.setattr(memory, "memory_needed", lambda compiled: share + 1)
    with pytest.raises(UserError, match=r"other programs leave .*; close some, or lower `train\.batch_size`"):
        check_memory(None, device)
    free.write_text("no fields")
    assert check_memory(None, device).startswith("memory per device: 256 KiB of 1 GiB, 2 MiB on all 8 devices")


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1.02e+03 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1 MiB"),
        (23.5 * 2**30, "23.5 GiB"),
        (2**44, "16 TiB"),
    ],
)
def test_format_bytes_has_three_digits(n_bytes, expected):
    assert format_bytes(n_bytes) == expected


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_pool_of_a_gpu_is_three_quarters_unless_the_environment_says_otherwise(name, monkeypatch):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    assert gpu_pool_share() == 0.75
    monkeypatch.setenv(name, ".92")
    assert gpu_pool_share() == 0.92
    for text in ("much", "0", "-1", "nan"):
        monkeypatch.setenv(name, text)
        with pytest.raises(
            UserError, match=f"{name} is '{text}', which is not a positive number; set it to one such as"
        ):
            gpu_pool_share()
