"""A mixture of experts against a loop over tokens, under every transformation that a layer meets."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models.objective import Params
from jaxformer.nn.execution import ROUTER
from jaxformer.nn.experts import Experts, routers
from jaxformer.nn.mlp import MLP
from jaxformer.ops.experts import RouterStatistics
from tests.arrays import apply, assert_close, first_params, normal, random_params

B, T, D, E, J, F, OUT = 3, 13, 7, 5, 2, 11, 3
EXPERT = partial(MLP, (F,), OUT)
SWIGLU = partial(MLP, (F,), OUT, "swiglu", False)
MODULES = {
    "one": Experts(EXPERT, E, 1),
    "shared, limited": Experts(SWIGLU, E, J, capacity_factor=0.75, shared_expert=True, router_bias=True),
}
X_BTD = normal(B, T, D)
RNGS = {"dropout": jax.random.key(0)}
"""That there is one tells the layer that this is training: only then is room limited."""


def params_of(module: Experts) -> Params:
    """A router whose logits are far apart: next to a tie, rounding would decide who is chosen."""
    params = random_params(module, X_BTD[0])
    return params | {"W_router": 3 * params["W_router"]}


def output(module: Experts, params: Params, x_TD: jax.Array) -> jax.Array:
    return module.apply({"params": params}, x_TD, rngs=RNGS)


def loss(module: Experts, params: Params, x_TD: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(output(module, params, x_TD)))


@pytest.fixture(scope="module")
def module() -> Experts:
    return MODULES["shared, limited"]


def looped(module: Experts, params: Params, x_TD: jax.Array) -> tuple[np.ndarray, int]:
    """Token by token, each expert an MLP of its own; and how many choices found no room."""
    logits_TE = np.float64(x_TD) @ np.float64(params["W_router"]) + np.float64(params.get("b_router", 0))
    room = T if module.capacity_factor is None else int(np.ceil(module.capacity_factor * module.per_token * T / E))
    mlp = module.make_expert()
    taken, dropped, rows = [0] * E, 0, []
    for x_D, logits_E in zip(x_TD, logits_TE, strict=True):
        row = apply(mlp, params["shared"], x_D) if module.shared_expert else np.zeros(OUT)
        chosen = np.argsort(-logits_E)[: module.per_token]
        among = chosen if len(chosen) > 1 else slice(None)
        for e in chosen:
            if taken[e] == room:
                dropped += 1
                continue
            taken[e] += 1
            own = jax.tree.map(lambda leaf, e=e: leaf[e], params["experts"])
            row = row + np.exp(logits_E[e]) / np.exp(logits_E[among]).sum() * apply(mlp, own, x_D)
        rows.append(np.asarray(row))
    return np.stack(rows), dropped


@pytest.mark.slow
def test_agrees_with_a_loop_over_tokens(module: Experts) -> None:
    params = params_of(module)
    wanted, dropped = looped(module, params, X_BTD[0])
    got, sown = jax.jit(partial(module.apply, rngs=RNGS, mutable=[ROUTER]))({"params": params}, X_BTD[0])
    assert_close(got, wanted)
    assert (dropped > 0) == (module.capacity_factor is not None)
    assert_close(routers({"layer": sown[ROUTER]})["layer"].dropped, dropped / (T * module.per_token))


def test_a_batch_equals_its_examples_computed_separately(module: Experts) -> None:
    params = params_of(module)
    one = jax.jit(partial(output, module, params))
    assert_close(jax.jit(jax.vmap(one))(X_BTD), jnp.stack([one(x_TD) for x_TD in X_BTD]))


@pytest.mark.slow
def test_gradients_of_every_order_of_mapping_agree_with_a_loop(module: Experts) -> None:
    params = params_of(module)
    f = partial(loss, module)
    gradient = jax.jit(jax.grad(f, argnums=(0, 1)))
    loop = [gradient(params, x_TD) for x_TD in X_BTD]
    each = jax.jit(jax.vmap(jax.grad(f, argnums=(0, 1)), (None, 0)))(params, X_BTD)
    for b in range(B):  # vmap of grad: an example's gradient is its own
        jax.tree.map(lambda got, wanted, b=b: assert_close(got[b], wanted), each, loop[b])
    whole, of_x = jax.jit(jax.grad(lambda p, x: jax.vmap(partial(f, p))(x).sum(), argnums=(0, 1)))(params, X_BTD)
    jax.tree.map(assert_close, whole, jax.tree.map(lambda *leaves: sum(leaves), *[grads for grads, _ in loop]))
    assert_close(of_x, jnp.stack([x for _, x in loop]))
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(whole))  # the router's, too


VALID_BT = np.array([[1] * 6 + [0] * 7, [0] * 7 + [1] * 6], bool)


@pytest.mark.slow
def test_padding_changes_neither_tokens_nor_gradients(module: Experts) -> None:
    """By vmap of grad, against a loop over the examples without their padding."""
    params = params_of(module)

    def padded_loss(params: Params, x_TD: jax.Array, valid_T: jax.Array) -> jax.Array:
        y = module.apply({"params": params}, x_TD, valid_T, rngs=RNGS)
        return jnp.sum(jnp.where(valid_T[:, None], jnp.sin(y), 0))

    each = jax.jit(jax.vmap(jax.value_and_grad(padded_loss, argnums=(0, 1)), (None, 0, 0)))(params, X_BTD[:2], VALID_BT)
    alone = jax.jit(jax.value_and_grad(partial(loss, module), argnums=(0, 1)))
    for b, valid_T in enumerate(VALID_BT):
        wanted, (of_params, of_x) = alone(params, X_BTD[b][valid_T])
        got, (got_params, got_x) = jax.tree.map(lambda leaf, b=b: leaf[b], each)
        assert_close(got, wanted)
        jax.tree.map(assert_close, got_params, of_params)
        assert_close(got_x[valid_T], of_x)
        assert not got_x[~valid_T].any()


@pytest.mark.slow
def test_forward_mode_is_the_transpose_of_reverse_mode(module: Experts) -> None:
    """⟨J u, v⟩ = ⟨u, Jᵀ v⟩, alone and under vmap; and the derivative is that of small steps."""
    params, u, v = params_of(module), normal(T, D, seed=1), normal(T, OUT, seed=2)
    f = partial(output, module, params)
    y, forward = jax.jit(lambda x: jax.jvp(f, (x,), (u,)))(X_BTD[0])
    back = jax.jit(lambda x: jax.vjp(f, x)[1](v)[0])(X_BTD[0])
    assert_close(jnp.vdot(forward, v), jnp.vdot(u, back), 1e-5 * T)
    mapped = jax.jit(jax.vmap(lambda x: jax.jvp(f, (x,), (u,))[1]))(X_BTD)
    assert_close(mapped[0], forward)
    h = 1e-3  # small enough that nobody is sent elsewhere; float32 leaves 1e-7 / h of the difference
    assert_close((jax.jit(f)(X_BTD[0] + h * u) - y) / h, forward, 2e-2)


@pytest.mark.slow
def test_room_is_limited_in_training_alone() -> None:
    module = MODULES["shared, limited"]
    params = params_of(module)
    free = module.clone(capacity_factor=None)
    np.testing.assert_array_equal(apply(module, params, X_BTD[0]), apply(free, params, X_BTD[0]))
    assert jnp.abs(apply(module, params, X_BTD[0], rngs=RNGS) - apply(free, params, X_BTD[0])).max() > 0.1
    alone = jnp.concatenate([apply(module, params, x_D[None]) for x_D in X_BTD[0]])
    assert_close(alone, apply(free, params, X_BTD[0]))  # so that decoding a token at a time is the same


def test_nothing_is_sown_where_nobody_asks() -> None:
    module = MODULES["one"]
    variables = jax.eval_shape(lambda: module.init(jax.random.key(0), X_BTD[0]))
    assert set(variables) == {"params"}
    _, sown = jax.eval_shape(lambda variables: module.apply(variables, X_BTD[0], mutable=["intermediates"]), variables)
    assert sown == {}


def test_statistics_are_found_by_layer() -> None:
    first, second = (RouterStatistics(*[jnp.full(2, i)] * 4) for i in range(2))
    sown = {"blocks_0": {"mlp": {"statistics": first}}, "blocks_1": {"mlp": {"statistics": second}}}
    assert routers(sown) == {"blocks_0.mlp": first, "blocks_1.mlp": second}
    assert routers({}) == {}


@pytest.mark.slow
def test_experts_begin_unlike_each_other() -> None:
    params = first_params(MODULES["one"], X_BTD[0])
    assert params["experts"]["W_1"].shape == (E, D, F)
    assert len({float(leaf.sum()) for leaf in params["experts"]["W_1"]}) == E
    # Of the fan-in of one: U(-1/√7, 1/√7), of which 385 draws miss the last twentieth with a chance of 2e-9.
    assert 0.95 * D**-0.5 < float(jnp.abs(params["experts"]["W_1"]).max()) <= D**-0.5


def test_bfloat16_is_routed_in_float32() -> None:
    module, params = MODULES["one"], params_of(MODULES["one"])
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    apply_to = lambda x: module.apply({"params": half}, x, mutable=[ROUTER])  # noqa: E731
    out, sown = jax.eval_shape(apply_to, X_BTD[0].astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(sown)} == {jnp.dtype(jnp.float32)}
