from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ladder.rungs import PlainBlock
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.block import Block, SideInputs
from jaxformer.nn.mlp import MLP
from jaxformer.nn.norms import LayerNorm, RMSNorm
from jaxformer.ops import masks
from tests.arrays import apply, assert_close, normal, random_params

T, D = 7, 13
POSITIONS_T = jnp.arange(T)
MASK_TT = masks.causal(POSITIONS_T, POSITIONS_T)
INPUTS = (normal(T, D), SideInputs(POSITIONS_T, MASK_TT))
ATTENTION, FEED_FORWARD = partial(MultiHeadAttention, 3, 5, 1), partial(MLP, (11,), D)


@pytest.mark.parametrize(
    ("norm", "placement", "residual"),
    [
        (None, "pre", True),
        (RMSNorm, "pre", True),
        (LayerNorm, "post", True),
        (RMSNorm, "both", True),
        (RMSNorm, "post", False),
        (LayerNorm, "output", True),
        (RMSNorm, "parallel", True),
        (RMSNorm, "parallel_two", True),
    ],
)
def test_a_block_is_its_parts_by_hand(norm: type | None, placement: str, residual: bool) -> None:
    block = (Block if residual else PlainBlock)(ATTENTION, FEED_FORWARD, norm, placement)
    params = random_params(block, *INPUTS)
    names = ["attention_norm", "mlp_norm"], ["attention_post_norm", "mlp_post_norm"]
    expected = {"both": [*names[0], *names[1]], "output": names[1], "parallel": names[0][:1]}.get(placement, names[0])
    assert set(params) == {"attention", "mlp", *(expected if norm else [])}

    def norm_of(name: str, x: jax.Array) -> jax.Array:
        return apply(norm(), params[name], x) if norm else x

    x = before = INPUTS[0]
    for part in ("attention", "mlp"):
        read = before if placement.startswith("parallel") else x
        if placement not in ("post", "output"):
            read = norm_of("attention_norm" if placement == "parallel" else f"{part}_norm", read)
        if part == "attention":
            y, _ = apply(ATTENTION(), params["attention"], read, POSITIONS_T, MASK_TT)
        else:
            y = apply(FEED_FORWARD(), params["mlp"], read)
        y = norm_of(f"{part}_post_norm", y) if placement in ("both", "output") else y
        x = x + y if residual else y
        x = norm_of(f"{part}_norm", x) if placement == "post" else x
    got, cache = apply(block, params, *INPUTS)
    assert_close(got, x)
    assert cache is None


def test_the_default_block_is_that_of_the_base_model_at_any_width() -> None:
    params = jax.eval_shape(Block().init, jax.random.key(0), jnp.zeros((T, D)))["params"]
    shapes = {name: params["attention" if "Q" in name else "mlp"][name].shape for name in ("W_Q", "W_1", "W_2")}
    assert shapes == {"W_Q": (D, 8, 64), "W_1": (D, 2048), "W_2": (2048, D)} and "attention_norm" in params


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_block_with_a_source_attends_to_it_between_attention_and_mlp(placement: str) -> None:
    block = Block(ATTENTION, FEED_FORWARD, LayerNorm, placement, make_cross_attention=ATTENTION)
    source, source_mask = normal(5, D, seed=1), normal(T, 5, seed=2) > 0
    x = INPUTS[0]
    inputs = (x, SideInputs(POSITIONS_T, MASK_TT, source=source, source_mask=source_mask))
    params = random_params(block, *inputs)
    parts = {
        "attention": lambda read, p: apply(ATTENTION(), p, read, POSITIONS_T, MASK_TT)[0],
        "cross_attention": lambda read, p: apply(ATTENTION(), p, read, POSITIONS_T, source_mask, source=source)[0],
        "mlp": lambda read, p: apply(FEED_FORWARD(), p, read),
    }
    for part, f in parts.items():
        norm = partial(apply, LayerNorm(), params[f"{part}_norm"])
        x = x + f(norm(x), params[part]) if placement == "pre" else norm(x + f(x, params[part]))
    assert_close(apply(block, params, *inputs)[0], x)
    assert set(params) == {*parts, *(f"{part}_norm" for part in parts)}


class Ones(nn.Module):
    """Stands for a part whose output is all ones."""

    pair: bool = False

    def __call__(self, x_TD: jax.Array, *_: object) -> jax.Array | tuple:
        ones = jnp.ones_like(x_TD)
        return (ones, None) if self.pair else ones


def dropped(residual: bool, rate: float = 0.3, key: jax.Array | None = None) -> np.ndarray:
    x = jnp.zeros((101, 211))
    block = (Block if residual else PlainBlock)(partial(Ones, pair=True), Ones, None, dropout=rate)
    return np.asarray(block.apply({}, x, key=key)[0])


def test_dropout_needs_a_key() -> None:
    assert (dropped(residual=True) == 2).all()


def test_dropout_zeroes_its_share_and_scales_the_rest() -> None:
    y = dropped(residual=False, key=jax.random.key(0))
    assert_close(np.unique(y), [0, 1 / 0.7])
    # 101·211 draws: the share is known to √(0.3·0.7/21311) = 0.0031; this is four of those.
    assert (y == 0).mean() == pytest.approx(0.3, abs=0.0126)


def test_dropout_keeps_the_expectation_and_draws_anew_for_each_part() -> None:
    y = dropped(residual=True, key=jax.random.key(1))
    # Each part adds 0 or 1/0.7; the sum of two has mean 2 and variance 2·0.3/0.7; four standard errors.
    assert y.mean() == pytest.approx(2, abs=4 * (0.6 / 0.7 / y.size) ** 0.5)
    assert_close(np.unique(y), [0, 1 / 0.7, 2 / 0.7])


def test_the_same_key_drops_the_same_features() -> None:
    first, again, other = (dropped(residual=True, key=jax.random.key(seed)) for seed in (2, 2, 3))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_placement_that_is_none_is_refused() -> None:
    """It would be a block without norms."""
    block = Block(partial(MultiHeadAttention, 1, D), partial(MLP, (D,), D), RMSNorm, "prenorm")
    with pytest.raises(ValueError, match="norm_placement is 'prenorm'; it must be one of pre, post, both"):
        block.init(jax.random.key(0), *INPUTS)
