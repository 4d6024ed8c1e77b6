"""Run docs/examples/tour.ipynb from top to bottom, in a folder of its own, and write it with its outputs.

    python docs/scripts/notebook.py [FILE]

The file is the notebook itself by default. A cell that fails is an error.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs/examples/tour.ipynb"
SECONDS_PER_CELL = 600

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=SECONDS_PER_CELL, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # times of this run
    nbformat.write(notebook, Path(sys.argv[1]) if sys.argv[1:] else NOTEBOOK)
