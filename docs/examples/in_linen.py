"""Modules of jaxformer in a Linen model of one's own, with its attention maps captured."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.inspect import capture
from jaxformer.nn import MultiHeadAttention, RMSNorm, capture_point
from jaxformer.ops import masks


class Pooler(nn.Module):
    """Classifier of a sequence `(T, D)`: self-attention among valid positions, then their mean."""

    n_classes: int

    @nn.compact
    def __call__(self, x_TD, valid_T):
        attention = MultiHeadAttention(n_heads=4, head_dim=16, name="attention")
        y_TD, _ = attention(RMSNorm(name="norm")(x_TD), mask=masks.tokens(len(x_TD), valid_T))
        mean_D = jnp.mean(x_TD + y_TD, axis=0, where=valid_T[:, None])
        return capture_point(self, "logits", nn.Dense(self.n_classes)(mean_D))


x_TD, valid_T = jax.random.normal(jax.random.key(0), (6, 64)), jnp.arange(6) < 5
model = Pooler(n_classes=3)
params = jax.jit(model.init)(jax.random.key(1), x_TD, valid_T)["params"]

x_BTD = jnp.stack([x_TD, 2 * x_TD])
logits = jax.vmap(lambda x: model.apply({"params": params}, x, valid_T))(x_BTD)  # modules map one example
print(logits.shape)

values = capture(model, params, x_TD, valid_T)
print(list(values))  # norm, attention.q, …, attention.pattern, …, logits
assert values["attention.pattern"].shape == (4, 6, 6)
assert float(values["attention.pattern"][:, :, 5].max()) == 0  # no weight on padding
