"""Commands of this project in the form that the user can type."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Folder of the checkout, or of the installed packages outside a checkout."""


def command(name: str) -> str:
    """Return a command that works in the user's folder, such as `jaxformer train`, or a call of train.py or sample.py
    if one of them was run."""
    program = Path(sys.argv[0] if sys.argv else "")
    script = program.with_name(f"{name}.py") if program.name else program
    if program.name in ("train.py", "sample.py") and program.resolve().parent == ROOT and script.is_file():
        return f"python {shlex.quote(str(script))}"
    return f"jaxformer {name}" if program.stem == "jaxformer" else f"python -m jaxformer {name}"
