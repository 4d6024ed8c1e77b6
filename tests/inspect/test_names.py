"""Names and indices select what they say, or are refused with what exists."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import inspect
from jaxformer.data.dataset import Batch
from jaxformer.inspect import capture, capture_gradients, gradient_of, intervene, run_from
from jaxformer.inspect.names import Selector, activation_name, check_index, check_indices
from tests.arrays import plain_decoder
from tests.helpers import slow
from tests.inspect.test_activations import V, random_model

T = 5
CONFIG = plain_decoder(V, 8, 16, n_blocks=2, n_heads=4, n_kv_heads=2, d_ff=(8,), norm="rmsnorm", norm_placement="pre")
MODEL, PARAMS, _ = random_model(CONFIG)
TOKENS, OTHER = jnp.arange(T), (3 * jnp.arange(T) + 1) % V
BATCH, EXAMPLE = Batch((TOKENS[None],), OTHER[None]), Batch((TOKENS,), OTHER)
LAYER = "blocks.0.attention"
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (T, 16), f"{LAYER}.q": (4, T, 4), f"{LAYER}.k": (2, T, 4), f"{LAYER}.mask": (T, T),
    f"{LAYER}.z": (4, T, 4), f"{LAYER}.z (call 2)": (4, T, 4), LAYER: (T, 16),
    "reader.pattern": (T, 3), "output.0": (3,),
}  # fmt: skip


def select(*patterns: str) -> list[tuple[str, int | None]]:
    selector = Selector(patterns)
    selected = [each for name, shape in SHAPES.items() for each in selector.select(name, shape)]
    selector.check()
    return selected


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["embed"], [("embed", None)]),
        (["output.0"], [("output.0", None)]),
        ([f"{LAYER}.z.3"], [(f"{LAYER}.z.3", 3)]),
        ([f"{LAYER}.z.-4"], [(f"{LAYER}.z.-4", 0)]),
        ([f"{LAYER}.z (call 2).1"], [(f"{LAYER}.z (call 2).1", 1)]),
        ([f"{LAYER}.[qk].1"], [(f"{LAYER}.q.1", 1), (f"{LAYER}.k.1", 1)]),
        ([f"{LAYER}.z", f"{LAYER}.z.2"], [(f"{LAYER}.z", None), (f"{LAYER}.z.2", 2)]),
        (["*.mask", "reader.*"], [(f"{LAYER}.mask", None), ("reader.pattern", None)]),
    ],
)
def test_patterns_select_activations_and_their_heads(patterns, expected):
    assert select(*patterns) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (f"{LAYER}.heads", rf"no activation is named '{LAYER}\.heads'; of 9, the nearest are {LAYER}\.mask, "),
        (f"{LAYER}.heads.2", rf"named '{LAYER}\.heads\.2'; of 9, the nearest are {LAYER}"),
        ("blocks.7.attention.z", rf"the nearest are {LAYER}\.z, "),
        (f"{LAYER}.2", rf"named '{LAYER}\.2': {LAYER} \(5, 16\) has no heads"),
        (f"{LAYER}.mask.0", r"mask \(5, 5\) has no heads"),
        ("reader.pattern.0", r"reader\.pattern \(5, 3\) has no heads"),
        ("embed.0", r"embed \(5, 16\) has no heads"),
        (f"{LAYER}.z.03", "no activation is named"),
    ],
)
def test_what_does_not_exist_is_an_error_with_what_does(pattern, message):
    with pytest.raises(KeyError, match=message):
        select(pattern)


@pytest.mark.parametrize("head", [4, 9, -5])
def test_heads_that_an_activation_does_not_have_are_refused(head):
    with pytest.raises(IndexError, match=rf"^{LAYER}\.z has no head {head}; it has 4, 0 to 3\.$"):
        select(f"{LAYER}.z.{head}")
    with pytest.raises(IndexError, match=rf"^{LAYER}\.k has no head 3; it has 2, 0 to 1\.$"):  # a key/value head
        select(f"{LAYER}.k.3")


def test_indices_are_pythons_within_their_axis():
    assert [check_index(i, 3, "head", "x") for i in (0, 2, -1, -3, np.int32(1))] == [0, 2, 2, 0, 1]
    assert check_indices((1, -1), (2, 3, 4), "x") == (1, 2) and check_indices(-2, (2, 3), "x") == (0,)
    for index in (3, -4):
        with pytest.raises(IndexError, match=rf"axis 1 of x has no index {index}; it has 3, 0 to 2"):
            check_indices((0, index), (2, 3), "x")
    with pytest.raises(IndexError, match=r"x has 2 axes, .* but 3 indices"):
        check_indices((0, 0, 0), (2, 3), "x")
    assert check_indices(np.array(1), (2, 3), "x") == check_indices(np.array([1]), (2, 3), "x") == (1,)
    for index in (1.0, True, np.True_, "1", slice(1)):  # True would be 1
        with pytest.raises(TypeError):
            check_index(index, 3, "head", "x")


def test_embeddings_are_named_without_their_module():
    names = [activation_name((module, "embed")) for module in ("embedding", "target_embedding", "mine")]
    assert names == ["embed", "target_embed", "mine.embed"]


def _logit(logits_TV: jax.Array) -> jax.Array:
    return logits_TV[-1, 3]


_gradient_of = partial(gradient_of, MODEL, PARAMS, TOKENS, wrt="embed")
PAIR: Any = (MODEL, PARAMS, [TOKENS], [OTHER])
REFUSED = {
    "capture": (lambda: capture(MODEL, PARAMS, TOKENS, names=f"{LAYER}.z.4"), IndexError),
    "capture_shapes": (lambda: inspect.capture_shapes(MODEL, PARAMS, TOKENS, names=f"{LAYER}.v.2"), IndexError),
    "run_from": (lambda: run_from(MODEL, PARAMS, (TOKENS,), {f"{LAYER}.z.4": jnp.zeros((T, 4))}), IndexError),
    "gradient_of": (lambda: _gradient_of(of=f"{LAYER}.z.9"), IndexError),
    "gradient_of a layer's head": (lambda: _gradient_of(of=f"{LAYER}.2"), KeyError),
    "gradient_of at": (lambda: _gradient_of(of=f"{LAYER}.z.1", at=(50,)), IndexError),
    "gradient_of several": (lambda: _gradient_of(of="blocks.*.mlp_out"), ValueError),
    "gradient_of by": (lambda: gradient_of(MODEL, PARAMS, TOKENS, of=_logit, wrt=f"{LAYER}.W_X"), KeyError),
    "gradients_by_position": (
        lambda: inspect.gradients_by_position(MODEL, PARAMS, EXAMPLE, "blocks.2.resid_pre"), KeyError
    ),
    "patch_activations": (lambda: inspect.patch_activations(*PAIR, f"{LAYER}.z.4", _logit), IndexError),
    "attribution_patching": (lambda: inspect.attribution_patching(*PAIR, "blocks.2.mlp_out", _logit), KeyError),
    "saturation": (lambda: inspect.saturation(MODEL, PARAMS, BATCH, [1.0], "blocks.2.attention"), KeyError),
    "ablation_loss": (lambda: inspect.ablation_loss(MODEL, PARAMS, BATCH, [(LAYER, 4)]), IndexError),
    "ablation_loss's layer": (
        lambda: inspect.ablation_loss(MODEL, PARAMS, BATCH, [("blocks.2.attention", 0)]), KeyError
    ),
    "patch_activations' metric": (lambda: inspect.patch_activations(*PAIR, "embed", lambda logits: logits), ValueError),
    "explain": (lambda: inspect.explain(MODEL, PARAMS, TOKENS.tolist(), 6), IndexError),
    "lens_logits": (lambda: inspect.lens_logits(MODEL, PARAMS, {"embedding": None}, TOKENS), KeyError),
    "logit_attribution": (
        lambda: inspect.logit_attribution(MODEL, PARAMS, TOKENS, target_T=OTHER + V), ValueError
    ),
    "logit_attribution's length": (
        lambda: inspect.logit_attribution(MODEL, PARAMS, TOKENS, target_T=OTHER[:1]), ValueError
    ),
}  # fmt: skip


OUTSIDE = jnp.array([0, V])
AT_ONCE = {
    "patched_back": (lambda: inspect.patched_back(PARAMS, PARAMS, LAYER, 4), IndexError),
    "patched_back's bool": (lambda: inspect.patched_back(PARAMS, PARAMS, LAYER, True), TypeError),
    "patched_back's layer": (lambda: inspect.patched_back(PARAMS, PARAMS, "blocks.2.attention", 0), KeyError),
    "patched_back's MLP": (lambda: inspect.patched_back(PARAMS, PARAMS, "blocks.0.mlp", 0), KeyError),
    "gradient_of at a bool": (lambda: _gradient_of(of=f"{LAYER}.z.1", at=(True,)), TypeError),
    "gradient_of at a slice": (lambda: _gradient_of(of=f"{LAYER}.z.1", at=slice(1)), TypeError),
    "explain's bool": (lambda: inspect.explain(MODEL, PARAMS, [0, 1, 2], True), TypeError),
    "explain's alternatives": (lambda: inspect.explain(MODEL, PARAMS, [0, 1, 2], 1, -1), ValueError),
    "path_attribution's edges": (lambda: inspect.path_attribution(*PAIR, _logit, n_exact=-1), ValueError),
    "saturation's temperature": (lambda: inspect.saturation(MODEL, PARAMS, BATCH, [1.0, 0.0]), ValueError),
    "run_from's pattern": (lambda: run_from(MODEL, PARAMS, (TOKENS,), {"blocks.*.mlp_out": TOKENS}), KeyError),
    "no texts": (lambda: inspect.jacobian_lens(MODEL, PARAMS, []), ValueError),
    "texts": (lambda: inspect.regression_lens(MODEL, PARAMS, [TOKENS, OUTSIDE]), ValueError),
    "tokens": (lambda: inspect.lens_logits(MODEL, PARAMS, {}, OUTSIDE), ValueError),
    "an example": (lambda: inspect.backward_lens(MODEL, PARAMS, Batch((OUTSIDE,), TOKENS[:2])), ValueError),
    "a batch": (lambda: inspect.per_example_gradients(MODEL, PARAMS, Batch((OUTSIDE[None],), TOKENS[:2])), ValueError),
    "inputs": (lambda: inspect.head_statistics(MODEL, PARAMS, OUTSIDE[None]), ValueError),
    "a batch for an example": (lambda: inspect.backward_lens(MODEL, PARAMS, TOKENS[None]), TypeError),
    "tokens of three axes": (lambda: inspect.sharpness(MODEL, PARAMS, TOKENS[None, None]), TypeError),
    "bools for tokens": (lambda: inspect.backward_lens(MODEL, PARAMS, Batch(([True, False],), TOKENS[:2])), TypeError),
}  # fmt: skip
"""Calls that are refused before a program is traced, in which tokens have no values."""


@pytest.mark.parametrize("name", [*AT_ONCE, *map(slow, REFUSED)])
def test_every_instrument_refuses_what_does_not_exist(name):
    call, error = (AT_ONCE | REFUSED)[name]
    with pytest.raises(error) as raised:
        call()
    assert len(str(raised.value)) > 20


@pytest.mark.slow
def test_heads_are_parts_of_their_activations_for_every_instrument():
    call = partial(MODEL.apply, {"params": PARAMS}, TOKENS)
    whole = capture(MODEL, PARAMS, TOKENS)
    for kind, head in (("k", 1), ("z", -4)):
        name, of = f"{LAYER}.{kind}.{head}", f"{LAYER}.{kind}"
        part = capture(MODEL, PARAMS, TOKENS, names=name)
        assert list(part) == [name]
        np.testing.assert_array_equal(part[name], whole[of][head])
        with intervene(name, lambda _, x: 2 * x):
            edited = call()
        with intervene(of, lambda _, x, head=head: x.at[head].multiply(2)):
            np.testing.assert_array_equal(edited, call())
        np.testing.assert_array_equal(run_from(MODEL, PARAMS, (TOKENS,), {name: 2 * part[name]}), edited)
    name, of, late = f"{LAYER}.z.2", f"{LAYER}.z", "blocks.1.attention.z"
    grads = [jax.jit(lambda n=n: capture_gradients(lambda: _logit(call()), names=n)[1][n])() for n in (name, of)]
    np.testing.assert_allclose(grads[0], grads[1][2], rtol=1e-5, atol=1e-6)
    ours = gradient_of(MODEL, PARAMS, TOKENS, of=f"{late}.3", at=(-1,), wrt=name)[name]
    theirs = gradient_of(MODEL, PARAMS, TOKENS, of=late, at=(3, -1), wrt=of)[of]
    np.testing.assert_allclose(ours, theirs[2], rtol=1e-4, atol=1e-5)
    whole_effect = inspect.patch_activations(*PAIR, "blocks.1.attention.z.2", _logit)["blocks.1.attention.z.2"]
    source = capture(MODEL, PARAMS, OTHER, names=f"{late}.2")[f"{late}.2"]
    for t in (0, T - 1):
        with intervene(f"{late}.2", lambda _, x, t=t: x.at[t].set(source[t])):
            np.testing.assert_allclose(whole_effect[t], _logit(call()), rtol=1e-4, atol=1e-5)
