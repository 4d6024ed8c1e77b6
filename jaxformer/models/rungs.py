"""Parts that only the first rungs of the ladder have: blocks without residual connections, heads without `W_O`."""

import jax

from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import Block, Function


class PlainBlock(Block):
    """`Block` without residual connections: f(norm(x)) instead of x + f(norm(x))."""

    def sublayer(self, x_TD: jax.Array, f: Function, norm: Function, post_norm: Function, drop: Function) -> jax.Array:
        if self.norm_placement == "post":
            return norm(drop(f(x_TD)))
        return drop(post_norm(f(norm(x_TD))))


class ConcatenatedHeads(MultiHeadAttention):
    """`MultiHeadAttention` whose output is the heads themselves, `(T, H·K)`."""

    def merge_heads(self, y_HTK: jax.Array, d_model: int) -> jax.Array:
        return y_HTK.swapaxes(0, 1).reshape(y_HTK.shape[1], -1)


class SummedHeads(MultiHeadAttention):
    """`MultiHeadAttention` whose output is the sum of the heads, `(T, K)`."""

    def merge_heads(self, y_HTK: jax.Array, d_model: int) -> jax.Array:
        return y_HTK.sum(axis=0)
