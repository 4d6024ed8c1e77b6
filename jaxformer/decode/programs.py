"""Compiled programs for text generation: the prefill of a chunk, the first token, and the decode loop.

A row's tokens are in a ring buffer of cache slots. Rows are aligned at their last prompt token, so that all rows of a
batch write to the same slot at each step: a dynamic-update-slice instead of a scatter.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxformer.contract import Contract, Task, contract_of
from jaxformer.decode.samplers import History, Samples, Sampling, init_history, sample, update_history
from jaxformer.decode.weights import for_matmul
from jaxformer.models.objective import Params
from jaxformer.ops.masks import EMPTY

MAX_TOKENS_PER_CALL = 64
"""Maximum decode steps per call of the compiled loop."""

Cache = Any
"""Pytree of arrays from a model's `init_cache` or `start`: keys and values in slots, or a state."""


class DecodeState(NamedTuple):
    """The state of a batch of B rows between two calls.

    Attributes:
      cache: KV cache or state, a pytree of arrays with B first.
      history: the text so far, as far as the sampling reads it.
      token_B: last token of each row, not yet in the cache; int32.
      position_B: its position; int32.
      seeds_B: seed of each row; uint32.
      done_B: True for rows that are done.
    """

    cache: Cache
    history: History
    token_B: jax.Array
    position_B: jax.Array
    seeds_B: jax.Array
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
        tokens_T = jnp.where(positions_T == EMPTY, self.fill_token, tokens_T)
        end = jnp.argmax(positions_T) + 1  # the rest is padding
        window_C = jax.lax.dynamic_slice_in_dim(jnp.append(window_C, tokens_T), end, self.context_length)
        logits_TV = self.model(window_C)
        return jnp.broadcast_to(logits_TV[-1], (len(tokens_T), logits_TV.shape[-1])), window_C

    def unembed(self, logits: jax.Array) -> jax.Array:
        """Return the logits."""
        return logits


def init_cache(model: nn.Module, n_slots: int, dtype: DTypeLike, rings: tuple[int, ...] = ()) -> Cache:
    """Return an empty cache of `n_slots` slots, and in each layer no more than its number in `rings`; 0 for no limit.
    See `engine.ring_sizes`."""
    cache = model.init_cache(n_slots, dtype)
    if not rings:
        return cache
    sizes = [min(ring or n_slots, n_slots) for ring in rings]
    layers_of = {size: model.init_cache(size, dtype).layers for size in set(sizes)}
    return cache._replace(layers=tuple(layers_of[size][i] for i, size in enumerate(sizes)))


@partial(jax.jit, static_argnames=("model", "n_slots", "dtype", "rings"))
def enlarge(model: nn.Module, cache: Cache, *, n_slots: int, dtype: DTypeLike, rings: tuple[int, ...]) -> Cache:
    """Return the cache of a batch with more slots."""
    return jax.vmap(lambda cache: put_first_slots(init_cache(model, n_slots, dtype, rings), cache))(cache)


@partial(jax.jit, static_argnames=("model", "n_slots", "dtype", "rings", "mesh"), donate_argnames="cache")
def prefill(
    model: nn.Module, params: Params, cache: Cache | None, tokens_BT: jax.Array, positions_BT: jax.Array,
    slot: jax.Array, last: jax.Array | None, *, n_slots: int, dtype: DTypeLike, rings: tuple[int, ...],
    mesh: Mesh | None,
) -> tuple[jax.Array | None, Cache]:  # fmt: skip
    """Extend the cache by a chunk of B prompts; return the logits `(B, V)` after the last one, and the cache.

    Args:
      cache: cache of the preceding chunks; None for the first chunk, for which `init_cache` creates one.
      positions_BT: position of each token, `EMPTY` for padding; int32.
      slot: cache slot of the first token.
      last: index of the prompts' last token in their last chunk, after which logits are returned; None for another.
      mesh: mesh over whose data-parallel devices the result is split; None leaves this to the partitioner.
    """

    def extend(tokens_T: jax.Array, positions_T: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache]:
        if cache is not None:
            return call(model, params, "extend", tokens_T, positions_T, cache, slot)
        # The first chunk needs to attend only to itself, not to empty slots.
        x_TD, used = extend_empty(model, params, tokens_T, positions_T, model.init_cache(len(tokens_T), dtype))
        return x_TD, put_first_slots(init_cache(model, n_slots, dtype, rings), used)

    x_BTD, cache = jax.vmap(extend)(tokens_BT, positions_BT, cache)
    if last is None:
        return None, split_rows(cache, mesh)
    x_BD = jax.lax.dynamic_index_in_dim(x_BTD, last, axis=1, keepdims=False)
    return split_rows((jax.vmap(partial(call, model, params, "unembed"))(x_BD), cache), mesh)


@partial(jax.jit, static_argnames=("n", "mesh"))
def repeat_rows(tree: Any, *, n: int, mesh: Mesh | None) -> Any:
    """Return arrays with each row n times: those of a prompt for its samples."""
    return split_rows(jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), tree), mesh)


@partial(jax.jit, static_argnames="mesh")
def start(
    sampling: Sampling, logits_BV: jax.Array, tokens_BP: jax.Array, lengths_B: jax.Array, history_B: History | None,
    seeds_B: jax.Array, done_B: jax.Array, *, mesh: Mesh | None,
) -> tuple[DecodeState, Samples]:  # fmt: skip
    """Sample the first token after a prefill; return the state without its cache, and the samples `(1, B)`.

    Args:
      tokens_BP: all tokens before it, padded on the right, for the history; `lengths_B` are their numbers.
      history_B: history of rows that continue; None for new ones.
    """
    if history_B is None:
        history_B = jax.vmap(partial(init_history, sampling, logits_BV.shape[-1]))(tokens_BP, lengths_B)
    history_B, logits_BV = split_rows((history_B, logits_BV), mesh)
    samples_B, history_B, done_B = sample_rows(sampling, logits_BV, history_B, seeds_B, done_B)
    state = DecodeState(None, history_B, samples_B.tokens, lengths_B, seeds_B, done_B)
    return split_rows(state, mesh), jax.tree.map(lambda x: x[None], samples_B)


def split_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Return arrays whose first axis is split over the data-parallel devices of a mesh; unchanged without a mesh. Empty
    arrays are replicated, as XLA returns them from `decode`."""
    if mesh is None:
        return tree
    spec = lambda x: PartitionSpec("data") if x.size else PartitionSpec()  # noqa: E731
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(x))), tree)


@partial(jax.jit, static_argnames=("model", "mesh"), donate_argnames="state")
def decode(
    model: nn.Module, sampling: Sampling, params: Params, state: DecodeState, ended_B: jax.Array, slot: jax.Array,
    limit: jax.Array, n_slots: jax.Array, *, mesh: Mesh | None,
) -> tuple[DecodeState, Samples]:  # fmt: skip
    """Run decode steps until each row has `limit` more tokens or all rows are done; return the state and the samples
    `(C, B)` of up to C = `MAX_TOKENS_PER_CALL` steps. Steps that were not run, and rows that are done, have the token
    `EMPTY`.

    Args:
      state: state whose cache has at least min(slot + limit, n_slots) slots, all of which attention reads.
      ended_B: True for rows that the caller has ended.
      slot: cache slot of the last token, `()` int32; those of the next follow it, modulo `n_slots`.
      limit: number of steps, `()` int32, at most `MAX_TOKENS_PER_CALL`.
      n_slots: slots to which the cache may grow, `()` int32.
      mesh: mesh of data-parallel devices, each of which decodes its own rows, and stops once these are done. None
        leaves the sharding to the partitioner.
    """
    run = partial(_decode, model)
    if mesh is not None:
        shared, split = PartitionSpec(), PartitionSpec("data")
        in_specs, out_specs = (shared, shared, split, split, *[shared] * 3), (split, PartitionSpec(None, "data"))
        run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return run(sampling, params, state, ended_B, slot, limit, n_slots)


def _decode(
    model: nn.Module, sampling: Sampling, params: Params, state: DecodeState, ended_B: jax.Array, slot: jax.Array,
    limit: jax.Array, n_slots: jax.Array,
) -> tuple[DecodeState, Samples]:  # fmt: skip
    """Run the loop of `decode`; the rows are all rows, or those of one device."""

    def unfinished(carry: tuple[jax.Array, DecodeState, Samples]) -> jax.Array:
        i, state, _ = carry
        return (i < limit) & ~state.done_B.all()

    @jax.jit  # traced once for its shapes and the loop
    def step(i: jax.Array, state: DecodeState) -> tuple[DecodeState, Samples]:
        extend = partial(decode_step, model, params, slot=(slot + i) % n_slots)
        logits_BV, cache = jax.vmap(extend)(state.token_B, state.position_B, state.cache)
        samples_B, history, done_B = sample_rows(sampling, logits_BV, state.history, state.seeds_B, state.done_B)
        return DecodeState(cache, history, samples_B.tokens, state.position_B + 1, state.seeds_B, done_B), samples_B

    def step_and_store(carry: tuple[jax.Array, DecodeState, Samples]) -> tuple[jax.Array, DecodeState, Samples]:
        i, state, samples_CB = carry
        state, samples_B = step(i, state)
        store = partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return i + 1, state, jax.tree.map(store, samples_CB, samples_B)

    initial = state._replace(done_B=state.done_B | ended_B)
    shapes_B = jax.eval_shape(step, jnp.int32(0), initial)[1]
    empty_CB = jax.tree.map(lambda x: jnp.full((MAX_TOKENS_PER_CALL, *x.shape), EMPTY, x.dtype), shapes_B)
    _, final, samples_CB = jax.lax.while_loop(unfinished, step_and_store, (jnp.int32(0), initial, empty_CB))
    return final, samples_CB


def sample_rows(
    sampling: Sampling, logits_BV: jax.Array, history_B: History, seeds_B: jax.Array, done_B: jax.Array
) -> tuple[Samples, History, jax.Array]:
    """Sample a token for each row, with a key from the row's own seed; return it, the history, and which rows are done.

    A row that was already done gets the token `EMPTY`; a row that draws a stop token is done after it.
    """

    def draw(logits_V: jax.Array, history: History, seed: jax.Array) -> tuple[Samples, History]:
        samples = sample(logits_V, history, jax.random.fold_in(jax.random.key(seed), history.n_new), sampling)
        return samples, update_history(history, samples.tokens, sampling)

    samples_B, history_B = jax.vmap(draw)(logits_BV, history_B, seeds_B)
    token_B = jnp.where(done_B, EMPTY, samples_B.tokens)
    stopped_B = jnp.isin(token_B, jnp.array(sampling.stop_tokens, jnp.int32))
    return samples_B._replace(tokens=token_B), history_B, done_B | stopped_B


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
