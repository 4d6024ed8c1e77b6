"""Flags for deterministic GPUs: where they are set, and where it is too late."""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.cli import verify_resume
from jaxformer.cli.arguments import load_config
from jaxformer.errors import UserError
from jaxformer.parallel import determinism
from jaxformer.parallel.determinism import check_deterministic, missing_flags, set_deterministic
from jaxformer.parallel.mesh import AXES
from jaxformer.train.loop import train
from jaxformer.train.setup import TrainSetup
from tests.helpers import ROOT

BOTH = "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_autotune_level=0"


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("", BOTH),
        ("--xla_cpu_max_isa=AVX2", BOTH),
        (BOTH, ""),
        ("--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_autotune_level=0"),
        ("--xla_gpu_exclude_nondeterministic_ops=false --xla_gpu_autotune_level=4", BOTH.partition(" ")[0]),
    ],
)
def test_flags_are_added_to_those_given_before_devices_start(monkeypatch, given: str, missing: str) -> None:
    monkeypatch.setenv("XLA_FLAGS", given)
    monkeypatch.setattr(determinism, "backends_are_initialized", lambda: False)
    assert missing_flags() == missing
    set_deterministic()
    assert os.environ["XLA_FLAGS"] == f"{given} {missing}".strip()
    assert missing_flags() == ""


def test_a_gpu_that_has_started_without_them_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(determinism, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(determinism.jax, "default_backend", lambda: "gpu")
    for check in (set_deterministic, lambda: check_deterministic("gpu")):
        with pytest.raises(
            UserError, match=f"without the flags it needs; set XLA_FLAGS='{BOTH}' before the first array"
        ):
            check()
    assert os.environ["XLA_FLAGS"] == ""
    monkeypatch.setenv("XLA_FLAGS", BOTH)
    set_deterministic()
    check_deterministic("gpu")


def test_training_on_such_a_gpu_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]), shape=dict.fromkeys(AXES, 1))
    data: Any = None
    config = load_config(f"{ROOT}/configs/quick.py")
    setup = TrainSetup(replace(config, compute=replace(config.compute, deterministic=True)), mesh)
    with pytest.raises(UserError, match="deterministic` is true, but JAX has initialised its GPUs"):
        train(setup, data, tmp_path)


def test_other_devices_need_no_flags(monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    check_deterministic("cpu")
    check_deterministic("tpu")
    jax.devices()  # starts the CPUs of these tests
    set_deterministic()
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.parametrize(
    ("given", "added"),
    [([], ["--compute.deterministic"]), (["--compute.no-deterministic"], []), (["--compute.deterministic"], [])],
)
def test_verify_resume_is_deterministic_unless_told(monkeypatch, given: list[str], added: list[str]) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(verify_resume, "_verify", lambda options, *_: calls.append(options) or 0)
    assert verify_resume.main(["--config", f"{ROOT}/configs/quick.py", *given]) == 0
    assert [word for word in calls[0] if "deterministic" in word] == given + added
