"""What instruments accept: a model and its parameters, or a run in place of both; tokens, or a text of the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import contract_of
from jaxformer.data.dataset import Batch
from jaxformer.data.pairs import encode_sources, encode_targets, start_of_target
from jaxformer.models.inputs import as_array, check_batch, check_example, check_next_tokens
from jaxformer.models.objective import Params, is_causal_lm

if TYPE_CHECKING:
    from jaxformer.runs.run import Run

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Instrument(Protocol[P, R_co]):
    """A function of a model and its parameters, or of a run."""

    @overload
    def __call__(self, model: nn.Module, params: Params, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, run: Run, /, *args: Any, **kwargs: Any) -> R_co: ...


def of_run(instrument: Callable[Concatenate[Any, Params, P], R]) -> Instrument[P, R]:
    """Let an instrument take a run in place of the model and its parameters, texts in place of tokens, and texts or
    tokens in place of examples and batches for next-token prediction: the names of its parameters say which of these
    they are. The inputs are checked, as compiled functions would take the nearest row for an id without an embedding.
    """
    signature = inspect.signature(instrument)
    converted = signature.parameters.keys() & CONVERSIONS.keys()

    @wraps(instrument)
    def instrument_of_run(*args: Any, **kwargs: Any) -> Any:
        run: Run | None = None
        if args and not isinstance(args[0], nn.Module):
            run = args[0]
            if not (hasattr(run, "model") and hasattr(run, "tokens")):
                raise TypeError(f"expected a run, or a model and its parameters; got a {type(run).__name__}")
            rest = args[2:] if len(args) > 1 and args[1] is run.params else args[1:]
            args = run.model, run.params, *rest
        bound = signature.bind(*args, **kwargs)
        for name in converted & bound.arguments.keys():
            CONVERSIONS[name](bound, name, run)
        return instrument(*bound.args, **bound.kwargs)

    return instrument_of_run


def _encode(run: Run | None, x: Any) -> Any:
    """Return the tokens of a text, or of a list of them; anything else is returned unchanged."""
    if run is not None:
        return run.tokens(x) if _is_one(x) else x
    if isinstance(x, str):
        raise TypeError(f"the text {x[:40]!r} needs a tokenizer; give the run in place of the model and its parameters")
    return jnp.array(x) if isinstance(x, list) and _is_one(x) else x


def _is_one(texts: Any) -> bool:
    """Return True for a single text: a string, or token ids `(T,)`."""
    if isinstance(texts, list):
        return bool(texts) and all(_is_id(x) for x in texts)
    return isinstance(texts, str) or (_are_ids(texts) and texts.ndim == 1)


def _is_id(x: Any) -> bool:
    return (isinstance(x, int | np.integer) and not isinstance(x, bool)) or (_are_ids(x) and x.ndim == 0)


def _are_ids(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and bool(jnp.issubdtype(x.dtype, jnp.integer))


def _are_several(texts: Any) -> bool:
    return isinstance(texts, list) and bool(texts) and all(map(_is_one, texts))


def _rows(texts: Any, run: Run | None) -> list[jax.Array]:
    """Return the tokens of each of several texts, or of one. Raises `ValueError` if there is none."""
    rows = [as_array(_encode(run, text)) for text in ([texts] if _is_one(texts) else texts)]
    if not rows:
        raise ValueError("there is no text; give one or more")
    return rows


def _padded(rows: list[jax.Array]) -> tuple[jax.Array, np.ndarray | None]:
    """Return tokens `(B, T)`, padded on the right, and a mask that is False for padding; None without padding."""
    lengths_B = np.array([len(row) for row in rows])
    T = lengths_B.max()
    tokens_BT = jnp.stack([jnp.pad(row, (0, T - len(row))) for row in rows])
    return tokens_BT, None if (lengths_B == T).all() else np.arange(T) < lengths_B[:, None]


def next_token_batch(model: nn.Module, rows: list[jax.Array]) -> Batch:
    """Return the next-token predictions of several texts, `(T,)` tokens each, as one batch.

    Raises:
      TypeError: the model is not a causal language model.
      ValueError: a text has fewer than two tokens, or too many, or ids outside the vocabulary.
    """
    if not is_causal_lm(model):
        raise TypeError(f"a {type(model).__name__} predicts no next token; give a Batch of its inputs and targets")
    contract = contract_of(model)
    for row in rows:
        check_next_tokens(contract, row)
    tokens_BT, mask_BT = _padded(rows)
    first = -1 if contract.fixed_length else 1  # of the targets
    weights_BT = None if mask_BT is None else mask_BT[:, first:].astype(np.float32)
    return Batch((tokens_BT[:, :-1],), tokens_BT[:, first:], weights_BT)


def _convert_tokens(bound: inspect.BoundArguments, name: str, run: Run | None) -> None:
    tokens_T = bound.arguments[name] = _encode(run, bound.arguments[name])
    check_example(bound.args[0], tokens_T)


def _convert_inputs(bound: inspect.BoundArguments, name: str, run: Run | None) -> None:
    """Convert the inputs of one example, a tuple or the only one of them."""
    inputs = bound.arguments[name]
    several = isinstance(inputs, tuple | list) and not _is_one(inputs)
    bound.arguments[name] = tuple(_encode(run, x) for x in (inputs if several else [inputs]))
    check_example(bound.args[0], *bound.arguments[name])


def _convert_texts(bound: inspect.BoundArguments, name: str, run: Run | None) -> None:
    rows = bound.arguments[name] = _rows(bound.arguments[name], run)
    for tokens_T in rows:
        check_example(bound.args[0], tokens_T)


def _convert_rows(bound: inspect.BoundArguments, name: str, run: Run | None) -> None:
    """Convert texts of one length to tokens `(B, T)`."""
    texts = bound.arguments[name]
    if _is_one(texts) or _are_several(texts):
        bound.arguments[name], mask_BT = _padded(_rows(texts, run))
        if mask_BT is not None:
            raise ValueError(DIFFERENT_LENGTHS)
    check_batch(bound.args[0], bound.arguments[name])


def _convert_example(bound: inspect.BoundArguments, name: str, run: Run | None) -> None:
    example = bound.arguments[name]
    if _is_one(example):
        batch = next_token_batch(bound.args[0], _rows(example, run))
        example = bound.arguments[name] = jax.tree.map(lambda x: x[0], batch)
    check_example(bound.args[0], *_inputs_of(example, "a text, its token ids, or the Batch of an example"))


def _convert_batch(bound: inspect.BoundArguments, name: str, run: Run | None) -> None:
    batch = bound.arguments[name]
    if _is_one(batch) or _are_several(batch) or (_are_ids(batch) and batch.ndim == 2):
        batch = bound.arguments[name] = next_token_batch(bound.args[0], _rows(batch, run))
    check_batch(bound.args[0], *_inputs_of(batch, "texts, their token ids, or a Batch"))


def _inputs_of(batch: Any, expected: str) -> tuple[Any, ...]:
    if not hasattr(batch, "inputs"):
        shape = f" of {x.dtype}, {x.shape}" if hasattr(x := batch, "dtype") else ""
        raise TypeError(f"expected {expected}; got a {type(batch).__name__}{shape}")
    inputs: tuple[Any, ...] = batch.inputs
    return inputs


def _convert_inputs_B(bound: inspect.BoundArguments, name: str, run: Run | None) -> None:
    """Convert texts to tokens `(B, T)`, and mask their padding."""
    inputs = bound.arguments[name]
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    if inputs and (_is_one(inputs[0]) or _are_several(inputs[0])):
        tokens_BT, mask_BT = _padded(_rows(inputs[0], run))
        inputs = (tokens_BT, *inputs[1:])
        if mask_BT is not None:
            if "target_mask_BT" not in bound.signature.parameters:
                raise ValueError(DIFFERENT_LENGTHS)
            bound.arguments["target_mask_BT"] = mask_BT
    bound.arguments[name] = inputs
    check_batch(bound.args[0], *inputs)


def _convert_pair(bound: inspect.BoundArguments, name: str, run: Run | None) -> None:
    """Convert a text to translate, and its translation, which begins with the end-of-text token, or the model's own."""
    source, target = bound.arguments["source_S"], bound.arguments["target_T"]
    if run is not None:
        _, tokenizer = run.text_model()
        if isinstance(source, str):
            [source] = encode_sources([source], tokenizer)
        if isinstance(target, str):
            target = [start_of_target(tokenizer), *encode_targets([target], tokenizer)[0]]
    bound.arguments["source_S"], bound.arguments["target_T"] = _encode(None, source), _encode(None, target)


DIFFERENT_LENGTHS = "the texts have different numbers of tokens; give texts of one length"
CONVERSIONS: dict[str, Callable[[inspect.BoundArguments, str, Run | None], None]] = {
    **dict.fromkeys(("tokens", "tokens_T"), _convert_tokens),
    **dict.fromkeys(("inputs", "source"), _convert_inputs),
    "texts": _convert_texts,
    "tokens_BT": _convert_rows,
    "example": _convert_example,
    "batch": _convert_batch,
    "inputs_B": _convert_inputs_B,
    "source_S": _convert_pair,
}
"""Conversions of arguments, by the name of an instrument's parameter."""
