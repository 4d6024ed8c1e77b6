"""Benchmarks: the harness, the report and the shell scripts."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import report
from benchmarks.cases import CASES
from benchmarks.harness import Case, MeasurementError, Side, against, measure
from tests.helpers import ROOT

GPU = ROOT / "benchmarks/gpu.sh"
PARTS = ["attention", "training", "kernels", "decoding"]


SIDES = """
import os

from benchmarks.harness import Milliseconds


def make(folder, who, ms, value):
    def note(what):
        with (folder.parent / "log").open("a") as log:
            print(who, what, file=log)

    if who == "devices":
        note(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return None, {}

    def step(number):
        note(number)
        return Milliseconds(ms + number)

    note("prepares")
    value / 1
    return step, {"values": [1.0, value, 1.0], "_hidden": 1}
"""


def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float = 1.0, checkout: Path | None = None, **changes: Any
) -> dict[str, Any]:
    """Measure a case whose sides need no library; they take 2 and 6 ms, and 1 more at each step."""
    (tmp_path / "sides.py").write_text(SIDES)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sides = {
        "ours": Side("sides:make", {"who": "ours", "ms": 2, "value": 1.0}, role="ours"),
        "peer": Side("sides:make", {"who": "peer", "ms": 6, "value": value}),
        "absent": Side("sides:make", needs=("no_such_package",)),
    }
    case = Case("About.", sides, {}, smoke={"both": {}, "one": {"skip": ["peer"]}}, **changes)
    if checkout is not None:
        case = against(case, checkout)
    *_, figures = measure(case, "smoke", False, tmp_path / "scratch", lambda _: None)
    return figures


def test_sides_take_turns_and_medians_and_ratios_are_of_the_rounds(tmp_path, monkeypatch):
    figures = measured(tmp_path, monkeypatch, derive=lambda settings, facts, ms: {"sum": sum(ms.values())})
    # Two steps before the rounds, to compile and to count the steps of a turn.
    turns = ["prepares", 0, 1, 2, 3]
    both = [f"{who} {n}" for n in turns[:-1] for who in ("ours", "peer")] + ["peer 3", "ours 3"]  # in turn first
    log = (tmp_path / "log").read_text().splitlines()
    assert log == [*both, *(f"ours {n}" for n in turns)]
    point = figures["points"]["both"]
    assert point["ms"]["ours"] == {"min": 4.0, "q1": 4.25, "median": 4.5, "q3": 4.75, "steps": 1}
    assert point["ratio"] == {"ours": {"peer": {"min": 1.8, "q1": 1.85, "median": 1.9, "q3": 1.95}}}  # 8 / 4, 9 / 5
    assert point["derived"] == {"sum": 13.0} and point["facts"]["ours"] == {"values": [1.0, 1.0, 1.0]}
    assert figures["points"]["one"]["ratio"] == {"ours": {}} and figures["left_out"] == {"absent": ["no_such_package"]}
    page = report.table(figures)
    assert page.splitlines()[0] == "| ms per step | ours | peer | ours over peer | sum |"
    assert page.splitlines()[2] == "| both | 4.5 (4.25 to 4.75) | 8.5 (8.25 to 8.75) | 1.90 (1.85 to 1.95) | 13 |"


def test_steps_that_start_a_process_have_no_turns_before_the_rounds(tmp_path, monkeypatch):
    point = measured(tmp_path, monkeypatch, warm_up=False)["points"]["one"]
    assert (tmp_path / "log").read_text().splitlines()[-3:] == ["ours prepares", "ours 0", "ours 1"]
    assert point["ms"]["ours"] == {"min": 2.0, "q1": 2.25, "median": 2.5, "q3": 2.75, "steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("more", "slower"), [(2, []), (-2, ["one: ours is 0.525 to 0.575 (quartiles) x as fast as"])])
def test_sides_are_compared_with_those_of_another_checkout(tmp_path, monkeypatch, more, slower):
    (tmp_path / "before").mkdir()
    (tmp_path / "before/benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "before/sides.py").write_text(SIDES.replace("ms + number", f"ms + number + {more}"))
    figures = measured(tmp_path, monkeypatch, checkout=tmp_path / "before")
    ours, before = (figures["points"]["one"]["ms"][name]["median"] for name in ("ours", "ours, before"))
    assert before == ours + more and figures["roles"] == {"ours": "ours", "ours, before": "peer"}
    lines = benchmarks.slower(figures | {"points": {"one": figures["points"]["one"]}})
    assert [line.removesuffix(" ours, before") for line in lines] == slower


@pytest.mark.parametrize(("value", "apart"), [(1.01, "1.0e-02"), (float("nan"), "nan")])
def test_sides_that_compute_different_things_are_not_compared(tmp_path, monkeypatch, value, apart):
    with pytest.raises(MeasurementError, match=f"peer differs from ours: values {apart} apart"):
        measured(tmp_path, monkeypatch, value=value)


@pytest.mark.parametrize(
    ("size", "gpu", "visible", "devices"),
    [("full", False, None, ""), ("full", True, None, "0"), ("full", True, "3,4", "3"), ("smoke", False, "3,4", "3,4")],
)
def test_all_sides_measure_the_same_single_gpu_or_none(tmp_path, monkeypatch, size, gpu, visible, devices):
    (tmp_path / "sides.py").write_text(SIDES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    points: dict[str, Any] = {"one": {"who": "devices", "ms": 0, "value": 0}}
    case = Case("About.", {"ours": Side("sides:make", role="ours")}, points, smoke=points, gpu=points)
    list(measure(case, size, gpu, tmp_path / "scratch", lambda _: None))
    assert (tmp_path / "log").read_text() == f"devices {devices}\n"


def test_measured_points_are_stored_although_a_later_one_fails(tmp_path, monkeypatch):
    (tmp_path / "sides.py").write_text(SIDES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    points = {"fine": {"value": 1.0}, "failing": {"value": "not a number"}}
    case = Case("About.", {"ours": Side("sides:make", {"who": "ours", "ms": 2}, role="ours")}, points)
    monkeypatch.setitem(benchmarks.CASES, "two", case)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "two", "--quick", "--results", str(tmp_path / "results")])
    assert benchmarks.main() == 1
    assert list(json.loads((tmp_path / "results/two.json").read_text())["figures"]["points"]) == ["fine"]


def test_sides_of_all_cases_are_functions_that_exist():
    makes = {side.make.partition(":")[::2] for case in CASES.values() for side in case.sides.values()}
    for module, function in makes:
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (module, function)


def test_report_shows_the_stored_results():
    begin, end = report.BEGIN, report.END
    page = report.README.read_text()
    assert page.split(begin)[1].split(end)[0] == f"\n{report.report(ROOT / 'benchmarks/results')}\n"


@pytest.mark.slow
def test_attention_of_all_libraries_agrees_and_is_stored(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "attention", "--smoke", "--results", str(tmp_path)]
    environment = own_devices() | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    stored = json.loads((tmp_path / "attention.json").read_text())
    assert stored["commit"] and stored["hardware"]["cpu"] and stored["versions"]["flax"]
    point = stored["figures"]["points"]["T 16"]
    assert point["ratio"]["jaxformer"]["flax"]["median"] > 0
    assert stored["figures"]["left_out"] == {} or not find_spec("torch")


def own_devices() -> dict[str, str]:
    """Return the environment without the number of devices of the tests."""
    return {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}


def stand_in(folder: Path, body: str) -> Path:
    """Write an interpreter for `gpu.sh` that runs shell code with the name of the case as `$script`."""
    file = folder / "python"
    file.write_text(f'#!/bin/bash\nscript=$3\necho "ran $*"\n{body}\n')
    file.chmod(0o755)
    return file


def gpu(python: Path, *options: str) -> subprocess.CompletedProcess:
    environment = own_devices() | {"PYTHON": str(python)}
    return subprocess.run([GPU, *options], env=environment, capture_output=True, text=True, timeout=560, check=False)


def started(output: str) -> list[str]:
    """Return the parts that were started, in order."""
    return [line.split()[1].rstrip(",") for line in output.splitlines() if line.endswith(" s") and "==" in line]


def test_attention_comes_first_and_all_parts_fit_into_nine_minutes(tmp_path):
    result = gpu(stand_in(tmp_path, "true"), "--results", "somewhere")
    assert result.returncode == 0, result.stderr
    assert started(result.stdout) == PARTS and result.stdout.endswith("== all parts succeeded\n")
    assert "ran -m benchmarks training --gpu --quick --results somewhere\n" in result.stdout
    limits = [int(line.split()[-2]) + 5 for line in result.stdout.splitlines() if line.endswith(" s")]  # and to kill it
    assert len(limits) == 4 and sum(limits) < 9 * 60


def test_failing_part_leaves_the_others_and_is_named_in_the_end(tmp_path):
    python = stand_in(tmp_path, "case $script in attention) exit 1 ;; decoding) exit 124 ;; esac")
    result = gpu(python)
    assert result.returncode == 1 and started(result.stdout) == PARTS
    assert "attention" in result.stderr and "decoding" in result.stderr


def test_machine_without_a_gpu_ends_after_the_first_part(tmp_path):
    result = gpu(stand_in(tmp_path, "exit 2"))
    assert result.returncode == 2 and started(result.stdout) == PARTS[:1]


@pytest.mark.slow
def test_benchmark_of_a_gpu_ends_at_once_on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = gpu(Path(sys.executable))
    assert result.returncode == 2, result.stderr
    assert started(result.stdout) == ["attention"]


def test_parts_are_chosen_by_name(tmp_path):
    python = stand_in(tmp_path, "true")
    assert started(gpu(python, "kernels", "attention").stdout) == ["attention", "kernels"]
    assert gpu(python, "decode").returncode == 2


def test_interruption_ends_the_part_that_runs(tmp_path):
    python = stand_in(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 50")
    with subprocess.Popen([GPU], env=os.environ | {"PYTHON": str(python)}, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 130
    number = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow
def test_cases_run_at_tiny_points(tmp_path):
    """Those that differ in what they measure: files, batches, a cache, kernels, and exponents over several points."""
    pytest.importorskip("torch")
    cases = ["cache", "checkpoint", "input", "kernels", "scaling"]
    command = [sys.executable, "-m", "benchmarks", *cases, "--smoke", "--results", str(tmp_path)]
    environment = own_devices() | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr
    assert {file.stem for file in tmp_path.glob("*.json")} == {*cases}
    figures = {name: json.loads((tmp_path / f"{name}.json").read_text())["figures"] for name in cases}
    assert 1 < figures["scaling"]["summary"]["T"]["theory"] < 2
    assert figures["kernels"]["points"]["tiny"]["facts"]["jaxformer"]["total, ms per step"] > 0


@pytest.mark.slow
def test_a_part_of_a_gpu_runs_at_tiny_shapes_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    result = gpu(Path(sys.executable), "--smoke", "--results", str(tmp_path), "training")
    assert result.returncode == 0, result.stdout + result.stderr
    training = json.loads((tmp_path / "gpu_training.json").read_text())["figures"]["points"]
    assert training["tiny"]["derived"]["fraction of large-matmul rate"] > 0
