"""Objectives: losses for training, and metrics for evaluation."""

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
from jaxformer.models.inputs import valid_tokens
from jaxformer.nn.execution import ROUTER
from jaxformer.nn.experts import routers
from jaxformer.nn.parameters import Params
from jaxformer.ops.experts import average_statistics, balance_loss
from jaxformer.ops.explicit_axes import with_auto_axes
from jaxformer.ops.linear_cross_entropy import Unembedding, linear_cross_entropy, rows_per_chunk
from jaxformer.ops.losses import negative_log_likelihood, pair_nll, top1_correct, uniform_cross_entropy

MAX_LOGITS_BYTES = 2**29
"""Maximum bytes of logits in float32 that a device holds at once; their gradient takes the same amount. In bfloat16,
which is for accelerators, it is twice that. A batch with more is computed in chunks, each of which reads the
unembedding and adds to its gradient. That costs more than the matmuls of a chunk of a few hundred tokens: with a
vocabulary of 128,256 tokens, a chunk in bfloat16 still has 4,096. Compiled for an H100, the loss of gpt2_124m moves
45.6 GB per 65,536 tokens, and 48.5 GB in chunks of half the size, which need 0.45 GB less memory."""


class BatchReduction(NamedTuple):
    """Reductions over the microbatches of a batch.

    Attributes:
      n: number of microbatches, over all devices and accumulation steps.
      mean: function that averages a tree over the microbatches computed at once.
      gather: function that concatenates rows over the microbatches computed at once.
      n_tokens: tokens of the batch without padding, float32; None without packed examples, or for one microbatch per
        device.
    """

    n: int = 1
    mean: Callable[[Any], Any] = lambda tree: tree
    gather: Callable[[jax.Array], jax.Array] = lambda rows: rows
    n_tokens: jax.Array | None = None


NO_REDUCTION = BatchReduction()
"""Reduction for a batch that is a single microbatch."""


class Objective(Protocol):
    """Loss and metrics of a task."""

    def loss(
        self,
        model: nn.Module,
        params: Params,
        batch: Batch,
        keys_B: jax.Array | None = None,
        smoothing: float = 0.0,
        across: BatchReduction = NO_REDUCTION,
    ) -> tuple[jax.Array, jax.Array]:
        """Return a microbatch's contributions to the objective, and to the reported loss, which excludes
        regularisation: float32 scalars.

        Args:
          keys_B: dropout keys; None for no dropout.
          smoothing: label smoothing.
          across: reductions over the microbatches of the batch.
        """
        ...

    def example_loss(self, model: nn.Module, params: Params, example: Batch, key: jax.Array | None = None) -> jax.Array:
        """Return the loss of one example, a float32 scalar, for inspection."""
        ...

    def measure(self, model: nn.Module, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Return the per-example measurements that `summary` needs, arrays `(B, …)`."""
        ...

    def summary(self, measures: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics by name, including `loss`, from the concatenated measurements of all examples."""
        ...


class CrossEntropy:
    """Cross-entropy of logits over classes: next tokens, masked tokens, or an image's class."""

    @with_auto_axes
    def loss(
        self,
        model: nn.Module,
        params: Params,
        batch: Batch,
        keys_B: jax.Array | None = None,
        smoothing: float = 0.0,
        across: BatchReduction = NO_REDUCTION,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the weighted mean in nats per target; the first value includes the auxiliary losses of routers.

        The auxiliary losses cover all tokens computed at once, without padding: the batch of all devices, or a
        microbatch with `compute.grad_accumulation_steps`, weighted by its share of the tokens.
        """
        (x_B, layer), sown = batched_apply(model, params)(*batch.inputs, rngs=_rngs(keys_B))
        targets_B, weights_B = jnp.asarray(batch.targets), batch.weights
        if weights_B is None:
            weights_B = jnp.full(targets_B.shape, 1 / (targets_B.size * across.n), jnp.float32)
        with jax.named_scope("loss"):  # by which `plan` and profiles know its operations
            if layer is not None:
                x_ND, targets_N = _token_rows(x_B, targets_B)
                smoothed, nll = linear_cross_entropy(
                    x_ND, layer, targets_N, jnp.reshape(weights_B, -1), _max_logits(x_ND), smoothing
                )
            else:
                nll_B = negative_log_likelihood(x_B, targets_B)
                nll = smoothed = jnp.sum(nll_B * weights_B)
                if smoothing:
                    uniform = jnp.sum(uniform_cross_entropy(x_B) * weights_B)
                    smoothed = (1 - smoothing) * nll + smoothing * uniform
        return smoothed + auxiliary_loss(model, sown.get(ROUTER, {}), across), nll

    @with_auto_axes
    def example_loss(self, model: nn.Module, params: Params, example: Batch, key: jax.Array | None = None) -> jax.Array:
        """Return the weighted sum in nats, or the mean without weights."""
        logits = model.apply({"params": params}, *example.inputs, rngs=_rngs(key))
        assert isinstance(logits, jax.Array)
        nll = negative_log_likelihood(logits, example.targets)
        return jnp.mean(nll) if example.weights is None else jnp.sum(nll * example.weights)

    @with_auto_axes
    def measure(self, model: nn.Module, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Return, per example, the weighted sums of nats and of top-1 correct targets, and the sum of weights."""

        def target_metrics(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
            return negative_log_likelihood(logits, targets), top1_correct(logits, targets)

        outputs_B, _ = batched_apply(model, params)(*batch.inputs)
        nll_B, correct_B = per_target(target_metrics, outputs_B, batch.targets)
        weights_B = jnp.ones(nll_B.shape) if batch.weights is None else batch.weights
        total = lambda x_B: jnp.sum((x_B * weights_B).reshape(len(x_B), -1), axis=1)  # noqa: E731
        return {
            "nats": total(nll_B),
            "correct": total(correct_B.astype(nll_B.dtype)),
            "weight": total(jnp.ones_like(nll_B)),
        }

    def summary(self, measures: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the loss in nats per target, and the top-1 accuracy."""
        # In float64, so that the metrics do not depend on the batch size.
        nats, correct, weight = (measures[name].sum(dtype=np.float64) for name in ("nats", "correct", "weight"))
        return {"loss": float(nats / weight), "accuracy": float(correct / weight)}


class Contrastive:
    """Contrastive loss of pairs of embeddings, as in `CLIP`: each embedding is identified among those of the batch by
    its partner (Radford et al. 2021, figure 3).

    A batch's targets are the caption index of each pair, int32 `(B,)`: in `summary`, all pairs with an equal index
    count as correct.
    """

    @with_auto_axes
    def loss(
        self,
        model: nn.Module,
        params: Params,
        batch: Batch,
        keys_B: jax.Array | None = None,
        smoothing: float = 0.0,
        across: BatchReduction = NO_REDUCTION,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the mean over the batch in nats per pair, with all pairs computed at once as negatives.

        These are the pairs of all devices. With `compute.grad_accumulation_steps`, each microbatch has only its own
        negatives, so the loss is a different one. Pairs of weight 0 are not negatives.

        Raises:
          UserError: label smoothing is set, but there are no classes.
        """
        if smoothing:
            raise UserError(f"`train.label_smoothing` is {smoothing}, but pairs have no labels to smooth; set it to 0.")
        image_BE, text_BE, log_scale = self._pairs(model, params, batch, keys_B)
        counts_N = None if batch.weights is None else across.gather(jnp.asarray(batch.weights)) > 0
        among = (across.gather(image_BE), across.gather(text_BE), log_scale, counts_N)
        nll_B = jax.vmap(lambda image_E, text_E: pair_nll(image_E, text_E, *among))(image_BE, text_BE)
        nll = jnp.mean(nll_B) / across.n if batch.weights is None else jnp.sum(nll_B * batch.weights)
        return nll, nll

    @with_auto_axes
    def measure(self, model: nn.Module, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """Return, per pair, both embeddings, its caption index, its weight, and the log of the logit scale."""
        image_BE, text_BE, log_scale = self._pairs(model, params, batch)
        weights_B = jnp.ones(len(image_BE)) if batch.weights is None else jnp.asarray(batch.weights)
        return {
            "image": image_BE,
            "text": text_BE,
            "log_scale": jnp.full(len(image_BE), log_scale),
            "caption": jnp.asarray(batch.targets),
            "weight": weights_B,
        }

    def summary(self, measures: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the loss with all pairs as one batch, and recall at 1 and 5 from images to texts and from texts to
        images."""
        counts = measures["weight"] > 0
        image_NE, text_NE = (measures[name][counts].astype(np.float64) for name in ("image", "text"))
        captions = measures["caption"][counts]
        cosine_NN, correct_NN = image_NE @ text_NE.T, captions[:, None] == captions
        logits_NN = np.exp(np.float64(measures["log_scale"][0])) * cosine_NN
        nll = [np.logaddexp.reduce(logits_NN, axis=axis) - np.diag(logits_NN) for axis in (0, 1)]
        metrics = {"loss": float(np.mean(nll))}
        for k in (1, 5):
            metrics[f"image_to_text_recall_at_{k}"] = recall(cosine_NN, correct_NN, k)
            metrics[f"text_to_image_recall_at_{k}"] = recall(cosine_NN.T, correct_NN, k)
        return metrics

    @with_auto_axes
    def example_loss(self, model: nn.Module, params: Params, example: Batch, key: jax.Array | None = None) -> jax.Array:
        """Return minus the logit of a pair: without negatives, only the term that pulls the pair together remains."""
        image_E, text_E, log_scale = model.apply({"params": params}, *example.inputs, rngs=_rngs(key))  # type: ignore[misc]
        return -jnp.exp(log_scale) * (image_E @ text_E)

    def _pairs(
        self, model: nn.Module, params: Params, batch: Batch, keys_B: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return both embeddings of each pair, `(B, E)`, and the log of the logit scale."""
        apply = lambda inputs, key: model.apply({"params": params}, *inputs, rngs=_rngs(key))  # noqa: E731
        pairs: tuple = jax.vmap(apply, out_axes=(0, 0, None))(batch.inputs, keys_B)
        return pairs


def recall(scores_NM: np.ndarray, correct_NM: np.ndarray, k: int) -> float:
    """Return the fraction of N queries with a correct answer among the k highest scores; in a tie, wrong answers rank
    first. Each query must have a correct answer."""
    best_N = np.where(correct_NM, scores_NM, -np.inf).max(axis=1)
    before_N = (~correct_NM & (scores_NM >= best_N[:, None])).sum(axis=1)
    return float((before_N < k).mean())


OBJECTIVES: dict[str, Objective] = {**dict.fromkeys(Task, CrossEntropy()), Task.CONTRASTIVE: Contrastive()}
"""Objectives by task."""


def objective_of(model: nn.Module) -> Objective:
    """Return the objective of the task that a model declares."""
    return OBJECTIVES[contract_of(model).task]


def mean_loss(model: nn.Module, params: Params, batch: Batch) -> jax.Array:
    """Return the weighted mean loss of a batch in nats per target, without dropout: a float32 scalar."""
    nats = objective_of(model).loss(model, params, batch)[1]
    return nats if batch.weights is None else nats / jnp.sum(batch.weights)


Outputs = tuple[Any, Unembedding | None]
"""Readout `(B, T, D)` and the layer from it to the logits; or logits and None."""


def batched_apply(model: nn.Module, params: Params) -> Callable[..., tuple[Outputs, Any]]:
    """Return a function of `(*inputs_B, rngs)` that returns readouts and the last layer or, without `has_features`,
    logits and None; and a dict with the collection `ROUTER`."""
    has_features = contract_of(model).has_features

    def outputs(model: Any, *inputs: Any) -> Outputs:
        return (model.readout(model.features(*inputs)), model.unembedding()) if has_features else (model(*inputs), None)

    apply = partial(model.apply, {"params": params}, mutable=[ROUTER], method=outputs)
    return jax.vmap(apply, out_axes=((0, None), 0))


def per_target(function: Callable[[jax.Array, jax.Array], Any], outputs_B: Outputs, targets: Any) -> Any:
    """Return `function(logits, targets)` for each example, a tree of arrays in the shape of the targets.

    From readouts, about `MAX_LOGITS_BYTES` of logits are computed at a time.

    Args:
      function: function of logits `(…, V)` and int32 targets `(…,)` that treats each target independently.
      outputs_B: outputs of `batched_apply`.
      targets: int32 `(B, …)`.
    """
    targets_B, (x_B, layer) = jnp.asarray(targets), outputs_B
    if layer is None:
        return function(x_B, targets_B)
    rows_N = _token_rows(x_B, targets_B)
    chunk = rows_per_chunk(targets_B.size, layer.W_DV.shape[-1], _max_logits(rows_N[0]))
    of_row = lambda row: function(layer.logits(row[0]), row[1])  # noqa: E731
    values = jax.vmap(of_row)(rows_N) if chunk == targets_B.size else jax.lax.map(of_row, rows_N, batch_size=chunk)
    return jax.tree.map(lambda x: x.reshape(targets_B.shape), values)


def _token_rows(x_BTD: jax.Array, targets_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the readout of all tokens, `(N, D)`, and their targets `(N,)`: from here on, tokens do not depend on their
    sequence."""
    return x_BTD.reshape(targets_B.size, -1), targets_B.reshape(-1)


def _max_logits(x_ND: jax.Array) -> int:
    width = x_ND.dtype.itemsize
    return (2 if width == 2 else 1) * MAX_LOGITS_BYTES // width


def auxiliary_loss(model: nn.Module, sown_B: Any, across: BatchReduction = NO_REDUCTION) -> jax.Array:
    """Return a microbatch's contribution to the weighted auxiliary losses, from the statistics of each example's
    routers."""
    total = jnp.float32(0)
    for statistics_B in routers(sown_B).values():
        experts = model.config.experts
        router = average_statistics(statistics_B, across.mean)
        loss = experts.balance_weight * balance_loss(router) + experts.router_z_weight * router.z
        # `router.n_tokens` is a mean over devices, each of which adds this to the loss.
        total += (
            loss / across.n if across.n_tokens is None else loss * router.n_tokens / jnp.maximum(across.n_tokens, 1)
        )
    return total


def count_tokens(model: nn.Module, batch: Batch) -> jax.Array | None:
    """Return the number of tokens of packed examples without padding, a float32 scalar; None for other batches."""
    valid_BT = valid_tokens(contract_of(model), batch.inputs)
    return None if valid_BT is None else jnp.sum(valid_BT, dtype=jnp.float32)


def is_causal_lm(model: nn.Module) -> bool:
    """Return True if a model predicts the next token at each position of a sequence."""
    return contract_of(model).task is Task.CAUSAL_LM


def next_token_nll(
    model: nn.Module, params: Params, tokens_T: jax.Array, dropout_key: jax.Array | None = None
) -> jax.Array:
    """Return the negative log-likelihood in nats of each token of a sequence given the tokens before it, `(T - 1,)`
    float32.

    For a model that predicts only the end of the window (`mlp_concat`), it is `(1,)`. A key turns dropout on.
    """
    logits = model.apply({"params": params}, tokens_T[:-1], rngs=_rngs(dropout_key))
    assert isinstance(logits, jax.Array)
    return negative_log_likelihood(logits, tokens_T[1:][-logits.shape[0] :])


def _rngs(dropout_key: jax.Array | None) -> dict[str, jax.Array] | None:
    return None if dropout_key is None else {"dropout": dropout_key}
