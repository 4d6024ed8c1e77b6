"""`python -m jaxformer plan`: for the devices here, for TPUs where the compiler is installed, and what it refuses."""

import importlib.util
import subprocess
import sys

import pytest

from jaxformer.__main__ import main
from jaxformer.cli.plan import check_topology
from jaxformer.errors import UserError
from jaxformer.plan.plan import asked_for
from tests.helpers import ROOT, changed

SMALL = [
    "plan", "--config", f"{ROOT}/configs/quick.py", "--model.d-model", "32", "--model.n-blocks", "2",
    "--model.d-ff", "64", "--model.vocab-size", "256", "--model.context-length", "16",
]  # fmt: skip


def number(line: str) -> float:
    """The first number in a line."""
    return next(float(word.replace(",", "")) for word in line.split() if word[0].isdigit())


def lines(text: str) -> dict[str, str]:
    """The lines of a plan by what stands first in them."""
    return {line[:20].strip(): line[20:] for line in text.splitlines() if line.startswith("  ")}


@pytest.mark.slow
def test_for_the_devices_here(capsys):
    assert main([*SMALL, "--mesh", "fsdp=8", "--compute.remat", "block", "--compute.scan-blocks"]) == 0
    said = capsys.readouterr().out
    found = lines(said)
    assert "on 8 x cpu, mesh fsdp 8" in said and "no estimate of the time" in said
    assert "fits: " in said.splitlines()[-1]
    # XLA's CPU compiler scatters and gathers as it is told, so that what is sent is what is needed.
    assert "1.00 times as much" in found["sent in all"]
    assert number(found["reduce-scatter"]) < number(found["all-gather"]) < 2 * number(found["reduce-scatter"])
    assert number(found["computed"]) > number(found["model operations"])


@pytest.mark.slow
def test_what_does_not_fit_says_what_to_change(capsys, monkeypatch):
    monkeypatch.setattr("jaxformer.plan.plan.memory_capacity", lambda device: 1e5)
    assert main([*SMALL, "--mesh", "data=8", "--train.batch-size", "16"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit: it needs ")
    assert all(way in last for way in ("--compute.remat block", "--compute.grad-accumulation-steps 2", "--mesh fsdp=8"))


def test_the_compilers_complaint_is_read():
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 37.50G of 15.75G hbm. Exceeded by 21.75G."
    assert asked_for(said) == 37.5 * 2**30
    other = (
        "Ran out of memory on HBM, the total memory required for HLO temporaries (148G) exceeds available HBM (15G)."
    )
    assert asked_for(other) == 148 * 2**30
    assert asked_for("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.") is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--topology", "v5z:4x4"], "there is no topology 'v5z:4x4'; near it are v5e:4x4, "),
        (["--topology", "v5p"], "there is no topology 'v5p'; near it are v5p:2x2x1, "),
        (["--topology", "v5e:9"], "near it are v5e:2x4, "),
        (["--topology", "v5e:4x4", "--mesh", "fsdp=5"], "the mesh fsdp=5 is of 5 devices, but v5e:4x4 has 16 chips"),
        (["--topolgy", "v5e:4x4"], "did you mean --topology?"),
        (["--mesh", "fsdp=8", "--train.batch-size", "12"], "does not split over 8 devices; use a multiple such as 16"),
        (["--mesh", "fsdp=3"], "but there are 8"),
    ],
)
def test_errors_are_one_sentence(options, said, capsys):
    assert main([*SMALL, *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err and err.count("\n") == 1


def test_without_the_compiler_the_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*SMALL, "--topology", "v5e:2x2"]) == 2
    assert "pip install 'jaxformer[plan]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topology", "mesh"),
    [("v5e:16x16", "fsdp=256"), ("v5p:8x8x8", "fsdp=64,tensor=8"), ("v4:2x2x1", ""), ("v6e:2x4", "tensor=2")],
)
def test_meshes_of_all_chips_pass(topology, mesh):
    check_topology(topology, mesh)
    with pytest.raises(UserError, match="chips"):
        check_topology(topology, "data=3")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
def test_for_tpus_that_are_not_here(tmp_path):
    wide = ["--model.d-model", "1024", "--model.d-ff", "4096", "--model.context-length", "512", "--model.n-heads", "8"]
    options = [*wide, "--mesh", "fsdp=4", "--compute.remat", "block", "--compute.scan-blocks"]
    command = [sys.executable, "-m", "jaxformer", *changed(SMALL, *options, "--topology", "v5e:2x2")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # the compiler's chatter is kept from the user
    found = lines(done.stdout)
    assert "4 x TPU v5 lite" in done.stdout and "attention: splash, precision: bfloat16" in done.stdout
    # Gradients are scattered, not summed whole: at most a quarter more than needed, and hardly an all-reduce.
    assert float(found["sent in all"].split(", ")[1].split()[0]) < 1.25
    assert number(found["all-reduce"]) < 0.1 * number(found["reduce-scatter"])
    assert "utilisation" in done.stdout and "fits: " in done.stdout
