"""What a model promises, held against what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.inspect.trace import editing, trace_names
from jaxformer.models.clip import LARGEST_LOG_SCALE
from jaxformer.models.objective import Params, is_causal_lm, objective_of
from jaxformer.ops.masks import EMPTY
from jaxformer.ops.precision import widened

ROUNDING = 1e-5
"""What float32 may differ by, of the largest value or of 1, where the same is summed in another order."""
FINITE_DIFFERENCE = 1e-5
"""What a derivative in float64 may differ by from a difference quotient, of its own size."""

NO_NEXT = "it gives no logits of next tokens"

Inputs = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Check:
    """One promise of a model."""

    promise: str
    said: str
    """What was measured; or why nothing was."""
    measured: float | None
    """The largest deviation; None where there is nothing to measure."""
    limit: float

    @property
    def holds(self) -> bool:
        """Also where there is nothing to measure; not where the deviation is NaN."""
        return self.measured is None or self.measured <= self.limit


def verify(model: nn.Module, params: Params, inputs_B: Inputs, targets_B: jax.Array) -> Iterator[Check]:
    """Hold a model against all that it promises, one promise after the other; against the first alone, finite results,
    where it does not keep that.

    It runs as it is built, which must be plainly (not scanned), in float32 and without dropout; gradients alone are
    those of the plain formula for attention. What is not a matter of one model, several devices,
    `python -m jaxformer verify` looks at.

    Args:
      inputs_B: what the model is called with, of several examples; see `random_inputs`.
      targets_B: classes that it could be trained to give, int32.
    """
    params = jax.tree.map(widened, params)
    first = jax.tree.map(lambda x: x[0], inputs_B)
    for check in (
        lambda: finite(model, params, inputs_B),
        lambda: causality(model, params, first),
        lambda: visible_places(model, params, first),
        lambda: rows_of_attention(model, params, first),
        lambda: padding(model, params, inputs_B),
        lambda: decoding(model, params, first),
        lambda: batching(model, params, inputs_B),
        lambda: no_dropout(model, params, first),
        lambda: gradients(model, params, Batch(first, targets_B[0])),
    ):
        with jax.default_matmul_precision("highest"):  # an accelerator would round more than this looks for
            found = check()
        yield found
        if found.promise == "finite" and not found.holds:
            return


def random_inputs(config: ModelConfig, n: int, seed: int = 0, most_tokens: int = 64) -> Inputs:
    """`n` examples of anything: tokens and pixels of all kinds, texts of several lengths, the first of them as long as
    it goes and the last shorter.

    Args:
      most_tokens: of a text, where the model reads any length; where it has a window, a few more than that.
    """
    rng, size = np.random.default_rng(seed), _vocabulary(config)
    if (window := getattr(config, "window", None)) is not None:
        most_tokens = max(most_tokens, window + 8)
    fixed = config.contract.fixed_length  # it reads full windows
    T = 0

    def fill(x: np.ndarray) -> np.ndarray:
        nonlocal T
        if x.dtype == np.uint8:
            return rng.integers(0, 256, (n, *x.shape), np.uint8)
        if x.ndim:
            T = len(x) if fixed else min(len(x), most_tokens)
        if x.dtype == bool:
            lengths = np.append(T, rng.integers(1, max(2, T), n - 1))
            return np.arange(T) < lengths[:, None]
        if not x.ndim:  # how long a prefix is
            return rng.integers(1, T, n).astype(x.dtype)
        return rng.integers(0, size, (n, T)).astype(x.dtype)

    return tuple(jnp.asarray(fill(x)) for x in config.example())


def finite(model: nn.Module, params: Params, inputs_B: Inputs) -> Check:
    """No result is infinite or NaN: else nothing can be compared."""
    forward = lambda params, inputs: model.apply({"params": params}, *inputs)  # noqa: E731
    results = jax.jit(jax.vmap(forward, in_axes=(None, 0)))(params, inputs_B)
    broken = [int(jnp.sum(~jnp.isfinite(x))) for x in jax.tree.leaves(results)]
    numbers = sum(x.size for x in jax.tree.leaves(results))
    return Check("finite", f"numbers that are infinite or NaN, of {numbers:,} that it gives", float(sum(broken)), 0.0)


def causality(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """No logit depends on a later token: its derivative with respect to what stands for that token is exactly 0."""
    ask = partial(Check, "causality", limit=0.0)
    if not _is_causal(model):
        return ask(NO_NEXT, None)
    tokens_T = inputs[_target(model)]
    embedded = trace_names(model, params, *inputs, names=("*embedding", "*embedding (call 2)"))
    at = list(embedded)[-1]
    direction_V = None

    def along(moved_TD: jax.Array, params: Params) -> jax.Array:
        nonlocal direction_V
        with editing(lambda name, x: x + moved_TD if name == at else x):
            logits_TV = _apply(model, params, *inputs)
        if direction_V is None:
            direction_V = np.random.default_rng(0).normal(size=logits_TV.shape[-1]).astype(np.float32)
        return logits_TV @ direction_V

    still_TD = jnp.zeros(embedded[at].shape)
    if len(jax.eval_shape(along, still_TD, params)) != len(tokens_T):
        return ask("it gives logits after a full window alone", None)
    size_TS = jnp.linalg.norm(jax.jit(jax.jacrev(along))(still_TD, params), axis=-1)
    allowed_TS = jnp.tril(jnp.ones(size_TS.shape, bool))
    if len(inputs) == 2:  # a prefix, which all see
        allowed_TS |= jnp.arange(len(tokens_T)) < inputs[1]
    T = len(tokens_T)
    finite = bool(jnp.isfinite(size_TS).all())
    if finite and not bool((size_TS > 0).any()):
        return ask("no logit depends on any token, as where W_out is 0", None)
    measured = jnp.max(jnp.where(allowed_TS, 0, size_TS)) if finite else jnp.nan
    # A derivative does not see what is chosen, such as an expert's place: other tokens from half way on do.
    half, changed = T // 2, list(inputs)
    changed[_target(model)] = tokens_T.at[half:].set((tokens_T[half:] + 1) % _vocabulary(model.config))
    forward = jax.jit(partial(_apply, model))
    before = [forward(params, *x)[: half if len(inputs) != 2 else 0] for x in (inputs, changed)]
    measured = worst_of((measured, jnp.max(jnp.abs(before[0] - before[1]), initial=0.0)))
    return ask(f"derivatives of logits by later tokens, and other tokens from {half} on, of {T}", measured)


def visible_places(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Where all scores are alike, every query of causal self-attention gives the same weight to each place that it is
    to see, itself and as many before it as the model reaches, and none to the others."""
    ask = partial(Check, "visible places", limit=ROUNDING)
    if not _is_causal(model):
        return ask(NO_NEXT, None)
    found: dict[str, jax.Array] = {}

    def level(name: str, value: jax.Array) -> jax.Array:
        if name.endswith(".attention.weights") and "encoder_blocks" not in name:
            found[name] = value
        return jnp.zeros_like(value) if name.endswith(".scores") else value

    def look(params: Params) -> dict[str, jax.Array]:
        found.clear()
        with editing(level):
            _apply(model, params, *inputs)
        return dict(found)

    maps = jax.jit(look)(params)
    if not maps:
        return ask("it has no attention to its own tokens", None)
    T = len(inputs[_target(model)])
    reach = contract_of(model).attention_window or T
    age_TT = jnp.arange(T)[:, None] - jnp.arange(T)
    seen_TT = (age_TT >= 0) & (age_TT < reach)
    if len(inputs) == 2:
        seen_TT |= (jnp.arange(T) < inputs[1]) & (age_TT < reach)
    wanted_TT = seen_TT / seen_TT.sum(-1, keepdims=True)
    deviation = worst_of(jnp.max(jnp.abs(weights - wanted_TT)) for weights in maps.values())
    unseen = "" if reach < T or getattr(model.config, "window", None) is None else f", a window of {reach} unseen"
    return ask(f"weights where all scores are alike, {len(maps)} layers, {T} tokens{unseen}", deviation)


def rows_of_attention(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Weights of attention add up to one: where all values are 1, so is every head's output."""
    heads: list[jax.Array] = []

    def ones(name: str, value: jax.Array) -> jax.Array:
        if name.endswith("attention.heads"):
            heads.append(value)
        return jnp.ones_like(value) if name.endswith("attention.values") else value

    def look(params: Params) -> list[jax.Array]:
        heads.clear()
        with editing(ones):
            model.apply({"params": params}, *inputs)
        return list(heads)

    ask = partial(Check, "rows of attention", limit=ROUNDING)
    found = jax.jit(look)(params)
    if not found:
        return ask("it has no heads", None)
    return ask(f"their sums less 1, {len(found)} layers", worst_of(jnp.max(jnp.abs(y - 1)) for y in found))


def padding(model: nn.Module, params: Params, inputs_B: Inputs) -> Check:
    """What stands in padded places never changes a result, nor does it how many there are."""
    ask = partial(Check, "padding", limit=ROUNDING)
    if is_causal_lm(model) and contract_of(model).has_cache:
        return ask("a prompt with and without padding in its cache", _padded_prompt(model, params, inputs_B))
    flags = [i for i, x in enumerate(inputs_B) if x.dtype == bool]
    if not flags:
        return ask("it is given nothing that is padded", None)
    at = flags[0]
    deviations: list[float] = []
    forward = partial(jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs)), params)
    size = _vocabulary(model.config)
    for b in range(len(inputs_B[at])):
        inputs = [x[b] for x in inputs_B]
        n = int(inputs[at].sum())
        if n == len(inputs[at]):
            continue
        filled, cut = list(inputs), list(inputs)
        filled[at - 1] = jnp.where(inputs[at], inputs[at - 1], (inputs[at - 1] + 1) % size)
        cut[at - 1], cut[at] = inputs[at - 1][:n], inputs[at][:n]
        results = [_leaves(forward(*x), n if _by_place(model) else None) for x in (inputs, filled, cut)]
        if any(bool((one != other).any()) for one, other in zip(*results[:2], strict=True)):
            return ask("what stands in a padded place changes a result", worst_of(map(apart, *results[:2])), limit=0.0)
        deviations += map(apart, results[0], results[2])
    if not deviations:
        return ask("no example has any", None)
    return ask("texts with and without padding", worst_of(deviations))


def _padded_prompt(model: nn.Module, params: Params, inputs_B: Inputs) -> float:
    tokens_T = inputs_B[0][0]
    T = len(tokens_T)
    n = max(1, T // 2)
    prefix = {"prefix": n} if contract_of(model).has_prefix else {}

    @jax.jit
    def padded(params: Params, tokens_T: jax.Array) -> jax.Array:
        """A prompt of n tokens in T slots, then one more in the slot after them."""
        positions_T = jnp.where(jnp.arange(T) < n, jnp.arange(T), EMPTY)
        cache = _call(model, params, "init_cache", T + 1)
        _, cache = _call(model, params, "extend", tokens_T, positions_T, cache, 0, **prefix)
        x_1D, _ = _call(model, params, "extend", tokens_T[n - 1 : n], jnp.array([n]), cache, T, **prefix)
        return _call(model, params, "unembed", x_1D)

    text = jnp.append(tokens_T[:n], tokens_T[n - 1])

    @jax.jit
    def alone(params: Params, text: jax.Array) -> jax.Array:
        x_TD = _call(model, params, "features", text, *prefix.values())
        return _call(model, params, "unembed", x_TD)[-1:]

    return apart(padded(params, tokens_T), alone(params, text))


def decoding(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """What is computed piece by piece with a cache, a prompt and then token by token, is what is computed at once."""
    ask = partial(Check, "decoding", limit=ROUNDING)
    if not contract_of(model).has_cache:
        return ask("it has no cache", None)
    whole_TV = jax.jit(partial(_apply, model))(params, *inputs)
    tokens_T = inputs[_target(model)]
    T = len(tokens_T)
    n, prefix = max(1, T // 2), {}
    if len(inputs) == 2:
        n, prefix = int(inputs[1]), {"prefix": inputs[1]}

    @jax.jit
    def prefill(params: Params, *inputs: jax.Array) -> tuple[jax.Array, Any]:
        if contract_of(model).task is Task.SEQUENCE_TO_SEQUENCE:
            cache = _call(model, params, "start", *inputs[:2], T)
        else:
            cache = _call(model, params, "init_cache", T)
        x_TD, cache = _call(
            model, params, "extend", inputs[_target(model)][:n], jnp.arange(n), cache, jnp.int32(0), **prefix
        )
        return _call(model, params, "unembed", x_TD), cache

    @jax.jit
    def step(params: Params, token: jax.Array, i: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        x_1D, cache = _call(model, params, "extend", token[None], i[None], cache, i, **prefix)
        return _call(model, params, "unembed", x_1D), cache

    rows, cache = prefill(params, *inputs)
    pieces = [rows]
    for i in range(n, T):
        row, cache = step(params, tokens_T[i], jnp.int32(i), cache)
        pieces.append(row)
    made_TV = jnp.concatenate(pieces)
    scale = ROUNDING * jnp.maximum(1.0, jnp.abs(whole_TV).max())
    wrong_T = np.asarray((jnp.abs(made_TV - whole_TV).max(-1) > scale) | ~jnp.isfinite(made_TV).all(-1))
    first = f"; apart from token {wrong_T.argmax()} on" if wrong_T.any() else ""
    said = f"{n} tokens at once and {T - n} one by one, with a cache{first}"
    return ask(said, apart(made_TV, whole_TV))


def batching(model: nn.Module, params: Params, inputs_B: Inputs) -> Check:
    """An example among others gives what it gives alone."""
    forward = lambda params, inputs: model.apply({"params": params}, *inputs)  # noqa: E731
    together = jax.tree.leaves(jax.jit(jax.vmap(forward, in_axes=(None, 0)))(params, inputs_B))
    alone = partial(jax.jit(forward), params)
    worst, n = 0.0, len(inputs_B[0])
    for b in range(n):
        for one, all_B in zip(jax.tree.leaves(alone(tuple(x[b] for x in inputs_B))), together, strict=True):
            worst = worst_of((worst, apart(all_B[b], one)))
    return Check("batching", f"{n} examples together and one by one", worst, ROUNDING)


def no_dropout(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Where no key is given, nothing is dropped: the same as of a model that knows no dropout."""
    ask = partial(Check, "no dropout", limit=ROUNDING)
    plain = _without_dropout(model.config)
    if plain == model.config:
        return ask("it has none", None)
    ours, theirs = (
        jax.jit(lambda params, *inputs, m=m: jax.tree.leaves(m.apply({"params": params}, *inputs)))(params, *inputs)
        for m in (model, plain.build())
    )
    return ask("without a key, and built without dropout", worst_of(map(apart, ours, theirs)))


def gradients(model: nn.Module, params: Params, example: Batch) -> Check:
    """In float64, the derivative of the loss in a random direction of all parameters is the loss's difference over a
    small step; and so it is along the gradient itself."""
    ask = partial(Check, "gradients", limit=FINITE_DIFFERENCE)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
        if contract_of(model).task is Task.CONTRASTIVE:  # beyond its largest scale the gradient goes on, on purpose
            exact = exact | {"t": np.minimum(exact["t"], LARGEST_LOG_SCALE - 1e-3)}
        plain = model.config.build()
        loss: Callable[[Params], jax.Array] = jax.jit(lambda p: objective_of(plain).example_loss(plain, p, example))
        grads = jax.device_get(jax.jit(jax.grad(loss))(exact))
        rng = np.random.default_rng(0)
        random = jax.tree.map(lambda p: rng.normal(size=p.shape), exact)
        worst = worst_of(_slope_error(loss, exact, grads, way) for way in (random, grads))
    return ask("along two directions, against differences in float64", worst)


def _slope_error(loss: Callable[[Params], jax.Array], params: Params, grads: Params, way: Params) -> float:
    """How far the slope in a direction, by the gradient, is from the difference quotient that is nearest to it, as a
    share of it. Of several steps, as a large one may cross a kink of a ReLU, and a small one drowns in rounding."""
    norm = lambda tree: sum(float(np.vdot(x, x)) for x in jax.tree.leaves(tree)) ** 0.5  # noqa: E731
    slope = sum(float(np.vdot(g, w)) for g, w in zip(*map(jax.tree.leaves, (grads, way)), strict=True))
    at = lambda t: float(loss(jax.tree.map(lambda p, w: p + t * w, params, way)))  # noqa: E731
    errors, here = [], abs(at(0))
    if not np.isfinite(slope):
        return float("nan")
    for relative in (1e-5, 1e-6, 1e-7):
        step = relative * norm(params) / max(norm(way), 1e-300)
        resolved = 1e-8 * here / step  # a slope of less than rounding shows is no slope
        errors.append(abs((at(step) - at(-step)) / (2 * step) - slope) / max(abs(slope), resolved))
    return float(np.nanmin(errors)) if np.isfinite(errors).any() else float("nan")


def worst_of(deviations: Iterable[Any]) -> float:
    """The largest; NaN where one is, which `max` would pass over."""
    return float(np.max([float(x) for x in deviations]))


def _vocabulary(config: Any) -> int:
    """How many tokens there are; 0 where there are none."""
    return config.contract.vocab_size or 0


def _is_causal(model: nn.Module) -> bool:
    return contract_of(model).task in (Task.CAUSAL_LM, Task.SEQUENCE_TO_SEQUENCE)


def _target(model: nn.Module) -> int:
    """Which of the inputs is the text that the model writes."""
    return 2 if contract_of(model).task is Task.SEQUENCE_TO_SEQUENCE else 0


def _by_place(model: nn.Module) -> bool:
    """Whether a model that is told what is padding gives something for each place of what may be padded."""
    contract = contract_of(model)
    return contract.has_features and contract.task is not Task.SEQUENCE_TO_SEQUENCE


def _apply(model: nn.Module, params: Params, *inputs: Any) -> jax.Array:
    logits = model.apply({"params": params}, *inputs)
    assert isinstance(logits, jax.Array)
    return logits


def _call(model: nn.Module, params: Params, method: str, *args: Any, **kwargs: Any) -> Any:
    return model.apply({"params": params}, *args, **kwargs, method=method)


def _leaves(result: Any, n: int | None) -> list[jax.Array]:
    """The arrays of a result; their first n rows, where a number is given."""
    return [x if n is None else x[:n] for x in jax.tree.leaves(result)]


def apart(one: jax.Array, other: jax.Array) -> float:
    """The largest difference, of the largest value or of 1; NaN where something is not finite."""
    ours, theirs = np.asarray(one, np.float32), np.asarray(other, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # of infinities
        scale = np.maximum(1.0, np.max(np.abs(theirs), initial=0.0))
        return float(np.max(np.abs(ours - theirs), initial=0.0) / scale)


def _without_dropout(config: Any) -> Any:
    """A config with every `dropout` in it set to 0."""
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "dropout":
            changes[field.name] = 0.0
        elif is_dataclass(value):
            changes[field.name] = _without_dropout(value)
    return replace(config, **changes)
