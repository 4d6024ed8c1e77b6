"""Remat, scanning and gathering change what is stored and compiled, and nothing else."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params, next_token_nll
from jaxformer.nn.execution import PLAIN, Execution, run_blocks
from tests.arrays import assert_close, build, random_tokens

V, T, N = 23, 7, 3
CONFIG = DecoderConfig(
    V, T, 12, n_blocks=N, n_heads=2, output_projection=True, d_ff=(17,), norm="rmsnorm", dropout=0.5
)  # fmt: skip
TOKENS_T = random_tokens(V, T + 1)
KEY = jax.random.key(7)


def loss(params: Params, execution: Execution, key: jax.Array | None = KEY) -> jax.Array:
    return next_token_nll(CONFIG.build(execution), params, TOKENS_T, key).mean()


def loss_and_gradient(params: Params, execution: Execution) -> tuple[jax.Array, Params]:
    return jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, execution)


@pytest.fixture(scope="module")
def plain() -> tuple[Params, tuple[jax.Array, Params]]:
    """Random parameters, and the loss and gradient of the blocks one after the other."""
    _, params = build(CONFIG)
    return params, loss_and_gradient(params, PLAIN)


def doubled(name: str, params: Params) -> Params:
    """A gather that can be seen: parameters stored at half their value."""
    assert name.startswith("blocks_")
    return jax.tree.map(lambda w: 2 * w, params)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "block"])
@pytest.mark.parametrize("scan", [False, True])
def test_the_loss_and_its_gradient_are_those_of_the_plain_blocks(plain, remat, scan):
    """Dropout is on: every block must get its own key."""
    params, (wanted, wanted_grads) = plain
    stored = {name: jax.tree.map(lambda w: w / 2, p) if name.startswith("blocks_") else p for name, p in params.items()}
    got, grads = loss_and_gradient(stored, Execution(remat=remat, scan=scan, gather=doubled))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for name, grad in grads.items():
        factor = 2 if name.startswith("blocks_") else 1
        jax.tree.map(lambda g, w, factor=factor: assert_close(g, factor * w), grad, wanted_grads[name])


def kept(execution: Execution, n_blocks: int = N) -> int:
    """Numbers a position that the forward pass leaves for the backward pass: of arrays with an axis of T."""
    config = replace(CONFIG, dropout=0.0, context_length=T + 4, n_blocks=n_blocks)
    _, params = build(config)
    model = config.build(execution)
    pull = jax.eval_shape(lambda p: jax.vjp(lambda p: next_token_nll(model, p, TOKENS_T), p)[1], params)
    return sum(leaf.size for leaf in jax.tree.leaves(pull) if T in leaf.shape) // T


def test_remat_keeps_less():
    """A block more costs everything; its input and its products with weights; its input alone."""
    costs = [kept(Execution(remat=remat), 3) - kept(Execution(remat=remat), 2) for remat in ("none", "dots", "block")]
    everything, dots, block = costs
    D, F = CONFIG.d_model, 17
    assert block == D
    assert dots == D + 3 * D + D + F  # W_Q, W_K, W_V, W_O, W_1; nothing asks for what W_2 gives
    assert everything > dots


def test_a_scan_compiles_one_block():
    def program(n_blocks: int, execution: Execution) -> str:
        config = replace(CONFIG, n_blocks=n_blocks)
        shapes = jax.eval_shape(lambda: config.build().init(jax.random.key(0), TOKENS_T[:-1])["params"])
        model = config.build(execution)
        return str(jax.make_jaxpr(lambda p: next_token_nll(model, p, TOKENS_T))(shapes))

    products = [program(n, Execution(scan=True)).count("dot_general") for n in (2, 6)]
    assert products[0] == products[1]
    assert program(6, PLAIN).count("dot_general") > 2 * products[1]


def test_parameters_keep_their_names_and_first_values():
    init = [
        jax.make_jaxpr(CONFIG.build(execution).init, return_shape=True)(KEY, TOKENS_T[:-1])
        for execution in (PLAIN, Execution(remat="block", scan=True, gather=doubled))
    ]
    assert set(init[0][1]["params"]) == {"embedding", "blocks_0", "blocks_1", "blocks_2", "W_out"}
    assert init[0][1] == init[1][1]
    assert str(init[0][0]) == str(init[1][0])  # the same program draws the same numbers


def test_blocks_of_different_shapes_cannot_be_scanned():
    config = replace(CONFIG, residual=False, unembedding="mlp")  # its last block is as wide as the vocabulary
    _, params = build(config)
    with pytest.raises(UserError, match=r"the blocks differ in shape .* set compute\.scan_blocks to false"):
        config.build(Execution(scan=True)).apply({"params": params}, TOKENS_T[:-1])
    logits = config.build(Execution(remat="block")).apply({"params": params}, TOKENS_T[:-1])
    assert_close(logits, config.build().apply({"params": params}, TOKENS_T[:-1]))


def test_each_block_is_given_its_own_parameters_inputs_and_key():
    """Blocks that are no transformer: x + weight · shift + the number drawn from the key."""

    class Fake:
        def __init__(self, number: int) -> None:
            self.name, self.variables = f"blocks_{number}", {"params": {"w": jnp.float32(number + 1)}}

        def is_initializing(self) -> bool:
            return False

        def clone(self, **_: Any) -> "Fake":
            return self

        def apply(self, variables: dict, x_TD: jax.Array, shift: float, key: jax.Array) -> tuple[jax.Array, None]:
            return x_TD + variables["params"]["w"] * shift + jax.random.uniform(key), None

    keys = jax.random.split(KEY, 3)
    wanted = 10.0 * (1 + 2 + 3) + sum(float(jax.random.uniform(key)) for key in keys)
    for execution in (Execution(remat="block"), Execution(scan=True), Execution(remat="dots", scan=True)):
        got = run_blocks([Fake(i) for i in range(3)], execution, jnp.zeros((2, 2)), 10.0, keys=keys)
        assert_close(got, np.full((2, 2), wanted))
