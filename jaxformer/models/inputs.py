"""Checks of inputs that users pass to a model directly: always the number of axes and the dtype, and token ids if their
values are known.

Under tracing there are no values, and a compiled function contains none of these checks.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Contract, contract_of
from jaxformer.errors import batch_hint
from jaxformer.nn.embedding import check_tokens


def check_example(model: nn.Module, *inputs: Any) -> None:
    """Raise `ValueError`, or `TypeError` for token ids of another dtype, if the inputs do not form one example: the
    wrong number of axes, as in a batch, ids outside the vocabulary, or a sequence longer than the model's positions.
    The sizes of other axes are not compared, and a model without a config of this library accepts anything."""
    contract = contract_of(model)
    for x, declared in zip(inputs, contract.inputs, strict=False):
        if x is None:
            continue
        if contract.vocab_size is not None and (len(declared.shape), declared.dtype) == (1, "int32"):
            check_tokens(x, contract.vocab_size)
            check_length(contract, len(x))
        elif len(got := jnp.shape(x)) != (n_axes := len(declared.shape)):
            hint = batch_hint(got, n_axes)
            raise ValueError(f"expected an input of shape {declared.shape}, got {got}{hint}.")


def check_examples(model: nn.Module, *inputs_B: Any) -> None:
    """Check each of several examples as `check_example` does; not under tracing, nor if other processes hold some."""
    arrays = [x for x in inputs_B if x is not None]
    if not any(isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in arrays):
        inputs_B = tuple(None if x is None else np.asarray(x) for x in inputs_B)
        for i in range(min(map(len, arrays), default=0)):
            check_example(model, *(None if x is None else x[i] for x in inputs_B))


def valid_tokens(contract: Contract, inputs: tuple[Any, ...]) -> Any:
    """Return a mask of packed inputs, `(T,)` bool or `(B, T)` for a batch, that is False for padding; None for inputs
    that are not packed."""
    is_packed = contract.has_segments and len(inputs) > 2 and inputs[2] is not None
    return inputs[2] != 0 if is_packed else None


def check_next_tokens(contract: Contract, tokens_T: jax.Array) -> None:
    """Check one sequence of tokens `(T,)` for next-token prediction. Raises `ValueError` for another number of axes,
    fewer than 2 tokens or too many, or ids outside the vocabulary."""
    assert contract.vocab_size is not None
    check_tokens(tokens_T, contract.vocab_size)
    if len(tokens_T) < 2:
        raise ValueError(f"expected 2 tokens or more, got {len(tokens_T)}; the first token is not predicted.")
    check_length(contract, len(tokens_T) - 1)


def check_length(contract: Contract, n_tokens: int) -> None:
    """Raise `ValueError` for more tokens than learned positions; sinusoidal and rotary positions are unlimited."""
    limit = contract.max_tokens
    if limit is None:
        return
    if contract.fixed_length and n_tokens != limit:
        raise ValueError(f"{n_tokens} tokens, but this model needs a window of exactly {limit}; give it as many.")
    if n_tokens > limit:
        raise ValueError(f"{n_tokens} tokens, but the model has {limit} learned positions; give it the last {limit}.")
