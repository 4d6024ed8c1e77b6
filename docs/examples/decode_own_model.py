"""KV cache and batched generation with a model of one's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Contract, Task, token_inputs
from jaxformer.decode import Sampling, generate_tokens
from jaxformer.ops import KVCache, attention, init_cache, masks, read_layer, rope, write_layer, write_positions

V, H, K = 20, 2, 8


class Model(nn.Module):
    """One layer of causal attention on layers of Flax; `generate_tokens` calls `init_cache`, `extend` and `unembed`."""

    contract = Contract(
        Task.CAUSAL_LM, token_inputs(32, "tokens_T"), vocab_size=V, n_classes=V, has_cache=True, extrapolates=True
    )

    def setup(self):
        self.embed, self.qkv, self.out = nn.Embed(V, H * K), nn.Dense(3 * H * K), nn.Dense(V)

    def init_cache(self, n_slots, dtype=jnp.float32):
        return init_cache(1, H, n_slots, K, dtype)

    def extend(self, tokens_T, positions_T, cache, slot):
        x_TD = self.embed(tokens_T)
        q_HTK, k_HTK, v_HTK = self.qkv(x_TD).reshape(-1, 3, H, K).transpose(1, 2, 0, 3)
        layer = write_layer(cache.layers[0], rope(k_HTK, positions_T), v_HTK, slot)
        position_S = write_positions(cache.position_S, positions_T, slot)
        mask_TS = masks.causal(positions_T, position_S) & masks.padding(positions_T, position_S)
        y_HTK = attention(rope(q_HTK, positions_T), *read_layer(layer, x_TD.dtype), mask_TS)
        return x_TD + y_HTK.swapaxes(0, 1).reshape(x_TD.shape), KVCache((layer,), position_S)

    def unembed(self, x_TD):
        return self.out(x_TD)

    def __call__(self, tokens_T):  # a whole text: a prefill of an empty cache
        return self.unembed(self.extend(tokens_T, jnp.arange(len(tokens_T)), self.init_cache(len(tokens_T)), 0)[0])


model, prompts = Model(), [[1, 2, 3], [4, 5, 6, 7, 8]]
params = jax.jit(model.init)(jax.random.key(0), jnp.array(prompts[0]))["params"]
settings = {"seeds": [0, 1], "max_new_tokens": 6, "context_length": 32}
pieces = generate_tokens(model, params, prompts, Sampling(temperature=0), **settings)
greedy = np.concatenate([piece.tokens for piece in pieces], axis=1)
print(greedy)
text = [*prompts[0], *greedy[0].tolist()]
logits_TV = model.apply({"params": params}, jnp.array(text))
assert logits_TV.argmax(axis=-1)[2:-1].tolist() == text[3:]  # the same tokens without a cache
