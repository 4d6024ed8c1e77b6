"""Attention in memory linear in T and S, in plain JAX.

The softmax is computed one block of keys at a time, with a running maximum and sum (Milakov and Gimelshein 2018; Rabe
and Staats 2021). The backward pass recomputes the blocks of scores from the saved log-sums (Dao et al. 2022).

A tile is the scores of a block of queries against a block of keys. There are two loops over the same tiles:

- at once, for accelerators: a tile of all heads and examples, in one loop of a length known to the compiler;
- sequential, for CPUs: one group of heads at a time, so that the tile stays in a core's cache, with a row's running
  sums held by an inner loop. As one flat loop, which stores them after each tile, it takes 8 % longer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.lax import dynamic_index_in_dim, dynamic_update_index_in_dim
from jax.typing import DTypeLike

from jaxformer.ops.attention import MASKED, adjust, check_inputs, zero_hidden
from jaxformer.ops.bias import Bias, DistanceBias
from jaxformer.ops.explicit_axes import with_auto_axes
from jaxformer.ops.masks import Causal, Mask, Packed, causal_part, segment
from jaxformer.ops.precision import accumulation_dtype, upcast

SAVED = "attention"
"""Name of the saved activations, for `jax.checkpoint_policies.save_only_these_names`, with which a rematerialised block
does not recompute attention."""


@with_auto_axes
def blockwise_attention(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    block: int = 512,
    sequential: bool = False,
) -> jax.Array:
    """Return the output of `ops.attention.attention`, with memory linear in T and S in both passes.

    Blocks hidden by a `Causal` mask, or by the causal part of a `Packed`, are skipped. Differentiable in reverse mode,
    and twice if all heads are computed at once. Masked keys are treated as in `attention`, as are the arguments that it
    shares, but a mask array is the same for all heads. A bias by distance takes memory linear in T and S as well.

    Args:
      block: maximum number of queries, and of keys, per block.
      sequential: compute the groups of heads of all examples one after another, also under `jax.vmap`, instead of all
        at once.
    """
    attend = partial(blockwise_attention_with_lse, bias=bias, soft_cap=soft_cap, sinks=sinks)
    return attend(q_HTK, k_GSK, v_GSK, mask, scale, block=block, sequential=sequential)[0]


@with_auto_axes
def blockwise_attention_with_lse(
    q_HTK: jax.Array,
    k_GSK: jax.Array,
    v_GSK: jax.Array,
    mask: Mask = None,
    scale: float | None = None,
    *,
    bias: Bias = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    block: int = 512,
    sequential: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return `ops.attention.attention_with_lse`, computed as `blockwise_attention`."""
    scale = check_inputs(q_HTK, k_GSK, v_GSK, mask, scale, bias, soft_cap, sinks)
    H, T, K = q_HTK.shape
    G, S, _ = k_GSK.shape
    tiles = Tiles(T, S, block, causal_part(mask), H // G, sequential, soft_cap)
    rest: jax.Array | None = None
    if isinstance(mask, Packed):
        rest = jnp.pad(mask.segments_T, (0, tiles.n_q * tiles.b_q - T))[None]
    elif not isinstance(mask, Causal | None):
        if mask.ndim == 3:
            raise ValueError("blockwise attention has no mask per head; give one of shape (T, S), or use attention")
        rest = jnp.pad(mask, ((0, tiles.n_q * tiles.b_q - T), (0, tiles.n_k * tiles.b_k - S)))[None]
    q_HNbK = split(q_HTK * scale, tiles.n_q, tiles.b_q)
    q_GNrK = q_HNbK.reshape(G, -1, tiles.n_q, tiles.b_q, K).swapaxes(1, 2).reshape(G, tiles.n_q, -1, K)
    k_GMcK, v_GMcK = (split(zero_hidden(x, mask, T), tiles.n_k, tiles.b_k) for x in (k_GSK, v_GSK))
    arrays = tiles.bias_of_groups(bias, G, accumulation_dtype(q_HTK.dtype)), rest
    order = (lambda x: x) if sequential else (lambda x: x.swapaxes(0, 1))
    results = tiled_attention(tiles, *map(order, (q_GNrK, k_GMcK, v_GMcK)), *arrays)

    def merge(x: jax.Array) -> jax.Array:
        x_GNr = order(x)
        x_GHNb = x_GNr.reshape(G, tiles.n_q, -1, tiles.b_q, *x_GNr.shape[3:]).swapaxes(1, 2)
        return x_GHNb.reshape(H, tiles.n_q * tiles.b_q, *x_GNr.shape[3:])[:, :T]

    y_HTK, lse_HT = map(merge, results)
    lse_HT = jnp.where(lse_HT == MASKED, -jnp.inf, lse_HT)
    if sinks is None:
        return y_HTK, lse_HT
    sinks_H1 = sinks[:, None].astype(lse_HT.dtype)
    share_HT = jax.nn.sigmoid(lse_HT - sinks_H1)  # of the keys in the denominator of the softmax
    return (share_HT[..., None] * y_HTK).astype(y_HTK.dtype), jnp.logaddexp(lse_HT, sinks_H1)


def split(x_HTK: jax.Array, n: int, b: int) -> jax.Array:
    """Split `(H, T, K)` into n blocks of b positions, `(H, n, b, K)`, padded with zeros."""
    H, T, K = x_HTK.shape
    return jnp.pad(x_HTK, ((0, 0), (0, n * b - T), (0, 0))).reshape(H, n, b, K)


@dataclass(frozen=True)
class Tiles:
    """Tiling of the T·S scores into n_q blocks of b_q queries and n_k blocks of b_k keys, as even as possible."""

    T: int
    S: int
    block: int
    causal: Causal | None
    heads: int = 1
    """Query heads per group; a block of queries stacks their rows, r = heads · b_q in all."""
    sequential: bool = False
    soft_cap: float | None = None

    @property
    def n_q(self) -> int:
        """Number of query blocks."""
        return -(-self.T // self.block)

    @property
    def n_k(self) -> int:
        """Number of key blocks."""
        return -(-self.S // self.block)

    @property
    def b_q(self) -> int:
        """Queries per block."""
        return -(-self.T // self.n_q)

    @property
    def b_k(self) -> int:
        """Keys per block."""
        return -(-self.S // self.n_k)

    def is_visible(self) -> np.ndarray:
        """Return True for each tile with a visible key, `(n_q, n_k)`."""
        i, j = np.indices((self.n_q, self.n_k))
        if self.causal is None:
            return np.full(i.shape, True)
        furthest = (i + 1) * self.b_q - 1 - j * self.b_k  # of the tile's last query from its first key
        nearest = i * self.b_q - ((j + 1) * self.b_k - 1)
        return (furthest >= 0) & (nearest < (self.causal.window or self.T))

    def mask(self, i: jax.Array, j: jax.Array, rest: jax.Array | None, example: jax.Array | int) -> jax.Array:
        """Return the mask of a tile, `(r, b_k)` bool; the padding of the last block is hidden.

        Args:
          rest: segments `(T,)` or a mask `(T, S)` for each example, padded to full blocks; None for `causal` only.
        """
        query_r = i * self.b_q + jnp.arange(self.heads * self.b_q) % self.b_q
        key_c = j * self.b_k + jnp.arange(self.b_k)
        mask_rc = jnp.broadcast_to(key_c < self.S, (len(query_r), self.b_k))
        if self.causal is not None:
            mask_rc &= self.causal(query_r, key_c)
        if rest is None:
            return mask_rc
        if rest.ndim == 2:
            return mask_rc & segment(rest[example, query_r], rest[example, key_c])
        start, sizes = (example, i * self.b_q, j * self.b_k), (1, self.b_q, self.b_k)
        return mask_rc & jnp.tile(jax.lax.dynamic_slice(rest, start, sizes)[0], (self.heads, 1))

    def bias_of_groups(self, bias: Bias, n_groups: int, dtype: DTypeLike) -> jax.Array | None:
        """Return a bias padded to full blocks, `(G, H/G, T, S)`; one by distance is `(G, H/G, 1, T + S - 1)`, from the
        last query's distance to the first key to the first query's distance to the last."""
        if bias is None:
            return None
        T, S, H = self.n_q * self.b_q, self.n_k * self.b_k, n_groups * self.heads
        if isinstance(bias, DistanceBias):
            bias_HTS = bias.at(jnp.arange(1 - T, S))[:, None]
        else:
            bias_HTS = jnp.broadcast_to(bias, (H, self.T, self.S))
            bias_HTS = jnp.pad(bias_HTS, ((0, 0), (0, T - self.T), (0, S - self.S)))
        return bias_HTS.astype(dtype).reshape(n_groups, self.heads, *bias_HTS.shape[1:])

    def bias_window(self, bias: jax.Array | None, i: Any, j: Any, g: Any = None) -> tuple:
        """Return start and sizes of a tile's part of `bias_of_groups`: of group g, or of all."""
        if bias is None:
            return ()
        g, n_groups = (0, len(bias)) if g is None else (g, 1)
        if bias.shape[2] == 1:
            start, sizes = (0, j * self.b_k + (self.n_q - 1 - i) * self.b_q), (1, self.b_q + self.b_k - 1)
        else:
            start, sizes = (i * self.b_q, j * self.b_k), (self.b_q, self.b_k)
        return (g, 0, *start), (n_groups, self.heads, *sizes)

    def adjust(self, scores_rc: jax.Array, bias_part: jax.Array | None) -> jax.Array:
        """Return a tile's scores after soft cap and bias."""
        if bias_part is not None:
            if bias_part.shape[2] == 1:
                bias_part = by_distance(bias_part, self.b_q)
            bias_part = bias_part.reshape(scores_rc.shape)
        return adjust(scores_rc, bias_part, self.soft_cap)


def by_distance(x_L: jax.Array, n: int) -> jax.Array:
    """Return the matrix of n rows with entry (r, c) from index n - 1 - r + c of x, from `(…, 1, L)` to
    `(…, n, L + 1 - n)`: by reshaping, since a gather would be slower, as would the sum that is its gradient."""
    L = x_L.shape[-1]
    # In rows of length L, a sequence of period L + 1 moves by one from row to row.
    repeated = jnp.tile(jnp.pad(x_L, (*((0, 0),) * (x_L.ndim - 1), (0, 1))), n)[..., n - 1 : n - 1 + n * L]
    return repeated.reshape(*x_L.shape[:-2], n, L)[..., : L + 1 - n]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def tiled_attention(
    tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, rest: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the attention output for blocks, from `(N, G, r, K)`, `(M, G, c, K)`, `(M, G, c, K)` to `(N, G, r, K)`,
    and the logsumexps `(N, G, r)`; with `sequential`, G is the first axis."""
    return forward(tiles, q, k, v, bias, rest)[0]


def forward(
    tiles: Tiles, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, rest: jax.Array | None
) -> tuple:
    """Return the output and the logsumexps, and the residuals for `backward`."""
    attend = over_examples(attend_sequentially, tiles) if tiles.sequential else partial(attend_at_once, tiles)
    y, log_total = (checkpoint_name(x, SAVED) for x in attend(rest, q, k, v, bias))
    return (y, log_total), (q, k, v, bias, rest, y, log_total)


def backward(tiles: Tiles, saved: tuple, cotangents: tuple) -> tuple:
    """Return the gradients with respect to q, k, v and bias (Dao et al. 2022, algorithm 4)."""
    q, k, v, bias, rest, y, log_total = saved
    dy, d_log_total = cotangents
    differentiate = (
        over_examples(gradients_sequentially, tiles) if tiles.sequential else partial(gradients_at_once, tiles)
    )
    # Σ over keys of weight · its gradient; the gradient of the logsumexp to a score is its weight.
    dot = jnp.sum(upcast(dy) * upcast(y), -1) - d_log_total
    *gradients, dbias = differentiate(rest, q, k, v, bias, dy, log_total, dot)
    return *(x.astype(like.dtype) for x, like in zip(gradients, (q, k, v), strict=True)), dbias, None


tiled_attention.defvjp(forward, backward)


def raw_scores(q_rK: jax.Array, k_cK: jax.Array) -> jax.Array:
    """Return the scores of one tile without soft cap, bias and mask, `(…, r, c)` float32 or wider."""
    return jnp.einsum("...rk,...ck->...rc", q_rK, k_cK, preferred_element_type=accumulation_dtype(q_rK.dtype))


def initial_sums(rows: tuple[int, ...], v: jax.Array) -> tuple[jax.Array, ...]:
    """Return the weighted sum of values `(…, K)`, the sum of weights and the maximum score before the first tile."""
    dtype = accumulation_dtype(v.dtype)
    # The maximum starts finite, so that a row without a visible key yields zeros instead of NaN.
    return jnp.zeros((*rows, v.shape[-1]), dtype), jnp.zeros(rows, dtype), jnp.full(rows, MASKED, dtype)


def add_tile(
    tiles: Tiles,
    sums: tuple[jax.Array, ...],
    q_rK: jax.Array,
    k_cK: jax.Array,
    v_cK: jax.Array,
    mask_rc: jax.Array,
    bias_part: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Return the sums and the maximum of `initial_sums`, updated with one more tile."""
    sum_rK, total_r, before_r = sums
    scores_rc = jnp.where(mask_rc, tiles.adjust(raw_scores(q_rK, k_cK), bias_part), -jnp.inf)
    top_r = jnp.maximum(before_r, scores_rc.max(-1))
    weights_rc = jnp.exp(scores_rc - top_r[..., None])
    shrink_r = jnp.exp(before_r - top_r)
    part_rK = jnp.einsum("...rc,...ck->...rk", weights_rc.astype(v_cK.dtype), v_cK, preferred_element_type=sum_rK.dtype)
    return sum_rK * shrink_r[..., None] + part_rK, total_r * shrink_r + weights_rc.sum(-1), top_r


def output(sums: tuple[jax.Array, ...], dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return the output, and the logsumexp of each row."""
    sum_K, total, top = sums
    total = jnp.where(total > 0, total, 1)
    return (sum_K / total[..., None]).astype(dtype), top + jnp.log(total)


def tile_gradients(
    tiles: Tiles,
    mask_rc: jax.Array,
    q_rK: jax.Array,
    k_cK: jax.Array,
    v_cK: jax.Array,
    bias_part: jax.Array | None,
    dy_rK: jax.Array,
    log_total_r: jax.Array,
    dot_r: jax.Array,
) -> tuple:
    """Return one tile's contributions to the gradients of its queries, keys, values and part of the bias."""
    einsum = partial(jnp.einsum, preferred_element_type=accumulation_dtype(q_rK.dtype))
    scores_rc, pull = jax.vjp(tiles.adjust, raw_scores(q_rK, k_cK), bias_part)
    weights_rc = jnp.exp(jnp.where(mask_rc, scores_rc, -jnp.inf) - log_total_r[..., None])
    to_weights = einsum("...rk,...ck->...rc", dy_rK, v_cK)
    to_scores, to_bias = pull(weights_rc * (to_weights - dot_r[..., None]))
    to_scores = to_scores.astype(q_rK.dtype)
    return (
        einsum("...rc,...ck->...rk", to_scores, k_cK),
        einsum("...rc,...rk->...ck", to_scores, q_rK),
        einsum("...rc,...rk->...ck", weights_rc.astype(dy_rK.dtype), dy_rK),
        to_bias,
    )


def attend_at_once(
    tiles: Tiles, rest: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sums, looping over the visible tiles of all heads."""

    def step(sums: tuple, ij: tuple) -> tuple:
        i, j = ij
        more = add_tile(
            tiles,
            tuple(at(x, i) for x in sums),
            *(at(q, i), at(k, j), at(v, j)),
            tiles.mask(i, j, rest, 0),
            part_of(bias, tiles.bias_window(bias, i, j)),
        )
        return tuple(put(x, i, value) for x, value in zip(sums, more, strict=True)), None

    return output(jax.lax.scan(step, initial_sums(q.shape[:-1], v), np.nonzero(tiles.is_visible()))[0], v.dtype)


def gradients_at_once(tiles: Tiles, rest: jax.Array | None, *arrays: jax.Array) -> tuple:
    """Return the gradients from q, k, v, bias, dy, log-sums and dots; see `backward`."""
    q, k, v, bias, *others = arrays

    def step(sums: tuple, ij: tuple) -> tuple:
        i, j = ij
        mask_rc, window = tiles.mask(i, j, rest, 0), tiles.bias_window(bias, i, j)
        of_queries = (at(x, i) for x in others)
        *parts, to_bias = tile_gradients(
            tiles, mask_rc, at(q, i), at(k, j), at(v, j), part_of(bias, window), *of_queries
        )
        added = (put(x, n, at(x, n) + part) for x, n, part in zip(sums[:3], (i, j, j), parts, strict=True))
        return (*added, add_part(sums[3], window, to_bias)), None

    gradients: tuple = jax.lax.scan(step, zeros_like(q, k, v, bias), np.nonzero(tiles.is_visible()))[0]
    return gradients


def zeros_like(*arrays: jax.Array | None) -> tuple:
    """Return sums of the same shapes at zero."""
    return tuple(None if x is None else jnp.zeros(x.shape, accumulation_dtype(x.dtype)) for x in arrays)


def part_of(x: jax.Array | None, window: tuple) -> jax.Array | None:
    """Return the part of x that a window (start and sizes) selects."""
    return None if x is None else jax.lax.dynamic_slice(x, *window)


def add_part(x: jax.Array | None, window: tuple, part: jax.Array) -> jax.Array | None:
    """Return x with `part` added to the part that a window selects."""
    if x is None:
        return None
    return jax.lax.dynamic_update_slice(x, jax.lax.dynamic_slice(x, *window) + part, window[0])


def at(x: jax.Array, i: jax.Array) -> jax.Array:
    """Return `x[i]`."""
    return dynamic_index_in_dim(x, i, keepdims=False)


def put(x: jax.Array, i: jax.Array, value: jax.Array) -> jax.Array:
    """Return x with `x[i]` replaced; in place where x is the carry of a loop."""
    return dynamic_update_index_in_dim(x, value, i, 0)


def over_examples(function: Callable[..., Any], tiles: Any) -> Callable[..., Any]:
    """Return a function of `rest` and arrays with a leading group axis, into which `vmap` merges the batch axis."""
    mapped = jax.custom_batching.custom_vmap(partial(function, tiles))

    @mapped.def_vmap
    def batched(n: int, is_batched: list[Any], rest: jax.Array | None, *arrays: jax.Array) -> tuple[Any, Any]:
        def merge(x: jax.Array | None, has_axis: bool) -> jax.Array | None:
            if x is None:
                return None
            x = x if has_axis else jnp.broadcast_to(x, (n, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        if rest is not None and (is_batched[0] or len(rest) > 1):  # one mask may serve all examples
            rest = merge(rest, is_batched[0])
        groups = len(arrays[0]) if not is_batched[1] else arrays[0].shape[1]
        results = mapped(rest, *map(merge, arrays, is_batched[1:]))
        results = jax.tree.map(lambda x: x.reshape(n, groups, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def attend_sequentially(
    tiles: Tiles, rest: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the output and the log-sums, from a loop over blocks of queries and an inner loop over their keys."""

    def row(_: None, indices: tuple) -> tuple:
        g, i, first, end = indices
        q_rK, example = block_of(q, g, i), example_of(g, q, rest)

        def step(j: jax.Array, sums: tuple) -> tuple:
            k_cK, v_cK, mask_rc = block_of(k, g, j), block_of(v, g, j), tiles.mask(i, j, rest, example)
            return add_tile(tiles, sums, q_rK, k_cK, v_cK, mask_rc, part_of(bias, tiles.bias_window(bias, i, j, g)))

        return None, output(jax.lax.fori_loop(first, end, step, initial_sums(q_rK.shape[:-1], v)), v.dtype)

    results: tuple[jax.Array, ...] = jax.lax.scan(row, None, loops(len(q), tiles.is_visible()))[1]
    y, log_total = (x.reshape(*q.shape[:2], *x.shape[1:]) for x in results)
    return y, log_total


def gradients_sequentially(tiles: Tiles, rest: jax.Array | None, *arrays: jax.Array) -> tuple:
    """Return the gradients from q, k, v, bias, dy, log-sums and dots, from a loop over blocks of keys and an inner loop
    over the queries that see them."""
    q, k, v, bias, *others = arrays

    def column(sums: tuple, indices: tuple) -> tuple:
        g, j, first, end = indices
        k_cK, v_cK, example = block_of(k, g, j), block_of(v, g, j), example_of(g, q, rest)

        def step(i: jax.Array, sums: tuple) -> tuple:
            dq, dbias, dk_cK, dv_cK = sums
            mask_rc, of_queries = tiles.mask(i, j, rest, example), (block_of(x, g, i) for x in others)
            window = tiles.bias_window(bias, i, j, g)
            part, to_k, to_v, to_bias = tile_gradients(
                tiles, mask_rc, block_of(q, g, i), k_cK, v_cK, part_of(bias, window), *of_queries
            )
            dq = jax.lax.dynamic_update_slice(dq, (block_of(dq, g, i) + part)[None, None], (g, i, 0, 0))
            return dq, add_part(dbias, window, to_bias), dk_cK + to_k, dv_cK + to_v

        dq, dbias, *sums = jax.lax.fori_loop(first, end, step, (*sums, *zeros_like(k_cK, v_cK)))
        return (dq, dbias), sums

    indices = loops(len(q), tiles.is_visible().T)
    sums: Any = jax.lax.scan(column, zeros_like(q, bias), indices)
    (dq, dbias), (dk, dv) = sums
    return dq, dk.reshape(k.shape), dv.reshape(v.shape), dbias


def block_of(x: jax.Array, g: jax.Array, i: jax.Array) -> jax.Array:
    """Return block i of group g."""
    return jax.lax.dynamic_slice(x, (g, i, *(0,) * (x.ndim - 2)), (1, 1, *x.shape[2:]))[0, 0]


def example_of(g: jax.Array, q: jax.Array, rest: jax.Array | None) -> jax.Array | int:
    """Return the index of the example that group g belongs to."""
    return 0 if rest is None else g // (len(q) // len(rest))


def loops(n_groups: int, is_visible: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return, for each row of tiles of each group, the group, the row, and the first and end index of its visible
    tiles, which are contiguous under a `Causal` mask."""
    n, n_tiles = is_visible.shape
    first = is_visible.argmax(axis=1)
    end = np.where(is_visible.any(axis=1), n_tiles - is_visible[:, ::-1].argmax(axis=1), 0)
    return np.repeat(np.arange(n_groups), n), *(np.tile(x, n_groups) for x in (np.arange(n), first, end))
