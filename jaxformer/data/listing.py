"""Listing of the files of folders and globs, by one rule: hidden ones are left out, and none is read twice."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from jaxformer.errors import UserError

MAGIC = re.compile(r"[*?[]")
"""Pattern of the characters that make a name a glob."""
LeftOut = defaultdict[str, set[Path]]
"""Paths that are left out, by reason."""


@dataclass(frozen=True)
class Listing:
    """Files to read, and how many are left out."""

    files: list[Path]
    """Sorted."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of paths by reason, such as a suffix."""

    @property
    def omission(self) -> str:
        """Return what is left out, in brackets, such as " (left out: 2 hidden, 1 .md)"; empty if nothing is."""
        reasons = [f"{n:,} {reason}" for reason, n in self.left_out.most_common(8)] + ["…"] * (len(self.left_out) > 8)
        return f" (left out: {', '.join(reasons)})" if reasons else ""

    def notes(self, name: str) -> tuple[str, ...]:
        """Return a note about what is left out of the named folder or glob, or none."""
        return (f"{len(self.files):,} file(s) of {name} are read{self.omission}",) if self.left_out else ()


def list_files(location: Path, is_known_kind: Callable[[Path], bool]) -> Listing:
    """Return the files of a location: the file itself, those of a known kind below a folder, or the matches of a glob.

    What exists is taken literally, also as the beginning of a glob. Hidden names, which begin with a dot, are left out
    unless the location spells them. Links are followed, but nothing is read twice. Raises `UserError` for a folder or a
    link that cannot be read, as what it holds would be missing from the data.
    """
    base, parts = location, list[str]()
    while not base.exists() and base != base.parent:
        base, parts = base.parent, [base.name, *parts]
    is_folder = not parts and base.is_dir()
    parts = ["**", "*"] if is_folder else parts
    left_out: LeftOut = defaultdict(set)
    files: dict[str, Path] = {}
    for path in sorted({*_match(base, parts, left_out)}):
        is_unknown = is_folder and not is_known_kind(path)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError | NotADirectoryError) and not path.is_symlink()
            if is_missing or (is_unknown and path.suffix):  # without a suffix, it may have led to a folder
                continue
            raise _unreadable(path, error) from error
        if stat.S_ISDIR(mode):
            if "**" not in parts:
                left_out["folder(s), which ** would search"].add(path)
        elif is_unknown:
            left_out[path.suffix.lower() or "without a suffix"].add(path)
        elif stat.S_ISREG(mode) and files.setdefault(os.path.realpath(path), path) is not path:
            left_out["repeated by a link"].add(path)
    return Listing([*files.values()], Counter({reason: len(paths) for reason, paths in left_out.items()}))


def _match(folder: Path, parts: Sequence[str], left_out: LeftOut) -> Iterator[Path]:
    """Yield the paths below a folder that match the parts of a glob, and those that may not exist if its last parts
    have no pattern."""
    if not parts:
        yield folder
    elif parts[0] == "**":
        for below in _folders(folder, left_out):
            yield from _match(below, parts[1:] or ["*"], left_out)
    elif not MAGIC.search(parts[0]):
        yield from _match(folder / parts[0], parts[1:], left_out)
    else:
        for path, _ in _entries(folder):
            if fnmatch(path.name, parts[0]):
                if is_hidden(path) and not parts[0].startswith("."):
                    left_out["hidden"].add(path)
                else:
                    yield from _match(path, parts[1:], left_out)


def _folders(top: Path, left_out: LeftOut) -> Iterator[Path]:
    """Yield a folder and those below it, each once, and by a link only what is not there otherwise."""
    folders, links, visited = [top], list[Path](), set[str]()
    while folders or links:
        folder = (folders or links).pop(0)
        if (real := os.path.realpath(folder)) in visited:
            left_out["repeated by a link"].add(folder)
            continue
        visited.add(real)
        yield folder
        for path, is_folder in _entries(folder):
            if is_folder and is_hidden(path):
                left_out["hidden"].add(path)
            elif is_folder:
                (links if path.is_symlink() else folders).append(path)


def _entries(folder: Path) -> list[tuple[Path, bool]]:
    """Return the paths in a folder, sorted, each with True for a folder; none if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted((folder / entry.name, entry.is_dir()) for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(Path(error.filename or folder), error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    link = f", a link to {path.readlink()}," if isinstance(error, FileNotFoundError) else ""
    remedy = "make it readable, remove it, or name what to read with a glob"
    return UserError(f"{path}{link} cannot be read: {error.strerror}; {remedy}.")


def is_hidden(path: Path) -> bool:
    """Return True for a name that begins with a dot."""
    return path.name.startswith(".")
