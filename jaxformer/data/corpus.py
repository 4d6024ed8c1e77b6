"""A text, split into training and held-out documents, as tokens."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxformer.config import DataConfig, ModelConfig, TokenModelConfig
from jaxformer.data.dataset import Dataset
from jaxformer.data.infer_config import describe_changes, describe_tokenizer_sample, infer_vocab_size
from jaxformer.data.text import SOTU, Document, hold_out, read_documents
from jaxformer.data.token_cache import Split, cache_root, cached, encode, holds_tokens_of, token_dtype
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError
from jaxformer.fields import at_least

FORMAT = 2
"""Raise it when the same text and settings are to give other tokens."""


@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Which text, and how it is cut into windows whose every token is to be predicted from those before it."""

    n_extra_tokens: ClassVar[int] = 0
    """Tokens of the model that no text has."""
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
        for name in ("path", "val_path"):
            if (path := getattr(self, name)) is not None and not path.strip():
                raise UserError(f"data.{name} is {path!r}; give a file, a folder, a glob, or '{SOTU}'.")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction is {self.val_fraction}; it must lie between 0 and 1, such as 0.05.")
        if self.stride is not None:
            at_least(self, 1, "stride")

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None,
        fixed: Container[str] | None = None,
    ) -> Dataset:  # fmt: skip
        model = token_model(model)
        self.check(model)
        corpus = load_corpus(self, model.vocab_size - self.n_extra_tokens, tokenizer)
        fitted = infer_vocab_size(model, corpus.tokenizer, self.n_extra_tokens) if tokenizer is None else model
        data = self.make(fitted, corpus, batch_size, seed)
        fit = describe_changes(model, fitted, f"{self.path} supports {corpus.tokenizer.vocab_size:,} tokens")
        data.notes = (*corpus.notes, *fit, *describe_tokenizer_sample(corpus.tokenizer, self.path))
        return data

    def check(self, model: TokenModelConfig) -> None:
        """Raise `UserError` where the model cannot learn from what this describes."""

    def make(self, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> Dataset:
        """Return the corpus in batches."""
        from jaxformer.data.windows import TextDataset

        return TextDataset(self, model, corpus, batch_size, seed)


def token_model(model: ModelConfig) -> TokenModelConfig:
    """The model, or `UserError` if it is none of tokens."""
    if not isinstance(model, TokenModelConfig):
        raise UserError(f"the data is text, but {type(model).__name__} describes no model of tokens; change one.")
    return model


@dataclass(frozen=True)
class Corpus:
    """Tokenized training and held-out text."""

    train: Split
    val: Split
    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 over the texts and all settings that shape the tokens."""
    notes: tuple[str, ...] = ()
    """Sentences about text that is left out."""


def load_corpus(config: TextConfig, vocab_size: int, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read, split and tokenize the text, or use the result of an earlier time; see `token_cache.cached`.

    A document of the held-out text at `val_path` is not trained on, wherever it lies.

    Without a tokenizer, one of at most `vocab_size` tokens learns from the training split only. A run that goes on
    brings its own: to its model the tokens of another one would mean nothing, should the text have changed. The
    fingerprint depends on how many tokens it has alone.

    Raises:
      UserError: see `read_documents` and `Tokenizer.train`; or the held-out text is all there is.
    """
    notes: tuple[str, ...] = ()
    documents = read_documents(config.path, config.unwrap)
    if config.val_path is None:
        train, val = hold_out(documents, config.val_fraction)
    else:
        val = read_documents(config.val_path, config.unwrap)
        held_out = {document.digest for document in val}
        train = [document for document in documents if document.digest not in held_out]
        if not train:
            raise UserError(
                f"every document of data.path {config.path} is in data.val_path {config.val_path}, too; give other "
                "text to train on, or leave data.val_path out."
            )
        if n := len(documents) - len(train):
            notes = (f"{n:,} document(s) of {config.path} are not trained on: {config.val_path} has the same text",)
    texts = _digest(train, val)
    folder = _token_folder(texts, vocab_size, tokenizer)
    train_tokens, val_tokens, tokenizer = cached(folder, train, val, vocab_size, tokenizer)
    fingerprint = hashlib.sha256(f"{texts} {tokenizer.vocab_size}".encode()).hexdigest()
    return Corpus(train_tokens, val_tokens, tokenizer, fingerprint, notes)


def _token_folder(texts: str, vocab_size: int, tokenizer: Tokenizer | None) -> Path:
    """Return where the tokens of texts lie; for a given tokenizer, also where it learned as one of more tokens."""
    root, prefix = cache_root() / "tokens", texts[:32]
    if tokenizer is None:
        return root / f"{prefix}-{vocab_size}"
    for folder in sorted(root.glob(f"{prefix}-*")):
        if holds_tokens_of(tokenizer, folder):
            return folder
    return root / f"{prefix}-{hashlib.sha256(tokenizer.as_json().encode()).hexdigest()[:32]}"


def _digest(train: list[Document], val: list[Document]) -> str:
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for split in (train, val):
        digest.update(f"split {len(split)}".encode())
        for document in split:
            digest.update(document.digest)
    return digest.hexdigest()


def tokenize(documents: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Return a `Split`'s tokens, `(n,)`, memory-mapped from a temporary file that ends with them.

    Raises:
      UserError: there is no room for it.
    """
    try:
        with tempfile.TemporaryFile() as file:
            for tokens, _ in encode(documents, tokenizer):
                file.write(tokens.tobytes())
            file.flush()
            return np.memmap(file, token_dtype(tokenizer), "r")
    except OSError as error:
        folder = tempfile.gettempdir()
        raise UserError(f"cannot write tokens to {folder}: {error.strerror}; make room, or set TMPDIR.") from error
