from math import e, exp, log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops import experts
from jaxformer.ops.experts import (
    RouterStatistics,
    average_statistics,
    balance_loss,
    capacity,
    capacity_without_padding,
    combine,
    dispatch,
)
from tests.arrays import assert_close, normal

# One compiled program a call instead of one a primitive.
assign, route = jax.jit(experts.assign, static_argnums=(1, 2)), jax.jit(experts.route, static_argnums=(1, 2))
router_statistics = jax.jit(experts.router_statistics, static_argnums=3)

T, E, J, D = 11, 5, 3, 7
LOGITS_TE = 2 * normal(T, E)


def softmax(x: np.ndarray) -> np.ndarray:
    y = np.exp(np.float64(x))
    return y / y.sum(-1, keepdims=True)


def test_weights_are_the_softmax_over_the_chosen() -> None:
    experts_TJ, weights_TJ = route(LOGITS_TE, J)
    wanted = np.argsort(-np.asarray(LOGITS_TE), axis=1)[:, :J]
    np.testing.assert_array_equal(experts_TJ, wanted)
    # As Mixtral computes it: the softmax over all, divided by what the chosen have of it.
    of_all = np.take_along_axis(softmax(LOGITS_TE), wanted, axis=1)
    assert_close(weights_TJ, of_all / of_all.sum(1, keepdims=True))


@pytest.mark.parametrize("n_chosen", [1, 2])
def test_weights_are_renormalised_or_not_as_asked(n_chosen: int) -> None:
    logits_TE = normal(5, 4)
    all_TE = np.sort(np.asarray(jax.nn.softmax(logits_TE)))[:, ::-1][:, :n_chosen]
    assert_close(route(logits_TE, n_chosen, False)[1], all_TE)
    assert_close(route(logits_TE, n_chosen, True)[1], all_TE / all_TE.sum(-1, keepdims=True))


def test_the_weight_of_one_expert_per_token_is_its_probability() -> None:
    experts_T1, weights_T1 = route(LOGITS_TE, 1)
    assert_close(weights_T1, softmax(LOGITS_TE).max(1, keepdims=True))
    np.testing.assert_array_equal(experts_T1[:, 0], np.asarray(LOGITS_TE).argmax(1))


@pytest.mark.parametrize(
    ("args", "room"),
    [
        ((128, 8, 2, None), 128),
        ((128, 8, 2, 1.0), 32),  # 256 choices, 8 experts
        ((128, 8, 2, 1.25), 40),
        ((10, 3, 1, 1.0), 4),  # 3.3 is rounded up
        ((128, 8, 2, 100.0), 128),  # no more than there are tokens
        ((1, 64, 2, 0.5), 1),  # one token always finds room
    ],
)
def test_capacity_by_hand(args: tuple, room: int) -> None:
    assert capacity(*args) == room


def test_places_by_hand() -> None:
    """Experts 0 and 1 with room for two: the third token finds 0 full, and the fourth both."""
    experts_TJ = jnp.array([[0, 1], [0, 2], [1, 0], [1, 0]])
    np.testing.assert_array_equal(assign(experts_TJ, 3, 2), [[0, 2], [1, 4], [3, 6], [6, 6]])


@pytest.mark.slow
def test_slots_are_unique_and_earlier_tokens_go_first() -> None:
    experts_TJ, _ = route(LOGITS_TE, J)
    room = 4
    places = np.asarray(assign(experts_TJ, E, room))
    taken = places[places < E * room]
    assert len(set(taken.tolist())) == taken.size
    np.testing.assert_array_equal(taken // room, np.asarray(experts_TJ)[places < E * room])
    # What comes later changes nothing.
    np.testing.assert_array_equal(assign(experts_TJ[:7], E, room), places[:7])
    assert (places == E * room).sum() == np.maximum(np.bincount(experts_TJ.ravel(), minlength=E) - room, 0).sum() > 0


@pytest.mark.parametrize("room", [T, 4])
def test_the_way_there_and_back(room: int) -> None:
    """Experts that multiply by their number plus 1, against a loop over tokens."""
    x_TD, (experts_TJ, weights_TJ) = normal(T, D, seed=1), route(LOGITS_TE, J)
    slots_TJ = assign(experts_TJ, E, room)
    x_ECD = jax.jit(dispatch, static_argnums=(2, 3))(x_TD, slots_TJ, E, room)
    assert x_ECD.shape == (E, room, D)
    got = combine(x_ECD * (1 + jnp.arange(E))[:, None, None], slots_TJ, weights_TJ)
    wanted, taken = np.zeros((T, D)), [0] * E
    for t in range(T):
        for expert, weight in zip(experts_TJ.tolist()[t], weights_TJ.tolist()[t], strict=True):
            taken[expert] += 1
            if taken[expert] <= room:
                wanted[t] += weight * (expert + 1) * np.asarray(x_TD)[t]
    assert_close(got, wanted)
    assert max(taken) > 4  # so that with room for four some are dropped
    filled = np.abs(x_ECD).sum(-1) > 0
    assert (filled.sum(1) == np.minimum(taken, room)).all()  # the rest are zeros


@pytest.mark.slow
def test_statistics_by_hand() -> None:
    """Logits (1, 0) and (0, 0) and one choice each, where the second finds no room."""
    logits_TE = np.float32([[1.0, 0.0], [0.0, 0.0]])
    found = router_statistics(logits_TE, np.array([[0], [0]]), np.array([[0], [2]]), 1)
    first = e / (e + 1)
    assert_close(found.share_E, [1, 0])
    assert_close(found.probability_E, [(first + 0.5) / 2, (1 - first + 0.5) / 2])
    assert_close(found.z, (log(exp(1) + 1) ** 2 + log(2) ** 2) / 2)
    assert_close(found.dropped, 0.5)


def test_balance_is_one_where_even_and_the_number_of_experts_where_all_go_to_one() -> None:
    even, one = jnp.full(E, 1 / E), jnp.eye(E)[2]
    assert_close(balance_loss(RouterStatistics(even, even, 0.0, 0.0)), 1)
    assert_close(balance_loss(RouterStatistics(one, one, 0.0, 0.0)), E)
    assert_close(balance_loss(RouterStatistics(one, even, 0.0, 0.0)), 1)


def test_balance_of_a_batch_is_that_of_its_tokens_in_one_row() -> None:
    """And not the mean of its examples': two that each send all to another expert balance each other."""
    B = 4
    logits_BTE = 2 * normal(B, T, E, seed=3) + 3 * normal(B, 1, E, seed=4)

    def statistics(logits_TE: jax.Array) -> RouterStatistics:
        experts_TJ, _ = route(logits_TE, J)
        return router_statistics(logits_TE, experts_TJ, assign(experts_TJ, E, T), T)

    of_each = jax.jit(jax.vmap(statistics))(logits_BTE)
    batch = balance_loss(jax.tree.map(lambda x: x.mean(0), of_each))
    logits = np.asarray(logits_BTE).reshape(-1, E)
    chosen = np.argsort(-logits, axis=1)[:, :J].ravel()
    assert_close(batch, E * (np.bincount(chosen, minlength=E) / chosen.size) @ softmax(logits).mean(0))
    assert float(jax.vmap(balance_loss)(of_each).mean()) > 1.05 * float(batch)


VALID_BT = np.array([[1] * T, [1] * 4 + [0] * 7, [0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0], [0] * T], bool)
"""An example without padding, one with it on the right, one with it anywhere, and one of nothing else."""


@pytest.mark.slow
def test_padding_counts_in_no_statistic() -> None:
    """Against the equations of the losses, in NumPy, over the tokens that are left."""
    logits_BTE, room = 2 * normal(len(VALID_BT), T, E, seed=3), 3

    def statistics(logits_TE: jax.Array, valid_T: jax.Array) -> RouterStatistics:
        experts_TJ, _ = experts.route(logits_TE, J)
        slots_TJ = experts.assign(experts_TJ, E, room, valid_T)
        return experts.router_statistics(logits_TE, experts_TJ, slots_TJ, room, valid_T)

    @jax.jit
    @jax.value_and_grad
    def losses(logits_BTE: jax.Array) -> jax.Array:
        batch = average_statistics(jax.vmap(statistics)(logits_BTE, VALID_BT))
        return balance_loss(batch) + batch.z

    found = jax.jit(lambda logits: average_statistics(jax.vmap(statistics)(logits, VALID_BT)))(logits_BTE)
    logits_NE = np.float64(logits_BTE)[VALID_BT]
    chosen = np.argsort(-logits_NE, axis=1)[:, :J]
    dropped = sum(
        np.maximum(np.bincount(np.argsort(-logits_TE[valid_T], axis=1)[:, :J].ravel(), minlength=E) - room, 0).sum()
        for logits_TE, valid_T in zip(np.asarray(logits_BTE), VALID_BT, strict=True)
    )
    share_E, probability_E = np.bincount(chosen.ravel()) / chosen.size, softmax(logits_NE).mean(0)
    z = np.square(np.log(np.exp(logits_NE).sum(-1))).mean()
    for got, wanted in zip(found, (share_E, probability_E, z, dropped / chosen.size, len(logits_NE)), strict=True):
        assert_close(got, wanted)
    loss, gradient_BTE = losses(logits_BTE)
    assert_close(loss, E * share_E @ probability_E + z)
    assert dropped > 0 and not gradient_BTE[~VALID_BT].any() and gradient_BTE[VALID_BT].all()


@pytest.mark.parametrize("factor", [None, 0.75, 1.1])
def test_capacity_is_that_of_the_tokens_without_padding(factor: float | None) -> None:
    of_each = jax.vmap(lambda valid_T: capacity_without_padding(valid_T, E, J, factor))
    lengths = np.arange(T + 1)
    limits = of_each(np.arange(T) < lengths[:, None])
    assert limits.tolist() == [capacity(int(n), E, J, factor) for n in lengths]


@pytest.mark.slow
def test_padding_takes_no_slot() -> None:
    """The tokens that are left have the slots that they have without it."""
    experts_TJ, _ = route(LOGITS_TE, J)
    room = capacity(T, E, J, 0.75)
    for valid_T in VALID_BT[1:3]:
        own = capacity(int(valid_T.sum()), E, J, 0.75)
        slots_TJ = np.asarray(assign(experts_TJ, E, room, valid_T, own))
        np.testing.assert_array_equal(slots_TJ[valid_T], assign(experts_TJ[valid_T], E, room, None, own))
        assert own < room and (slots_TJ[~valid_T] == E * room).all()


@pytest.mark.slow
def test_balancing_lowers_the_probability_of_those_chosen_too_often() -> None:
    def loss(logits_TE: jax.Array) -> jax.Array:
        experts_TJ, _ = route(logits_TE, 1)
        return balance_loss(router_statistics(logits_TE, experts_TJ, assign(experts_TJ, E, T), T))

    gradient_E = jax.jit(jax.grad(loss))(jnp.zeros((T, E)).at[:, 2].set(0.1)).sum(0)
    assert gradient_E[2] > 0 and (jnp.delete(gradient_E, 2) < 0).all()


@pytest.mark.slow
def test_experts_mix_no_tokens() -> None:
    """NaN in one token, and in one that found no room; output and gradient."""
    experts_TJ, weights_TJ = np.array([[0], [1], [0], [0]]), np.full((4, 1), 0.5, np.float32)
    slots_TJ = assign(experts_TJ, 2, 2)  # the last token is dropped

    def through(x_TD: jax.Array) -> jax.Array:
        return combine(jnp.sin(dispatch(x_TD, slots_TJ, 2, 2)), slots_TJ, weights_TJ)

    run = jax.jit(jax.value_and_grad(lambda x_TD: (jnp.nansum(through(x_TD)), through(x_TD)), has_aux=True))
    is_hidden = np.isin(np.arange(4), [1, 3])[:, None]
    clean, hidden = (
        jax.device_get(run(np.where(is_hidden, np.float32(value), normal(4, 3)))) for value in (0.0, np.nan)
    )
    for wanted, got in ((clean[0][1], hidden[0][1]), (clean[1], hidden[1])):
        np.testing.assert_array_equal(got[[0, 2]], wanted[[0, 2]])
    assert not hidden[0][1][3].any()


def test_experts_are_chosen_in_the_groups_with_the_largest_two_by_hand() -> None:
    """Scores of 2 groups of 3: .5 + .4 exceeds .8 + 0, so the expert of .8 is not chosen."""
    scores_E, correction_E = np.array([0.8, 1e-9, 1e-9, 0.4, 0.5, 0.1]), np.array([0, 0, 0, 0, 0, 0.35])
    logits_1E = np.log(scores_E / (1 - scores_E))[None]
    in_groups = jax.jit(lambda x: experts.route_in_groups(x, 2, correction_E, 2, 1, factor=3.0))
    of_all = jax.jit(lambda x: experts.route_in_groups(x, 2, renormalize=False))
    experts_TJ, weights_TJ = in_groups(logits_1E)
    np.testing.assert_array_equal(experts_TJ, [[4, 5]])  # .1 + .35 exceeds .4
    assert_close(weights_TJ, [[3 * 0.5 / 0.6, 3 * 0.1 / 0.6]])
    assert_close(of_all(logits_1E)[1], [[0.8, 0.5]])
    with pytest.raises(ValueError, match="4 experts cannot be chosen from 1 of 2 groups of 6 experts in all"):
        experts.route_in_groups(logits_1E, 4, 0.0, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_mixtures_of_experts_are_those_of_transformers(family: str) -> None:
    """Routers, their biases and those of experts, the clamped SwiGLU, and the gate of a shared expert."""
    torch, module = pytest.importorskip("torch"), f"transformers.models.{family}.modeling_{family}"
    theirs = pytest.importorskip(module)
    E, J, D, F = 8, 3, 7, 5
    sizes = {"hidden_size": D, "intermediate_size": F, "moe_intermediate_size": F, "num_experts_per_tok": J}
    sizes |= {"num_local_experts": E, "n_routed_experts": E, "num_experts": E, "shared_expert_intermediate_size": F}
    if family == "gpt_oss":
        mixture = theirs.GptOssMLP(theirs.GptOssConfig(**sizes))
    elif family == "deepseek_v3":
        groups = {"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
        mixture = theirs.DeepseekV3MoE(theirs.DeepseekV3Config(**sizes, **groups))
    else:
        mixture = theirs.Qwen2MoeSparseMoeBlock(theirs.Qwen2MoeConfig(**sizes, norm_topk_prob=False))
    draw, weight = np.random.default_rng(0), {}
    for name, leaf in mixture.state_dict().items():
        weight[name] = draw.normal(size=leaf.shape).astype(np.float32)
        leaf.copy_(torch.tensor(weight[name]))
    x_TD = 3 * normal(11, D)
    wanted = mixture(torch.tensor(np.array(x_TD))[None])
    wanted = (wanted[0] if isinstance(wanted, tuple) else wanted)[0].detach()

    def mlp(x_D: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.nn.silu(x_D @ gate.T) * (x_D @ up.T) @ down.T

    @jax.jit
    def ours(x_TD: jax.Array) -> jax.Array:
        name = "router" if family == "gpt_oss" else "gate"
        logits_TE, shared_TD = x_TD @ weight[f"{name}.weight"].T, 0.0
        gate_up, down = weight["experts.gate_up_proj"], weight["experts.down_proj"]
        if family == "gpt_oss":
            chosen = experts.route(logits_TE + weight["router.bias"], J)
        elif family == "deepseek_v3":
            chosen = experts.route_in_groups(logits_TE, J, weight["gate.e_score_correction_bias"], 4, 2, factor=2.5)
        else:
            chosen = experts.route(logits_TE, J, renormalize=False)
        slots_TJ = experts.assign(chosen[0], E, len(x_TD))
        x_ECD = dispatch(x_TD, slots_TJ, E, len(x_TD))
        if family == "gpt_oss":
            y = jnp.einsum("ecd,edf->ecf", x_ECD, gate_up) + weight["experts.gate_up_proj_bias"][:, None]
            y = experts.clamped_swiglu(y[..., ::2], y[..., 1::2])
            y_ECD = jnp.einsum("ecf,efd->ecd", y, down) + weight["experts.down_proj_bias"][:, None]
        else:
            y_ECD = jax.vmap(mlp)(x_ECD, gate_up[:, :F], gate_up[:, F:], down)
            name = "shared_experts" if family == "deepseek_v3" else "shared_expert"
            shared_TD = mlp(x_TD, *(weight[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down")))
        if family == "qwen2_moe":
            shared_TD = jax.nn.sigmoid(x_TD @ weight["shared_expert_gate.weight"].T) * shared_TD
        return combine(y_ECD, slots_TJ, chosen[1]) + shared_TD

    assert_close(ours(x_TD), wanted)
