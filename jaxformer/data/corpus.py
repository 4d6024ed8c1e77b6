"""A text, split into training and held-out documents, as tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxformer.config import DataConfig, ModelConfig, TokenModelConfig, at_least
from jaxformer.data.dataset import Dataset
from jaxformer.data.fit import describe_fit, fit_vocabulary
from jaxformer.data.text import SOTU, Document, hold_out, read_documents
from jaxformer.data.token_cache import Split, cache_root, cached, encode, holds_tokens_of
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError

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
        fitted = fit_vocabulary(model, corpus.tokenizer, self.n_extra_tokens) if tokenizer is None else model
        data = self.make(fitted, corpus, batch_size, seed)
        data.notes = describe_fit(model, fitted, f"{self.path} supports {corpus.tokenizer.vocab_size:,} tokens")
        return data

    def check(self, model: TokenModelConfig) -> None:
        """Raise `UserError` where the model cannot learn from what this describes."""

    def make(self, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> Dataset:
        """Return the corpus in batches."""
        from jaxformer.data.windows import Text

        return Text(self, model, corpus, batch_size, seed)


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


def load_corpus(config: TextConfig, vocab_size: int, tokenizer: Tokenizer | None = None) -> Corpus:
    """Read, split and tokenize the text, or use the result of an earlier time; see `token_cache.cached`.

    Without a tokenizer, one of at most `vocab_size` tokens learns from the training split only. A run that goes on
    brings its own: to its model the tokens of another one would mean nothing, should the text have changed. The
    fingerprint depends on how many tokens it has alone.

    Raises:
      UserError: see `read_documents` and `Tokenizer.train`.
    """
    documents = read_documents(config.path, config.unwrap)
    if config.val_path is None:
        train, val = hold_out(documents, config.val_fraction)
    else:
        train, val = documents, read_documents(config.val_path, config.unwrap)
    texts = _digest(train, val)
    folder = cache_root() / "tokens" / hashlib.sha256(f"{texts} {vocab_size}".encode()).hexdigest()[:32]
    if tokenizer is not None and not holds_tokens_of(tokenizer, folder):
        folder = folder.with_name(hashlib.sha256(f"{texts} {tokenizer.as_json()}".encode()).hexdigest()[:32])
    train_tokens, val_tokens, tokenizer = cached(folder, train, val, vocab_size, tokenizer)
    fingerprint = hashlib.sha256(f"{texts} {tokenizer.vocab_size}".encode()).hexdigest()
    return Corpus(train_tokens, val_tokens, tokenizer, fingerprint)


def _digest(train: list[Document], val: list[Document]) -> str:
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for split in (train, val):
        digest.update(f"split {len(split)}".encode())
        for document in split:
            digest.update(document.digest)
    return digest.hexdigest()


def tokenize(documents: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Return a `Split`'s tokens, `(n,)`."""
    return np.concatenate([tokens for tokens, _ in encode(documents, tokenizer)])
