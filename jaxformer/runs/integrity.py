"""Integrity of checkpoints: SHA-256 checksums of their files."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxformer.errors import parse_json
from jaxformer.files import sha256

CHECKSUMS = "sha256.json"
"""File of checksums by file name: of a checkpoint's items, or of a run's tokenizer and classes."""
METADATA = "_CHECKPOINT_METADATA"
"""Orbax's metadata file, written after the checksums."""
ARRAYS = ("params/", "opt_state/")
"""Items that contain nearly all bytes of a checkpoint."""
INDEX = re.compile(r"(params|opt_state)/(?:manifest\.ocdbt|[^/]+/\.zarray)")
"""Pattern of a file without which no array of its item can be read."""
ALL_ARRAYS, NO_ARRAYS = slice(None), slice(0)
MISSING = " is missing"
HASHING_THREADS = 4


def find_corruption(checkpoint: Path, arrays: slice = ALL_ARRAYS) -> str | None:
    """Return a description of the corruption of a checkpoint's folder, or None if it is intact. Orbax detects a missing
    or truncated file, but not flipped bits. Of the files with arrays, in order, the content of those in the slice
    `arrays` is verified; the others must exist."""
    try:
        expected = parse_json((checkpoint / CHECKSUMS).read_bytes())
        parse_json((checkpoint / METADATA).read_bytes())
        is_inside = lambda name: not name.startswith("/") and ".." not in name.split("/")  # noqa: E731
        if not (isinstance(expected, dict) and expected and all(map(is_inside, expected))):
            raise ValueError
        for name in expected:
            if not stat.S_ISREG((checkpoint / name).stat().st_mode):  # reading a device might never end
                return f"{name} is not a file"
        array_files = [name for name in expected if name.startswith(ARRAYS)]
        actual = hash_files(checkpoint, sorted({*expected} - {*array_files} | {*array_files[arrays]}))
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(checkpoint)}{MISSING}"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except ValueError:
        return f"{CHECKSUMS} or {METADATA} is invalid"
    return next((f"{name} does not match its checksum" for name in actual if actual[name] != expected[name]), None)


def find_unindexed(checkpoint: Path) -> str | None:
    """Return a description of an item of a checkpoint's folder whose arrays cannot be read, or None. Files that were
    never merged match their checksums."""
    try:
        names = parse_json((checkpoint / CHECKSUMS).read_bytes())
    except FileNotFoundError:
        return f"{CHECKSUMS}{MISSING}"
    indexed = {match[1] for name in names if (match := INDEX.fullmatch(name))}
    with_data = {name.partition("/")[0] for name in names if name.startswith(ARRAYS) and "/d/" in name}
    unindexed = sorted(with_data - indexed)  # an optimizer's state may be empty
    return f"{unindexed[0]} has no index of its arrays" if unindexed else None


def hash_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of files in a folder, in hexadecimal, by file name."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: sha256(folder / name), names), strict=True))


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of the files of a checkpoint's items."""
    files = sorted(p for item in checkpoint.iterdir() if item.is_dir() for p in item.rglob("*") if p.is_file())
    checksums = hash_files(checkpoint, [file.relative_to(checkpoint).as_posix() for file in files])
    (checkpoint / CHECKSUMS).write_text(json.dumps(checksums, indent=0), encoding="utf-8")
