"""Documents of a corpus: cleaned texts, read anew in each iteration, so that no text is ever entirely in memory."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxformer.data.progress import Progress
from jaxformer.data.sources import CODE, find_files, read_documents_of, suffix_of
from jaxformer.data.text import MAX_WORD_CHARACTERS, clean, cut, page_width
from jaxformer.errors import UserError

NO_UNWRAP = -1
"""Page width that stands for a document whose lines are not even examined."""
DIGEST = np.dtype("V32")
"""Dtype of a SHA-256, which sorts like bytes."""


@dataclass(frozen=True)
class DocumentFile:
    """A file of documents."""

    path: Path
    n_documents: int
    stamp: tuple[int, int]
    """Size and modification time, to detect changes."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Cleaned documents of several files. Iteration yields each document as pieces of at most `PIECE_CHARACTERS`, which
    tokenize like the whole text. A document's pieces must be read before the next document."""

    files: tuple[DocumentFile, ...]
    column: str
    """Field or column with the text, in files of rows."""
    index_N: np.ndarray
    """Index of each document among all documents of the files, ascending; documents of only white space are left
    out."""
    widths_N: np.ndarray
    """Page width in characters at which each document's lines are unwrapped, 0 for one that is not wrapped; or
    `NO_UNWRAP`."""
    bytes_N: np.ndarray
    """Size of each document in UTF-8."""
    digests_N: np.ndarray
    """SHA-256 of each text, of dtype `DIGEST`."""
    notes: tuple[str, ...] = ()
    """Notes about files that are left out and lines that are joined."""
    span: tuple[int, int | None] = (0, None)
    """Character range `[start, stop)` of a single document; None for its end."""

    def __len__(self) -> int:
        return len(self.index_N)

    @property
    def n_bytes(self) -> int:
        """Size of all documents in UTF-8, before they are cut to `span`."""
        return int(self.bytes_N.sum())

    def __getitem__(self, chosen: np.ndarray) -> Documents:
        """Return some of the documents, by indices or a boolean mask."""
        arrays = ("index_N", "widths_N", "bytes_N", "digests_N")
        return replace(self, **{name: getattr(self, name)[chosen] for name in arrays})

    def __iter__(self) -> Iterator[Iterator[str]]:
        """Yield the pieces of each document. Raises `UserError` if a file has changed since `read_documents`."""
        first = position = 0
        for file in self.files:
            stop = int(np.searchsorted(self.index_N, first + file.n_documents))
            if position == stop:  # no document from this file
                first += file.n_documents
                continue
            n = first
            for n, pieces in enumerate(read_documents_of(file.path, self.column), start=first + 1):
                if position < stop and self.index_N[position] == n - 1:
                    width = int(self.widths_N[position])
                    yield cut(_between(clean(pieces, None if width == NO_UNWRAP else width), *self.span))
                    position += 1
            first += file.n_documents
            if n != first or _stamp(file.path) != file.stamp:
                raise UserError(f"{file.path} changed while it was read; start again once it is unchanged.")

    def cut_end(self, fraction: float) -> tuple[Documents, Documents]:
        """Cut a single document at the last line break, or else the last space, that leaves between one and two times
        `fraction` of the text for the second part; a long text without either is cut at any character. Raises
        `UserError` if a short text has neither."""
        n_characters = sum(len(piece) for piece in Pieces(self))
        latest = int(n_characters * (1 - fraction))
        earliest = max(0, int(n_characters * (1 - 2 * fraction)))
        cuts = {"\n": 0, " ": 0}
        offset = earliest
        for piece in Pieces(replace(self, span=(earliest, latest))):
            for character in cuts:
                if (index := piece.rfind(character)) >= 0:
                    cuts[character] = offset + index + 1
            offset += len(piece)
        position = cuts["\n"] or cuts[" "] or (latest if latest - earliest > MAX_WORD_CHARACTERS else 0)
        if position == 0:
            name = ", ".join(file.path.name for file in self.files)
            raise UserError(f"{name} is too short for a held-out split; give data.val_path.")
        begin, end = (replace(self, span=span) for span in ((0, position), (position, None)))
        return begin, end

    def digest(self) -> bytes:
        """Return bytes that identify the texts and their order."""
        return f"{len(self)} {self.span} ".encode() + self.digests_N.tobytes()


@dataclass(frozen=True)
class Pieces:
    """The pieces of documents, read anew in each iteration."""

    documents: Documents

    def __iter__(self) -> Iterator[str]:
        for pieces in self.documents:
            yield from pieces


def read_documents(path: str, unwrap_lines: bool, column: str = "text") -> Documents:
    """Return the documents at a path, without those of only white space. All files are read once, or twice to determine
    the page width of plain text: 0.8 s for 49 MB of books. Raises `UserError` if there are no files or no text in them,
    and as `read_documents_of` does."""
    listing = find_files(path)
    files, digests = [], bytearray()
    index, widths, sizes = array("q"), array("h"), array("q")
    progress, n = Progress(f"reading {path}"), 0
    for file in listing.files:
        stamp, first = _stamp(file), n
        may_unwrap = unwrap_lines and suffix_of(file) not in CODE
        for pieces in read_documents_of(file, column):
            width = page_width(pieces) if may_unwrap else None
            digest, n_bytes = hashlib.sha256(), 0
            for piece in clean(pieces, width):
                raw = piece.encode()
                digest.update(raw)
                n_bytes += len(raw)
                progress.add(len(raw))
            if n_bytes:
                index.append(n)
                widths.append(NO_UNWRAP if width is None else width)
                sizes.append(n_bytes)
                digests += digest.digest()
            n += 1
        files.append(DocumentFile(file, n - first, stamp))
    if not index:
        raise UserError(f"the {len(files)} file(s) at {path} hold no text.")
    index_N, widths_N, bytes_N = (np.array(values) for values in (index, widths, sizes))
    notes = listing.notes(path)
    if n_wrapped := int((widths_N > 0).sum()):
        joined = f"{n_wrapped:,} of {len(index):,} document(s) of {path} are wrapped to a page's width"
        notes = (*notes, f"{joined}; their lines are joined into paragraphs, unless --data.no-unwrap is given")
    return Documents(tuple(files), column, index_N, widths_N, bytes_N, np.frombuffer(bytes(digests), DIGEST), notes)


def hold_out(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """Split documents into (training, validation) by the order of their digests, with about `fraction` of the bytes in
    the latter. Equal documents are in the same split. Each split has at least one document; if all are equal, one is
    cut, see `Documents.cut_end`. Raises `UserError` if it is too short."""
    contents, first_N, content_N = np.unique(documents.digests_N, return_index=True, return_inverse=True)
    if len(contents) == 1:
        return documents[first_N].cut_end(fraction)
    sizes = np.bincount(content_N, weights=documents.bytes_N)
    n_held_out = 1 + int(np.searchsorted(np.cumsum(sizes), fraction * documents.n_bytes))
    is_held_out_N = content_N < min(n_held_out, len(contents) - 1)
    return documents[~is_held_out_N], documents[is_held_out_N]


def leave_out(documents: Documents, others: Documents) -> Documents:
    """Return the documents whose content equals none of the others."""
    return documents[~np.isin(documents.digests_N, others.digests_N)]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return status.st_size, status.st_mtime_ns


def _between(pieces: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    """Yield the characters in `[start, stop)`."""
    offset = 0
    for piece in pieces:
        if stop is not None and offset >= stop:
            return
        part = piece[max(0, start - offset) : None if stop is None else stop - offset]
        offset += len(piece)
        if part:
            yield part
