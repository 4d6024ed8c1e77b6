import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxformer.inspect import first_non_finite
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params
from tests.arrays import build, random_tokens

CONFIG = DecoderConfig(
    23, 7, 13, n_blocks=2, n_heads=3, head_dim=5, output_projection=True, d_ff=(17,), norm="rmsnorm", final_norm=True
)
BATCH = random_tokens(23, 3, 8)


def damaged(largest: float, *path: str) -> tuple[nn.Module, Params]:
    """The small decoder with one parameter multiplied, so that its largest value becomes this."""
    model, params = build(CONFIG)
    *parents, name = path
    place = params
    for parent in parents:
        place = place[parent]
    place[name] = place[name] / jnp.abs(place[name]).max() * largest
    return model, params


def test_a_finite_model_has_nothing_to_name() -> None:
    assert first_non_finite(*build(CONFIG), BATCH) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_damaged_parameter_is_named(value: float) -> None:
    named = first_non_finite(*damaged(value, "blocks_1", "attention", "W_K"), BATCH)
    assert named == "the parameter blocks.1.attention.W_K"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("blocks_0", "mlp", "W_1"), "the output of blocks.0.mlp"),
        (("blocks_1", "attention", "W_V"), "the output of blocks.1.attention"),
        (("blocks_1", "mlp_norm", "gamma"), "the output of blocks.1.mlp_norm"),
        (("W_out",), "the output of the model (logits)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_first_module_to_overflow_is_named(path: tuple[str, ...], named: str) -> None:
    model, params = damaged(3e38, *path)  # float32 ends at 3.4e38
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    said = first_non_finite(model, params, BATCH)
    assert said is not None
    assert said.startswith(f"{named} (largest")


class Table(nn.Module):
    """Logits that are a function of a row of a table."""

    first: float
    root: bool = False

    @nn.compact
    def __call__(self, tokens_T: jax.Array) -> jax.Array:
        W = self.param("W", nn.initializers.constant(self.first), (23, 23))
        return jnp.sqrt(W[tokens_T]) if self.root else W[tokens_T] * jnp.where(jnp.arange(23) % 2, 1, -1)


def test_a_loss_that_overflows_alone_is_named() -> None:
    model = Table(3e38)  # logits of ±3e38 are finite, their differences are not
    params = model.init(jax.random.key(0), BATCH[0])["params"]
    named = first_non_finite(model, params, BATCH)
    assert named is not None
    assert named.startswith("the loss (largest")
    assert "3e+38" in named


def test_a_gradient_that_is_infinite_alone_is_named() -> None:
    model = Table(0.0, root=True)  # √0 is 0, its slope is infinite
    params = model.init(jax.random.key(0), BATCH[0])["params"]
    assert first_non_finite(model, params, BATCH) == "the gradient of W"
