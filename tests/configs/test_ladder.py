"""Candidates for the recipe of the ladder, and the table of their outcomes."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from configs import ladder
from jaxformer.cli.arguments import load_config
from jaxformer.data.windows import next_token_batch
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.run import abstract_params
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_train_step

LAST = [*ladder.RECIPE][-1]


@pytest.mark.slow
def test_candidates_have_at_most_a_million_parameters_and_equal_tokens() -> None:
    for name in ladder.RECIPE:
        config = load_config(f"ladder:{name}")
        model: Any = config.model
        assert config.steps * config.train.batch_size * model.context_length == pytest.approx(800_000, rel=0.002)
        sizes = jax.tree_util.tree_leaves_with_path(abstract_params(model.build()))
        inner = sum(leaf.size for path, leaf in sizes if "W_E" not in str(path) and "W_out" not in str(path))
        assert inner == pytest.approx(1e6, rel=0.02) if name != LAST else 0.8e6 < inner < 1e6


@pytest.mark.slow
def test_the_last_candidate_learns_a_batch_by_heart() -> None:
    config = load_config(f"ladder:{LAST}")
    model = replace(config.model, vocab_size=32, context_length=8, d_model=16, n_blocks=1, d_ff=(32,))
    config = replace(
        config, model=model, train=replace(config.train, batch_size=4), steps=60,
        optimizer=replace(config.optimizer, warmup_steps=0),
    )  # fmt: skip
    setup = TrainSetup(config, make_mesh(devices=jax.devices()[:1]))
    batch = next_token_batch(np.random.default_rng(0).integers(32, size=(4, 9), dtype=np.int32))
    step, state, losses = make_train_step(setup), setup.init_state(), []
    for i in range(60):
        state, metrics = step(state, batch, np.int32(i))
        losses.append(float(metrics.loss))
    assert np.isfinite(losses).all() and losses[-1] < 0.75 * losses[0]
