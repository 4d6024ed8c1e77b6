"""Recurrent sequence to sequence; torch's side is stored, `tests/fixtures/make_recurrent_torch.py` made it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.errors import UserError
from jaxformer.inspect import capture
from jaxformer.models.objective import Params
from jaxformer.models.recurrent import Recurrent, RecurrentCache, RecurrentConfig
from jaxformer.models.recurrent_lm import RecurrentLMConfig
from jaxformer.ops.losses import negative_log_likelihood
from jaxformer.ops.masks import EMPTY
from tests.arrays import apply, assert_close, first_params, normal, random_params, random_tokens
from tests.fixtures.recurrent_weights import LENGTHS, A, D, I, recurrence_of, torch_says
from tests.helpers import slow

V, S, T = 11, 6, 5
SOURCE_S, TARGET_T = random_tokens(V, S), random_tokens(V, T, seed=1)
VALID_S = np.arange(S) < 4
BAHDANAU = RecurrentConfig(V, 32, d_embedding=I, d_model=D, attention="additive", d_attention=A)
CONFIGS = {
    "bahdanau": BAHDANAU,
    "dot, two layers of lstm": replace(BAHDANAU, cell="lstm", n_layers=2, attention="dot", d_attention=None, tied=True),
    "sutskever": replace(
        BAHDANAU, cell="lstm", n_layers=2, bidirectional=False, attention="none", d_attention=None, tied=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Small:
    """A small model and the programs that the tests share."""

    config: RecurrentConfig
    model: Recurrent
    params: Params

    @cached_property
    def forward(self) -> Callable:
        return jax.jit(partial(self.model.apply, {"params": self.params}))

    @cached_property
    def start(self) -> Callable:
        return jax.jit(lambda source_S, valid_S: self._apply(source_S, valid_S, 16, method="start"))

    @cached_property
    def extend(self) -> Callable:
        """Logits in place of features."""

        def extend(tokens_T: jax.Array, positions_T: jax.Array, cache: RecurrentCache) -> tuple:
            x_TD, cache = self._apply(tokens_T, positions_T, cache, 0, method="extend")
            return self._apply(x_TD, method="unembed"), cache

        return jax.jit(extend)

    def _apply(self, *args: object, method: str) -> tuple:
        return self.model.apply({"params": self.params}, *args, method=method)


def drawn(config: RecurrentConfig) -> Small:
    """With weights that keep the gates inside their range, and biases that are not zero."""
    model = config.build()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), SOURCE_S, VALID_S, TARGET_T)["params"])
    leaves, tree = jax.tree.flatten(shapes)
    params = [normal(*leaf.shape, seed=i) / leaf.shape[-1] ** 0.5 for i, leaf in enumerate(leaves)]
    return Small(config, model, jax.tree.unflatten(tree, params))


@pytest.fixture(scope="module", params=["bahdanau", slow("sutskever")])
def case(request: pytest.FixtureRequest) -> Small:
    return drawn(CONFIGS[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_logits_and_alignment_are_those_of_a_torch_model(cell: str) -> None:
    stored, prefix = torch_says(), f"model {cell}: "
    weight = lambda name: stored[f"{prefix}{name}.weight"]  # noqa: E731
    decoder = recurrence_of(stored, f"{prefix}cell.")
    parts = range(1 if cell == "GRU" else 2)
    params = {
        "embedding": {"W_E": weight("source")},
        "target_embedding": {"W_E": weight("target")},
        "encoder_0": recurrence_of(stored, f"{prefix}encoder.", "_l0"),
        "backward_encoder_0": recurrence_of(stored, f"{prefix}encoder.", "_l0_reverse"),
        "W_s_0": np.stack([weight(f"begin.{part}").T for part in parts]),
        # torch has one matrix for the token and the context, one on the other.
        "reader": {
            "recurrence": dict(decoder, W=decoder["W"][:, :I]),
            "C": decoder["W"][:, I:],
            "W_a": weight("W_a").T, "U_a": weight("U_a").T, "v_a": weight("v_a").T,
        },
        "W_o": weight("read").T, "b_o": stored[f"{prefix}read.bias"], "W_out": weight("out").T,
    }  # fmt: skip
    config = replace(BAHDANAU, cell=cell.lower())
    model = config.build()
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), SOURCE_S, VALID_S, TARGET_T)["params"])
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    call = jax.jit(lambda *args: capture(model, params, *args, names=("logits", "reader.pattern")))
    for i, length in enumerate(LENGTHS):
        alignment_TS, logits_TV = call(stored["source"][i], jnp.arange(S) < length, stored["target"][i]).values()
        assert_close(logits_TV, stored[f"{prefix}logits {i}"])
        assert_close(alignment_TS[:, :length], stored[f"{prefix}alignment {i}"])
        assert (alignment_TS[:, length:] == 0).all()


@pytest.mark.slow
def test_an_output_depends_on_all_earlier_tokens_and_no_later_one() -> None:
    case = drawn(BAHDANAU)
    logits_TV = case.forward(SOURCE_S, VALID_S, TARGET_T)
    same = np.stack([TARGET_T] * T)
    variants = (same + np.eye(T, dtype=np.int32)) % V
    forward = jax.jit(jax.vmap(lambda target_T: case.forward(SOURCE_S, VALID_S, target_T)))
    others_TTV, same_TTV = (np.asarray(forward(targets_TT)) for targets_TT in (variants, same))
    felt_TT = (others_TTV != same_TTV).any(-1)  # [i, t]: does output t change with token i?
    np.testing.assert_array_equal(felt_TT, np.triu(np.ones((T, T), bool)))
    assert_close(same_TTV[0], logits_TV)


def test_padding_changes_no_bit(case: Small) -> None:
    source_S = np.asarray(SOURCE_S)
    other_S = np.where(VALID_S, source_S, (source_S + 3) % V)
    assert (other_S != SOURCE_S).any()
    logits_TV = case.forward(SOURCE_S, VALID_S, TARGET_T)
    np.testing.assert_array_equal(logits_TV, case.forward(other_S, VALID_S, TARGET_T))
    n = int(VALID_S.sum())
    assert_close(logits_TV, case.forward(SOURCE_S[:n], VALID_S[:n], TARGET_T))


def test_every_valid_token_of_the_source_is_felt(case: Small) -> None:
    logits_TV = np.asarray(case.forward(SOURCE_S, VALID_S, TARGET_T))
    for i in np.flatnonzero(VALID_S):
        other_S = (np.asarray(SOURCE_S) + (np.arange(S) == i)) % V
        assert np.abs(case.forward(other_S.astype(np.int32), VALID_S, TARGET_T) - logits_TV).max() > 1e-4


def test_a_batch_equals_its_examples_computed_separately(case: Small) -> None:
    source_BS, target_BT = map(np.asarray, (random_tokens(V, 3, S, seed=4), random_tokens(V, 3, T, seed=5)))
    valid_BS = np.arange(S) < np.array([[6], [1], [3]])
    together = jax.jit(jax.vmap(case.forward))(source_BS, valid_BS, target_BT)
    assert_close(together, np.stack([case.forward(*row) for row in zip(source_BS, valid_BS, target_BT, strict=True)]))


@pytest.mark.slow
def test_decoding_in_any_portions_equals_the_full_pass(case: Small) -> None:
    full_TV = case.forward(SOURCE_S, VALID_S, TARGET_T)
    for n in (1, 3):
        # Padding on the left of the prefix, as prompts of a batch have it.
        padded, place = np.pad(TARGET_T[:n], (3 - n, 0), constant_values=7), np.arange(3)
        cache = case.start(SOURCE_S, VALID_S)
        logits_TV, cache = case.extend(padded, np.where(place < 3 - n, EMPTY, place - 3 + n), cache)
        rows = list(np.asarray(logits_TV)[3 - n :])
        for t in range(n, T):
            logits_1V, cache = case.extend(np.asarray(TARGET_T)[[t]], np.array([t]), cache)
            rows.append(np.asarray(logits_1V)[0])
        assert_close(np.stack(rows), full_TV)


@pytest.mark.slow
def test_the_gradient_reaches_every_parameter_and_is_finite_for_a_source_of_padding_alone() -> None:
    case = drawn(CONFIGS["dot, two layers of lstm"])

    def loss(params: Params, valid_S: jax.Array) -> jax.Array:
        logits_TV = case.model.apply({"params": params}, SOURCE_S, valid_S, TARGET_T)
        return negative_log_likelihood(logits_TV, jnp.roll(TARGET_T, -1)).mean()

    grad = jax.jit(jax.grad(loss))
    gradient, of_nothing = (jax.device_get(grad(case.params, valid_S)) for valid_S in (VALID_S, VALID_S & False))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.isfinite(leaf).all() and leaf.any(), path
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(of_nothing))


@pytest.mark.slow
def test_tokens_come_in_of_size_1_and_logits_begin_of_size_1() -> None:
    """So that gates begin in the middle of their range, and the loss near that of a guess."""
    config = replace(BAHDANAU, vocab_size=211, d_embedding=64, d_model=32, tied=True)
    model = config.build()
    params = first_params(model, SOURCE_S, VALID_S, TARGET_T)
    W_VD = params["embedding"]["W_E"] * 64**0.5
    assert_close(W_VD.std(), 1, 0.05)
    logits_TV = apply(model, params, SOURCE_S, VALID_S, random_tokens(211, T))
    assert 0.3 < logits_TV.std() < 2


@pytest.mark.slow
def test_dropout_acts_only_with_a_key() -> None:
    plain = drawn(BAHDANAU)
    dropping = replace(BAHDANAU, dropout=0.3).build()
    call = jax.jit(lambda rngs: dropping.apply({"params": plain.params}, SOURCE_S, VALID_S, TARGET_T, rngs=rngs))
    without = plain.forward(SOURCE_S, VALID_S, TARGET_T)
    assert_close(call(None), without, 1e-6)
    assert jnp.abs(call({"dropout": jax.random.key(0)}) - without).max() > 0.01


@pytest.mark.slow
def test_a_bfloat16_cache_stores_the_source_in_bfloat16() -> None:
    case = drawn(BAHDANAU)
    start = jax.jit(partial(case.model.apply, {"params": case.params}, method="start"), static_argnums=(2, 3))
    cache = start(SOURCE_S, VALID_S, 16, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.memory)} == {jnp.dtype("bfloat16"), jnp.dtype("bool")}
    logits_TV, longer = case.extend(TARGET_T, np.arange(T), cache)
    assert_close(logits_TV, case.forward(SOURCE_S, VALID_S, TARGET_T), 2**-6)  # bfloat16 rounds to 2⁻⁹
    assert jax.tree.map(lambda x: x.dtype, longer) == jax.tree.map(lambda x: x.dtype, cache)
    with pytest.raises(UserError, match="int8; use float32 or bfloat16"):
        start(SOURCE_S, VALID_S, 16, jnp.int8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cell": "rnn"}, ["cell", "rnn", "gru, lstm"]),
        ({"attention": "fixed", "d_attention": None}, ["attention", "fixed", "none, additive, linear, dot"]),
        ({"attention": "dot"}, ["d_attention", "3", "dot"]),
        ({"d_attention": 0}, ["d_attention", "0"]),
    ],
    ids=str,
)
def test_an_invalid_config_is_refused_with_its_value(fields: dict, said: list[str]) -> None:
    with pytest.raises(UserError) as error:
        replace(BAHDANAU, **fields)
    assert all(word in str(error.value) for word in said)


@pytest.mark.slow
def test_linear_attention_is_one_average_of_the_source_for_all_states() -> None:
    """The state's part of the score is the same for all source positions, and the softmax does not see it."""
    small = drawn(replace(BAHDANAU, attention="linear"))
    draw_TS = normal(T, S)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def slope_and_weights(params: Params) -> tuple[jax.Array, jax.Array]:
        weights_TS = capture(small.model, params, SOURCE_S, VALID_S, TARGET_T, names=("reader.pattern",))[
            "reader.pattern"
        ]
        return jnp.sum(weights_TS * draw_TS), weights_TS

    slope, weights_TS = jax.device_get(slope_and_weights(small.params))
    assert_close(weights_TS, np.broadcast_to(weights_TS[0], (T, S)))
    assert np.ptp(weights_TS[0, :4]) > 0.05  # it is no uniform average
    assert np.abs(slope["reader"]["W_a"]).max() < 1e-6


def test_a_plain_recurrent_language_model_is_elmans_network() -> None:
    """In float64, one step at a time."""
    model = RecurrentLMConfig(V, T, "tanh", d_model=D, n_layers=2).build()
    params = random_params(model, TARGET_T)
    x_TD = np.asarray(params["embedding"]["W_E"], np.float64)[TARGET_T]
    for i in range(2):
        p, h_D, h_TD = params[f"layers_{i}"], np.zeros(D), []
        for x_D in x_TD:
            h_D = np.tanh(x_D @ p["W"][0] + p["b_W"][0] + h_D @ p["U"][0])
            h_TD.append(h_D)
        x_TD = np.stack(h_TD)
    assert_close(apply(model, params, TARGET_T), x_TD @ params["W_out"])


@pytest.mark.slow
def test_a_recurrent_language_model_reads_on_from_its_state_past_padding() -> None:
    model = RecurrentLMConfig(V, T, "lstm", d_model=D, n_layers=2).build()
    params = random_params(model, TARGET_T)
    expected_TV = apply(model, params, TARGET_T)
    cache = model.init_cache(1)
    with pytest.raises(UserError, match="the cache's dtype is int8; use float32 or bfloat16 for a recurrent model"):
        model.init_cache(1, jnp.int8)
    tokens, positions = jnp.array([7, TARGET_T[0], TARGET_T[1]]), jnp.array([EMPTY, 0, 1])
    x_TD, cache = apply(model, params, tokens, positions, cache, 0, method="extend")
    assert_close(apply(model, params, x_TD[1:], method="unembed"), expected_TV[:2])
    x_TD, _ = apply(model, params, TARGET_T[2:], jnp.arange(2, T), cache, 0, method="extend")
    assert_close(apply(model, params, x_TD, method="unembed"), expected_TV[2:])
