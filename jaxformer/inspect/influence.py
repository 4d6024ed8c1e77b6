"""Causes of a prediction among the training documents: the derivative of a text's log-probability by the weight of each
document, through all steps of training, and the proof, which is to train again without them.

The batch at a step is a pure function of data, seed and step, and on the same devices a step is bit-identical. So
training can be repeated with other weights for the losses of some documents, and everything else equal: batches,
denominators, dropout, schedule. A step whose weights are all 1 is the run's own program; one with other weights is
another program, which rounds differently. The derivative is that of this function of the weights, computed backwards
through the steps from states that are computed again (REPLAY, Engstrom et al. 2025). TracIn (Pruthi et al. 2020,
section 3.2) is cheaper, and leaves out how an update changes those after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt, log
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.data.dataset import Batch
from jaxformer.data.windows import TextDataset, eval_batches, next_token_batch
from jaxformer.errors import UserError
from jaxformer.models.objective import Params, objective_of
from jaxformer.nn.embedding import check_tokens
from jaxformer.parallel.mesh import batch_sharding, global_device_put, make_mesh
from jaxformer.runs.run import Run, load_data, read_config
from jaxformer.terminal import short_repr
from jaxformer.train.setup import TrainSetup, TrainState
from jaxformer.train.step import CompiledStep, make_train_step

SMALLEST = 1e-30
"""Replaces zeros of the optimizer's state where a derivative is taken: a square root has none at 0."""
WINDOWS = 8
"""Windows of a text that are evaluated at once."""

Progress = Callable[[int, int], object]
"""Called after each step with the number of steps done, and of all."""


class Replay:
    """The training of a run on windows of text, repeated with other weights of its documents.

    A target has the weight of its document, 1 in the run, and the end-of-text token after a document belongs to it.
    Steps, batches and denominators remain, so that a document of weight 0 takes part as context alone: its tokens are
    read, where a window reaches into the next document, but not learned.

    Attributes:
      documents: tokens of each document, N arrays, with the end-of-text token after it.
      n_steps: number of steps, up to the run's checkpoint.
    """

    def __init__(self, run: Run) -> None:
        """Read the data of a run, whose training is repeated up to its checkpoint.

        Raises:
          UserError: it was not trained, or not on windows of text, or began with pretrained parameters; or as
            `load_data`.
        """
        if not run.step:
            raise UserError(f"{run.path} has no training to repeat, as it is at step 0; name a run that was trained.")
        config = read_config(run.path)
        data = load_data(run.path, config)
        if type(data) is not TextDataset or config.init_from is not None:
            raise UserError(f"{run.path} was not trained on windows of text, from random parameters; name such a run.")
        self._data, self._run, self._model, self.n_steps = data, run, run.text_model()[0], run.step
        self._setup = TrainSetup(config, make_mesh(config.mesh))
        self._step, self._weighted_step = CompiledStep(self._setup, lambda _: None), make_train_step(self._setup)
        self._split = batch_sharding(self._setup.mesh)
        tokens, tokenizer = data.corpus.train.tokens, data.corpus.tokenizer
        first = tokenizer.end_of_text if tokenizer.begin_of_text is None else tokenizer.begin_of_text
        starts = np.flatnonzero(tokens == first) + 1
        if tokenizer.begin_of_text is None:
            starts = starts[:-1]  # the last end-of-text token begins no document
        self.documents = np.split(tokens, starts)[1:]
        document_of = np.repeat(np.arange(-1, len(starts)), np.diff(starts, prepend=0, append=len(tokens)))
        self._document_of = replace(data.windows, tokens=document_of.clip(0))

    def train(
        self, weights_N: np.ndarray | None = None, without: Collection[int] = (), progress: Progress = lambda *_: None
    ) -> Params:
        """Train again, with the run's present config and data, and return the last parameters, float32. By default, and
        if all weights are 1, they equal the run's to the last bit on the same devices, versions and XLA flags, unless
        the run was resumed with other settings or data than it began with, such as more steps of a schedule. A step in
        which a target has another weight also rounds differently.

        Args:
          weights_N: weight of each document, float32; 1 by default.
          without: steps, counted from 1, at which all targets have weight 0.

        Raises:
          ValueError: there is not one weight per document.
          IndexError: there is no such step.
        """
        for step, state, _ in self.steps(weights_N, without):
            progress(step, self.n_steps)
            params = state.params
        return params

    def steps(
        self, weights_N: np.ndarray | None = None, without: Collection[int] = ()
    ) -> Iterator[tuple[int, TrainState, float]]:
        """Train again as `train`, and yield each step, counted from 1, the state after it, whose memory the next one
        takes, and its loss."""
        if outside := [step for step in without if not 1 <= step <= self.n_steps]:
            raise IndexError(f"there is no step {outside[0]}; the run has {self.n_steps}, from 1 on.")
        state, weights_N = self._setup.init_state(), self._weights(weights_N)
        for step, inputs in enumerate(self._inputs(0, self.n_steps), 1):
            state, loss = self._advance(state, np.zeros_like(weights_N) if step in without else weights_N, *inputs)
            yield step, state, float(loss)  # virtual devices with many steps in flight wait for each other forever

    def leave_out(self, documents: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return weights of all documents, `(N,)` float32: 0 for some, and 1 for the others."""
        weights_N = np.ones(len(self.documents), np.float32)
        weights_N[documents] = 0
        return weights_N

    def log_probability(self, params: Params, tokens: np.ndarray | str) -> jax.Array:
        """Return the log-probability in nats of the tokens of a text after the first, a float32 scalar, in windows of
        the context length. Raises `ValueError` for fewer than two tokens, or ids outside the vocabulary."""
        tokens = np.asarray(self._run.tokens(tokens))
        check_tokens(tokens, self._model.vocab_size)
        if len(tokens) < 2:
            raise ValueError(f"expected 2 tokens or more, got {len(tokens)}; the first token is not predicted.")
        length, n_predicted = self._model.context_length + 1, self._model.n_predicted
        windows = eval_batches(tokens, length, n_predicted, WINDOWS)
        batches = (next_token_batch(windows_BT, n_predicted, weights) for windows_BT, weights in windows)
        return -sum((_nats(self._setup.model, params, batch) for batch in batches), jnp.float32(0))

    def influence(
        self,
        texts: Sequence[np.ndarray | str],
        weights_N: np.ndarray | None = None,
        progress: Progress = lambda *_: None,
    ) -> tuple[Params, np.ndarray]:
        """Return the last parameters, and the derivative of each text's log-probability by the weight of each document,
        in nats, `(texts, N)` float32: to first order, what the document added to it. A text may be given as its tokens.

        It takes two trainings and a backward pass through each step, in the memory of 2·√steps states.

        Raises:
          FloatingPointError: a derivative is not finite.
        """
        part, kept, steps = isqrt(self.n_steps - 1) + 1, [jax.device_get(self._setup.init_state())], self.n_steps
        for step, state, _ in self.steps(weights_N):
            if step % part == 0:
                kept.append(jax.device_get(state))
            progress(step, 3 * steps)
        params = jax.tree.map(jnp.copy, state.params)
        gradients = [jax.grad(self.log_probability)(params, tokens) for tokens in texts]
        layout = self._layout_of_derivatives()
        zero = lambda x, at: jnp.zeros((len(texts), *x.shape), x.dtype, device=at)  # noqa: E731
        zeros = jax.tree.map(zero, _split(state)[0], layout)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *gradients)
        to_state = zeros._replace(params=jax.device_put(stacked, layout.params))
        weights_N = self._weights(weights_N)
        to_weights = jnp.zeros((len(texts), len(self.documents)), jnp.float32)
        for start in reversed(range(0, steps, part)):
            states, inputs = [], list(self._inputs(start, min(start + part, steps)))
            state = jax.device_put(kept[start // part], self._setup.state_shardings)
            for each in inputs:
                states.append(jax.tree.map(jnp.copy, state))
                state, loss = self._advance(state, weights_N, *each)
                jax.block_until_ready(loss)
            for each in reversed(inputs):
                to_state, of_step = self._pull(states.pop(), weights_N, to_state, *each)
                to_weights = jax.block_until_ready(to_weights + of_step)
                progress(3 * steps - 2 * int(each[-1]), 3 * steps)
            if not jnp.isfinite(to_weights).all():
                raise FloatingPointError("the derivative of training is not finite")
        return params, np.asarray(to_weights)

    def _weights(self, weights_N: np.ndarray | None) -> np.ndarray:
        N = len(self.documents)
        weights_N = np.ones(N, np.float32) if weights_N is None else np.asarray(weights_N, np.float32)
        if weights_N.shape != (N,):
            raise ValueError(f"weights of shape {weights_N.shape} for {N} documents; give one per document.")
        return weights_N

    def _inputs(self, start: int, stop: int) -> Iterator[tuple[Batch, np.ndarray, np.int32]]:
        """Yield the batch, the index of the document of each target, and the step, for the steps start, …, stop - 1."""
        for step in range(start, stop):
            read = step + self._setup.config.train.skip_batches
            documents = next_token_batch(self._document_of.batch(read), self._model.n_predicted).targets
            yield (*global_device_put((self._data.batch(read), documents), self._split), np.int32(step))

    def _advance(
        self, state: TrainState, weights_N: np.ndarray, batch: Batch, documents: np.ndarray, step: np.int32
    ) -> tuple[TrainState, jax.Array]:
        """Return state and loss of a step, by the run's own program if all targets have weight 1."""
        if (weights_N == 1).all() or (weights_N[np.asarray(documents)] == 1).all():
            state, metrics = self._step(state, batch, int(step))
            return state, metrics.loss
        return self._weighted(state, weights_N, batch, documents, step)

    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    def _weighted(
        self, state: TrainState, weights_N: jax.Array, batch: Batch, documents: jax.Array, step: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        """Return state and loss of a step in which targets have the weights of their documents."""
        weights = weights_N[documents] * np.float32(1 / documents.size)
        state, metrics = self._weighted_step(state, batch._replace(weights=weights), step)
        return state, metrics.loss

    @partial(jax.jit, static_argnums=0)
    def _pull(self, state: TrainState, weights_N: jax.Array, to_state: TrainState, *inputs: Any) -> tuple[Any, ...]:
        """Return derivatives by the floats of the state before a step, and by the weights, from those by the state
        after it."""
        floats, others = _split(state)

        def advance(floats: TrainState, weights_N: jax.Array) -> TrainState:
            return _split(self._weighted(_join(floats, others), weights_N, *inputs)[0])[0]

        inside = jax.tree.map(lambda x: jnp.where(x == 0, SMALLEST, x), floats.opt_state)
        _, pull = jax.vjp(advance, floats._replace(opt_state=inside), weights_N)
        to_floats, to_weights = jax.vmap(pull)(to_state)
        return jax.lax.with_sharding_constraint(to_floats, self._layout_of_derivatives()), to_weights

    def _layout_of_derivatives(self) -> TrainState:
        """Return how derivatives by the floats of a state lie on the devices: as these, each with an axis of texts. The
        program of a backward step is compiled for no other, as its results are the next one's arguments."""
        stacked = lambda x: NamedSharding(x.sharding.mesh, PartitionSpec(None, *x.sharding.spec))  # noqa: E731
        layout: TrainState = jax.tree.map(stacked, _split(self._setup.abstract_state)[0])
        return layout


@dataclass(frozen=True)
class Proof:
    """Training without some documents."""

    documents: np.ndarray
    """Indices of the documents left out."""
    predicted: float
    """Minus the sum of their influence on the text, in nats."""
    measured: float
    """Change of the log-probability of the text, in nats."""


@dataclass(frozen=True)
class Causes:
    """The documents that made a text likely or unlikely."""

    tokens: np.ndarray
    """The text; its first token is not predicted."""
    log_probability: float
    """In nats, after the training repeated."""
    is_equal: bool
    """True if the parameters after it equal the run's to the last bit."""
    added_N: np.ndarray
    """Influence of each document, in nats."""
    untrained: float
    """Log-probability of the text if all tokens were equally likely, in nats."""
    proofs: Sequence[Proof] = ()
    """Trainings without the documents of most influence, and without as many others."""

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def ranked(self) -> np.ndarray:
        """Indices of the documents, `(N,)`, those that added most first."""
        return np.argsort(-self.added_N, kind="stable")

    @property
    def is_plausible(self) -> bool:
        """True if no document has more influence on the text than there was to learn of it. More is a sign of training
        at the edge of stability, where small changes of a weight say nothing about leaving a document out."""
        return bool(np.abs(self.added_N).max() <= -self.untrained)


def causes(
    replay: Replay, run: Run, tokens: np.ndarray, prove: int = 0, progress: Progress = lambda *_: None
) -> Causes:
    """Return the influence of all documents on a text, proven by training without `prove` of them, and without as many
    random others. Raises `FloatingPointError` as `Replay.influence` does."""
    params, (added_N,) = replay.influence([tokens], progress=progress)
    is_equal = jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), params, run.params))
    base = float(replay.log_probability(params, tokens))
    untrained = -(len(tokens) - 1) * log(run.text_model()[1].vocab_size)
    found = Causes(tokens, base, is_equal, added_N, untrained)
    proofs = []
    if prove:
        top, others = found.ranked[:prove], np.random.default_rng(0).permutation(found.ranked[prove:])[:prove]
        for left_out in (top, others):
            params = replay.train(replay.leave_out(left_out), progress=progress)
            change = float(replay.log_probability(params, tokens)) - base
            proofs.append(Proof(left_out, -float(added_N[left_out].sum()), change))
    return replace(found, proofs=proofs)


@partial(jax.jit, static_argnums=0)
def _nats(model: Any, params: Params, batch: Batch) -> jax.Array:
    return objective_of(model).loss(model, params, batch)[1]


def _split(state: TrainState) -> tuple[Any, Any]:
    """Return the state with None in place of its other arrays than floats, and with None in place of its floats."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    floats = jax.tree.map(lambda x: x if is_float(x) else None, state)
    return floats, jax.tree.map(lambda x: None if is_float(x) else x, state)


def _join(floats: TrainState, others: TrainState) -> TrainState:
    return jax.tree.map(lambda x, y: y if x is None else x, floats, others, is_leaf=lambda x: x is None)
