"""The shell scripts of benchmarks/."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxformer.errors import UserError
from jaxformer.train.log import read_metrics
from tests.helpers import ROOT, write_books

GPU = ROOT / "benchmarks/gpu.sh"
PARTS = ["attention", "training", "decoding", "kernels"]


def stand_in(folder: Path, body: str) -> Path:
    """Write an interpreter for `gpu.sh` that runs shell code with the name of the script as `$script`."""
    file = folder / "python"
    file.write_text(f'#!/bin/bash\nscript=$(basename "$1")\necho "ran $script ${{*:2}}"\n{body}\n')
    file.chmod(0o755)
    return file


def gpu(python: Path, *options: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment |= {"PYTHON": str(python)}
    return subprocess.run([GPU, *options], env=environment, capture_output=True, text=True, timeout=560, check=False)


def started(output: str) -> list[str]:
    """Return the parts that were started, in order."""
    return [line.split()[1].rstrip(",") for line in output.splitlines() if line.endswith(" s") and "==" in line]


def test_attention_comes_first_and_all_parts_fit_into_nine_minutes(tmp_path):
    result = gpu(stand_in(tmp_path, "true"), "--results", "somewhere")
    assert result.returncode == 0, result.stderr
    assert started(result.stdout) == PARTS and result.stdout.endswith("== all parts succeeded\n")
    assert "ran train_gpu.py gpt2_124m --results somewhere\n" in result.stdout
    assert "ran decode.py --device gpu --batch-sizes 1 64 --rounds 5 --results somewhere\n" in result.stdout
    limits = [int(line.split()[-2]) + 5 for line in result.stdout.splitlines() if line.endswith(" s")]  # and to kill it
    assert len(limits) == 4 and sum(limits) < 9 * 60


def test_all_parts_measure_the_same_single_gpu(tmp_path, monkeypatch):
    python = stand_in(tmp_path, "echo gpu $CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu(python).stdout.count("gpu 0\n") == len(PARTS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert gpu(python).stdout.count("gpu 3\n") == len(PARTS)


def test_failing_part_leaves_the_others_and_is_named_in_the_end(tmp_path):
    python = stand_in(tmp_path, "case $script in attention*) exit 1 ;; decode*) exit 124 ;; esac")
    result = gpu(python)
    assert result.returncode == 1 and started(result.stdout) == PARTS
    assert result.stderr == "== failed: attention (status 1) decoding (out of time)\n"


def test_machine_without_a_gpu_ends_after_the_first_part(tmp_path):
    result = gpu(stand_in(tmp_path, "exit 2"))
    assert result.returncode == 2 and started(result.stdout) == ["attention"]


@pytest.mark.slow
def test_benchmark_of_a_gpu_ends_at_once_on_a_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    result = gpu(Path(sys.executable))
    assert (result.returncode, result.stderr) == (2, "error: there is no GPU; --smoke runs on any device.\n")
    assert started(result.stdout) == ["attention"]


@pytest.mark.slow
def test_decoding_on_a_cpu_is_not_taken_for_that_on_a_gpu(tmp_path):
    (tmp_path / "job.json").write_text('{"device": "gpu"}')
    command = [sys.executable, ROOT / "benchmarks/decode_jaxformer.py", tmp_path, "1", "bfloat16"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stderr) == (1, "error: there is no GPU; --smoke runs on any device.\n")


def test_parts_are_chosen_by_name(tmp_path):
    python = stand_in(tmp_path, "true")
    assert started(gpu(python, "kernels", "attention").stdout) == ["attention", "kernels"]
    for wrong in ("decode", "60", "train_gpu.py", ".*", ""):
        result = gpu(python, wrong)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == f"error: there is no part '{wrong}'; there are {' '.join(PARTS)}.\n"
    result = gpu(python, "--results")
    assert (result.returncode, result.stderr) == (2, "error: --results needs a folder.\n")


def test_interruption_ends_the_part_that_runs(tmp_path):
    python = stand_in(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 50")
    with subprocess.Popen([GPU], env=os.environ | {"PYTHON": str(python)}, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 130
    number = int((tmp_path / "pid").read_text())
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


SOURCES = ROOT / "benchmarks/sources.sh"
MARKS = "<!-- outcomes of benchmarks/sources.py -->\n", "<!-- end of outcomes -->\n"


@pytest.fixture
def sources(monkeypatch):
    """Return the module `benchmarks/sources.py`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("sources")


def outcome(rung: str, steps: int, **changes: Any) -> dict[str, Any]:
    """Return the outcome of a rung as `sources.json` holds it."""
    return {
        "rung": rung, "parameters": 6_500_000, "steps": steps, "loss": 4.0, "perplexity": 54.598, "bits_per_byte": 2.4,
        "minutes": 12.34, "ended_early": "", "entropy": "1.17", "sources": "68.284", "of_steps": 10_644,
        "ended": steps == 10_644, "device": "NVIDIA H200",
    } | changes  # fmt: skip


def test_table_shows_what_is_stored(sources):
    rungs = {
        "residual": outcome("residual", 10_644),
        "two_blocks": outcome("two_blocks", 3_400, perplexity=None, bits_per_byte=None, entropy=""),
        "four_blocks": outcome("four_blocks", 6, ended_early="not finite at step 6", ended=True),
    }
    _, rule, *lines = sources.table(rungs).splitlines()
    assert rule == "|" + "---|" * 9
    assert lines[0] == "| `residual` | 6,500,000 | 10,644 | 54.60 | 2.400 | 1.17 | 12.3 | NVIDIA H200 | 68.284 |"
    assert lines[1].startswith("| `two_blocks` | 6,500,000 | 3,400 of 10,644 | - | - | - |")
    assert lines[2].startswith("| `four_blocks` | 6,500,000 | not finite at step 6 |")


def test_page_of_the_ladder_shows_the_stored_outcomes_of_the_sources_size(sources):
    page = (ROOT / "docs/ladder.md").read_text()
    shown = page.split(MARKS[0])[1].split(MARKS[1])[0]
    assert shown == f"\n{sources.table(sources.read_outcomes(ROOT / 'benchmarks/results/sources.json'))}\n"


def test_rung_that_has_not_gone_on_keeps_its_outcome(sources):
    stored = {"residual": outcome("residual", 10_644), "multihead": outcome("multihead", 50)}
    new = {
        "mlp_concat": outcome("mlp_concat", 3, device="cpu"),
        "residual": outcome("residual", 10_644, device="cpu"),
        "multihead": outcome("multihead", 60, device="cpu"),
    }
    merged = sources.merge(stored, new, ["mlp_concat", "residual", "multihead", "rmsnorm"])
    assert {name: x["device"] for name, x in merged.items()} == {
        "mlp_concat": "cpu", "residual": "NVIDIA H200", "multihead": "cpu",
    }  # fmt: skip


def ladder(folder: Path, *options: str) -> subprocess.Popen:
    """Start `sources.sh` with results and a page in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment |= {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [SOURCES, "--folder", folder / "runs", *options],
        env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.path", "books", "--steps", "4"], "mlp_rowwise has steps 4, the sources 10644; name a folder"),
        ([], "--data.path is missing"),
        (["--data.path", "books", "--seconds", "60"], "--seconds is 60; it must be above 60"),
        (["--data.path", "books", "--stepz", "4"], "--stepz"),
        (["--data.path", "books", "--rungs", "six_blocks"], "six_blocks"),
        (["--data.path", "books", "--results", "wrong"], "sources.json holds no outcomes of the ladder"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(tmp_path, monkeypatch, capsys, sources, options, message):
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong/sources.json").write_text('{"figures": {"rungs": {"residual": {"ru')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sources.py", *options])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # handlers are those of the tests
    monkeypatch.setattr(sources, "train", lambda *_: pytest.fail("training began"))
    try:
        status = sources.main()
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "before", MARKS[0], MARKS[1] + MARKS[0]])
def test_page_without_its_marks_is_left_alone(tmp_path, sources, text):
    page = tmp_path / "ladder.md"
    page.write_text(text)
    with pytest.raises(UserError, match=r"ladder\.md lacks the lines"):
        sources.fill_page(page, {})
    assert page.read_text() == text


@pytest.mark.exhaustive
def test_next_call_continues_where_the_time_was_over_and_fills_the_page(tmp_path, sources):
    page = tmp_path / "ladder.md"
    page.write_text(f"before\n{''.join(MARKS)}after\n")
    options = [
        "--results", str(tmp_path), "--rungs", "mlp_rowwise", "residual", "--data.path",
        str(write_books(tmp_path / "books")), "--model.vocab-size", "280", "--model.context-length", "8",
        "--model.d-model", "8", "--model.d-ff", "8", "--train.batch-size", "4", "--train.eval-examples", "8",
        "--train.report-every", "0", "--train.log-every", "1", "--train.eval-every", "10",
    ]  # fmt: skip
    first = ladder(tmp_path, "--seconds", "400", *options, "--steps", "100000")
    until, metrics = time.monotonic() + 240, tmp_path / "runs/mlp_rowwise/metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 30:
        assert time.monotonic() < until and first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)  # stops as when the time is over
    out, err = first.communicate(timeout=120)
    assert first.returncode == 3, out + err
    saved = json.loads((tmp_path / "sources.json").read_text())["figures"]["rungs"]["mlp_rowwise"]["steps"]
    assert saved >= 29 and f"| `mlp_rowwise` | 4,896 | {saved:,} of 100,000 |" in page.read_text()

    second = ladder(tmp_path, "--seconds", "400", *options, "--steps", str(saved + 2))
    out, err = second.communicate(timeout=400)
    assert second.returncode == 0, out + err
    assert f"mlp_rowwise: resuming {tmp_path}/runs/mlp_rowwise" in out
    rungs = json.loads((tmp_path / "sources.json").read_text())["figures"]["rungs"]
    ended = (saved + 2, True, "cpu, float32")
    assert {name: (x["steps"], x["ended"], x["device"]) for name, x in rungs.items()} == {
        "mlp_rowwise": ended, "residual": ended,
    }  # fmt: skip
    losses = [row["loss"] for row in read_metrics(metrics.parent) if "loss" in row]
    assert len(losses) == saved + 2  # no step was lost or taken twice
    last = read_metrics(metrics.parent)[-1]
    assert f"| {last['val_ppl']:.2f} | {last['val_bpb']:.3f} |" in page.read_text()
    assert page.read_text() == f"before\n{MARKS[0]}\n{sources.table(rungs)}\n{MARKS[1]}after\n"


@pytest.mark.exhaustive
def test_all_parts_run_at_tiny_shapes_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    result = gpu(Path(sys.executable), "--smoke", "--results", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    names = ("gpu_attention", "gpu_gpt2_124m", "decode_gpu", "gpu_kernels")
    figures = [json.loads((tmp_path / f"{name}.json").read_text())["figures"] for name in names]
    attention, training, decoding, kernels = figures
    assert attention["attention"] == "attention: xla (cpu has no fused kernel)" and attention["fused"] is False
    assert result.stdout.splitlines()[1] == "cpu: attention: xla (cpu has no fused kernel): NOT FUSED"
    assert training["share_of_matmul_rate"]["jaxformer"] > 0
    assert set(training["median_ms_a_step"]) == {"jaxformer", "torch_compiled"}
    assert decoding["batch_1"]["same_text_as_transformers"]["jaxformer float32"] == 1
    assert kernels["kernels_ms_a_step"]["total"] > 0
