"""What the engine runs on the device: read prompts, draw the first token, decode in a loop.

A row's tokens lie in a ring of slots. Rows are aligned at their last prompt token, so that all of a batch write to the
same slot at each step (a dynamic-update-slice, where slots of their own would make a scatter), and a row's position is
the shared counter less the row's offset.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.contract import contract_of
from jaxformer.decode.samplers import Drawn, History, Sampling, begin, sample, update
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

CHUNK = 64
"""The most tokens decoded in one call of the compiled loop."""


class DecodeState(NamedTuple):
    """What a batch carries from one call to the next."""

    cache: Any
    history: History
    token_B: jax.Array
    """The last token of each row, not yet read."""
    done_B: jax.Array


class DecodeOutput(NamedTuple):
    """The tokens that one call made."""

    n: jax.Array
    drawn_CB: Drawn
    """Of which the first n are; the token of a row that is done is `EMPTY`."""
    done_B: jax.Array
    """Rows that are done after them."""


@partial(jax.jit, static_argnames=("model", "n_slots", "n_read", "dtype"), donate_argnames="cache")
def read(
    model: nn.Module, params: Params, cache: Any, tokens_BT: jax.Array, positions_BT: jax.Array, slot: jax.Array, *,
    n_slots: int, n_read: int, dtype: Any,
) -> Any:  # fmt: skip
    """The cache after one more part of the prompts, which is not their last."""
    return _read(model, params, cache, tokens_BT, positions_BT, slot, n_slots, n_read, dtype)[1]


def _read(
    model: Any, params: Params, cache: Any, tokens_BT: jax.Array, positions_BT: jax.Array, slot: jax.Array | int,
    n_slots: int, n_read: int, dtype: Any,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """Features of a part of the prompts, and the cache with it; without a cache, the part is the first."""

    def one(tokens_T: jax.Array, positions_T: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        if cache is None:  # what comes first sees nothing but itself, and no empty slots
            whole, used = model.init_cache(n_slots, dtype), model.init_cache(len(tokens_T), dtype)
            x_TD, used = begin_text(model, params, tokens_T, positions_T, used)
        else:
            whole, used = cache, first_slots(model, cache, n_read, dtype)
            x_TD, used = call(model, params, "extend", tokens_T, positions_T, used, slot)
        return x_TD, put_first_slots(whole, used)

    return jax.vmap(one)(tokens_BT, positions_BT, cache)


def _start(
    model: nn.Module, sampling: Sampling, params: Params, cache: Any, tokens_BT: jax.Array, positions_BT: jax.Array,
    slot: jax.Array, last: jax.Array, prompts: tuple[jax.Array, jax.Array], history: History | None,
    seeds_R: jax.Array, done_R: jax.Array, made: jax.Array, *,
    n_samples: int, n_slots: int, n_read: int, dtype: Any,
) -> tuple[DecodeState, DecodeOutput]:  # fmt: skip
    """Read the last part of B prompts and draw the first new token of each of their R = B · n_samples rows.

    Args:
      cache: of the parts before; None if there are none.
      last: the place in this part, the same for all, where the prompts end.
      prompts: whole, for the history: `(B, P)` tokens, filled up on the right, and `(B,)` lengths.
      history: of rows that go on; None for new ones.
      made: new tokens that the rows already have.
    """
    x_BTD, cache = _read(model, params, cache, tokens_BT, positions_BT, slot, n_slots, n_read, dtype)
    x_BD = jax.lax.dynamic_index_in_dim(x_BTD, last, axis=1, keepdims=False)
    logits_BV = jax.vmap(partial(call, model, params, "unembed"))(x_BD)
    if history is None:
        history = jax.vmap(partial(begin, sampling, logits_BV.shape[-1]))(*prompts)
    if n_samples > 1:
        cache, history, logits_BV = jax.tree.map(
            lambda x: jnp.repeat(x, n_samples, axis=0), (cache, history, logits_BV)
        )
    drawn_B, history = _draw(logits_BV, history, seeds_R, made, sampling)
    drawn_B, done_R = _end(drawn_B, done_R, sampling)
    made_1B = DecodeOutput(jnp.int32(1), jax.tree.map(lambda x: x[None], drawn_B), done_R)
    return DecodeState(cache, history, drawn_B.token, done_R), made_1B


_SIZES = ("model", "sampling", "n_samples", "n_slots", "n_read", "dtype")
start = jax.jit(_start, static_argnames=_SIZES, donate_argnames=("cache", "history"))
start_samples = jax.jit(_start, static_argnames=_SIZES)  # with n_samples above 1: a larger cache cannot use its space


@partial(jax.jit, static_argnames=("model", "sampling", "n_read", "dtype"), donate_argnames="rows")
def decode(
    model: Any, sampling: Sampling, params: Params, rows: DecodeState, offset_B: jax.Array, seeds_B: jax.Array,
    ended_B: jax.Array, counter: jax.Array, made: jax.Array, limit: jax.Array, n_slots: jax.Array, *,
    n_read: int, dtype: Any,
) -> tuple[DecodeState, DecodeOutput]:  # fmt: skip
    """Up to `limit` more tokens of each row; fewer if all rows are done before.

    Args:
      offset_B: the counter less the row's position.
      ended_B: rows that are done, whatever they say.
      counter: the next token's place in the text of the longest row; modulo n_slots it is the slot.
      made: new tokens that the rows already have.
      n_read: slots that are looked at, at least min(counter + limit, n_slots).
    """

    def advance(i: jax.Array, token_B: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        def one(token: jax.Array, position: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            slot = (counter + i) % n_slots
            x_1D, cache = call(model, params, "extend", token[None], position[None], cache, slot)
            return call(model, params, "unembed", x_1D[0]), cache

        return jax.vmap(one)(token_B, counter + i - offset_B, cache)

    # The loop goes round with the slots that are in use only.
    used = jax.vmap(lambda cache: first_slots(model, cache, n_read, dtype))(rows.cache)
    begun = rows._replace(cache=used, done_B=rows.done_B | ended_B)
    ended, made_CB = _loop(advance, sampling, begun, seeds_B, made, limit)
    return ended._replace(cache=jax.vmap(put_first_slots)(rows.cache, ended.cache)), made_CB


@partial(jax.jit, static_argnames=("model", "sampling"))
def begin_windows(
    model: Any, sampling: Sampling, params: Params, window_BT: jax.Array, prompts: tuple[jax.Array, jax.Array]
) -> DecodeState:
    """Rows of a model without a cache, which have read all of their windows but the last token."""
    V = jax.eval_shape(partial(model.apply, {"params": params}), window_BT[0]).shape[-1]
    history = jax.vmap(partial(begin, sampling, V))(*prompts)
    return DecodeState(jnp.roll(window_BT, 1, axis=1), history, window_BT[:, -1], jnp.zeros(len(window_BT), bool))


@partial(jax.jit, static_argnames=("model", "sampling"), donate_argnames="rows")
def decode_windows(
    model: Any, sampling: Sampling, params: Params, rows: DecodeState, seeds_B: jax.Array, ended_B: jax.Array,
    made: jax.Array, limit: jax.Array,
) -> tuple[DecodeState, DecodeOutput]:  # fmt: skip
    """What `decode` does, by a full pass over the window for each token."""

    def advance(i: jax.Array, token_B: jax.Array, window_BT: jax.Array) -> tuple[jax.Array, Any]:
        window_BT = jnp.concatenate([window_BT[:, 1:], token_B[:, None]], axis=1)
        return jax.vmap(lambda window_T: model.apply({"params": params}, window_T)[-1])(window_BT), window_BT

    return _loop(advance, sampling, rows._replace(done_B=rows.done_B | ended_B), seeds_B, made, limit)


def _loop(
    advance: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
    sampling: Sampling, rows: DecodeState, seeds_B: jax.Array, made: jax.Array, limit: jax.Array,
) -> tuple[DecodeState, DecodeOutput]:  # fmt: skip
    """Read and draw until `limit` tokens are made or all rows are done.

    Args:
      advance: the step, the tokens `(B,)` to read and the cache, to logits `(B, V)` and the longer cache.
    """

    def more(carry: tuple[jax.Array, DecodeState, Drawn]) -> jax.Array:
        i, rows, _ = carry
        return (i < limit) & ~rows.done_B.all()

    def step(i: jax.Array, rows: DecodeState) -> tuple[DecodeState, Drawn]:
        logits_BV, cache = advance(i, rows.token_B, rows.cache)
        drawn_B, history = _draw(logits_BV, rows.history, seeds_B, made + i, sampling)
        drawn_B, done_B = _end(drawn_B, rows.done_B, sampling)
        return DecodeState(cache, history, drawn_B.token, done_B), drawn_B

    def step_and_keep(carry: tuple[jax.Array, DecodeState, Drawn]) -> tuple[jax.Array, DecodeState, Drawn]:
        i, rows, drawn_CB = carry
        rows, drawn_B = step(i, rows)
        keep = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return i + 1, rows, jax.tree.map(keep, drawn_CB, drawn_B)

    none = jax.tree.map(lambda x: jnp.zeros((CHUNK, *x.shape), x.dtype), jax.eval_shape(step, 0, rows)[1])
    n, rows, drawn_CB = jax.lax.while_loop(more, step_and_keep, (jnp.int32(0), rows, none))
    return rows, DecodeOutput(n, drawn_CB, rows.done_B)


def _draw(
    logits_BV: jax.Array, history_B: History, seeds_B: jax.Array, made: jax.Array, sampling: Sampling
) -> tuple[Drawn, History]:
    """A token of each row, from the row's own stream of randomness."""

    def one(logits_V: jax.Array, history: History, seed: jax.Array) -> tuple[Drawn, History]:
        drawn = sample(logits_V, history, jax.random.fold_in(jax.random.key(seed), made), sampling)
        return drawn, update(history, drawn.token, sampling)

    return jax.vmap(one)(logits_BV, history_B, seeds_B)


def _end(drawn_B: Drawn, done_B: jax.Array, sampling: Sampling) -> tuple[Drawn, jax.Array]:
    """Rows that were done make nothing; those that draw a stop token are done now."""
    token_B = jnp.where(done_B, EMPTY, drawn_B.token)
    stopped_B = jnp.isin(token_B, jnp.array(sampling.stop_tokens, jnp.int32))
    return drawn_B._replace(token=token_B), done_B | stopped_B


def first_slots(model: Any, cache: Any, n: int, dtype: Any) -> Any:
    """The part of one row's cache that a cache of n slots would have."""
    return first_parts(cache, jax.eval_shape(partial(model.init_cache, n, dtype)))


def first_parts(tree: Any, shapes: Any) -> Any:
    """Arrays cut to the given shapes."""
    return jax.tree.map(lambda x, shape: jax.lax.slice(x, (0,) * x.ndim, shape.shape), tree, shapes)


def put_first_slots(cache: Any, part: Any) -> Any:
    """The cache with what `first_slots` took put back."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y, (0,) * x.ndim), cache, part)


def begin_text(
    model: Any, params: Params, tokens_T: jax.Array, positions_T: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """`extend` of an empty cache with a prompt, or with its first part where it may come in parts."""
    prefix = (len(tokens_T),) if contract_of(model).has_prefix else ()
    return call(model, params, "extend", tokens_T, positions_T, cache, 0, *prefix)


def call(model: nn.Module, params: Params, method: str, *args: Any) -> Any:
    return model.apply({"params": params}, *args, method=method)
