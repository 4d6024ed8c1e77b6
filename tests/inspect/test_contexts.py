"""What is computed within an intervention is computed with it, and what is computed outside without it, in any order.

An intervention that sets a head's output to 0 equals parameters whose `W_O` is 0 for that head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import inspect
from jaxformer.inspect import intervene
from jaxformer.models.objective import Params
from tests.arrays import plain_decoder
from tests.helpers import slow
from tests.inspect.test_activations import V, random_model

T = 5
CONFIG = plain_decoder(V, 8, 8, n_blocks=2, n_heads=2, d_ff=(8,), norm="rmsnorm", norm_placement="pre", final_norm=True)
MODEL, PARAMS, _ = random_model(CONFIG)
TOKENS, OTHER = jnp.arange(T), (3 * jnp.arange(T) + 1) % V
Z, HEAD = "blocks.0.attention.z", 1
ABLATED = jax.tree_util.tree_map_with_path(
    lambda path, x: x.at[HEAD].set(0) if (path[0].key, path[-1].key) == ("blocks_0", "W_O") else x, PARAMS
)
zero = lambda name, x_TK: 0 * x_TK  # noqa: E731
ablation = partial(intervene, f"{Z}.{HEAD}", zero)
PLAIN = jax.jit(lambda params: MODEL.apply({"params": params}, TOKENS))


def preference(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[-1, 3] - logits_TV[-1, 5]


def numbers(result: Any) -> list[np.ndarray]:
    """Return the arrays and numbers of a result."""
    leaves = jax.tree.leaves(result, is_leaf=lambda x: hasattr(x, "__dataclass_fields__"))
    parts = [numbers(vars(x)) if hasattr(x, "__dataclass_fields__") else [x] for x in leaves]
    return [np.asarray(x, np.float64) for part in parts for x in part if not isinstance(x, str | None)]


INSTRUMENTS: dict[str, Callable[[Params], Any]] = {
    "logit_lens": lambda p: inspect.logit_lens(MODEL, p, TOKENS),
    "patch_activations": lambda p: inspect.patch_activations(
        MODEL, p, [TOKENS], [OTHER], "blocks.1.mlp_out", preference
    ),
    "a batch": jax.vmap(PLAIN, in_axes=None, axis_size=2),
}


@pytest.mark.parametrize("name", ["logit_lens", *(slow(name) for name in INSTRUMENTS if name != "logit_lens")])
def test_instrument_is_that_of_the_edited_model_within_an_intervention_alone(name):
    instrument = INSTRUMENTS[name]
    with ablation():
        edited = numbers(instrument(PARAMS))
    plain, expected = numbers(instrument(PARAMS)), numbers(instrument(ABLATED))
    for x, y in zip(edited, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    assert any(np.nanmax(np.abs(x - y), initial=0) > 1e-3 for x, y in zip(plain, expected, strict=True))


@pytest.mark.slow
def test_two_edits_of_one_name_never_share_a_program():
    n = 0

    @jax.jit
    def logits(params: Params) -> jax.Array:
        nonlocal n
        n += 1
        return MODEL.apply({"params": params}, TOKENS)

    expected = {0: np.asarray(logits(ABLATED)), 1: np.asarray(logits(PARAMS))}
    for factor in (0, 1, 0):
        scale = jnp.float32(factor)  # that the edit closes over
        with intervene(f"{Z}.{HEAD}", lambda _, x, scale=scale: scale * x):
            results = [logits(PARAMS) for _ in range(3)]
            with intervene("embed", zero):
                assert np.abs(logits(PARAMS) - expected[factor]).max() > 0.01
        for result in results:
            np.testing.assert_allclose(result, expected[factor], rtol=1e-4, atol=1e-5)
    assert n == 1 + 3 * 2  # once per context, and none in a loop


@pytest.mark.slow
def test_interventions_hold_in_every_decode_step():
    @jax.jit
    def logits(params: Params) -> jax.Array:
        call, cache, rows = partial(MODEL.apply, {"params": params}), MODEL.bind({"params": params}).init_cache(8), []
        for i in range(2):
            x_TD, cache = call(TOKENS[i : i + 1], jnp.array([i]), cache, i, method="extend")
            rows.append(call(x_TD, method="unembed")[0])
        return jnp.stack(rows)

    with ablation():
        np.testing.assert_allclose(logits(PARAMS), PLAIN(ABLATED)[:2], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits(PARAMS), PLAIN(PARAMS)[:2], rtol=1e-4, atol=1e-5)
