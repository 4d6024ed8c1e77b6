"""Benchmarks: the harness, the report and the shell scripts."""

import ast
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import gpu_queue, report
from benchmarks.cases import CASES
from benchmarks.harness import Case, MeasurementError, Side, against, measure
from studies import sources
from tests.helpers import ROOT

SIDES = """
import os

from benchmarks.harness import Milliseconds


def make(folder, who, ms, value):
    def note(what):
        with (folder.parent / "log").open("a") as log:
            print(who, what, file=log)

    if who == "devices":
        note(os.environ.get("CUDA_VISIBLE_DEVICES") + os.environ["XLA_FLAGS"])
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
def test_all_sides_measure_the_same_single_gpu_or_none_with_their_own_flags(
    tmp_path, monkeypatch, size, gpu, visible, devices
):
    (tmp_path / "sides.py").write_text(SIDES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    points: dict[str, Any] = {"one": {"who": "devices", "ms": 0, "value": 0}}
    case = Case("About.", {"ours": Side("sides:make", flags="--b", role="ours")}, points, smoke=points, gpu=points)
    monkeypatch.setenv("XLA_FLAGS", "--a")
    list(measure(case, size, gpu, tmp_path / "scratch", lambda _: None))
    assert (tmp_path / "log").read_text() == f"devices {devices}--a --b\n"


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


def own_devices() -> dict[str, str]:
    """Return the environment without the number of devices of the tests."""
    return {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}


FAKE_JOB = """
import json, sys, time
from pathlib import Path

what, *_, folder = sys.argv[1:]
(Path(folder) / f"gpu_{what}.json").write_text(json.dumps(sys.argv))
if what == "hangs":
    time.sleep(100)
sys.exit({"fails": 1, "disagrees": 3}.get(what, 0))
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Return a function that runs a queue of jobs by name and seconds, and returns status, state and what was packed;
    jobs do what their names say."""
    (tmp_path / "fake_job.py").write_text(FAKE_JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_queue, "gpu_name", lambda: "a card")
    monkeypatch.setattr(gpu_queue.record, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_queue.record, "commit", lambda: "a commit")

    def run(seconds: float, **jobs: float) -> tuple[int, dict[str, Any], list[str]]:
        table = {
            name: gpu_queue.Job(each, "fake_job", (name,), ("fake_job.py",), needs_books=name == "reads")
            for name, each in jobs.items()
        }
        monkeypatch.setattr(gpu_queue, "JOBS", table)
        results, out = tmp_path / "results", tmp_path / "out"
        status = gpu_queue.Queue(results, False, out, time.monotonic() + seconds).run(list(table))
        with tarfile.open(out / "results.tar.gz") as archive:
            names = [name.removeprefix("gpu_").removesuffix(".json") for name in archive.getnames()]
        state = json.loads((results / "gpu_queue.json").read_text())["figures"]
        return status, {name: each["status"] for name, each in state.items()}, names

    return run


def test_job_that_fails_or_overruns_leaves_the_others_their_time(queue):
    status, state, packed = queue(60, fails=9, hangs=1, disagrees=9, fine=9)
    assert state == {"fails": "status 1", "hangs": "out of time", "disagrees": "problems", "fine": "done"}
    assert status == 1 and packed == ["disagrees", "fails", "fine", "hangs", "queue"]


def test_queue_continues_with_what_is_not_done(queue, tmp_path, capsys):
    assert queue(30, fine=20, later=90)[:2] == (gpu_queue.TIME_OVER, {"fine": "done"})
    assert queue(100, fine=20, later=90)[:2] == (0, {"fine": "done", "later": "done"})
    output = capsys.readouterr().out
    assert "== later: needs 90 s, and " in output and "== fine: done 2" in output
    assert output.count("== fine, at most 20 s") == 1 and output.count("== later, at most 90 s") == 1
    with (tmp_path / "fake_job.py").open("a") as file:
        file.write("# another")
    queue(100, fine=20, later=90)
    assert capsys.readouterr().out.count("at most") == 2


def test_results_of_another_machine_are_filed_beside_those_of_earlier_calls(queue, tmp_path, monkeypatch, capsys):
    queue(60, fine=9)
    here = tmp_path / "here"
    here.mkdir()
    earlier = {"status": "done", "seconds": 1, "gpu": "a card", "jax": "1", "date": "2026-01-01"}
    (here / "gpu_queue.json").write_text(json.dumps({"figures": {"earlier": earlier, "fine": earlier}}))
    assert gpu_queue.collect(tmp_path / "out", here) == 0
    state = json.loads((here / "gpu_queue.json").read_text())["figures"]
    assert state["earlier"] == earlier and state["fine"]["commit"] == "a commit"
    assert (here / "gpu_fine.json").exists() and "fine: done" in capsys.readouterr().out


def test_outcomes_of_rungs_return_with_the_results_and_fill_their_page(queue, tmp_path):
    stored, page, here = (tmp_path / name for name in ("studies/results/sources.json", "docs/alternatives.md", "here"))
    for folder in (stored.parent, page.parent, here):
        folder.mkdir(parents=True)
    stored.write_text(json.dumps({"figures": {"rungs": {}}}))
    page.write_text(f"before\n{sources.BEGIN}{sources.END}after\n")
    assert queue(60, fine=9)[2] == ["fine", "queue", "sources"]
    stored.unlink()
    assert gpu_queue.collect(tmp_path / "out", here) == 0
    assert json.loads(stored.read_text()) == {"figures": {"rungs": {}}} and not (here / stored.name).exists()
    assert sources.table({}) in page.read_text()


def test_each_job_of_the_queue_fits_into_one_call_and_its_files_and_cases_exist():
    assert all(job.seconds <= 570 for job in gpu_queue.JOBS.values())
    for name, job in gpu_queue.JOBS.items():
        if job.module == "benchmarks":
            assert all(CASES[case].gpu and CASES[case].smoke for case in job.cases), name
        assert all(next(ROOT.glob(pattern), None) for pattern in job.files), name


@pytest.mark.parametrize("name", [name for name, job in gpu_queue.JOBS.items() if isinstance(job, gpu_queue.Rung)])
def test_rungs_of_the_queue_are_trained_at_the_sources_size_within_their_seconds(name, tmp_path, monkeypatch):
    monkeypatch.setenv(gpu_queue.BOOKS, str(tmp_path))
    trained = {}
    monkeypatch.setattr(sources, "train", lambda options, _, seconds: trained.update({seconds: options}) or 0)
    monkeypatch.setattr(sources, "outcomes", lambda *_: {})
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers are those of the tests
    job = gpu_queue.JOBS[name]
    monkeypatch.setattr(sys, "argv", ["sources.py", *job.options(tmp_path, is_smoke=False)])
    assert sources.main() == 0
    data = ["--data.path", f"{tmp_path}/train", "--data.val-path", f"{tmp_path}/val"]
    assert trained == {job.seconds - 60: ["--rungs", name, *data]} and job.least() == job.seconds


def test_jobs_that_need_books_wait_for_them(queue, capsys):
    assert queue(60, reads=9, fine=9) == (0, {"fine": "done"}, ["fine", "queue"])
    assert "reads: needs the books; set BOOKS, or see --prepare" in capsys.readouterr().out


def gpu(*options: str) -> subprocess.CompletedProcess:
    command = [ROOT / "benchmarks/gpu.sh", *options]
    environment = own_devices() | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_queue_ends_at_once_without_a_gpu_and_at_unknown_jobs():
    result = gpu()
    assert result.returncode == 2 and result.stderr == "error: there is no GPU; --smoke runs on any device.\n"
    assert "there is no job 'decode'" in gpu("decode").stderr


SIGNALLED_WHILE_IT_STARTS_A_JOB = """
import os, signal, subprocess, time

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        if "hanging" in command:
            while not (os.path.exists(PID) and os.path.getsize(PID)):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Popen
"""


@pytest.mark.parametrize("prelude", ["", SIGNALLED_WHILE_IT_STARTS_A_JOB], ids=["running", "starting"])
def test_interruption_ends_the_job_that_runs(tmp_path, prelude):
    (tmp_path / "hanging.py").write_text(f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid()))\n"
                                         "time.sleep(100)")  # fmt: skip
    code = (
        f"PID = '{tmp_path}/pid'\n{prelude}\nfrom benchmarks import gpu_queue as q; import sys\n"
        "q.JOBS.clear(); q.JOBS['it'] = q.Job(9, 'hanging', (), ('train.py',)); sys.exit(q.main())"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with subprocess.Popen([sys.executable, "-c", code, "--smoke"], env=environment, cwd=ROOT) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.02)
        if not prelude:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 143
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_what_fails_on_a_gpu_is_stored_beside_what_was_measured(tmp_path, monkeypatch):
    (tmp_path / "sides.py").write_text(SIDES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sides = {
        "ours": Side("sides:make", {"who": "ours", "ms": 2}, role="ours"),
        "peer": Side("sides:make", {"who": "peer", "ms": 6}, early=True),
        "broken": Side("sides:make", {"who": "peer", "ms": "six"}),
    }
    points = {
        "alone": {"value": 1.0, "skip": ["peer", "broken"]},
        "all": {"value": 1.0},
        "none": {"value": "no number"},
    }
    case = Case("About.", sides, {}, smoke=points, together=True)
    *_, figures = measure(case, "smoke", True, tmp_path / "scratch", lambda _: None)
    assert list(figures["points"]) == ["alone", "all"]
    assert list(figures["points"]["all"]["ms"]) == ["ours", "peer"]
    problems = figures["problems"]
    assert "broken: TypeError" in problems["all"][0] and len(problems["none"]) == 3
    different = Case("About.", sides | {"broken": Side("sides:make", {"who": "x", "ms": 1, "value": 2.0})}, {},
                     smoke={"all": {"value": 1.0}})  # fmt: skip
    *_, figures = measure(different, "smoke", True, tmp_path / "scratch", lambda _: None)
    assert figures["problems"] == {"all": ["broken differs from ours: values 1.0e+00 apart."]}
    assert list(figures["points"]["all"]["ms"]) == ["ours", "peer", "broken"]


@pytest.mark.slow
def test_cases_run_at_tiny_points(tmp_path):
    """Those that differ in what they measure: attention of all libraries, files, batches, and exponents over
    several points. Texts and kernels are measured by the queue."""
    pytest.importorskip("torch")
    cases = ["attention", "checkpoint", "input", "scaling"]
    command = [sys.executable, "-m", "benchmarks", *cases, "--smoke", "--results", str(tmp_path)]
    environment = own_devices() | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr
    assert {file.stem for file in tmp_path.glob("*.json")} == {*cases}
    stored = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in cases}
    assert stored["attention"]["commit"] and stored["attention"]["hardware"]["cpu"]
    assert stored["attention"]["versions"]["flax"]
    figures = {name: each["figures"] for name, each in stored.items()}
    assert figures["attention"]["points"]["T 16"]["ratio"]["jaxformer"]["flax"]["median"] > 0
    assert figures["attention"]["left_out"] == {}
    assert 1 < figures["scaling"]["summary"]["T"]["theory"] < 2


@pytest.mark.slow
def test_all_jobs_of_the_queue_run_at_tiny_shapes_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    result = gpu("--smoke", "--results", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"the sum of all jobs is {sum(job.seconds for job in gpu_queue.JOBS.values())} s" in result.stdout
    figures = {file.stem: json.loads(file.read_text())["figures"] for file in tmp_path.glob("gpu_*.json")}
    statuses = {name: each["status"] for name, each in figures.pop("gpu_queue").items()}
    assert statuses == {name: "done" for name, job in gpu_queue.JOBS.items() if job.is_tried}
    points = {name.removeprefix("gpu_"): each["points"] for name, each in figures.items()}
    assert points["first_run"]["resume"]["facts"]["jaxformer"]["bit-identical"] is True
    curve = points["speedrun"]["adamw"]["facts"]["jaxformer"]["at step"]
    assert curve.keys() == {"0", "1", "2"} and all(1 < each["bits per byte"] < 20 for each in curve.values())
    assert json.loads((tmp_path / "sources.json").read_text())["figures"]["rungs"]["residual"]["ended"] is True
    assert points["tests"]["attention"]["facts"]["tests"]["largest difference"] < 1
    assert points["training"]["tiny"]["derived"]["fraction of large-matmul rate"] > 0
    assert points["decode_profile"]["tiny"]["facts"]["jaxformer"]["kernels, per token"] > 1
    assert points["decoding"]["tiny"]["ratio"]["int8"]["transformers"]["median"] > 0
    assert points["kernels"]["tiny"]["facts"]["jaxformer"]["total, ms per step"] > 0
