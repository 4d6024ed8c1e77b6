"""Training and sampling need no optional package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.extras import EXTRAS
from tests.helpers import ROOT, tiny, write_books

WITHOUT_EXTRAS = f"import sys; sys.modules |= dict.fromkeys({[*EXTRAS]}); from jaxformer.__main__ import main; "


def core(here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process that cannot import optional packages."""
    command = [sys.executable, "-c", f"{WITHOUT_EXTRAS}sys.exit(main({[*arguments]}))"]
    env = {name: x for name, x in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_without_extras_a_run_trains_and_samples_and_one_note_names_them(tmp_path):
    write_books(tmp_path / "books")
    trained = core(tmp_path, "train", *tiny(tmp_path / "books", steps=2))
    assert trained.returncode == 0, trained.stderr
    note = "note: what needs the extras plots is left out; pip install 'jaxformer[plots]' adds it"
    assert trained.stdout.splitlines().count(note) == 1
    assert (tmp_path / "runs/quick/report.html").exists() and not (tmp_path / "runs/quick/plots").exists()
    sampled = core(tmp_path, "sample", "--prompt", "The cat", "--max-new-tokens", "5")
    assert sampled.returncode == 0 and sampled.stdout.startswith("The cat")
    assert core(tmp_path, "inspect").returncode == 0
