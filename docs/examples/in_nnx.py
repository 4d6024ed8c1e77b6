"""A module of jaxformer in a Flax NNX model, and a whole model as one of NNX, by `flax.nnx.bridge`."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxformer.models import DecoderConfig
from jaxformer.nn import MultiHeadAttention
from jaxformer.ops import Causal, RoPE


class Model(nnx.Module):
    """Causal self-attention between two linear layers of NNX."""

    def __init__(self, d_in: int, d_model: int, rngs: nnx.Rngs) -> None:
        self.before = nnx.Linear(d_in, d_model, rngs=rngs)
        attention = MultiHeadAttention(n_heads=2, head_dim=8, rope=RoPE(10_000.0))
        self.attention = nnx.bridge.ToNNX(attention, rngs=rngs)
        self.attention.lazy_init(jnp.ones((1, d_model)))  # creates its parameters
        self.after = nnx.Linear(d_model, d_in, rngs=rngs)

    def __call__(self, x_TI: jax.Array) -> jax.Array:
        x_TD = self.before(x_TI)
        y_TD, _ = self.attention(x_TD, mask=Causal())
        return self.after(x_TD + y_TD)


def loss(model: Model, x_BTI: jax.Array) -> jax.Array:
    """Return the mean squared error of predicting each next vector."""
    predicted_BTI = nnx.vmap(lambda model, x_TI: model(x_TI), in_axes=(None, 0))(model, x_BTI[:, :-1])
    return jnp.mean((predicted_BTI - x_BTI[:, 1:]) ** 2)


model = Model(d_in=3, d_model=16, rngs=nnx.Rngs(0))
x_BTI = jax.random.normal(jax.random.key(0), (4, 7, 3))
grads = nnx.jit(nnx.grad(loss))(model, x_BTI)
print(jax.tree.map(jnp.shape, nnx.to_pure_dict(grads)["attention"]))
assert float(jnp.abs(nnx.to_pure_dict(grads)["attention"]["W_Q"]).max()) > 0

early = model(x_BTI[0])[:3]
assert bool(jnp.allclose(early, model(x_BTI[0].at[3:].set(0))[:3], atol=1e-5))  # the mask hides later positions

decoder = nnx.bridge.ToNNX(
    DecoderConfig(11, 6, d_model=16, n_blocks=1, n_heads=2, d_ff=(32,)).build(), rngs=nnx.Rngs(0)
)
decoder.lazy_init(jnp.zeros(6, int))
print("parameters of a decoder:", sum(x.size for x in jax.tree.leaves(nnx.state(decoder, nnx.Param))))
assert decoder(jnp.array([3, 1, 4])).shape == (3, 11)
