"""Pairs told from each other: by hand, and over devices as on one."""

from functools import partial
from math import exp, log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import ComputeConfig, Config, TrainConfig
from jaxformer.data.captions import CaptionsConfig
from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.models.clip import CLIPConfig, ImageTowerConfig, TextTowerConfig
from jaxformer.models.objective import OBJECTIVES, BatchReduction, Contrastive, objective_of, recall
from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh
from jaxformer.train.setup import TrainSetup
from jaxformer.train.step import make_gradient
from tests.arrays import assert_close, random_params, random_tokens

B, T, V = 16, 5, 19
CONFIG = CLIPConfig(
    vision=ImageTowerConfig(
        image_size=4, patch_size=2, mean=(0.5,), std=(0.3,), d_model=8, n_heads=2, d_ff=(12,), n_blocks=1
    ),
    text=TextTowerConfig(V, T, d_model=6, n_heads=2, d_ff=(10,), n_blocks=1),
    d_joint=4,
)
MODEL = CONFIG.build()
PARAMS = random_params(MODEL, *CONFIG.example())
DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(256, size=(B, 4, 4, 1)).astype(np.uint8)
VALID = np.arange(T) < DRAW.integers(1, T + 1, size=(B, 1))
CAPTIONS = np.arange(B, dtype=np.int32)
PAIRS = Batch((IMAGES, np.asarray(random_tokens(V, B, T)), VALID), CAPTIONS)
OBJECTIVE = Contrastive()


class Given:
    """A model whose places are its inputs, scaled by 10."""

    def apply(self, variables, image_E, text_E, rngs=None):
        return image_E, text_E, variables["params"]["t"]


TEN = {"t": jnp.float32(log(10))}


def places(*rows: tuple) -> np.ndarray:
    """Of length 1, from angles in degrees."""
    angles = np.radians(np.float32(rows))
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


@jax.jit
def whole(params, batch):
    return jax.value_and_grad(lambda params: OBJECTIVE.loss(MODEL, params, batch)[0])(params)


@partial(jax.jit, static_argnames="across")
def loss_of(batch, across=BatchReduction()):  # noqa: B008
    return OBJECTIVE.loss(MODEL, PARAMS, batch, across=across)[0]


def test_clip_has_the_contrastive_objective() -> None:
    assert objective_of(MODEL) is OBJECTIVES["contrastive"]
    assert isinstance(objective_of(MODEL), Contrastive)


@pytest.mark.slow
def test_the_loss_of_two_pairs_by_hand() -> None:
    """Images at 0° and 90°, texts at 0° and 60°: logits 10, 5 and 0, 5 √3 by row."""
    batch = Batch((places(0, 90), places(0, 60)), CAPTIONS[:2])
    c = 10 * np.cos(np.radians(30))
    rows = [log(exp(10) + exp(5)) - 10, log(exp(0) + exp(c)) - c]
    columns = [log(exp(10) + exp(0)) - 10, log(exp(5) + exp(c)) - c]
    wanted = (np.mean(rows) + np.mean(columns)) / 2
    for loss in jax.jit(partial(OBJECTIVE.loss, Given()))(TEN, batch):
        assert_close(loss, wanted, 1e-6)
    measures = {name: np.asarray(x) for name, x in jax.jit(partial(OBJECTIVE.measure, Given()))(TEN, batch).items()}
    assert OBJECTIVE.summary(measures)["loss"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_formula_in_the_paper() -> None:
    """Figure 3, written out: cross-entropy of rows and of columns against their own numbers."""

    def figure_3(params):
        encode = jax.vmap(lambda *inputs: MODEL.apply({"params": params}, *inputs)[:2])
        I_e, T_e = encode(*PAIRS.inputs)
        logits = I_e @ T_e.T * jnp.exp(params["t"])
        by_image, by_text = (jax.nn.log_softmax(logits, axis) for axis in (1, 0))
        return -(jnp.mean(jnp.diag(by_image)) + jnp.mean(jnp.diag(by_text))) / 2

    wanted, wanted_grads = jax.jit(jax.value_and_grad(figure_3))(PARAMS)
    loss, grads = whole(PARAMS, PAIRS)
    assert_close(loss, wanted, 1e-6)
    jax.tree.map(partial(assert_close, tolerance=1e-6), grads, wanted_grads)


@pytest.mark.slow
def test_the_trainer_has_the_same_gradient_on_a_mesh() -> None:
    """With parameters in shards, and heads split."""
    config = Config("test", CONFIG, data=CaptionsConfig(), steps=1, train=TrainConfig(batch_size=B))
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    setup = TrainSetup(config, mesh)
    params = jax.device_put(PARAMS, setup.state_shardings.params)
    loss, grads = jax.jit(make_gradient(setup))(
        params, global_device_put(PAIRS, batch_sharding(mesh)), setup.example_keys(0)
    )
    wanted, wanted_grads = whole(PARAMS, PAIRS)
    assert_close(loss, wanted, 1e-6)
    jax.tree.map(assert_close, grads, wanted_grads)


@pytest.mark.slow
def test_accumulating_tells_each_pair_from_those_of_its_part() -> None:
    """The loss is the mean over two parts of half a batch."""
    compute = ComputeConfig(grad_accumulation_steps=2)
    config = Config("test", CONFIG, data=CaptionsConfig(), steps=1, train=TrainConfig(batch_size=B), compute=compute)
    mesh = make_mesh("", jax.devices()[:1])
    setup = TrainSetup(config, mesh)
    loss = jax.jit(lambda *batch: make_gradient(setup)(*batch)[0])(PARAMS, PAIRS, setup.example_keys(0))
    halves = [jax.tree.map(lambda x, i=i: x[i : i + B // 2], PAIRS) for i in (0, B // 2)]
    apart = sum(map(loss_of, halves)) / 2
    assert_close(loss, apart, 1e-6)
    assert abs(apart - loss_of(PAIRS)) > 0.1  # negatives of the other part change it, as those of other devices do


@pytest.mark.slow
def test_losses_of_microbatches_sum_to_that_of_the_batch() -> None:
    assert_close(loss_of(PAIRS, BatchReduction(4)), loss_of(PAIRS) / 4, 1e-6)


@pytest.mark.slow
def test_pairs_of_weight_0_are_as_if_they_were_not_there() -> None:
    """In the loss and in what is said of measures, whatever is in them."""
    kept = np.arange(B) < B // 2
    weights = np.where(kept, np.float32(2 / B), 0)
    alone, filled = jax.tree.map(lambda x: x[: B // 2], PAIRS), PAIRS._replace(weights=weights)
    wanted = loss_of(alone)
    assert_close(loss_of(filled), wanted, 1e-6)
    summaries = []
    for batch in (alone, filled._replace(weights=np.float32(kept))):
        measures = jax.jit(partial(OBJECTIVE.measure, MODEL))(PARAMS, batch)
        summaries.append(OBJECTIVE.summary({name: np.asarray(x) for name, x in measures.items()}))
    assert summaries[0] == pytest.approx(summaries[1], abs=1e-6)
    assert summaries[0]["loss"] == pytest.approx(float(wanted), abs=1e-6)


def test_recall_by_hand() -> None:
    """Images at 0°, 90° and 180°; texts 80°, 100° and 170°.

    The nearest texts of the images are the first (80° off), the first or second (10°, both), the third; of the texts'
    nearest images, the first and second text have the second (10°), the third the third.
    """
    measures = {
        "image": places(0, 90, 180), "text": places(80, 101, 170), "log_scale": np.zeros(3, np.float32),
        "caption": np.array([4, 7, 2]), "weight": np.ones(3, np.float32),
    }  # fmt: skip
    found = OBJECTIVE.summary(measures)
    assert found["image_to_text_recall_at_1"] == pytest.approx(2 / 3)  # the second finds the first one's text at 10°
    assert found["text_to_image_recall_at_1"] == pytest.approx(2 / 3)  # the first finds the second's image at 10°
    assert found["image_to_text_recall_at_5"] == found["text_to_image_recall_at_5"] == 1  # there are only three
    measures["caption"] = np.array([4, 4, 2])  # the first two have one caption: either is right
    found = OBJECTIVE.summary(measures)
    assert found["image_to_text_recall_at_1"] == found["text_to_image_recall_at_1"] == 1


def test_recall_counts_what_stands_before_the_best_right_answer() -> None:
    scores = np.array([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    right = np.array([[False, False, True, True], [True, False, True, False]])
    assert [recall(scores, right, k) for k in (1, 2, 3)] == [0.0, 0.5, 1.0]


def test_recall_of_equal_embeddings_is_zero() -> None:
    """Equal scores are no success: chance would be a half."""
    assert recall(np.ones((8, 8)), np.eye(8, dtype=bool), 4) == 0


def test_the_loss_of_a_pair_alone_draws_it_together() -> None:
    found = jax.jit(partial(OBJECTIVE.example_loss, Given()))(TEN, Batch((places(0)[0], places(60)[0])))
    assert_close(found, -5.0)


def test_labels_that_are_not_there_cannot_be_smoothed() -> None:
    with pytest.raises(UserError, match=r"label_smoothing` is 0\.1, but pairs have no labels"):
        OBJECTIVE.loss(MODEL, PARAMS, PAIRS, smoothing=0.1)
