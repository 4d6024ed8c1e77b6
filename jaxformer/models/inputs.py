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

from jaxformer.contract import Contract, Input, contract_of
from jaxformer.errors import batch_hint
from jaxformer.nn.embedding import check_tokens, values_are_known


def check_example(model: nn.Module, *inputs: Any) -> None:
    """Raise `ValueError`, or `TypeError` for token ids of another dtype, if the inputs do not form one example: the
    wrong number of axes, as in a batch, ids outside the vocabulary, or a sequence longer than the model's positions.
    The sizes of other axes are not compared, and a model without a config of this library accepts anything."""
    contract = contract_of(model)
    for x, declared in zip(inputs, contract.inputs, strict=False):
        if x is None:
            continue
        if _are_tokens(contract, declared):
            _check_tokens(contract, x)
        elif len(got := jnp.shape(x)) != (n_axes := len(declared.shape)):
            hint = batch_hint(got, n_axes)
            raise ValueError(f"expected an input of shape {declared.shape}, got {got}{hint}.")


def check_batch(model: nn.Module, *inputs_B: Any) -> None:
    """Check the inputs of several examples, each with a first axis B, as `check_example` does."""
    contract = contract_of(model)
    for x, declared in zip(inputs_B, contract.inputs, strict=False):
        if x is None:
            continue
        are_tokens = _are_tokens(contract, declared)
        if len(got := jnp.shape(x)) != 1 + len(declared.shape):
            axes = ", ".join(["B", *(["T"] if are_tokens else map(str, declared.shape))])
            raise ValueError(f"expected a batch of shape ({axes}), got {got}.")
        if are_tokens:
            for tokens_T in np.asarray(x) if values_are_known(x) else [jax.ShapeDtypeStruct(got[1:], x.dtype)]:
                _check_tokens(contract, tokens_T)


def as_array(x: Any) -> jax.Array:
    """Return an array. Raises `ValueError` for a number that JAX would wrap around, such as 2**32 + 5 to 5."""
    array = jnp.asarray(x)
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)) and array.dtype.kind in "iu":
        given = np.asarray(x)
        if (wrapped := given[given.astype(array.dtype) != given]).size:
            raise ValueError(f"{wrapped[0]} is beyond the range of {array.dtype}")
    return array


def _are_tokens(contract: Contract, declared: Input) -> bool:
    return contract.vocab_size is not None and (len(declared.shape), declared.dtype) == (1, "int32")


def _check_tokens(contract: Contract, tokens_T: Any) -> None:
    assert contract.vocab_size is not None
    check_tokens(tokens_T, contract.vocab_size)
    check_length(contract, len(tokens_T))


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
