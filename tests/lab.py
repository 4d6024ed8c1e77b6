"""The laboratory's page, built from its sources."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import ROOT

LAB = ROOT / "docs/lab"


@cache
def built_page() -> Path:
    """Build the page, and beside it the scripts and styles of the package's pages, once per process; skip the test
    without Node and its packages, but in CI, which has them."""
    if shutil.which("node") is None or not (LAB / "node_modules").exists():
        assert "CI" not in os.environ, "node is not installed, or `npm ci` did not run in docs/lab"
        pytest.skip("node is not installed, or `npm ci` did not run in docs/lab")
    subprocess.run(["npm", "run", "build", "--", "build"], cwd=LAB, check=True, capture_output=True)
    return LAB / "build/lab.html"
