"""Losses of counting, the first plateaus of a language model: how often each token occurs, and after which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxformer.terminal import short_repr


@dataclass(frozen=True, eq=False)
class Counts:
    """Counts in a training text, and for each token of a held-out text after the first, `M` in all."""

    frequency_V: np.ndarray
    """Frequencies of the tokens in training, with one added to each count, float64."""
    n_tokens: int
    """Tokens of the training text."""
    frequency_M: np.ndarray
    """Frequencies of the held-out tokens."""
    orders: tuple[tuple[np.ndarray, np.ndarray], ...]
    """Counts in training of each held-out token together with the one before it, and of the one before it; then the
    same with the two before it, and so on."""
    pairs: tuple[np.ndarray, np.ndarray]
    """Pairs (a, b) of a token and the next in training, as a V + b in ascending order, and their counts."""
    val_pairs_M: np.ndarray
    """The pair of each held-out token with the one before it, as a V + b."""

    def __repr__(self) -> str:
        return short_repr(self)

    def loss(self, order: int = 1, pseudo_count: float = 1.0) -> float:
        """Return the cross-entropy in nats per held-out token, given the `order - 1` tokens before it.

        Args:
          order: 1 for tokens alone, 2 for pairs, and so on.
          pseudo_count: counts added after each context, distributed as the next lower order predicts.
        """
        probability_M = self.frequency_M
        for seen_M, total_M in self.orders[: order - 1]:
            probability_M = (seen_M + pseudo_count * probability_M) / (total_M + pseudo_count)
        return float(-np.log(probability_M).mean())


def token_loss(train_N: np.ndarray, val_M: np.ndarray, vocab_size: int) -> float:
    """Return the cross-entropy of tokens in nats under their frequencies in another text, with one added to each
    count."""
    return float(-np.log(_frequencies(train_N, vocab_size)[val_M]).mean())


def count(train_N: np.ndarray, val_M: np.ndarray, vocab_size: int, max_order: int = 2) -> Counts:
    """Count the tokens of a text, and those of another after up to `max_order - 1` tokens before them. Raises
    `ValueError` if so many tokens together have more than 2^63 values."""
    if vocab_size**max_order > 2**63:
        raise ValueError(f"expected vocab_size**max_order of at most 2**63, got {vocab_size}**{max_order}.")
    frequency_V = _frequencies(train_N, vocab_size)
    train, val, orders = np.asarray(train_N, np.int64), val_M.astype(np.int64), []
    keys, val_keys, seen = train, val, np.bincount(train, minlength=vocab_size)[val]
    pairs, val_pairs = (train[:0],) * 2, val[:-1] * vocab_size + val[1:]
    for order in range(2, min(max_order, len(train)) + 1):  # longer contexts than the text were not seen
        total = seen[:-1] - (val_keys[:-1] == keys[-1])  # nothing follows the last one
        keys, val_keys = (key[:-1] * vocab_size + text[order - 1 :] for key, text in ((keys, train), (val_keys, val)))
        found = np.unique(keys, return_counts=True)
        seen = _occurrences(*found, val_keys)
        if order == 2:
            pairs = found
        missing = np.zeros(order - 2, int)  # the first held-out tokens have no context of this length
        orders.append((np.concatenate([missing, seen]), np.concatenate([missing, total])))
    return Counts(frequency_V, len(train), frequency_V[val[1:]], tuple(orders), pairs, val_pairs)


def _occurrences(keys_K: np.ndarray, count_K: np.ndarray, queries_M: np.ndarray) -> np.ndarray:
    """Return the count of each query; 0 if it is not among the keys, which are in ascending order."""
    at = np.searchsorted(keys_K, queries_M).clip(max=len(keys_K) - 1)
    return np.where(keys_K[at] == queries_M, count_K[at], 0)


def _frequencies(tokens_N: np.ndarray, vocab_size: int) -> np.ndarray:
    counts_V = np.bincount(tokens_N, minlength=vocab_size) + 1
    return counts_V / counts_V.sum()
