"""Data of jaxformer in a training loop of one's own: text, tokenizer and batches."""

import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

from jaxformer.config import TokenModelConfig
from jaxformer.data import TextConfig

folder = Path(tempfile.mkdtemp())
for name, animal in (("one", "cat"), ("two", "dog"), ("three", "cow")):
    (folder / f"{name}.txt").write_text(f"The {animal} sees the sea and the {animal} likes the house. " * 60)

sizes = TokenModelConfig(vocab_size=290, context_length=8)  # of a tokenizer that is trained, and of a window
data = TextConfig(path=str(folder), val_fraction=0.3).load(sizes, batch_size=16, seed=0)
print(data.describe())


class Model(nn.Module):
    """A recurrent language model, of a batch."""

    @nn.compact
    def __call__(self, tokens_BT):
        x_BTD = nn.Embed(data.model.vocab_size, 32)(tokens_BT)
        return nn.Dense(data.model.vocab_size)(nn.RNN(nn.GRUCell(64))(x_BTD))


model, optimizer = Model(), optax.adamw(1e-2)
params = jax.jit(model.init)(jax.random.key(0), data.batch(0).inputs[0])
state = optimizer.init(params)


@jax.jit
def step(params, state, batch):
    """Return parameters and optimizer state after a step, and the loss before it, in nats per token."""

    def loss(params):
        logits_BTV = model.apply(params, *batch.inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch.targets).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


losses = []
for batch in data.stream(0, 20):  # prefetched; `data.batch(k)` is that of step k alone
    params, state, loss = step(params, state, batch)
    losses.append(float(loss))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f};", repr(data.tokenizer.decode(batch.inputs[0][0])))
assert losses[-1] < losses[0]
np.testing.assert_array_equal(data.batch(19).targets, batch.targets)  # a function of data, seed and step
