"""The samplers on logits from anywhere: here from a table of bigrams. They need JAX alone, and no Flax."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decode import Sampling, distribution, init_history, sample, update_history

text = "the cat sees the dog and the dog sees the sea "
letters = sorted({*text})
counts_VV = np.full((len(letters), len(letters)), 0.01)
for a, b in zip(text, text[1:] + text[:1], strict=True):
    counts_VV[letters.index(a), letters.index(b)] += 1
logits_VV = jnp.log(counts_VV / counts_VV.sum(axis=1, keepdims=True))

sampling = Sampling(temperature=0.8, top_k=3, min_p=0.05, frequency_penalty=0.1)
prompt = jnp.array([letters.index(letter) for letter in "the c"])


@jax.jit
def draw(token, history, key):
    """Return the next token, and the history with it."""
    drawn = sample(logits_VV[token], history, key, sampling)
    return drawn.tokens, update_history(history, drawn.tokens, sampling)


token, history, drawn = prompt[-1], init_history(sampling, len(letters), prompt, len(prompt)), []
for key in jax.random.split(jax.random.key(0), 24):
    token, history = draw(token, history, key)
    drawn.append(letters[int(token)])
print("the c" + "".join(drawn))

p_V = distribution(logits_VV[token], history, sampling)  # of the next token, after all steps
assert int((p_V > 0).sum()) <= 3 and abs(float(p_V.sum()) - 1) < 1e-6
