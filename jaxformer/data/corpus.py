"""A corpus as token files: made once, memory-mapped ever after."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxformer.config import DataConfig, ModelConfig, TokenModelConfig, at_least
from jaxformer.data.dataset import Dataset
from jaxformer.data.text import Document, hold_out, read_documents
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError

FORMAT = 1
"""Raise it when the same text and settings are to give other tokens."""
BUILDING = ".building-"
DAY = 24 * 60 * 60


@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Which text, and how it is cut into windows whose every token is to be predicted from those before it."""

    path: str = "sotu"
    """A file, a folder (every .txt below it), a glob, or 'sotu' (the State of the Union addresses)."""
    val_path: str | None = None
    """Held-out text, named like path; without it whole documents are held out."""
    val_fraction: float = 0.05
    """Share of the bytes to hold out where there is no val_path."""
    unwrap: bool = True
    """Join lines that were broken only to fit a page's width."""
    stride: int | None = None
    """Tokens between the starts of two windows; without it, the context length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction is {self.val_fraction}; it must lie between 0 and 1, such as 0.05.")
        if self.stride is not None:
            at_least(self, 1, "stride")

    def load(self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None) -> Dataset:
        from jaxformer.data.windows import Text

        model = token_model(model)
        return Text(self, model, load_corpus(self, model.vocab_size, tokenizer), batch_size, seed)


def token_model(model: ModelConfig) -> TokenModelConfig:
    """The model, or `UserError` if it is none of tokens."""
    if not isinstance(model, TokenModelConfig):
        raise UserError(f"the data is text, but {type(model).__name__} describes no model of tokens; change one.")
    return model


@dataclass(frozen=True)
class Split:
    """One end-of-text token, then the documents, each followed by one."""

    tokens: np.ndarray
    """`(n,)` uint16, or uint32 for large vocabularies; memory-mapped."""
    documents: int
    n_bytes: int
    """Of the documents in UTF-8."""


@dataclass(frozen=True)
class Corpus:
    """Tokenized training and held-out text."""

    train: Split
    val: Split
    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 over the texts and all settings that shape the tokens."""


def cache_root() -> Path:
    """Where caches lie: `$JAXFORMER_CACHE`, else jaxformer/ in `$XDG_CACHE_HOME` or ~/.cache."""
    if place := os.environ.get("JAXFORMER_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxformer"


def load_corpus(config: TextConfig, vocab_size: int, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read, split and tokenize the text, or find the result of an earlier time.

    Without a tokenizer, one learns from the training split only. A run that goes on brings its own: to its model the
    tokens of another one would mean nothing, should the text have changed. The fingerprint does not depend on it.

    Raises:
      UserError: see `read_documents` and `Tokenizer.train`.
    """
    documents = read_documents(config.path, config.unwrap)
    if config.val_path is None:
        train, val = hold_out(documents, config.val_fraction)
    else:
        train, val = documents, read_documents(config.val_path, config.unwrap)
    fingerprint = _fingerprint(train, val, vocab_size)
    folder = cache_root() / "tokens" / fingerprint[:32]
    _remove_abandoned(folder.parent)
    if tokenizer is not None and not _tokenized_by(tokenizer, folder):
        folder = folder.with_name(hashlib.sha256(f"{fingerprint} {tokenizer.as_json()}".encode()).hexdigest()[:32])
    if not folder.is_dir():
        _build(folder, train, val, vocab_size, tokenizer)
    counts = json.loads((folder / "counts.json").read_text())
    splits = {name: Split(np.load(folder / f"{name}.npy", mmap_mode="r"), **counts[name]) for name in ("train", "val")}
    return Corpus(splits["train"], splits["val"], Tokenizer.load(folder / "tokenizer.json"), fingerprint)


def _fingerprint(train: list[Document], val: list[Document], vocab_size: int) -> str:
    digest = hashlib.sha256(f"{FORMAT} {vocab_size}".encode())
    for split in (train, val):
        digest.update(f"split {len(split)}".encode())
        for document in split:
            text = document.text.encode()
            digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def _tokenized_by(tokenizer: Tokenizer, folder: Path) -> bool:
    file = folder / "tokenizer.json"
    return file.is_file() and file.read_text(encoding="utf-8") == tokenizer.as_json()


def _remove_abandoned(place: Path) -> None:
    """Remove what processes left that were killed while they tokenized."""
    for scratch in place.glob(f"{BUILDING}*"):
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


def _build(
    folder: Path, train: list[Document], val: list[Document], vocab_size: int, tokenizer: Tokenizer | None
) -> None:
    """Write into a temporary folder and rename it, so that `folder` is whole or absent."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{BUILDING}{socket.gethostname()}-{os.getpid()}-"
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    except OSError as error:
        raise UserError(f"cannot write to {folder.parent}: {error.strerror}; set JAXFORMER_CACHE.") from error
    try:
        tokenizer = tokenizer or Tokenizer.train([d.text for d in train], vocab_size)
        tokenizer.save(scratch / "tokenizer.json")
        counts = {}
        for name, documents in (("train", train), ("val", val)):
            tokens = tokenize(documents, tokenizer)
            np.save(scratch / f"{name}.npy", tokens)
            counts[name] = {"documents": len(documents), "n_bytes": sum(d.n_bytes for d in documents)}
        (scratch / "counts.json").write_text(json.dumps(counts))
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same result
                raise
    except OSError as error:
        raise UserError(f"cannot write tokens to {folder.parent}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def tokenize(documents: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    """A `Split`'s tokens, `(n,)`."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    parts = [np.array([tokenizer.end_of_text], dtype)]
    for start in range(0, len(documents), 16):  # a few at a time: encodings are large
        for tokens in tokenizer.encode_batch([d.text for d in documents[start : start + 16]]):
            parts.append(np.array([*tokens, tokenizer.end_of_text], dtype))
    return np.concatenate(parts)
