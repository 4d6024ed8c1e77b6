"""Checks of inputs that users pass to a model directly: always the number of axes and the dtype, and token ids if their
values are known.

Under tracing there are no values, and a compiled function contains none of these checks.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.contract import Contract, Input, contract_of
from jaxformer.errors import UserError, batch_hint
from jaxformer.nn.embedding import check_tokens


def check_example(model: nn.Module, *inputs: Any) -> None:
    """Raise `UserError` if the inputs do not form one example: the wrong number of axes, as in a batch, invalid token
    ids, or a sequence longer than the model's positions. The sizes of other axes are not compared, and a model without
    a config of this library accepts anything."""
    contract = contract_of(model)
    for x, declared in zip(inputs, contract.inputs, strict=False):
        if x is None:
            continue
        check_shape(x, declared)
        if contract.vocab_size is not None and (len(declared.shape), declared.dtype) == (1, "int32"):
            check_length(contract, len(x))
            check_tokens(x, contract.vocab_size)


def valid_tokens(contract: Contract, inputs: tuple[Any, ...]) -> Any:
    """Return a mask of packed inputs, `(T,)` bool or `(B, T)` for a batch, that is False for padding; None for inputs
    that are not packed."""
    is_packed = contract.has_segments and len(inputs) > 2 and inputs[2] is not None
    return inputs[2] != 0 if is_packed else None


def check_next_tokens(contract: Contract, tokens_T: jax.Array) -> None:
    """Check one sequence of tokens `(T,)` for next-token prediction. Raises `UserError` for another number of axes,
    fewer than 2 tokens or too many, or ids outside the vocabulary."""
    assert contract.vocab_size is not None
    check_shape(tokens_T, contract.inputs[0])
    if len(tokens_T) < 2:
        raise UserError(f"expected 2 tokens or more, got {len(tokens_T)}; the first token is not predicted.")
    check_length(contract, len(tokens_T) - 1)
    check_tokens(tokens_T, contract.vocab_size)


def check_shape(x: Any, declared: Input) -> None:
    """Raise `UserError` for an input whose number of axes is not that of one example."""
    n_axes, got = len(declared.shape), jnp.shape(x)
    if len(got) != n_axes:
        shape = "(T,)" if n_axes == 1 else declared.shape
        raise UserError(f"expected an input of shape {shape}, got {got}{batch_hint(got, n_axes)}.")


def check_length(contract: Contract, n_tokens: int) -> None:
    """Raise `UserError` for more tokens than the model has positions; sinusoidal and rotary positions are unlimited."""
    limit = contract.max_tokens
    if limit is None:
        return
    if contract.fixed_length and n_tokens != limit:
        raise UserError(f"{n_tokens} tokens, but this model needs a window of exactly {limit}; give it as many.")
    if n_tokens > limit:
        raise UserError(f"{n_tokens} tokens, but the model has {limit} learned positions; give it the last {limit}.")
