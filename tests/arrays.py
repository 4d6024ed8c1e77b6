"""Random arrays, small models and one way to compare numbers."""

from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.cli.arguments import load_config
from jaxformer.ladder.rungs import RungDecoderConfig
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params
from jaxformer.nn.execution import Execution

LADDER = Path(__file__).parents[1] / "configs" / "ladder.py"

PLAIN: dict[str, Any] = {
    "n_blocks": 1, "n_heads": 1, "positions": "learned", "rope": None, "d_ff": (2048, 2048), "activation": "relu",
    "bias": True, "norm": "none", "final_norm": False,
}  # fmt: skip
"""Fields of the simplest decoder: one head and block, learned positions, biases, and no norms."""


def plain_decoder(*args: Any, **fields: Any) -> DecoderConfig:
    """Return the config of the simplest decoder with these fields."""
    return DecoderConfig(*args, **PLAIN | fields)


def plain_rung(*args: Any, **fields: Any) -> RungDecoderConfig:
    """Return the config of the simplest decoder of the ladder with these fields."""
    return RungDecoderConfig(*args, **PLAIN | fields)


def rung_like(config: DecoderConfig, **changes: Any) -> RungDecoderConfig:
    """Return a decoder's config, with the fields that only rungs have, after changes."""
    return RungDecoderConfig(**vars(config) | {"output_projection": True} | changes)


def rung(name: str) -> Any:
    """Return the model config of a rung, in the sources' size."""
    return load_config(f"{LADDER}:{name}").model


def as_array(values: Any, dtype: Any = np.float32) -> jax.Array:
    """Return a JAX array; `jnp.asarray` would compile a conversion per shape."""
    return jax.device_put(np.asarray(values, dtype))


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """float32 from N(0, 1)."""
    return as_array(np.random.default_rng(seed).normal(size=shape))


def random_tokens(vocab_size: int, *shape: int, seed: int = 0) -> jax.Array:
    """int32, uniform."""
    return as_array(np.random.default_rng(seed).integers(vocab_size, size=shape), np.int32)


def first_params(module: nn.Module, *args: Any) -> Params:
    """Return the initial parameters of a module."""
    return jax.jit(lambda: module.init(jax.random.key(0), *args)["params"])()


def random_params(module: nn.Module, *args: Any, seed: int = 0) -> Params:
    """Return random parameters without compiling a program: gains are not one and biases not zero, so that a misplaced
    one shows."""
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *args)["params"])
    draw = np.random.default_rng(seed)

    def leaf(path: tuple, shape: jax.ShapeDtypeStruct) -> jax.Array:
        name, values = path[-1].key, draw.normal(size=shape.shape)
        if name.startswith("gamma"):
            return as_array(1 + 0.3 * values)
        fan_in = prod(shape.shape[: 2 if name == "W_O" else 1])  # 1 for a single number
        return as_array(values / (1 if name in ("W_E", "W_pos") else sqrt(fan_in)))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def build(config: Any) -> tuple[nn.Module, Params]:
    """Return a model with random parameters."""
    model = config.build()
    return model, random_params(model, jnp.zeros(config.context_length, jnp.int32))


@partial(jax.jit, static_argnames=("module", "method"))
def apply(module: nn.Module, params: Params, *args: Any, method: str | None = None, **kwargs: Any) -> Any:
    """Return the module's output, by one compiled program."""
    return module.apply({"params": params}, *args, method=method, **kwargs)


def assert_close(got: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Assert that arrays agree within tolerance · max(1, the largest expected); 1e-5 is 84 float32 epsilons."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * max(1.0, np.abs(wanted).max(initial=0)))


def assert_same_however_computed(config: Any, params: Params, *inputs: Any) -> None:
    """Assert that loss and gradient with dropout do not depend on scanning blocks and activation checkpointing.

    Every parameter must have a gradient.
    """

    @partial(jax.jit, static_argnums=0)
    def value_and_grad(model: nn.Module) -> tuple:
        rngs = {"dropout": jax.random.key(0)}
        loss = lambda params: jax.nn.logsumexp(model.apply({"params": params}, *inputs, rngs=rngs))  # noqa: E731
        return jax.value_and_grad(loss)(params)

    wanted, got = value_and_grad(config.build()), value_and_grad(config.build(Execution(remat="block", scan=True)))
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert np.abs(theirs).max() > 0, path
        assert_close(ours, theirs)
