"""What `verify` finds kept, and by what it knows a fault."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.data.dataset import Batch
from jaxformer.inspect import trace
from jaxformer.inspect.verify import causality, gradients, padding, random_inputs, verify, visible_places
from jaxformer.nn import attention as nn_attention
from jaxformer.nn.block import Block
from jaxformer.nn.execution import Execution
from jaxformer.ops import attention, masks
from tests.helpers import exhaustive
from tests.inspect.test_trace import MODELS, T, made

PROMISES = [
    "finite", "causality", "visible places", "rows of attention", "padding", "decoding", "batching", "no dropout",
    "gradients",
]  # fmt: skip
ONCE = ("encoder-decoder",)


def checks(name: str, **changes) -> dict:
    config = replace(MODELS[name], **changes)
    model, params, _ = made(config)
    inputs = random_inputs(config, 3)
    example = [x[0] for x in inputs]
    given = jax.tree.leaves(jax.eval_shape(lambda: model.apply({"params": params}, *example)))[0]
    found = list(verify(model, params, inputs, jnp.zeros((3, *given.shape[:-1]), jnp.int32)))
    assert [check.promise for check in found] == PROMISES
    return {check.promise: check for check in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ONCE else pytest.mark.exhaustive) for name in MODELS]
)
def test_every_model_keeps_what_applies_to_it(name):
    layers = ("n_blocks", "n_encoder_blocks", "n_decoder_blocks", "n_layers")
    found = checks(name, **{field: 1 for field in layers if hasattr(MODELS[name], field)})
    assert all(check.holds for check in found.values()), found
    measured = {promise for promise, check in found.items() if check.measured is not None}
    assert {"batching", "gradients"} <= measured
    if name in ("grouped", "attending", "encoder-decoder"):
        assert {"causality", "padding", "decoding"} <= measured


def sees_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "causal", lambda query_T, key_S: query_T[:, None] + 1 >= key_S)


def sees_not_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "causal", lambda query_T, key_S: query_T[:, None] > key_S)


def writes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    step = nn_attention.decode_step
    monkeypatch.setattr(nn_attention, "decode_step", lambda q, k, v, cache, slot, *rest: step(
        q, k, v, cache, jnp.minimum(slot + 1, cache.k_GKS.values.shape[-1] - 1), *rest
    ))  # fmt: skip


def masks_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def softmax(scores_HTS: jax.Array, mask: masks.Mask = None) -> jax.Array:
        mask_TS = mask.array(*scores_HTS.shape[1:]) if isinstance(mask, masks.Causal) else mask
        return jnp.where(mask_TS, jax.nn.softmax(scores_HTS), 0)

    monkeypatch.setattr(attention, "softmax", softmax)


def forgets_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    step = nn_attention.decode_step
    monkeypatch.setattr(nn_attention, "decode_step", lambda *given: step(*given[:-1], 1.0))


def drops_always(monkeypatch: pytest.MonkeyPatch) -> None:
    after: Callable = Block._after
    key = jax.random.key(0)
    monkeypatch.setattr(Block, "_after", lambda self, x, y, part, _: after(self, x, y, part, key))


@pytest.mark.parametrize(
    ("plant", "broken"),
    [
        (sees_the_next, {"causality", "visible places"}),
        exhaustive(sees_not_itself, {"visible places", "rows of attention"}),  # the first sees nothing
        (writes_late, {"decoding"}),
        exhaustive(masks_late, {"rows of attention", "causality"}),  # the sum below it knows all
        (forgets_the_scale, {"decoding", "padding"}),
        (drops_always, {"no dropout"}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.slow
def test_a_planted_fault_is_named(plant, broken, monkeypatch):
    plant(monkeypatch)
    found = checks("decoder", n_blocks=1, dropout=0.3 if plant is drops_always else 0.0)
    failed = {promise for promise, check in found.items() if not check.holds}
    assert failed >= broken
    assert failed <= broken | {"decoding", "padding"}  # which also part where they are masked or dropped otherwise
    if plant is forgets_the_scale:
        assert found["decoding"].said.endswith("apart from token 3 on")  # the first that comes alone


@pytest.mark.slow
def test_a_wrong_derivative_is_seen():
    """Of a loss whose gradient is doubled on its way through one op."""

    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    with pytest.MonkeyPatch.context() as patch:
        mix = attention.mix
        patch.setattr(attention, "mix", lambda weights, v: doubled(mix(weights, v)))
        found = checks("decoder", n_blocks=1)
    assert not found["gradients"].holds and found["gradients"].measured > 1e-2
    assert all(check.holds for promise, check in found.items() if promise != "gradients")


def test_a_window_is_looked_past(monkeypatch):
    """One that hides nothing is seen, whatever the least number of tokens is."""
    monkeypatch.setattr(
        masks, "sliding_window", lambda query_T, key_S, width: jnp.ones((len(query_T), len(key_S)), bool)
    )
    config = replace(MODELS["decoder"], window=70, context_length=100)
    model, params, _ = made(config)
    inputs = random_inputs(config, 2)
    assert inputs[0].shape == (2, 78)
    found = visible_places(model, params, (inputs[0][0],))
    assert not found.holds and "78 tokens" in found.said
    short = visible_places(model, params, (inputs[0][0][:70],))
    assert short.holds and short.said.endswith("a window of 70 unseen")


@pytest.mark.slow
def test_a_scale_at_its_limit_is_no_wrong_gradient():
    model, params, _ = made(MODELS["clip"])
    inputs = [x[0] for x in random_inputs(MODELS["clip"], 2)]
    found = gradients(model, params | {"t": jnp.float32(5)}, Batch(tuple(inputs), jnp.int32(0)))
    assert found.holds, found


def test_a_slope_that_is_infinite_is_none():
    model, params, inputs = made(MODELS["decoder"])
    steep = params | {"W_out": np.full(params["W_out"].shape, 1e300)}
    found = gradients(model, steep, Batch(inputs, jnp.zeros(T, jnp.int32)))
    assert not found.holds and np.isnan(found.measured)


def test_a_model_that_says_nothing_has_no_causality_to_show():
    model, params, inputs = made(MODELS["decoder"])
    found = causality(model, params | {"W_out": jnp.zeros_like(params["W_out"])}, inputs)
    assert found.measured is None and "no logit depends" in found.said


def test_one_example_has_no_padding_to_try():
    model, params, inputs = made(MODELS["masked"])
    whole = (inputs[0][None], jnp.ones((1, T), bool))
    assert padding(model, params, whole).measured is None


def test_a_scanned_model_is_refused():
    model = MODELS["decoder"].build(Execution(scan=True))
    _, params, inputs = made(MODELS["decoder"])
    with pytest.raises(ValueError, match="build the model plainly"):
        trace(model, params, *inputs)


def test_random_inputs_are_what_models_are_called_with():
    for config in MODELS.values():
        inputs, example = random_inputs(config, 3, most_tokens=5), config.example()
        assert [(x.dtype, x.ndim - 1) for x in inputs] == [(x.dtype, x.ndim) for x in example]
        assert all(len(x) == 3 for x in inputs)
    source, valid, target = random_inputs(MODELS["encoder-decoder"], 4, most_tokens=5)
    assert source.shape == target.shape == (4, 5) and np.asarray(valid)[0].all() and valid.any(axis=1).all()
    assert not valid[1:].all(axis=1).any()
    assert random_inputs(MODELS["concatenated"], 2, most_tokens=5)[0].shape == (2, 7)
