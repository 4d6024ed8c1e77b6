"""Checks of what a caller of a decoder gives: prompts, seeds, counts, and the length of the context."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import contract_of


def check_prompts(model: nn.Module, prompts: Sequence[Sequence[int]], context_length: int, **counts: int) -> None:
    """Raise `ValueError` if `check_context` or `check_rows` does, or a named count is below 1 or has more than 31
    bits."""
    for name, value in counts.items():
        if not 1 <= index(value) < 2**31:
            raise ValueError(f"{name} is {value}; it must be at least 1 and below 2**31")
    check_context(model, context_length)
    check_rows(model, prompts, context_length, "prompt")


def has_state(model: nn.Module) -> bool:
    """Return True if an array of the model's cache does not depend on the number of slots."""
    small, large = (jax.eval_shape(lambda n=n: model.init_cache(n, jnp.float32)) for n in (8, 16))
    return any(x.shape == y.shape for x, y in zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True))


def check_context(model: nn.Module, context_length: int) -> None:
    """Raise `ValueError` for a context longer than the model's learned positions: JAX would repeat the last one."""
    limit = contract_of(model).max_tokens
    if limit is not None and context_length > limit:
        raise ValueError(f"context_length is {context_length}, but the model has {limit} learned positions")


def check_rows(model: nn.Module, rows: Sequence[Sequence[int]], context_length: int, name: str) -> None:
    """Raise `ValueError` if a row, which messages call `name`, does not have 1 to `context_length` tokens, or has one
    outside the vocabulary; `TypeError` if it is no sequence of integers."""
    last = vocab_size(model) - 1
    for number, row in enumerate(rows, start=1):
        label = f"{name} {number}" if len(rows) > 1 else f"the {name}"
        tokens_T = np.asarray(row)
        if tokens_T.ndim == 1 and not 1 <= len(row) <= context_length:
            limit = f"it must have at least 1 and at most the context's {context_length}"
            raise ValueError(f"{label} has {len(row)} tokens; {limit}.")
        if tokens_T.ndim != 1 or not np.issubdtype(tokens_T.dtype, np.integer):
            problem = f"{label} is {tokens_T.dtype} of shape {tokens_T.shape}"
            raise TypeError(f"{problem}; it must be a sequence of integers, such as int32.")
        if len(outside := tokens_T[(tokens_T < 0) | (tokens_T > last)]):
            raise ValueError(f"{label} has a token {outside[0]}; it must be from 0 to {last}, the vocabulary's last.")


def vocab_size(model: nn.Module) -> int:
    """Return the vocabulary size V that a language model declares."""
    size = contract_of(model).vocab_size
    if size is None:
        raise ValueError(f"the contract of {type(model).__name__} has no vocab_size")
    return size


def seeds_of_rows(seeds: Sequence[int], n_prompts: int, n_samples: int) -> np.ndarray:
    """Return the seeds as an array, uint32. Raises `TypeError` or `OverflowError` if one is not a whole number of 32
    bits, `ValueError` if there is not one per row."""
    if len(seeds) != n_prompts * n_samples:
        raise ValueError(f"{len(seeds)} seeds for {n_prompts} prompts of {n_samples} rows each")
    return np.array([index(seed) for seed in seeds], np.uint32)
