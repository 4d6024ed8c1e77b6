"""A training step on a GPU beside the CPU's."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jaxformer.config import ComputeConfig, Config, OptimizerConfig, TrainConfig
from jaxformer.data.windows import TextConfig, next_token_batch
from jaxformer.models.decoder import ExpertsConfig
from jaxformer.ops import RoPE
from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step
from tests.arrays import plain_decoder
from tests.gpu.beside_float64 import Comparison, beside

__all__ = ["beside"]

DENSE = plain_decoder(
    vocab_size=512, context_length=256, d_model=256, n_blocks=2, n_heads=4, n_kv_heads=2, d_ff=(512,),
    activation="swiglu", norm="rmsnorm", final_norm=True, positions="none", rope=RoPE(), unembedding="tied",
)  # fmt: skip
MODELS = {"decoder": DENSE, "experts": replace(DENSE, experts=ExpertsConfig(4))}
LIMITS = {"float32": 1e-4, "bfloat16": 0.03}


def step(model: str, precision: str, device: jax.Device) -> dict[str, np.ndarray]:
    """Return loss, norms and the update of one step."""
    config = Config(
        "t", MODELS[model], data=TextConfig(), steps=2, optimizer=OptimizerConfig(learning_rate=0.1),
        train=TrainConfig(batch_size=4), compute=ComputeConfig(precision=precision),
    )  # fmt: skip
    setup = TrainSetup(config, make_mesh(devices=[device]))
    tokens = np.random.default_rng(0).integers(512, size=(4, 257), dtype=np.int32)
    state = setup.init_state()
    before = jax.device_get(state.params)
    batch: Any = global_device_put(next_token_batch(tokens), batch_sharding(setup.mesh))
    state, metrics = make_train_step(setup)(state, batch, np.int32(0))
    update = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, before)
    leaves = {f"update of {jax.tree_util.keystr(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(update)}
    return {"loss": np.asarray(metrics.loss), "norm of the gradient": np.asarray(metrics.grad_norm), **leaves}


@cache
def on_the_cpu(model: str) -> dict[str, np.ndarray]:
    return step(model, "float32", jax.devices("cpu")[0])


# In bfloat16, rounding would decide which experts a token chooses.
@pytest.mark.parametrize(
    ("model", "precision"), [("decoder", "bfloat16"), ("decoder", "float32"), ("experts", "float32")]
)
def test_a_step_is_that_of_the_cpu(beside: Comparison, model: str, precision: str) -> None:
    got, wanted = step(model, precision, beside.device), on_the_cpu(model)
    for name, value in wanted.items():
        beside.close(name, got[name], value, LIMITS[precision])
