"""Training and sampling need no optional package."""

import os
import subprocess
import sys

import pytest

from jaxformer.errors import EXTRAS
from tests.helpers import ROOT, tiny, write_books

PROGRAM = f"""if True:
    import sys
    sys.modules |= dict.fromkeys({[*EXTRAS]})
    from jaxformer.__main__ import main
    for command in %r:
        if status := main(command):
            sys.exit(status)
        print("----", flush=True)
"""
"""Commands one after another, in a process that cannot import optional packages."""


@pytest.mark.slow
def test_without_extras_a_run_trains_and_samples(tmp_path):
    write_books(tmp_path / "books")
    train = ["train", *tiny(tmp_path / "books", steps=2)]
    commands = [train, ["sample", "--prompt", "The cat", "--max-new-tokens", "5"], ["inspect"]]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM % commands], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    trained, sampled, _, end = result.stdout.split("----\n")
    assert "plots" not in trained  # only the alignment of a translation is drawn with an extra
    run = tmp_path / "runs/quick"
    assert (run / "report.html").exists()
    assert sampled.startswith("The cat") and (run / "inspect.html").exists() and not end
