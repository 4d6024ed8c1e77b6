"""Induction on a repeated random sequence (Olsson et al. 2022): head statistics find the heads, ablation confirms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect import ablate_heads, ablation_loss, head_statistics
from tests.arrays import plain_decoder

N = 12
"""Tokens of the vocabulary, positions, and the width of heads."""


def decoder_with_an_induction_head() -> tuple[Any, Any]:
    """Return a model written by hand. The stream has a position, a token, and what heads say. Head 0 of the first layer
    says the previous token; head 0 of the second looks for positions that say the present token, and says theirs."""
    model = plain_decoder(N, N, 3 * N, n_blocks=2, n_heads=2, head_dim=N, d_ff=(1,)).build()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(N, jnp.int32)))["params"]
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    each = np.arange(N)
    position, token, said = each, N + each, 2 * N + each
    params["embedding"]["W_pos"][each, position] = params["embedding"]["W_E"][each, token] = 1
    first, second = (params[f"blocks_{i}"]["attention"] for i in range(2))
    first["W_Q"][position[1:], 0, each[:-1]] = second["W_Q"][token, 0, each] = 100
    first["W_K"][position, 0, each] = second["W_K"][said, 0, each] = 1
    first["W_V"][token, 0, each] = second["W_V"][token, 0, each] = 1
    first["W_O"][0, each, said], second["W_O"][0, each, said] = 1, 20
    params["W_out"][said, each] = 1
    return model, params


@pytest.mark.slow
def test_induction_heads_have_high_scores_and_their_ablation_raises_the_loss():
    model, params = decoder_with_an_induction_head()
    rng, lengths_B = np.random.default_rng(1), np.arange(4, 8)
    once_BT = np.stack([1 + rng.permutation(N - 1) for _ in lengths_B])  # none twice before the sequence repeats itself
    tokens_BT = np.take_along_axis(once_BT, np.arange(N) % lengths_B[:, None], 1).astype(np.int32)
    tokens_BT = np.pad(tokens_BT, ((0, 0), (1, 0)))  # a token that begins each: the first position attends to itself
    counts_BT = np.float32(np.arange(N) > lengths_B[:, None])  # targets that induction predicts
    batch = Batch((tokens_BT[:, :-1],), tokens_BT[:, 1:], counts_BT)
    statistics = head_statistics(model, params, *map(jnp.asarray, batch.inputs))
    heads = [("blocks.0.attention", "previous"), ("blocks.1.attention", "induction")]
    for layer, name in heads:
        found, other = getattr(statistics[layer], name)
        assert found > 0.99 and other < 0.4
    without = ablate_heads(model, params, batch)
    assert without.loss < 1e-3
    for layer, _ in heads:
        needed, other = without.mean[layer]
        assert needed > 1 and abs(other) < 1e-3
        np.testing.assert_allclose(ablation_loss(model, params, batch, [(layer, 0)]) - without.loss, needed, rtol=1e-4)
