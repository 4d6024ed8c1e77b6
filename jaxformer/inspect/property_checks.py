"""Property checks: invariants of every model, measured on a trained one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.inspect.activations import Activations, Inputs, capture, capture_shapes, intervene
from jaxformer.inspect.difference_quotients import ACCURACY, compare_slopes
from jaxformer.inspect.of_run import of_run
from jaxformer.models.clip import LARGEST_LOG_SCALE
from jaxformer.models.decoder import DecoderConfig
from jaxformer.models.objective import Params, is_causal_lm, objective_of
from jaxformer.nn.execution import Execution
from jaxformer.nn.parameter_norms import dotted
from jaxformer.nn.trace_context import current_trace
from jaxformer.ops.attention import MASKED, attention
from jaxformer.ops.blockwise import blockwise_attention
from jaxformer.ops.masks import EMPTY
from jaxformer.ops.precision import upcast

ROUNDING = 1e-5
"""Tolerance of results whose sums are in another order, relative to the largest value. Float32 may exceed it in deep or
badly scaled models; what exceeds it is computed again in float64, where only a fault does."""
BLOCKS = 4
"""Blocks of positions in blockwise attention, whose gradient is checked."""

ROWS = 16
"""Logits that are differentiated at once in the check of causality: with all 64 of a text of SmolLM2-135M, it takes
five times the processor time of 16."""

NOT_CAUSAL = "it has no next-token logits"


@dataclass(frozen=True)
class Check:
    """Result of one property check."""

    name: str
    detail: str
    """Description of the measurement, or the reason why there is none."""
    deviation: float | None
    """Largest deviation; None if the property does not apply."""
    limit: float

    @property
    def holds(self) -> bool:
        """True within the limit or if the property does not apply; False for NaN."""
        return self.deviation is None or self.deviation <= self.limit


@of_run
def verify(model: nn.Module, params: Params, batch: Batch) -> Iterator[Check]:
    """Yield a check of each property of one model; stop after the first, finite outputs, if it fails.

    The model runs in float32 or, where that deviates by more than `ROUNDING`, in float64.

    Args:
      model: model without scanned blocks.
      batch: several examples with valid targets, such as `random_inputs`; with a run, also texts.
    """
    batch = jax.tree.map(jnp.asarray, batch)
    inputs_B = batch.inputs
    params = jax.tree.map(upcast, params)
    first = jax.tree.map(lambda x: x[0], inputs_B)
    checks: tuple[tuple[Callable[..., Check], Any], ...] = (
        (finite, inputs_B),
        (causality, first),
        (attention_mask, first),
        (attention_rows, first),
        (padding, inputs_B),
        (decoding, first),
        (batching, inputs_B),
        (bits, inputs_B),
        (no_dropout, first),
        (dropout_keys, first),
        (gradients, jax.tree.map(lambda x: x[:2], batch)),
    )
    for check, argument in checks:
        result = without_rounding(check, model, params, argument)
        yield result
        if result.name == "finite" and not result.holds:
            return


def without_rounding(check: Callable[..., Check], model: nn.Module, params: Params, argument: Any) -> Check:
    """Return a check in float32 or, if it fails by what turn out to be rounding errors, in float64."""
    with jax.default_matmul_precision("highest"):  # accelerators round float32 matmuls by default
        result = check(model, params, argument)
        if result.holds or result.limit != ROUNDING or not np.isfinite(float(result.deviation or 0)):
            return result
        with jax.enable_x64(True):
            exact = check(model, jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params), argument)
    if not exact.holds:
        return result
    return replace(exact, detail=f"{exact.detail}, in float64; in float32 it rounds to {result.deviation:.1e}")


def _longest_window(config: object) -> int | None:
    """Return the longest attention window of a decoder's blocks, in tokens; None without windows."""
    kinds = config.attention if isinstance(config, DecoderConfig) else ()
    return max((kind.window for kind in kinds if kind.window is not None), default=None)


def random_inputs(config: ModelConfig, n: int, seed: int = 0, max_tokens: int = 64) -> Inputs:
    """Return the inputs of `n` random examples: pixels, tokens, and texts of several lengths, the first the longest.

    Args:
      max_tokens: maximum sequence length. A model with fixed-length inputs always gets its full length; a model with an
        attention window gets at least 8 more tokens than the window.
    """
    rng, vocab_size = np.random.default_rng(seed), _vocab_size(config)
    if (window := _longest_window(config)) is not None:
        max_tokens = max(max_tokens, window + 8)
    T = 0

    def fill(x: np.ndarray) -> np.ndarray:
        nonlocal T
        if x.dtype == np.uint8:
            return rng.integers(0, 256, (n, *x.shape), np.uint8)
        if x.ndim:
            T = len(x) if config.contract.fixed_length else min(len(x), max_tokens)
        if x.dtype == bool:
            lengths = np.append(T, rng.integers(1, max(2, T), n - 1))
            return np.arange(T) < lengths[:, None]
        if not x.ndim:  # prefix length
            return rng.integers(1, T, n).astype(x.dtype)
        return rng.integers(0, vocab_size, (n, T)).astype(x.dtype)

    return tuple(jnp.asarray(fill(x)) for x in config.example())


def finite(model: nn.Module, params: Params, inputs_B: Inputs) -> Check:
    """Check that no output is infinite or NaN, a precondition of the other checks."""
    outputs = _batched(model, params, inputs_B)
    n_broken = sum(int(jnp.sum(~jnp.isfinite(x))) for x in outputs)
    detail = f"infinite or NaN values among {sum(x.size for x in outputs):,} outputs"
    return Check("finite", detail, float(n_broken), 0.0)


def causality(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Check that no logit depends on a later token: its derivative by the token's embedding is exactly 0."""
    check = partial(Check, "causality", limit=0.0)
    if not _is_causal(model):
        return check(NOT_CAUSAL, None)
    tokens_T = inputs[_text_index(model)]
    T = len(tokens_T)
    names = ("*embed", "*embed (call 2)")
    embeddings = capture_shapes(model, params, *inputs, names=names, missing_ok=True)
    *_, name = (name for name in embeddings if "pos_embed" not in name)
    direction_V = None

    def projected_logits(shift_TD: jax.Array, params: Params) -> jax.Array:
        nonlocal direction_V
        with intervene(name, lambda _, x_TD: x_TD + shift_TD):
            logits_TV = _call(model, params, *inputs)
        if direction_V is None:
            direction_V = np.random.default_rng(0).normal(size=logits_TV.shape[-1]).astype(np.float32)
        return logits_TV @ direction_V

    zeros_TD = jnp.zeros(embeddings[name].shape)
    if len(jax.eval_shape(projected_logits, zeros_TD, params)) != T:
        return check("it has logits only after a full window", None)

    @jax.jit
    def slopes(params: Params) -> jax.Array:
        """Return the norm of the derivative of each projected logit by each embedding, `(T, S)`."""
        pull_back = jax.vjp(lambda shift_TD: projected_logits(shift_TD, params), zeros_TD)[1]
        return jax.lax.map(lambda row_T: jnp.linalg.norm(*pull_back(row_T), axis=-1), jnp.eye(T), batch_size=ROWS)

    slope_TS = slopes(params)
    allowed_TS = jnp.tril(jnp.ones(slope_TS.shape, bool))
    if len(inputs) == 2:  # a prefix is visible to all
        allowed_TS |= jnp.arange(T) < inputs[1]
    is_finite = bool(jnp.isfinite(slope_TS).all())
    if is_finite and not bool((slope_TS > 0).any()):
        return check("no logit depends on any token, as if W_out were 0", None)
    by_slope = jnp.max(jnp.where(allowed_TS, 0, slope_TS)) if is_finite else jnp.nan
    # Derivatives miss discrete choices, such as an expert's capacity, so also change all tokens of the second half.
    half, changed = T // 2, list(inputs)
    changed[_text_index(model)] = tokens_T.at[half:].set((tokens_T[half:] + 1) % _vocab_size(model.config))
    forward = jax.jit(partial(_call, model))
    logits, others = (forward(params, *x)[: half if len(inputs) != 2 else 0] for x in (inputs, changed))
    deviation = largest_of((by_slope, jnp.max(jnp.abs(logits - others), initial=0.0)))
    return check(f"derivatives of logits by later tokens, and other tokens from {half} on, of {T}", deviation)


def attention_mask(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Check that causal self-attention with equal scores is uniform over the visible positions: the query's own and
    earlier ones within the layer's attention window."""
    check = partial(Check, "attention mask", limit=ROUNDING)
    if not _is_causal(model):
        return check(NOT_CAUSAL, None)
    replaced = _capture_with(model, params, inputs, "*.attn_scores", jnp.zeros_like, "*.attention.pattern")
    maps = {name: weights_HTT for name, weights_HTT in replaced.items() if "encoder_blocks" not in name}
    if not maps:
        return check("it has no self-attention", None)
    T = len(inputs[_text_index(model)])
    contract, age_TT = contract_of(model), jnp.arange(T)[:, None] - jnp.arange(T)[None]
    windows = contract.layer_windows or (contract.attention_window or T,) * len(maps)

    def deviation(window: int, weights_HTT: jax.Array) -> jax.Array:
        visible_TT = (age_TT >= 0) & (age_TT < window)
        if len(inputs) == 2:
            visible_TT |= (jnp.arange(T) < inputs[1])[None] & (age_TT < window)
        dtype = weights_HTT.dtype
        expected_TT = visible_TT.astype(dtype) / visible_TT.sum(-1, keepdims=True, dtype=dtype)
        return jnp.max(jnp.abs(weights_HTT - expected_TT[None]))

    largest = largest_of(deviation(*layer) for layer in zip(windows, maps.values(), strict=True))
    detail = f"weights for equal scores, {len(maps)} layers, {T} tokens"
    untested = _longest_window(model.config) is not None and min(windows) >= T
    return check(f"{detail}, a window of {min(windows)} untested" if untested else detail, largest)


def attention_rows(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Check that attention weights sum to 1 without sinks: if all values are 1, so is every head's output."""
    check = partial(Check, "attention rows", limit=ROUNDING)
    sums = _capture_with(model, params, inputs, "*attention.v", jnp.ones_like, "*attention.z").values()
    if not sums:
        return check("it has no attention heads", None)
    return check(f"sums of weights minus 1, {len(sums)} layers", largest_of(jnp.max(jnp.abs(y - 1)) for y in sums))


def _capture_with(
    model: nn.Module, params: Params, inputs: Inputs, replaced: str, edit: Callable[[jax.Array], jax.Array], names: str
) -> Activations:
    """Return activations by name, with others replaced by `edit` of their values, and without attention sinks."""

    def captured(params: Params) -> Activations:
        with intervene(replaced, lambda _, value: edit(value), missing_ok=True):
            return capture(model, params, *inputs, names=names, missing_ok=True)

    return jax.jit(captured)(_without_sinks(params))


def _without_sinks(params: Params) -> Params:
    """Return parameters whose attention sinks take nothing of the weights, which sum to 1 without them."""

    def sunk(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        return jnp.full_like(x, MASKED) if dotted(path).endswith(".sinks") else x

    return jax.tree_util.tree_map_with_path(sunk, params)


def padding(model: nn.Module, params: Params, inputs_B: Inputs) -> Check:
    """Check that outputs depend neither on the content nor on the amount of padding."""
    check = partial(Check, "padding", limit=ROUNDING)
    if is_causal_lm(model) and contract_of(model).has_cache:
        return check("a prompt with and without padding in its cache", _padded_prompt(model, params, inputs_B))
    masks = [i for i, x in enumerate(inputs_B) if x.dtype == bool]
    if not masks:
        return check("its inputs have no padding", None)
    at, deviations = masks[0], list[float]()
    forward = partial(jax.jit(partial(_call, model)), params)
    contract = contract_of(model)
    has_position_axis = contract.has_features and contract.task is not Task.SEQUENCE_TO_SEQUENCE
    for b in range(len(inputs_B[at])):
        inputs = [x[b] for x in inputs_B]
        n = int(inputs[at].sum())
        if n == len(inputs[at]):
            continue
        refilled, cut = list(inputs), list(inputs)
        refilled[at - 1] = jnp.where(inputs[at], inputs[at - 1], (inputs[at - 1] + 1) % _vocab_size(model.config))
        cut[at - 1], cut[at] = inputs[at - 1][:n], inputs[at][:n]
        rows = slice(n) if has_position_axis else ...
        variants = (inputs, refilled, cut)
        outputs, of_refilled, of_cut = ([y[rows] for y in jax.tree.leaves(forward(*x))] for x in variants)
        if any(bool((a != b).any()) for a, b in zip(outputs, of_refilled, strict=True)):
            deviation = largest_of(map(relative_error, outputs, of_refilled))
            return check("the content of padding changes an output", deviation, limit=0.0)
        deviations += map(relative_error, outputs, of_cut)
    if not deviations:
        return check("no example has any", None)
    return check("texts with and without padding", largest_of(deviations))


def _padded_prompt(model: nn.Module, params: Params, inputs_B: Inputs) -> float:
    """Return the relative error of the logits after a padded prompt in a cache."""
    tokens_T = inputs_B[0][0]
    T = len(tokens_T)
    n = max(1, T // 2)
    prefix = {"prefix": n} if contract_of(model).has_prefix else {}

    @jax.jit
    def padded(params: Params, tokens_T: jax.Array) -> jax.Array:
        """Return the logits of a token in the slot after a prompt of n tokens in T slots."""
        positions_T = jnp.where(jnp.arange(T) < n, jnp.arange(T), EMPTY)
        cache = _call(model, params, T + 1, _dtype(params), method="init_cache")
        _, cache = _extend(model, params, tokens_T, positions_T, cache, 0, **prefix)
        return _extend(model, params, tokens_T[n - 1 : n], jnp.array([n]), cache, T, **prefix)[0]

    @jax.jit
    def unpadded(params: Params, tokens: jax.Array) -> jax.Array:
        x_TD = _call(model, params, tokens, *prefix.values(), method="features")
        return _call(model, params, x_TD, method="unembed")[-1:]

    return relative_error(padded(params, tokens_T), unpadded(params, jnp.append(tokens_T[:n], tokens_T[n - 1])))


def decoding(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Check that prefill and decode steps with a cache give the same logits as one full pass."""
    check = partial(Check, "decoding", limit=ROUNDING)
    if not contract_of(model).has_cache:
        return check("it has no cache", None)
    full_TV = jax.jit(partial(_call, model))(params, *inputs)
    tokens_T = inputs[_text_index(model)]
    T = len(tokens_T)
    n, prefix = max(1, T // 2), {}
    if len(inputs) == 2:
        n, prefix = int(inputs[1]), {"prefix": inputs[1]}

    @jax.jit
    def prefill(params: Params, *inputs: jax.Array) -> tuple[jax.Array, Any]:
        if contract_of(model).task is Task.SEQUENCE_TO_SEQUENCE:
            cache = _call(model, params, *inputs[:2], T, _dtype(params), method="start")
        else:
            cache = _call(model, params, T, _dtype(params), method="init_cache")
        prompt = inputs[_text_index(model)][:n]
        return _extend(model, params, prompt, jnp.arange(n), cache, jnp.int32(0), **prefix)

    decode_step = jax.jit(partial(_extend, model, **prefix))
    logits_1V, cache = prefill(params, *inputs)
    rows = [logits_1V]
    for i in range(n, T):
        logits_1V, cache = decode_step(params, tokens_T[i : i + 1], jnp.array([i]), cache, jnp.int32(i))
        rows.append(logits_1V)
    cached_TV = jnp.concatenate(rows)
    limit = ROUNDING * jnp.abs(full_TV).max()
    differs_T = np.asarray((jnp.abs(cached_TV - full_TV).max(-1) > limit) | ~jnp.isfinite(cached_TV).all(-1))
    first = f"; they differ from token {differs_T.argmax()} on" if differs_T.any() else ""
    detail = f"prefill of {n} tokens and {T - n} decode steps{first}"
    return check(detail, relative_error(cached_TV, full_TV))


def batching(model: nn.Module, params: Params, inputs_B: Inputs) -> Check:
    """Check that an example has the same outputs in a batch as on its own."""
    batched, forward, n = _batched(model, params, inputs_B), jax.jit(partial(_call, model)), len(inputs_B[0])
    deviation = largest_of(
        relative_error(y_B[b], y)
        for b in range(n)
        for y_B, y in zip(batched, jax.tree.leaves(forward(params, *(x[b] for x in inputs_B))), strict=True)
    )
    return Check("batching", f"{n} examples together and one by one", deviation, ROUNDING)


def bits(model: nn.Module, params: Params, inputs_B: Inputs) -> Check:
    """Check that, in a batch of one size, an example has the same outputs to the last bit whatever the others are and
    wherever it stands; and for a causal language model also whatever follows."""
    limit = 0.0 if jax.default_backend() == "cpu" else ROUNDING  # elsewhere not measured
    call = jax.jit(partial(_batched, model))
    batched = call(params, inputs_B)
    moved = call(params, jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), inputs_B))
    others = call(params, jax.tree.map(lambda x: jnp.repeat(x[:1], len(x), axis=0), inputs_B))
    pairs = [(jnp.roll(y_B, 1, axis=0), z_B) for y_B, z_B in zip(batched, moved, strict=True)]
    pairs += [(y_B[0], z_B[0]) for y_B, z_B in zip(batched, others, strict=True)]
    detail = "among other examples, and at another place of the batch"
    if is_causal_lm(model) and not (contract := contract_of(model)).has_prefix and not contract.fixed_length:
        tokens_BT, half = inputs_B[0], inputs_B[0].shape[1] // 2
        cut = call(params, (tokens_BT.at[:, half:].set(0), *inputs_B[1:]))
        pairs += [(y_BTV[:, :half], z_BTV[:, :half]) for y_BTV, z_BTV in zip(batched, cut, strict=True)]
        detail += ", and before other tokens"
    return Check("bits", detail, largest_of(relative_error(*pair) for pair in pairs), limit)


def no_dropout(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Check that without a dropout key the outputs equal those of a model built without dropout."""
    check = partial(Check, "no dropout", limit=ROUNDING)
    plain = _without_dropout(model.config)
    if plain == model.config:
        return check("it has none", None)
    outputs, expected = (jax.tree.leaves(jax.jit(partial(_call, m))(params, *inputs)) for m in (model, plain.build()))
    return check("without a key, and built without dropout", largest_of(map(relative_error, outputs, expected)))


def dropout_keys(model: nn.Module, params: Params, inputs: Inputs) -> Check:
    """Check that every dropout layer draws its own mask, and another one with another key."""
    check = partial(Check, "dropout keys", limit=0.0)
    if _without_dropout(model.config) == model.config:
        return check("it has no dropout", None)

    @jax.jit
    def dropout_masks(params: Params, key: jax.Array) -> list[jax.Array]:
        """Return the mask of each call of a dropout layer."""
        masks, trace = [], current_trace()

        def record(call: Callable, arguments: tuple, named: dict, context: nn.module.InterceptorContext) -> Any:
            if not isinstance(context.module, nn.Dropout) or context.method_name != "__call__":
                return call(*arguments, **named)
            scale = call(jnp.ones_like(arguments[0]), *arguments[1:], **named)
            if current_trace() == trace:  # a mask could not leave a scan
                masks.append(scale != 0)
            return scale * arguments[0]

        with nn.intercept_methods(record):
            model.apply({"params": params}, *inputs, rngs={"dropout": key})
        return masks

    drawn = [np.asarray(mask) for seed in range(2) for mask in dropout_masks(params, jax.random.key(seed))]
    # Masks with fewer entries of one kind may be equal by chance.
    drawn = [mask for mask in drawn if 8 <= mask.sum() <= mask.size - 8]
    if not drawn:
        return check("no mask is large enough to compare", None)
    equal = [np.array_equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i]]
    return check(f"equal pairs among {len(drawn)} masks", float(sum(equal)))


def gradients(model: nn.Module, params: Params, batch: Batch) -> Check:
    """Check the gradient of the training loss against differences in float64, for each parameter.

    The gradient is that of the plain attention formula and, by half in the first layer, of blockwise attention.
    """
    layers = count()

    def attend(q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, *rest: Any, **named: Any) -> jax.Array:
        y_HTK = attention(q_HTK, k_GSK, v_GSK, *rest, **named)
        if next(layers):
            return y_HTK
        block = -(-max(q_HTK.shape[1], k_GSK.shape[1]) // BLOCKS)
        tiled_HTK = blockwise_attention(q_HTK, k_GSK, v_GSK, *rest, **named, block=block, sequential=True)
        return (y_HTK + tiled_HTK) / 2

    def loss(model: nn.Module, params: Params) -> jax.Array:
        return objective_of(model).loss(model, params, batch)[0]

    with jax.enable_x64(True):
        if contract_of(model).task is Task.CONTRASTIVE:
            # Beyond the largest scale, the gradient deliberately differs from the loss's.
            params = params | {"t": np.minimum(params["t"], LARGEST_LOG_SCALE - 0.1)}
        plain, mixed = model.config.build(), model.config.build(Execution(attention=attend))
        slopes = compare_slopes(partial(loss, plain), jax.grad(partial(loss, mixed)), params)
    wrong = [name for name, slope in slopes.items() if not slope.holds]
    rough = [name for name, slope in slopes.items() if slope.holds and slope.is_rough]
    detail = f"{len(slopes)} parameters, against differences in float64"
    for names, problem in ((wrong, "wrong"), (rough, "too rough to measure")):
        if names:
            detail += f"; {problem}: {', '.join(names[:3])}" + f" and {len(names) - 3} more" * (len(names) > 3)
    return Check("gradients", detail, largest_of(slope.deviation for slope in slopes.values()), ACCURACY)


def largest_of(deviations: Iterable[float | jax.Array]) -> float:
    """Return the largest deviation; NaN if any is NaN, which `max` could ignore."""
    return float(np.max([float(x) for x in deviations]))


def relative_error(values: jax.Array, expected: jax.Array, least: float = 0.0) -> float:
    """Return the largest difference divided by the largest expected magnitude, at least `least`, or by 1 if that is 0;
    NaN if a value is not finite."""
    got, want = np.asarray(values), np.asarray(expected)
    with np.errstate(invalid="ignore", over="ignore"):
        scale = np.max(np.abs(want), initial=least)
        return float(np.max(np.abs(got - want), initial=0.0) / np.where(scale == 0, 1, scale))


def _dtype(params: Params) -> jnp.dtype:
    return jax.tree.leaves(params)[0].dtype


def _vocab_size(config: ModelConfig) -> int:
    """Return the vocabulary size; 0 for a model without tokens."""
    return config.contract.vocab_size or 0


def _is_causal(model: nn.Module) -> bool:
    return contract_of(model).task in (Task.CAUSAL_LM, Task.SEQUENCE_TO_SEQUENCE)


def _text_index(model: nn.Module) -> int:
    """Return the index of the input that holds the generated text."""
    return 2 if contract_of(model).task is Task.SEQUENCE_TO_SEQUENCE else 0


def _batched(model: nn.Module, params: Params, inputs_B: Inputs) -> list[jax.Array]:
    """Return the outputs of a batch, each with leading axis B."""
    forward = jax.vmap(lambda params, inputs: _call(model, params, *inputs), in_axes=(None, 0))
    return jax.tree.leaves(jax.jit(forward)(params, inputs_B))


def _call(model: nn.Module, params: Params, *inputs: object, method: str | None = None, **kwargs: Any) -> Any:
    return model.apply({"params": params}, *inputs, method=method, **kwargs)


def _extend(model: nn.Module, params: Params, *inputs: object, **prefix: Any) -> tuple[jax.Array, Any]:
    """Call the model's method `extend`; return the logits after each token, and the cache."""
    x_TD, cache = _call(model, params, *inputs, **prefix, method="extend")
    return _call(model, params, x_TD, method="unembed"), cache


def _without_dropout(config: Any) -> Any:
    """Return a config with every `dropout` in it set to 0."""
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "dropout":
            changes[field.name] = 0.0
        elif is_dataclass(value):
            changes[field.name] = _without_dropout(value)
    return replace(config, **changes)
