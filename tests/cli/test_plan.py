"""`python -m jaxformer plan`: local devices, TPUs where the compiler is installed, and errors."""

import importlib.util
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import version
from math import prod
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from jaxformer.__main__ import main
from jaxformer.cli import plan
from jaxformer.cli.arguments import load_config
from jaxformer.errors import UserError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.plan.plan import Plan, describe, memory_hints, memory_in_error
from jaxformer.plan.roofline import CHIPS
from jaxformer.plan.topology import GPUS, SPECS, check_topology, rescale_mesh, topology_devices
from jaxformer.train.setup import TrainSetup
from tests.helpers import ROOT, changed

SMALL = [
    "plan", "--config", f"{ROOT}/configs/quick.py", "--model.d-model", "32", "--model.n-blocks", "2",
    "--model.d-ff", "64", "--model.vocab-size", "256", "--model.context-length", "16",
]  # fmt: skip


def number(line: str) -> float:
    """Return the first number in a line."""
    return next(float(word.replace(",", "")) for word in line.split() if word[0].isdigit())


def lines(text: str) -> dict[str, str]:
    """Return the lines of a plan by their label."""
    return {line[:20].strip(): line[20:] for line in text.splitlines() if line.startswith("  ")}


@pytest.mark.slow
def test_plan_for_local_devices(capsys):
    assert main([*SMALL, "--mesh", "fsdp=8", "--compute.remat", "block", "--compute.scan-blocks"]) == 0
    out = capsys.readouterr().out
    values = lines(out)
    assert "on 8 x cpu, mesh fsdp 8" in out and "no time estimate" in out
    assert "fits: " in out.splitlines()[-1]
    # XLA's CPU compiler adds no communication to that of the sharding.
    assert "1.00 times as much" in values["sent in all"]
    assert number(values["reduce-scatter"]) < number(values["all-gather"]) < 2 * number(values["reduce-scatter"])
    assert number(values["computed FLOPs"]) > number(values["model FLOPs"])
    assert number(values["attention"]) == 2 * (4 * 32 * 32 + 2 * 8)  # with gains of queries and keys, 8 per head
    assert number(values["logits"]) == 256 * 32 and values["embedding"].endswith(" 0.0%")
    # 2 x 2 x 16 x 32 x 4 bytes, and positions
    assert "KV cache: 8.26e-06 GB per text of 16 or more tokens, in float32" in out


@pytest.mark.slow
def test_step_that_does_not_fit_names_remedies(capsys, monkeypatch):
    monkeypatch.setattr("jaxformer.plan.plan.memory_capacity", lambda device: 1e5)
    assert main([*SMALL, "--mesh", "data=8", "--train.batch-size", "16"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit: it needs ")
    assert all(
        option in last for option in ("--compute.remat block", "--compute.grad-accumulation-steps 2", "--mesh fsdp=8")
    )


@pytest.mark.parametrize(("microbatches", "steps"), [(2, 2), (3, 4), (7, 8), (9, 2)])
def test_gradient_accumulation_is_raised_as_far_as_memory_needs(microbatches, steps):
    """Of 8 examples per device, one microbatch in `microbatches` would fit; with more than 8, none does."""
    config = load_config(f"{ROOT}/configs/quick.py")
    setup = TrainSetup(replace(config, train=replace(config.train, batch_size=64)), make_mesh("fsdp=8"))
    state = jax.tree.leaves((setup.abstract_state, setup.abstract_state.params))
    fixed = sum(4 * prod(x.sharding.shard_shape(x.shape)) for x in state)
    needs: Any = Namespace(memory=fixed + microbatches * 1e6, capacity=(fixed + 1e6) / 0.9 + 1)
    assert f"`compute.grad_accumulation_steps={steps}`" in memory_hints(needs, setup)


def test_memory_is_read_from_out_of_memory_errors():
    error = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 37.50G of 15.75G hbm. Exceeded by 21.75G."
    assert memory_in_error(error) == 37.5 * 2**30
    other = (
        "Ran out of memory on HBM, the total memory required for HLO temporaries (148G) exceeds available HBM (15G)."
    )
    assert memory_in_error(other) == 148 * 2**30
    assert memory_in_error("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topology", "v5z:4x4"], "there is no topology 'v5z:4x4'; similar names are v5e:4x4, "),
        (["--topology", "v5e:9"], "similar names are v5e:2x4, "),
        (["--topology", "v5e:4x4", "--mesh", "fsdp=5"], "the mesh fsdp=5 has 5 devices, but v5e:4x4 has 16 chips"),
        (["--topology", "h100:0"], "there is no topology 'h100:0'; similar names are h100:1, h100:2, h100:4."),
        (["--topology", "h100:2x2x2"], "similar names are h100:8, "),
        (["--topology", "h100:4", "--mesh", "fsdp=8"], "the mesh fsdp=8 has 8 devices, but h100:4 has 4 GPUs"),
        (["--mesh", "fsdp=8", "--train.batch-size", "12"], "does not split over 8 devices; use a multiple such as 16"),
        (["--mesh", "fsdp=3"], "but there are 8"),
        (["--mesh", "auto"], "those of cpu are not known; name others by --topology, such as h100:8"),
    ],
)
def test_wrong_input_is_a_user_error(options, message, capsys):
    assert main([*SMALL, *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(("packing", "is_said"), [("documents", True), ("windows", False)])
def test_the_number_of_documents_that_cudnn_takes_is_said(packing, is_said):
    config = load_config(f"{ROOT}/configs/quick.py")
    setup = TrainSetup(replace(config, data=replace(config.data, packing=packing)), make_mesh("data=8"))
    planned = Plan("gpu", "attention: cudnn", 1, (8, 16), 1.0, None, 1.0, None, (), None, 0.0)
    assert ("at most 32 documents per row" in "\n".join(describe(planned, setup))) == is_said


def test_help_of_mesh_names_auto(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out.partition("--mesh ")[2].partition("\n  --")[0]
    assert "'auto' ranks all meshes" in " ".join(text.split())


@pytest.mark.parametrize(("topology", "extra"), [("v5e:2x2", "plan"), ("h100:8", "plan-gpu")])
def test_missing_compiler_names_the_extra(topology, extra, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*SMALL, "--topology", topology]) == 2
    assert f"pip install 'jaxformer[{extra}]'" in capsys.readouterr().err


def test_config_mesh_is_rescaled_to_a_topology_of_another_size_and_that_is_said(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["plan", "--config", f"{ROOT}/configs/gpt.py:llama_7b", "--topology", "h100:8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "the config's mesh fsdp=256 does not have 8 devices; planning for --mesh fsdp=8\n"
    assert "needs the GPU compiler" in captured.err


@pytest.mark.parametrize(("memory", "status"), [(1e9, 0), pytest.param(1e12, 1, marks=pytest.mark.slow)])
def test_the_best_three_meshes_are_compiled_and_ranked_again(memory, status, capsys, monkeypatch):
    """All fit, and the first remains the best; or none does, and the one that needs least memory is named."""
    compiled = []

    def make_plan(setup: TrainSetup) -> Namespace:
        compiled.append(",".join(f"{axis}={n}" for axis, n in setup.mesh.shape.items() if n > 1))
        needed = memory / len(compiled)
        return Namespace(memory=needed, fits=needed < 1e10, bytes_sent=2e9, estimate=None, exposed=None)

    monkeypatch.setattr("jaxformer.plan.make_plan", make_plan)
    monkeypatch.setattr("jaxformer.plan.topology.topology_devices", lambda topology: jax.devices())
    monkeypatch.setattr("jaxformer.plan.topology._is_installed", lambda name: True)
    config = replace(load_config(f"{ROOT}/configs/quick.py"), mesh="auto")
    assert plan._plan_meshes(config, "h100:8") == status
    out = capsys.readouterr().out.splitlines()
    table = out[out.index("compiled:") + 2 : -1]
    assert [line.split()[0] for line in table] == (compiled if status == 0 else compiled[::-1])
    assert [line.split()[0] for line in out[2:5]] == compiled
    assert out[-1].startswith(f"--mesh {table[0].split()[0]} plans")


@pytest.mark.slow
def test_meshes_are_ranked_without_a_compiler_which_is_said(capsys, monkeypatch):
    monkeypatch.setattr("jaxformer.plan.topology._is_installed", lambda name: False)
    config = replace(load_config(f"{ROOT}/configs/quick.py"), mesh="auto")
    assert plan._plan_meshes(config, "tpu7x:2x2x1") == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "on 8 x TPU7x" in first and last.startswith("not compiled: pip install 'jaxformer[plan]'")


@pytest.mark.parametrize(
    ("mesh", "n", "rescaled"),
    [
        ("fsdp=256", 8, "fsdp=8"), ("fsdp=256", 512, "fsdp=256"), ("", 8, ""),
        ("fsdp=16,tensor=4", 8, "fsdp=2,tensor=4"), ("data=4", 8, "data=4,fsdp=2"), ("tensor=3", 8, "tensor=3"),
        ("fsdp=256", 1, "fsdp=1"),
    ],
)  # fmt: skip
def test_fsdp_takes_what_the_other_axes_leave(mesh, n, rescaled):
    assert rescale_mesh(mesh, n) == rescaled


def test_facts_of_gpus_agree_with_their_rates():
    """Each file in `plan/gpus` names a chip of the roofline, with its memory and bandwidth."""
    texts = [path.read_text() for path in SPECS.glob("*.txtpb")]
    facts = [dict(re.findall(r'(\w+): "?([^"\n]+)', text)) for text in texts]
    chips = [(CHIPS[f["device_description_str"]], f) for f in facts]
    assert len(chips) == len(GPUS) == 4
    for chip, f in chips:
        assert (chip.memory, chip.bandwidth) == (float(f["device_memory_size"]), float(f["memory_bandwidth"]))


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [
        ("v5e:16x16", "fsdp=256"),
        ("v5p:8x8x8", "fsdp=64,tensor=8"),
        ("tpu7x:2x2x1", "fsdp=8"),  # two devices per chip
        ("h100:8", "fsdp=8"),
        ("h200:4x8", "data=4,tensor=8"),
        ("b200:1", ""),
    ],
)
def test_topology_accepts_meshes_of_all_chips(topology, mesh):
    check_topology(topology, mesh)
    with pytest.raises(UserError, match="change `mesh`"):
        check_topology(topology, "data=3")


@pytest.mark.parametrize(
    ("log", "status", "message"),
    [
        (
            "I1 loads\nF1123 00:22:22.8 26 parse_flags.cc:4] Unknown flag in XLA_FLAGS: --x\n",
            1,
            "Unknown flag in XLA_FLAGS",
        ),
        (
            "Traceback (most recent call last):\n  File\nValueError: no such thing.\n",
            1,
            "(status 1): ValueError: no such",
        ),
        ("", -9, "the GPU compiler failed (status -9): nothing."),
    ],
)
def test_failure_of_the_compiler_is_one_sentence(log, status, message, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], status, stderr=log))
    assert main([*SMALL, "--topology", "h100:8"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the GPU compiler failed") and message in err and err.count("\n") == 1


def test_compiler_of_another_version_than_jaxlib_names_the_right_one(monkeypatch):
    def not_registered(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", not_registered)
    with pytest.raises(UserError, match=f"pip install jax-cuda13-plugin=={version('jaxlib')}"):
        topology_devices("h100:8")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(UserError, match="XLA_PYTHON_CLIENT_MEM_FRACTION is 'most'"):
        topology_devices("h100:8")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_plan_for_absent_tpus(tmp_path):
    wide = ["--model.d-model", "1024", "--model.d-ff", "4096", "--model.context-length", "512", "--model.n-heads", "8"]
    options = [*wide, "--mesh", "fsdp=4", "--compute.remat", "block", "--compute.scan-blocks"]
    command = [sys.executable, "-m", "jaxformer", *changed(SMALL, *options, "--topology", "v5e:2x2")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # the compiler's log is not shown
    values = lines(done.stdout)
    assert "4 x TPU v5 lite" in done.stdout and "attention: splash, precision: bfloat16" in done.stdout
    # Gradients are reduce-scattered: at most a quarter more than the minimum, and hardly an all-reduce.
    assert float(values["sent in all"].split(", ")[1].split()[0]) < 1.25
    assert number(values["all-reduce"]) < 0.1 * number(values["reduce-scatter"])
    assert "MFU" in done.stdout and "fits: " in done.stdout
