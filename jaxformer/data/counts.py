"""Losses of counting, the first plateaus of a language model: how often each token occurs, and after which token."""

import numpy as np


def token_loss(train_N: np.ndarray, held_out_M: np.ndarray, vocab_size: int) -> float:
    """Return the cross-entropy of tokens in nats under their frequencies in another text, with one added to each
    count."""
    return float(-np.log(_frequencies(train_N, vocab_size)[held_out_M]).mean())


def pair_loss(train_N: np.ndarray, held_out_M: np.ndarray, vocab_size: int) -> float:
    """Return the cross-entropy in nats of each token given the one before it, under the pairs in another text, with one
    count added after each token, distributed like the tokens."""
    before, after = (held_out_M[part].astype(np.int64) for part in (slice(-1), slice(1, None)))
    train_N = np.asarray(train_N, np.int64)
    pairs, count_P = np.unique(train_N[:-1] * vocab_size + train_N[1:], return_counts=True)
    at = np.searchsorted(pairs, before * vocab_size + after).clip(max=len(pairs) - 1)
    seen = np.where(pairs[at] == before * vocab_size + after, count_P[at], 0)
    total_V = np.bincount(train_N[:-1], minlength=vocab_size)
    return float(-np.log((seen + _frequencies(train_N, vocab_size)[after]) / (total_V[before] + 1)).mean())


def _frequencies(tokens_N: np.ndarray, vocab_size: int) -> np.ndarray:
    counts_V = np.bincount(tokens_N, minlength=vocab_size) + 1
    return counts_V / counts_V.sum()
