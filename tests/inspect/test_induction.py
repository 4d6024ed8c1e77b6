"""A task with a known answer: of a random sequence that repeats itself, the repetition can be told by a head that looks
at what followed the same token before (Olsson et al. 2022). The report finds it, and the loss misses it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect import ablate_heads, head_statistics, loss_without, views
from jaxformer.inspect.page import Table
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import next_token_nll

V, T = 24, 32
MODEL = DecoderConfig(
    V, T, d_model=48, n_blocks=2, n_heads=4, d_ff=(96,), output_projection=True, norm="rmsnorm", positions="rope",
    embedding_std=0.3, final_norm=True,
)  # fmt: skip


def repeated(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `(n, T + 1)`, and where the next one has been seen after this one before, `(n, T)`."""
    lengths = rng.integers(8, 15, n)
    places = np.arange(T + 1) % lengths[:, None]
    tokens = np.stack([rng.permutation(V) for _ in range(n)])  # no token twice before the sequence repeats itself
    return np.take_along_axis(tokens, places, 1).astype(np.int32), np.arange(T) >= lengths[:, None]


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    model, optimizer, rng = MODEL.build(), optax.adamw(3e-3), np.random.default_rng(0)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(T, jnp.int32))["params"]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens_BT, counts_BT):
        def loss(params):
            nll_BT = jax.vmap(partial(next_token_nll, model, params))(tokens_BT)
            return jnp.mean(nll_BT, where=counts_BT)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for _ in range(1500):
        params, state, loss = step(params, state, *repeated(rng, 32))
        if loss < 0.02:
            break
    assert loss < 0.1
    return model, params


@pytest.mark.exhaustive
def test_the_report_finds_induction_heads_and_the_loss_misses_them(trained):
    model, params = trained
    tokens, counts = repeated(np.random.default_rng(1), 32)
    weights = counts / counts.sum(1, keepdims=True)
    batch = Batch((tokens[:, :-1],), tokens[:, 1:], weights.astype(np.float32))
    found = head_statistics(model, params, *map(jnp.asarray, batch.inputs))
    scores = {(layer, h): float(x) for layer, gaze in found.items() for h, x in enumerate(gaze.induction)}
    ranked = sorted(scores, key=lambda head: -scores[head])
    best = ranked[0]
    assert best[0] == "blocks.1.attention" and scores[best] > 0.5  # it takes an earlier layer that looks one back

    without = ablate_heads(model, params, batch)
    heads = [head for head in ranked if scores[head] > 0.3]
    others = [head for head in ranked if head[0] == "blocks.1.attention" and scores[head] < 0.1]
    assert heads and others
    assert loss_without(model, params, batch, heads) - without.loss >= 1
    assert all(without.mean[layer][h] < 0.1 for layer, h in others)

    table = views.heads(model, params, batch)[1]  # of the page
    assert isinstance(table, Table)
    column = table.head.index("induction")
    assert max(table.rows, key=lambda row: row[column])[0] == f"{best[0]}, head {best[1]}"
