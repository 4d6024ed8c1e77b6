"""Induction on a repeated random sequence (Olsson et al. 2022): head statistics find the heads, ablation confirms."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect import ablate_heads, ablation_loss, head_statistics
from jaxformer.inspect.pages import model_sections
from jaxformer.inspect.pages.labels import head_label
from jaxformer.inspect.pages.page import Table
from jaxformer.models.objective import next_token_nll
from jaxformer.ops import RoPE
from tests.arrays import plain_decoder

V, T = 24, 32
MODEL = plain_decoder(
    V, T, d_model=48, n_blocks=2, n_heads=4, d_ff=(96,), norm="rmsnorm", positions="none", rope=RoPE(),
    embedding_std=0.3, final_norm=True,
)  # fmt: skip


def repeated(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens `(n, T + 1)`, and a mask `(n, T)` of those whose successor is predictable by induction."""
    lengths = rng.integers(8, 15, n)
    positions = np.arange(T + 1) % lengths[:, None]
    tokens = np.stack([rng.permutation(V) for _ in range(n)])  # no token twice before the sequence repeats itself
    return np.take_along_axis(tokens, positions, 1).astype(np.int32), np.arange(T) >= lengths[:, None]


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    model, optimizer, rng = MODEL.build(), optax.adamw(3e-3), np.random.default_rng(0)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(T, jnp.int32))["params"]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens_BT, target_mask_BT):
        def loss(params):
            nll_BT = jax.vmap(partial(next_token_nll, model, params))(tokens_BT)
            return jnp.mean(nll_BT, where=target_mask_BT)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.jit(optimizer.init)(params)
    for _ in range(1500):
        params, state, loss = step(params, state, *repeated(rng, 32))
        if loss < 0.05:
            break
    assert loss < 0.1
    return model, params


@pytest.mark.slow
def test_induction_heads_have_high_scores_and_their_ablation_raises_the_loss(trained):
    model, params = trained
    tokens, counts = repeated(np.random.default_rng(1), 32)
    weights = counts / counts.sum(1, keepdims=True)
    batch = Batch((tokens[:, :-1],), tokens[:, 1:], weights.astype(np.float32))
    result = head_statistics(model, params, *map(jnp.asarray, batch.inputs))
    scores = {
        (layer, h): float(x)
        for layer, layer_statistics in result.items()
        for h, x in enumerate(layer_statistics.induction)
    }
    ranked = sorted(scores, key=lambda head: -scores[head])
    best = ranked[0]
    assert (
        best[0] == "blocks.1.attention" and scores[best] > 0.5
    )  # induction needs a previous-token head in an earlier layer

    without = ablate_heads(model, params, batch)
    heads = [head for head in ranked if scores[head] > 0.3]
    others = [head for head in ranked if head[0] == "blocks.1.attention" and scores[head] < 0.1]
    assert heads and others
    assert ablation_loss(model, params, batch, heads) - without.loss >= 1
    assert all(without.mean[layer][h] < 0.1 for layer, h in others)

    table = model_sections.head_sections(model, params, batch)[1]  # of the page
    assert isinstance(table, Table)
    column = table.head.index("induction")
    assert max(table.rows, key=lambda row: row[column])[0] == head_label(*best)
