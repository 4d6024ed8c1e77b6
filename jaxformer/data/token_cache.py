"""On-disk token cache: written once, then verified and memory-mapped."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxformer.data.documents import Documents, Pieces
from jaxformer.data.progress import Progress
from jaxformer.data.text import batches
from jaxformer.data.tokenizer import TOKENIZER_CONFIG, Tokenizer
from jaxformer.data.word_encoder import WordEncoder
from jaxformer.errors import UserError, os_error_reason
from jaxformer.fields import from_dict, to_dict
from jaxformer.files import sha256, try_lock

SCRATCH = ".building-"
"""Name prefix of a folder that is being written, followed by host and process id."""
SCRATCH_SECONDS = 24 * 60 * 60
"""Age in seconds at which a scratch folder of an unknown process is removed."""
WARN_AFTER_SECONDS = 5.0
"""Seconds of waiting for another process before a warning; the processes of a job start at the same time."""
TOKENIZER, MANIFEST = "tokenizer.json", "manifest.json"
SPLITS = ("train.tokens", "val.tokens")
CHARACTERS_PER_BATCH = 2**19
"""Characters of text that are tokenized at once: encodings take about 200 bytes per character."""

warn = logging.getLogger(__name__).warning


@dataclass(frozen=True)
class Split:
    """Tokens of a training or validation split: an end-of-text token, then each document followed by an end-of-text
    token; or, for a tokenizer with `begin_of_text`, each document between `begin_of_text` and end-of-text."""

    tokens: np.ndarray
    """`(n,)` uint16, or uint32 for large vocabularies; memory-mapped."""
    documents: int
    """Number of documents."""
    n_bytes: int
    """Size of the documents in UTF-8."""


@dataclass(frozen=True)
class _Manifest:
    """Expected contents of a cache folder; tuples have one value per split, in the order of `SPLITS`."""

    key: str
    """Name of the folder."""
    dtype: Literal["uint16", "uint32"]
    learned_one_in: int
    """`one_in` of the tokenizer: the inverse of the fraction of texts that it was trained on."""
    documents: tuple[int, ...]
    n_bytes: tuple[int, ...]
    checksums: tuple[str, ...]
    """SHA-256 of the token files, then of the tokenizer's files, see `_tokenizer_files`."""


class Unverified(Exception):
    """The contents of a cache folder do not match its manifest."""


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with permissions for this user only, whatever the umask."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def cached(
    folder: Path, train: Documents, val: Documents, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[Split, Split, Tokenizer]:
    """Return both splits as tokens, and their tokenizer, from a cache folder, which is written if it is missing. All
    files are verified by their SHA-256, at about a second per gigabyte of tokens. A corrupt folder is removed with a
    warning and written again. Without a tokenizer, one of at most `vocab_size` tokens is trained on the training
    documents. Raises `UserError` as `Tokenizer.train` does, and if the folder cannot be written or read back."""
    _remove_abandoned(folder.parent)
    with suppress(FileNotFoundError, Unverified):
        return read(folder)
    with _lock(folder):
        try:
            return read(folder)  # another process may have written it meanwhile
        except FileNotFoundError:
            pass
        except Unverified as error:
            warn("cached tokens in %s %s; tokenizing again.", folder, error)
            # Rename it first, so that no process reads a partial folder.
            with _scratch(folder, "remove", folder) as scratch, suppress(FileNotFoundError):  # another was faster
                folder.rename(scratch / folder.name)
        _build(folder, train, val, vocab_size, tokenizer)
        try:
            return read(folder)
        except (FileNotFoundError, Unverified) as error:
            remedy = "set JAXFORMER_CACHE"
            raise UserError(f"cached tokens in {folder} {error}, although just written; {remedy}.") from error


def has_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return True if the tokens in a cache folder are from this tokenizer."""
    stored = {name: (folder / name).read_text(encoding="utf-8", errors="replace") for name in _tokenizer_files(folder)}
    return stored == tokenizer.files(TOKENIZER)


def _tokenizer_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that `Tokenizer.save` wrote."""
    return [name for name in (TOKENIZER, TOKENIZER_CONFIG) if (folder / name).is_file()]


def read(folder: Path) -> tuple[Split, Split, Tokenizer]:
    """Return both splits and their tokenizer from a cache folder. Raises `FileNotFoundError` if the folder is missing,
    `Unverified` if its contents do not match its manifest."""
    if not folder.is_dir():
        raise FileNotFoundError("are not there")
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
        manifest = from_dict(_Manifest, values if isinstance(values, dict) else {}, MANIFEST)
        if manifest.key != folder.name:
            raise Unverified("belong to another text")
        for name, checksum in zip((*SPLITS, *_tokenizer_files(folder)), manifest.checksums, strict=True):
            if sha256(folder / name) != checksum:
                raise Unverified(f"do not match their checksum ({name})")
        train, val = (
            Split(np.memmap(folder / name, manifest.dtype, "r"), documents, n_bytes)
            for name, documents, n_bytes in zip(SPLITS, manifest.documents, manifest.n_bytes, strict=True)
        )
        tokenizer = Tokenizer.load(folder / TOKENIZER)
        tokenizer.one_in = manifest.learned_one_in
        return train, val, tokenizer
    except (OSError, ValueError, RecursionError, UserError) as error:
        raise Unverified(f"cannot be read ({os_error_reason(error) or error})") from error


def encode(documents: Documents, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the tokens of a `Split` in parts, each with the number of bytes of its text."""
    dtype = token_dtype(tokenizer)
    end = np.array([tokenizer.end_of_text], dtype)
    begin = end[:0] if tokenizer.begin_of_text is None else np.array([tokenizer.begin_of_text], dtype)
    yield end[len(begin) :], 0

    def parts(document: Iterable[str]) -> Iterator[tuple[str | np.ndarray, int]]:
        """Yield the texts and special tokens of a document, with their bytes of text."""
        yield begin, 0
        for i, piece in enumerate(document):
            # If the tokenizer adds a space to each piece, it replaces the one that the piece begins with.
            yield piece.removeprefix(" ") if i and tokenizer.doubles_space else piece, len(piece.encode())
        yield end, 0

    encode_batch = (WordEncoder(tokenizer) if tokenizer.separates_words else tokenizer).encode_batch
    progress = Progress("tokenizing", documents.n_bytes)
    for batch in batches(chain.from_iterable(map(parts, documents)), lambda part: len(part[0]), CHARACTERS_PER_BATCH):
        encoded = iter(encode_batch([part for part, _ in batch if isinstance(part, str)]))
        tokens = [np.array(next(encoded), dtype) if isinstance(part, str) else part for part, _ in batch]
        n_bytes = sum(n for _, n in batch)
        yield np.concatenate(tokens), n_bytes
        progress.add(n_bytes)


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest dtype for a tokenizer's tokens, uint16 or uint32."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def _build(folder: Path, train: Documents, val: Documents, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Write a cache folder atomically: write a scratch folder, then rename it."""
    with _scratch(folder, "write to", folder.parent) as scratch:
        tokenizer = tokenizer or Tokenizer.train(Pieces(train), vocab_size)
        tokenizer.save(scratch / TOKENIZER)
        documents = dict(zip(SPLITS, (train, val), strict=True))
        sizes = [_write_tokens(scratch / name, split, tokenizer) for name, split in documents.items()]
        dtype: Any = token_dtype(tokenizer).name
        checksums = tuple(sha256(scratch / name) for name in (*SPLITS, *_tokenizer_files(scratch)))
        manifest = _Manifest(folder.name, dtype, tokenizer.one_in, (len(train), len(val)), tuple(sizes), checksums)
        (scratch / MANIFEST).write_text(json.dumps(to_dict(manifest)), encoding="utf-8")
        for file in scratch.iterdir():
            _sync(file)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has written the same
                raise
        with suppress(OSError):  # not every file system can sync a folder
            _sync(folder.parent)


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows syncs only writable files
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tokens(file: Path, documents: Documents, tokenizer: Tokenizer) -> int:
    """Write the tokens of a split; return the size of its documents in bytes."""
    n_bytes = 0
    with file.open("wb") as content:
        for tokens, n in encode(documents, tokenizer):
            content.write(tokens.tobytes())
            n_bytes += n
    return n_bytes


@contextmanager
def _scratch(folder: Path, action: str, target: Path) -> Iterator[Path]:
    """Create a folder beside a cache folder and remove it afterwards. Converts file-system errors to `UserError`."""
    try:
        prefix = f"{SCRATCH}{socket.gethostname()}-{os.getpid()}-"
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot {action} {target}: {error.strerror or error}; set JAXFORMER_CACHE.") from error


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait for and hold the lock of a cache folder against other processes, also on other hosts. The lock file stays:
    if it were removed, two processes could lock two files with the same name."""
    try:
        make_private(folder.parent)
        descriptor = os.open(folder.parent / f"{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {folder.parent}: {error.strerror}; set JAXFORMER_CACHE.") from error
    try:
        with suppress(OSError):  # the file system has no locks
            if not try_lock(descriptor, WARN_AFTER_SECONDS):
                warn("waiting for another process that writes tokens to %s.", folder)
                try_lock(descriptor, inf)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove the scratch folders of processes that were killed."""
    for scratch in parent.glob(f"{SCRATCH}*"):
        host, pid, _ = [*scratch.name.removeprefix(SCRATCH).rsplit("-", 2), "", ""][:3]
        dead = host == socket.gethostname() and pid.isdigit() and not _is_running(int(pid))
        with suppress(FileNotFoundError):  # just finished
            if dead or time.time() - scratch.stat().st_mtime > SCRATCH_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Return True if a process of this host is running; always on Windows, where signal 0 would end the process."""
    if os.name == "nt":
        return True
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True
