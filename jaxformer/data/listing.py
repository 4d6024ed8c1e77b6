"""Listing of the files of folders and globs, by one rule: hidden ones are left out, and none is read twice."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxformer.errors import UserError


@dataclass(frozen=True)
class Listing:
    """Files to read, and how many are left out."""

    files: list[Path]
    """Sorted."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of paths by reason, such as a suffix; hidden ones are not counted."""

    @property
    def omission(self) -> str:
        """Return what is left out, in brackets, such as " (left out: 2 .pdf, 1 .md)"; empty if nothing is."""
        reasons = [f"{n:,} {reason}" for reason, n in self.left_out.most_common(8)] + ["…"] * (len(self.left_out) > 8)
        return f" (left out: {', '.join(reasons)})" if reasons else ""

    def notes(self, name: str) -> tuple[str, ...]:
        """Return a note about what is left out of the named folder or glob, or none."""
        return (f"{len(self.files):,} file(s) of {name} are read{self.omission}",) if self.left_out else ()


def list_files(location: Path, is_known_kind: Callable[[Path], bool]) -> Listing:
    """Return the files of a location: the file itself, those of a known kind below a folder, or the matches of a glob.

    What exists is taken literally, also as the beginning of a glob. Hidden names, which begin with a dot, are left out
    unless the location spells them. Links are followed, but nothing is read twice. Raises `UserError` for a link that
    leads nowhere, and `OSError` for a folder below that cannot be listed, as what it holds would be missing.
    """
    base, parts = location, list[str]()
    while not base.exists() and base != base.parent:
        base, parts = base.parent, [base.name, *parts]
    is_folder = not parts and base.is_dir()
    files, left_out = dict[str, Path](), Counter[str]()
    for path in sorted({*_match(base, ["**"] if is_folder else parts)}):
        is_unknown = is_folder and not is_known_kind(path)
        if path.is_file() and is_unknown:
            left_out[path.suffix.lower() or "without a suffix"] += 1
        elif path.is_file():
            left_out["repeated by a link"] += files.setdefault(os.path.realpath(path), path) is not path
        elif path.is_dir():
            left_out["folder(s), which ** would search"] += "**" not in parts and not is_folder
        elif path.is_symlink() and not path.exists() and not (is_unknown and path.suffix):
            # Without a suffix, it may have led to a folder.
            remedy = "restore it, remove the link, or name what to read with a glob"
            raise UserError(f"{path}, a link to {path.readlink()}, leads nowhere; {remedy}.")
    return Listing([*files.values()], +left_out)


def _match(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the paths below a folder that match the parts of a glob, or itself without any."""
    first = parts.index("**") if "**" in parts else len(parts)
    pattern = Path(glob.escape(str(base)), *parts[:first])
    for path in map(Path, glob.iglob(str(pattern))):  # noqa: PTH207, whose * matches hidden names
        if first == len(parts):
            yield path
        elif path.is_dir():
            for folder in _folders(path):
                yield from _match(folder, parts[first + 1 :] or ["*"])


def _folders(top: Path) -> Iterator[Path]:
    """Yield a folder and those below it that are not hidden, each once, and by a link only what is not there
    otherwise."""
    folders, links, visited = [top], list[Path](), set[str]()
    while folders or links:
        folder = (folders or links).pop(0)
        if (real := os.path.realpath(folder)) in visited:
            continue
        visited.add(real)
        yield folder
        with os.scandir(folder) as entries:
            below = sorted(Path(entry) for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        for path in below:
            (links if path.is_symlink() else folders).append(path)


def is_hidden(path: Path) -> bool:
    """Return True for a name that begins with a dot."""
    return path.name.startswith(".")
