from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import pytest

from jaxformer.config import ModelConfig
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.norms import LayerNorm, RMSNorm
from tests.helpers import slow
from tests.test_x64 import MODELS

WITH_NORMS = [name for name, config in MODELS.items() if hasattr(config, "norm_eps") or name == "clip"]
SLOWER = {*WITH_NORMS} - {"decoder", "clip"}


def epsilons(config: ModelConfig) -> set[tuple[type, float]]:
    """Every norm that a model calls, with its ε; without computing anything."""
    seen = set()

    def listen(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
        if isinstance(context.module, LayerNorm | RMSNorm):
            seen.add((type(context.module), context.module.eps))
        if isinstance(context.module, MultiHeadAttention) and context.module.qk_norm:
            seen.add((MultiHeadAttention, context.module.norm_eps))
        return call(*args, **kwargs)

    with nn.intercept_methods(listen):
        jax.eval_shape(lambda *xs: config.build().init(jax.random.key(0), *xs), *config.example())
    return seen


@pytest.mark.parametrize("name", [slow(name) if name in SLOWER else name for name in WITH_NORMS])
def test_every_norm_of_a_model_has_the_epsilon_of_its_config(name: str) -> None:
    config = MODELS[name]
    by_family = {(RMSNorm, 1e-6), (LayerNorm, 1e-5), (MultiHeadAttention, 1e-6)}
    assert epsilons(config) and epsilons(config) <= by_family
    towers = ("vision", "text") if name == "clip" else ()
    given = {tower: replace(getattr(config, tower), norm_eps=1e-12) for tower in towers} or {"norm_eps": 1e-12}
    assert {eps for _, eps in epsilons(replace(config, **given))} == {1e-12}


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_a_width_in_the_place_of_epsilon_is_refused(norm: type) -> None:
    with pytest.raises(ValueError, match=r"eps is 16; .* the width is that of the features"):
        norm(16).init(jax.random.key(0), jax.numpy.ones((5, 16)))
