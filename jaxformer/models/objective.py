"""What models are trained on, and what is measured of them.

An objective has four functions:
  `loss(model, params, batch, keys_B, smoothing, across)`: what a part of a batch adds to what is minimised, and to the
    loss that people read (it lacks what only regularises), float32 scalars. Dropout is on where keys are given.
  `example_loss(model, params, example, key)`: what one example alone adds, for looking at how it is made.
  `measure(model, params, batch)`: what evaluation has to know of each example, arrays with B first.
  `summary(measures)`: metrics, by name, of what `measure` gave for all examples, joined; one is `loss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.nn.execution import ROUTER
from jaxformer.nn.experts import routers
from jaxformer.ops.experts import balance_loss
from jaxformer.ops.losses import negative_log_likelihood, pair_nll, top1_correct, uniform_cross_entropy
from jaxformer.ops.precision import widened

Params = Any
"""A pytree of arrays: what `model.init(…)["params"]` gives."""

MAX_LOGITS_PER_CHUNK = 2**26
"""How many logits a device holds at once, 256 MiB in float32; of a batch with more they are made in pieces, and made
again for the gradient. Each piece adds to the gradient of the whole unembedding, which costs more than the products of
a piece of a few hundred tokens: with 128,256 tokens in the vocabulary a piece still has 523."""


class BatchReduction(NamedTuple):
    """The parts that a batch is computed in.

    Attributes:
      n: how many there are.
      mean: of a tree that each part has, over all that are computed at once.
      gather: rows that each part has, one after the other, of all that are computed at once.
    """

    n: int = 1
    mean: Callable[[Any], Any] = lambda tree: tree
    gather: Callable[[jax.Array], jax.Array] = lambda rows: rows


NO_REDUCTION = BatchReduction()
"""A batch in one piece."""


class Objective(Protocol):
    """See above."""

    def loss(
        self, model: nn.Module, params: Params, batch: Batch, keys_B: jax.Array | None = None, smoothing: float = 0.0,
        across: BatchReduction = NO_REDUCTION,
    ) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip

    def example_loss(
        self, model: nn.Module, params: Params, example: Batch, key: jax.Array | None = None
    ) -> jax.Array: ...

    def measure(self, model: nn.Module, params: Params, batch: Batch) -> dict[str, jax.Array]: ...

    def summary(self, measures: Mapping[str, np.ndarray]) -> dict[str, float]: ...


class CrossEntropy:
    """The model gives logits of classes: of each next token, of masked ones, of what an image shows."""

    def loss(
        self, model: nn.Module, params: Params, batch: Batch, keys_B: jax.Array | None = None, smoothing: float = 0.0,
        across: BatchReduction = NO_REDUCTION,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Nats a target, the mean over all of them as weighted; what routers of experts add is minimised, too.

        They are to send tokens evenly over all that is computed at once: the batch of all devices, or with
        `compute.grad_accumulation_steps` a part of it.
        """

        def costs(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            nll = negative_log_likelihood(logits, targets)
            return nll, (1 - smoothing) * nll + smoothing * uniform_cross_entropy(logits) if smoothing else nll

        outputs_B, sown = batched_apply(model, params)(*batch.inputs, rngs=_rngs(keys_B))
        costs_B = per_target_loss(costs, model, params, outputs_B, batch.targets)
        routing = across.mean(jax.tree.map(lambda x: jnp.mean(x, axis=0), sown.get(ROUTER, {})))
        if batch.weights is None:
            nll, smoothed = (jnp.mean(cost) / across.n for cost in costs_B)
        else:
            nll, smoothed = (jnp.sum(cost * batch.weights) for cost in costs_B)
        return smoothed + auxiliary_loss(model, routing) / across.n, nll

    def example_loss(self, model: nn.Module, params: Params, example: Batch, key: jax.Array | None = None) -> jax.Array:
        """Nats: the weighted sum, or the mean where there are no weights."""
        logits = model.apply({"params": params}, *example.inputs, rngs=_rngs(key))
        assert isinstance(logits, jax.Array)
        nll = negative_log_likelihood(logits, example.targets)
        return jnp.mean(nll) if example.weights is None else jnp.sum(nll * example.weights)

    def measure(self, model: nn.Module, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Of each example the weighted sums of nats, of targets whose logit is the largest, and of weights."""

        def costs(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            return negative_log_likelihood(logits, targets), top1_correct(logits, targets)

        outputs_B, _ = batched_apply(model, params)(*batch.inputs)
        nll_B, correct_B = per_target_loss(costs, model, params, outputs_B, batch.targets)
        weights_B = jnp.ones(nll_B.shape) if batch.weights is None else batch.weights
        total = lambda x_B: jnp.sum((x_B * weights_B).reshape(len(x_B), -1), axis=1)  # noqa: E731
        return {"nats": total(nll_B), "correct": total(correct_B), "weight": total(jnp.ones_like(nll_B))}

    def summary(self, measures: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Nats a target, and the share of targets that would be guessed right."""
        # In float64, so that the batch's size does not show.
        nats, correct, weight = (measures[name].sum(dtype=np.float64) for name in ("nats", "correct", "weight"))
        return {"loss": float(nats / weight), "accuracy": float(correct / weight)}


class Contrastive:
    """The model gives places in one space to the two halves of a pair, and what cosines are scaled by, as `CLIP`; each
    half is to be told from all others of the batch by the other one (Radford et al. 2021, figure 3).

    A batch's targets say which caption each pair has, int32 `(B,)`: in `summary`, all that are equal are right.
    """

    def loss(
        self, model: nn.Module, params: Params, batch: Batch, keys_B: jax.Array | None = None, smoothing: float = 0.0,
        across: BatchReduction = NO_REDUCTION,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Nats a pair, the mean over the batch, each told from all pairs that are computed at once.

        These are those of all devices. With `compute.grad_accumulation_steps` each microbatch is computed by itself,
        and its pairs are told from fewer: another loss. Pairs of weight 0 are nobody's wrong answer.

        Raises:
          UserError: for label smoothing, as there are no classes.
        """
        if smoothing:
            raise UserError(f"train.label_smoothing is {smoothing}, but pairs have no labels to smooth; set it to 0.")
        image_BE, text_BE, log_scale = self._pairs(model, params, batch, keys_B)
        counts_N = None if batch.weights is None else across.gather(jnp.asarray(batch.weights)) > 0
        among = (across.gather(image_BE), across.gather(text_BE), log_scale, counts_N)
        nll_B = jax.vmap(lambda image_E, text_E: pair_nll(image_E, text_E, *among))(image_BE, text_BE)
        nll = jnp.mean(nll_B) / across.n if batch.weights is None else jnp.sum(nll_B * batch.weights)
        return nll, nll

    def measure(self, model: nn.Module, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Of each pair the two places, which caption it has, whether it counts, and the scale of all."""
        image_BE, text_BE, log_scale = self._pairs(model, params, batch)
        weights_B = jnp.ones(len(image_BE)) if batch.weights is None else jnp.asarray(batch.weights)
        return {
            "image": image_BE, "text": text_BE, "log_scale": jnp.full(len(image_BE), log_scale),
            "caption": jnp.asarray(batch.targets), "weight": weights_B,
        }  # fmt: skip

    def summary(self, measures: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The loss of all pairs as one batch, and how often what is right is among the first 1 and 5 found: of all
        texts for an image, and of all images for a text."""
        counts = measures["weight"] > 0
        image_NE, text_NE = (measures[name][counts].astype(np.float64) for name in ("image", "text"))
        captions = measures["caption"][counts]
        cosine_NN, right_NN = image_NE @ text_NE.T, captions[:, None] == captions
        logits_NN = np.exp(np.float64(measures["log_scale"][0])) * cosine_NN
        nll = [np.logaddexp.reduce(logits_NN, axis=axis) - np.diag(logits_NN) for axis in (0, 1)]
        found = {"loss": float(np.mean(nll))}
        for k in (1, 5):
            found[f"image_to_text_recall_at_{k}"] = recall(cosine_NN, right_NN, k)
            found[f"text_to_image_recall_at_{k}"] = recall(cosine_NN.T, right_NN, k)
        return found

    def example_loss(self, model: nn.Module, params: Params, example: Batch, key: jax.Array | None = None) -> jax.Array:
        """Minus the logit of a pair: with no others to tell it from, its loss is what draws the two together."""
        image_E, text_E, log_scale = model.apply({"params": params}, *example.inputs, rngs=_rngs(key))  # type: ignore[misc]
        return -jnp.exp(log_scale) * (image_E @ text_E)

    def _pairs(
        self, model: nn.Module, params: Params, batch: Batch, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Places `(B, E)` of both halves, and the logarithm of the scale."""
        of_one = lambda inputs, key: model.apply({"params": params}, *inputs, rngs=_rngs(key))  # noqa: E731
        found: tuple = jax.vmap(of_one, out_axes=(0, 0, None))(batch.inputs, keys_B)
        return found


def recall(scores_NM: np.ndarray, right_NM: np.ndarray, k: int) -> float:
    """Share of the N queries for which a right answer is among the k of highest score; a wrong one of equal score
    stands before it. Each query has a right answer."""
    best_N = np.where(right_NM, scores_NM, -np.inf).max(axis=1)
    before_N = (~right_NM & (scores_NM >= best_N[:, None])).sum(axis=1)
    return float((before_N < k).mean())


OBJECTIVES: dict[str, Objective] = {**dict.fromkeys(Task, CrossEntropy()), Task.CONTRASTIVE: Contrastive()}
"""Objectives by task."""


def objective_of(model: nn.Module) -> Objective:
    """Return the objective of the task that a model declares."""
    return OBJECTIVES[contract_of(model).task]


def mean_loss(model: nn.Module, params: Params, batch: Batch) -> jax.Array:
    """Nats a target of a batch, the mean over all of them as weighted, without dropout: a float32 scalar."""
    nats = objective_of(model).loss(model, params, batch)[1]
    return nats if batch.weights is None else nats / jnp.sum(batch.weights)


def batched_apply(model: nn.Module, params: Params) -> Callable[..., tuple[Any, Any]]:
    """Return `(*inputs_B, rngs)` to features or, of a model without, logits; and the collection `ROUTER`."""
    method = "features" if contract_of(model).has_features else None
    return jax.vmap(partial(model.apply, {"params": params}, mutable=[ROUTER], method=method))


def per_target_loss(
    function: Callable[[jax.Array, jax.Array], Any], model: nn.Module, params: Params, outputs_B: Any, targets: Any
) -> Any:
    """Return `function(logits, targets)` of each example, a tree of arrays of the targets' shape; of a model with
    features, with about `MAX_LOGITS_PER_CHUNK` logits at a time.

    Args:
      function: of logits `(…, V)` and int32 targets `(…,)`, for each target by itself.
      outputs_B: outputs of `batched_apply`.
      targets: with B first.
    """
    contract, targets_B = contract_of(model), jnp.asarray(targets)
    if not contract.has_features:
        return jax.vmap(function)(outputs_B, targets_B)
    pieces = n_chunks(targets_B.size, contract.n_classes) if contract.n_classes else 1

    def unembedded(params: Params, x: jax.Array, targets: jax.Array) -> Any:
        logits: Any = model.apply({"params": params}, x, method="unembed")
        return function(logits, targets)

    if pieces == 1:
        return jax.vmap(partial(unembedded, params))(outputs_B, targets_B)
    # From here on each token is for itself, whatever sequence it is of.
    x_ND, targets_N = outputs_B.reshape(targets_B.size, -1), targets_B.reshape(-1)
    filling = -len(x_ND) % pieces  # what is predicted from it is cut off again
    x_ND, targets_N = jnp.pad(x_ND, ((0, filling), (0, 0))), jnp.pad(targets_N, (0, filling))
    # What the pieces add up to, the gradient of these parameters, is summed in float32.
    wide = jax.tree.map(widened, params)

    @jax.checkpoint
    def one(piece: tuple[jax.Array, jax.Array]) -> Any:
        return unembedded(jax.tree.map(lambda w, like: w.astype(like.dtype), wide, params), *piece)

    losses = jax.lax.map(one, (x_ND.reshape(pieces, -1, x_ND.shape[-1]), targets_N.reshape(pieces, -1)))
    return jax.tree.map(lambda x: x.reshape(-1)[: targets_B.size].reshape(targets_B.shape), losses)


def n_chunks(n_tokens: int, vocab_size: int) -> int:
    """Into how many pieces tokens are cut so that the logits of each stay at about `MAX_LOGITS_PER_CHUNK`."""
    return min(n_tokens, -(-n_tokens * vocab_size // MAX_LOGITS_PER_CHUNK))


def auxiliary_loss(model: nn.Module, routing: Any) -> jax.Array:
    """What the routers of experts add to the loss, as its config weighs it; from statistics averaged over the batch."""
    total = jnp.float32(0)
    for found in routers(routing).values():
        total += model.config.balance_weight * balance_loss(found) + model.config.router_z_weight * found.z
    return total


def is_causal_lm(model: nn.Module) -> bool:
    """Return whether a model predicts the next token at each position of one sequence."""
    return contract_of(model).task is Task.CAUSAL_LM


def next_token_nll(
    model: nn.Module, params: Params, tokens_T: jax.Array, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Nats that each token of one sequence costs a language model given those before it, `(T - 1,)` float32.

    A model that predicts only the end of the window (`mlp_concat`) gives that much: `(1,)`. Dropout is on
    where a key is given.
    """
    logits = model.apply({"params": params}, tokens_T[:-1], rngs=_rngs(dropout_key))
    assert isinstance(logits, jax.Array)
    return negative_log_likelihood(logits, tokens_T[1:][-logits.shape[0] :])


def _rngs(dropout_key: jax.Array | None) -> dict[str, jax.Array] | None:
    return None if dropout_key is None else {"dropout": dropout_key}
