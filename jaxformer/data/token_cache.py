"""Tokens on disk: made once, then verified and memory-mapped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from jaxformer.data.text import Document, Pieces
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, os_error_reason
from jaxformer.fields import from_dict, to_dict

BUILDING = ".building-"
DAY = 24 * 60 * 60
QUIET_SECONDS = 5.0
"""Another process is waited for so long before that is said: those of one job begin together."""
TOKENIZER, MANIFEST = "tokenizer.json", "manifest.json"
PIECES_AT_ONCE = 16
"""Pieces of text tokenized side by side: encodings take some 200 bytes per character."""


@dataclass(frozen=True)
class Split:
    """One end-of-text token, then the documents, each followed by one."""

    tokens: np.ndarray
    """`(n,)` uint16, or uint32 for large vocabularies; memory-mapped."""
    documents: int
    n_bytes: int
    """Of the documents in UTF-8."""


@dataclass(frozen=True)
class _TokenFile:
    """Size and checksum of a file of tokens."""

    documents: int
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    """Contents that a folder of the cache must have."""

    key: str
    """The folder's name."""
    dtype: Literal["uint16", "uint32"]
    tokenizer: str
    """SHA-256 of its file."""
    learned_one_in: int
    """Of so many pieces of text, the tokenizer learned from one."""
    train: _TokenFile
    val: _TokenFile


class Unverified(Exception):
    """A folder of the cache that does not hold what was written."""


def cache_root() -> Path:
    """Return where caches lie: `$JAXFORMER_CACHE`, else jaxformer/ in `$XDG_CACHE_HOME` or ~/.cache."""
    if root := os.environ.get("JAXFORMER_CACHE"):
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxformer"


def make_private(folder: Path) -> None:
    """Make a folder of a cache, and those above it, where they are missing; for this user alone, whatever the umask."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def cached(
    folder: Path, train: Sequence[Document], val: Sequence[Document], vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[Split, Split, Tokenizer]:
    """Return both splits as tokens, and their tokenizer, from a folder that is written first where there is none.

    Every byte is compared with the SHA-256 stored beside it, about a second per gigabyte of tokens. What does not agree
    is removed with a warning, and made anew.

    Args:
      tokenizer: what to tokenize with; without it, one learns from the training documents.

    Raises:
      UserError: see `Tokenizer.train`; or the folder cannot be written, or not be read back.
    """
    _remove_abandoned(folder.parent)
    with suppress(FileNotFoundError, Unverified):
        return read(folder)
    with _lock(folder):
        try:
            return read(folder)  # another process may have written it meanwhile
        except FileNotFoundError:
            pass
        except Unverified as error:
            logging.getLogger(__name__).warning("cached tokens in %s %s; tokenizing again.", folder, error)
            _discard(folder)
        _build(folder, train, val, vocab_size, tokenizer)
        try:
            return read(folder)
        except (FileNotFoundError, Unverified) as error:
            raise UserError(
                f"cached tokens in {folder} {error}, although written anew; set JAXFORMER_CACHE."
            ) from error


def has_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a folder of the cache was made with this tokenizer."""
    file = folder / TOKENIZER
    return file.is_file() and file.read_bytes() == tokenizer.as_json().encode()


def read(folder: Path) -> tuple[Split, Split, Tokenizer]:
    """Return both splits and their tokenizer as `_build` wrote them.

    Raises:
      FileNotFoundError: there is no such folder.
      Unverified: it holds something else.
    """
    if not folder.is_dir():
        raise FileNotFoundError("are not there")
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
        manifest = from_dict(_Manifest, values if isinstance(values, dict) else {}, MANIFEST)
        if manifest.key != folder.name:
            raise Unverified("are those of another text")
        _verify(folder / TOKENIZER, manifest.tokenizer)
        splits = []
        for name, known in (("train", manifest.train), ("val", manifest.val)):
            _verify(file := _token_file(folder, name), known.sha256)
            tokens = np.memmap(file, manifest.dtype, "r")
            splits.append(Split(tokens, known.documents, known.n_bytes))
        tokenizer = Tokenizer.load(folder / TOKENIZER)
        tokenizer.one_in = manifest.learned_one_in
        return splits[0], splits[1], tokenizer
    except (OSError, ValueError, RecursionError, UserError) as error:
        raise Unverified(f"cannot be read ({os_error_reason(error) or error})") from error


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield a `Split`'s tokens, a part after the other, and how many bytes of text each part is."""
    dtype = token_dtype(tokenizer)
    end = np.array([tokenizer.end_of_text], dtype)
    yield end, 0
    batch: list[str | None] = []

    def flush() -> Iterator[tuple[np.ndarray, int]]:
        texts = [text for text in batch if text is not None]
        encoded = iter(tokenizer.encode_batch(texts))
        parts = [end if text is None else np.array(next(encoded), dtype) for text in batch]
        yield np.concatenate(parts), sum(len(text.encode()) for text in texts)

    for document in documents:
        for piece in chain(document.pieces(), (None,)):
            batch.append(piece)
            if len(batch) == PIECES_AT_ONCE:
                yield from flush()
                batch = []
    if batch:
        yield from flush()


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest of the types that tokens are stored in."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def _build(
    folder: Path, train: Sequence[Document], val: Sequence[Document], vocab_size: int, tokenizer: Tokenizer | None
) -> None:
    """Write into a temporary folder and rename it, so that `folder` is whole or absent."""
    try:
        prefix = f"{BUILDING}{socket.gethostname()}-{os.getpid()}-"
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    except OSError as error:
        raise UserError(f"cannot write to {folder.parent}: {error.strerror}; set JAXFORMER_CACHE.") from error
    try:
        tokenizer = tokenizer or Tokenizer.train(Pieces(train), vocab_size)
        json_of_tokenizer = tokenizer.as_json().encode()
        manifest = _Manifest(
            folder.name,
            token_dtype(tokenizer).name,  # type: ignore[arg-type]
            hashlib.sha256(json_of_tokenizer).hexdigest(),
            tokenizer.one_in,
            *(_write(_token_file(scratch, name), split, tokenizer) for name, split in (("train", train), ("val", val))),
        )
        for name, content in ((TOKENIZER, json_of_tokenizer), (MANIFEST, json.dumps(to_dict(manifest)).encode())):
            with (scratch / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same result
                raise
        _sync(folder.parent)
    except OSError as error:
        raise UserError(f"cannot write tokens to {folder.parent}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(path: Path, documents: Sequence[Document], tokenizer: Tokenizer) -> _TokenFile:
    digest, n_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for tokens, n in encode(documents, tokenizer):
            raw = tokens.tobytes()
            file.write(raw)
            digest.update(raw)
            n_bytes += n
        file.flush()
        os.fsync(file.fileno())
    return _TokenFile(len(documents), n_bytes, digest.hexdigest())


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise Unverified(f"are not what was written ({path.name})")


def _token_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.tokens"


def _sync(folder: Path) -> None:
    """Make the names in a folder last, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _discard(folder: Path) -> None:
    """Remove a folder of the cache; by a rename first, so that nobody finds half of it."""
    try:
        scratch = Path(tempfile.mkdtemp(prefix=f"{BUILDING}{socket.gethostname()}-{os.getpid()}-", dir=folder.parent))
        with suppress(FileNotFoundError):  # another process was faster
            folder.rename(scratch / folder.name)
    except OSError as error:
        raise UserError(f"cannot remove {folder}: {error.strerror}; set JAXFORMER_CACHE.") from error
    shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait until no other process, here or on another host, writes this folder of the cache, and keep others waiting.

    The kernel ends it with its process, however that dies. The file stays: removed, two could hold one each.
    """
    try:
        make_private(folder.parent)
        lock = os.open(folder.parent / f"{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {folder.parent}: {error.strerror}; set JAXFORMER_CACHE.") from error
    try:
        with suppress(OSError):  # a file system without locks
            deadline = time.monotonic() + QUIET_SECONDS
            while not _try_lock(lock):
                if time.monotonic() >= deadline:
                    logging.getLogger(__name__).warning("waiting for another process that writes tokens to %s.", folder)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    break
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """Return True where the lock was free, and is held now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_abandoned(parent: Path) -> None:
    """Remove what processes left that were killed while they tokenized."""
    for scratch in parent.glob(f"{BUILDING}*"):
        host, pid, _ = [*scratch.name.removeprefix(BUILDING).rsplit("-", 2), "", ""][:3]
        dead = host == socket.gethostname() and pid.isdigit() and not _lives(int(pid))
        try:
            if dead or time.time() - scratch.stat().st_mtime > DAY:
                shutil.rmtree(scratch, ignore_errors=True)
        except FileNotFoundError:  # finished this moment
            pass


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
