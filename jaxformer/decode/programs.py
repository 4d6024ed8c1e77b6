"""Compiled programs for text generation: the chunked prefill, the first token, and the decode loop.

A row's tokens are in a ring buffer of cache slots. Rows are aligned at their last prompt token, so that all rows of a
batch write to the same slot at each step: a dynamic-update-slice instead of a scatter. A row's position is the shared
counter minus the row's offset.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jaxformer.contract import Contract, Task, contract_of
from jaxformer.decode.samplers import Drawn, History, Sampling, init_history, sample, update_history
from jaxformer.decode.weights import for_matmul
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

MAX_TOKENS_PER_CALL = 64
"""Maximum decode steps per call of the compiled loop."""

Cache = Any
"""Pytree of arrays from a model's `init_cache` or `start`: keys and values in slots, or a state."""


class Chunk(NamedTuple):
    """Tokens of B prompts that are prefilled together.

    Attributes:
      tokens_BT: int32.
      positions_BT: position of each token, `EMPTY` for padding; int32.
      slot: cache slot of the first token, `()` int32.
    """

    tokens_BT: jax.Array
    positions_BT: jax.Array
    slot: ArrayLike


class Rows(NamedTuple):
    """What differs between the rows of a batch, besides their state.

    Attributes:
      offset_B: the counter minus the row's position; int32.
      seeds_B: seed of each row; uint32.
      ended_B: True for rows that the caller has ended.
    """

    offset_B: jax.Array
    seeds_B: jax.Array
    ended_B: jax.Array


class Span(NamedTuple):
    """The decode steps of one call; each field is `()` int32.

    Attributes:
      counter: index of the next token in the longest row; modulo n_slots it is the slot.
      n_new: new tokens that the rows already have.
      limit: number of steps, at most `MAX_TOKENS_PER_CALL`.
      n_slots: slots to which the cache may grow.
    """

    counter: ArrayLike
    n_new: ArrayLike
    limit: ArrayLike
    n_slots: ArrayLike


class DecodeState(NamedTuple):
    """The state of a batch between two calls.

    Attributes:
      cache: KV cache or state, a pytree of arrays with B first.
      history: the text so far, as far as the sampling reads it.
      token_B: last token of each row, not yet in the cache; int32.
      done_B: True for rows that are done.
    """

    cache: Cache
    history: History
    token_B: jax.Array
    done_B: jax.Array


class DecodeOutput(NamedTuple):
    """The tokens of one call.

    Attributes:
      n: number of new tokens per row, `()` int32.
      drawn_CB: new tokens, of which the first n are valid; a row that is done has the token `EMPTY`.
      done_B: True for rows that are done after this call.
    """

    n: jax.Array
    drawn_CB: Drawn
    done_B: jax.Array


class SlidingWindow(nn.Module):
    """A model without a cache, wrapped as one whose state is its window of last tokens, `(context_length,)` int32.

    Attributes:
      fill_token: token that pads the window before the text begins.
    """

    model: nn.Module
    context_length: int
    fill_token: int
    contract = Contract(Task.CAUSAL_LM, has_cache=True, attention_window=1, extrapolates=True)

    def init_cache(self, n_slots: int, dtype: DTypeLike) -> jax.Array:
        """Return an empty window."""
        return jnp.full(self.context_length, self.fill_token, jnp.int32)

    def extend(
        self, tokens_T: jax.Array, positions_T: jax.Array, window_C: jax.Array, slot: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the logits after the last token, `(T, V)` with equal rows, and the window."""
        end = jnp.argmax(positions_T) + 1  # the rest is padding
        window_C = jax.lax.dynamic_slice_in_dim(jnp.append(window_C, tokens_T), end, self.context_length)
        logits_TV = self.model(window_C)
        return jnp.broadcast_to(logits_TV[-1], (len(tokens_T), logits_TV.shape[-1])), window_C

    def unembed(self, logits: jax.Array) -> jax.Array:
        """Return the logits."""
        return logits


@partial(jax.jit, static_argnames=("model", "n_slots", "dtype"))
def enlarge(model: nn.Module, cache: Cache, *, n_slots: int, dtype: DTypeLike) -> Cache:
    """Return the cache of a batch with more slots."""
    return jax.vmap(lambda cache: put_first_slots(model.init_cache(n_slots, dtype), cache))(cache)


@partial(jax.jit, static_argnames=("model", "n_slots", "dtype"), donate_argnames="cache")
def prefill(
    model: nn.Module, params: Params, cache: Cache | None, chunk: Chunk, *, n_slots: int, dtype: DTypeLike
) -> Cache:
    """Return the cache with one more chunk of the prompts, which is not their last."""
    return _prefill(model, params, cache, chunk, n_slots, dtype)[1]


def _prefill(
    model: nn.Module, params: Params, cache: Cache | None, chunk: Chunk, n_slots: int, dtype: DTypeLike
) -> tuple[jax.Array, Cache]:
    """Return the features `(B, T, D)` of a chunk and the cache extended by it. For the first chunk the cache is None,
    and one of n_slots is created."""

    def extend(tokens_T: jax.Array, positions_T: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache]:
        if cache is not None:
            return call(model, params, "extend", tokens_T, positions_T, cache, chunk.slot)
        # The first chunk needs to attend only to itself, not to empty slots.
        x_TD, used = extend_empty(model, params, tokens_T, positions_T, model.init_cache(len(tokens_T), dtype))
        return x_TD, put_first_slots(model.init_cache(n_slots, dtype), used)

    return jax.vmap(extend)(chunk.tokens_BT, chunk.positions_BT, cache)


def _start(
    model: nn.Module, sampling: Sampling, params: Params, cache: Cache | None, chunk: Chunk, last: jax.Array,
    prompts: tuple[jax.Array, jax.Array], history: History | None, seeds_R: jax.Array, done_R: jax.Array,
    n_new: jax.Array, *, n_samples: int, n_slots: int, dtype: DTypeLike, mesh: Mesh | None = None,
) -> tuple[DecodeState, DecodeOutput]:  # fmt: skip
    """Prefill the last chunk of B prompts and sample the first new token of each of their R = B · n_samples rows.

    Args:
      cache: cache of the preceding chunks; None for the first chunk.
      last: index in the chunk of the last prompt token, the same for all prompts.
      prompts: all prompt tokens, for the history: `(B, P)`, padded on the right, and their lengths `(B,)`.
      history: history of rows that continue; None for new ones.
      n_new: new tokens that the rows already have.
    """
    x_BTD, cache = _prefill(model, params, cache, chunk, n_slots, dtype)
    x_BD = jax.lax.dynamic_index_in_dim(x_BTD, last, axis=1, keepdims=False)
    logits_BV = jax.vmap(partial(call, model, params, "unembed"))(x_BD)
    if history is None:
        history = jax.vmap(partial(init_history, sampling, logits_BV.shape[-1]))(*prompts)
    if n_samples > 1:
        cache, history, logits_BV = jax.tree.map(
            lambda x: jnp.repeat(x, n_samples, axis=0), (cache, history, logits_BV)
        )
    cache, history, logits_BV = split_rows((cache, history, logits_BV), mesh)
    drawn_B, history, done_R = _draw(logits_BV, history, seeds_R, done_R, n_new, sampling)
    output = DecodeOutput(jnp.int32(1), jax.tree.map(lambda x: x[None], drawn_B), done_R)
    return split_rows(DecodeState(cache, history, drawn_B.token, done_R), mesh), output


def split_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Return arrays whose first axis is split over the data-parallel devices of a mesh; unchanged without a mesh. Empty
    arrays are replicated, as XLA returns them from `decode`."""
    if mesh is None:
        return tree
    spec = lambda x: PartitionSpec("data") if x.size else PartitionSpec()  # noqa: E731
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(x))), tree)


_SIZES = ("model", "sampling", "n_samples", "n_slots", "dtype", "mesh")
start = jax.jit(_start, static_argnames=_SIZES, donate_argnames=("cache", "history"))
start_samples = jax.jit(_start, static_argnames=_SIZES)  # n_samples > 1: a larger cache cannot reuse donated memory


@partial(jax.jit, static_argnames=("model", "sampling", "mesh"), donate_argnames="state")
def decode(
    model: nn.Module, sampling: Sampling, params: Params, state: DecodeState, rows: Rows, span: Span, mesh: Mesh | None
) -> tuple[DecodeState, DecodeOutput]:
    """Run decode steps until each row has `span.limit` more tokens or all rows are done.

    Args:
      state: state whose cache has at least min(counter + limit, n_slots) slots, all of which attention reads.
      mesh: mesh of data-parallel devices, each of which decodes its own rows, and stops once these are done; only the
        number of steps is reduced over the devices, once per call. None leaves the sharding to the partitioner.
    """
    if mesh is None:
        return _decode(model, sampling, params, state, rows, span, axis=None)
    shared, split = PartitionSpec(), PartitionSpec("data")
    in_specs = shared, split, split, shared
    out_specs = split, DecodeOutput(shared, PartitionSpec(None, "data"), split)  # type: ignore[arg-type]
    run = partial(_decode, model, sampling, axis="data")
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return run(params, state, rows, span)


def _decode(
    model: nn.Module, sampling: Sampling, params: Params, state: DecodeState, rows: Rows, span: Span, axis: str | None
) -> tuple[DecodeState, DecodeOutput]:
    """See `decode`; the rows are all rows, or those of one device along a mesh's axis."""
    counter, n_new, limit, n_slots = span

    def unfinished(carry: tuple[jax.Array, DecodeState, Drawn]) -> jax.Array:
        i, state, _ = carry
        return (i < limit) & ~state.done_B.all()

    @jax.jit  # traced once for its shapes and the loop
    def step(i: jax.Array, state: DecodeState) -> tuple[DecodeState, Drawn]:
        slot = (i + counter) % n_slots
        extend = partial(decode_step, model, params, slot=slot)
        logits_BV, cache = jax.vmap(extend)(state.token_B, i + counter - rows.offset_B, state.cache)
        drawn_B, history, done_B = _draw(logits_BV, state.history, rows.seeds_B, state.done_B, i + n_new, sampling)
        return DecodeState(cache, history, drawn_B.token, done_B), drawn_B

    def step_and_store(carry: tuple[jax.Array, DecodeState, Drawn]) -> tuple[jax.Array, DecodeState, Drawn]:
        i, state, drawn_CB = carry
        state, drawn_B = step(i, state)
        store = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return i + 1, state, jax.tree.map(store, drawn_CB, drawn_B)

    initial = state._replace(done_B=state.done_B | rows.ended_B)
    shapes_B = jax.eval_shape(step, jnp.int32(0), initial)[1]
    empty_CB = jax.tree.map(lambda x: jnp.full((MAX_TOKENS_PER_CALL, *x.shape), EMPTY, x.dtype), shapes_B)
    n, final, drawn_CB = jax.lax.while_loop(unfinished, step_and_store, (jnp.int32(0), initial, empty_CB))
    n = n if axis is None else jax.lax.pmax(n, axis)
    return final, DecodeOutput(n, drawn_CB, final.done_B)


def _draw(
    logits_BV: jax.Array, history_B: History, seeds_B: jax.Array, done_B: jax.Array, n_new: jax.Array,
    sampling: Sampling,
) -> tuple[Drawn, History, jax.Array]:  # fmt: skip
    """Sample a token for each row, with a key from the row's own seed; return it, the history, and which rows are done.

    A row that was already done gets the token `EMPTY`; a row that draws a stop token is done after it.
    """

    def draw(logits_V: jax.Array, history: History, seed: jax.Array) -> tuple[Drawn, History]:
        drawn = sample(logits_V, history, jax.random.fold_in(jax.random.key(seed), n_new), sampling)
        return drawn, update_history(history, drawn.token, sampling)

    drawn_B, history_B = jax.vmap(draw)(logits_BV, history_B, seeds_B)
    token_B = jnp.where(done_B, EMPTY, drawn_B.token)
    stopped_B = jnp.isin(token_B, jnp.array(sampling.stop_tokens, jnp.int32))
    return drawn_B._replace(token=token_B), history_B, done_B | stopped_B


def first_parts(tree: Cache, shapes: Cache) -> Cache:
    """Return the arrays of a tree cut to the given shapes."""
    return jax.tree.map(lambda x, shape: jax.lax.slice(x, (0,) * x.ndim, shape.shape), tree, shapes)


def put_first_slots(cache: Cache, part: Cache) -> Cache:
    """Return the cache with its first slots, as from `first_parts`, replaced by `part`."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y, (0,) * x.ndim), cache, part)


def extend_empty(
    model: nn.Module, params: Params, tokens_T: jax.Array, positions_T: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Extend an empty cache by a prompt, or by its first chunk; return the features `(T, D)` and the cache."""
    prefix = (len(tokens_T),) if contract_of(model).has_prefix else ()
    return call(model, params, "extend", tokens_T, positions_T, cache, 0, *prefix)


def decode_step(
    model: nn.Module, params: Params, token: jax.Array, position: jax.Array, cache: Cache, slot: jax.Array
) -> tuple[jax.Array, Cache]:
    """Extend one row's cache by one token; return the logits `(V,)` of the next token, and the cache."""
    x_1D, cache = call(model, params, "extend", token[None], position[None], cache, slot)
    return call(model, params, "unembed", x_1D[0]), cache


def call(model: nn.Module, params: Params, method: str, *args: Any) -> Any:
    """Call a method of a model with its parameters, which `decode.weights.lay_out` may have transposed."""
    return model.apply({"params": for_matmul(params)}, *args, method=method)
