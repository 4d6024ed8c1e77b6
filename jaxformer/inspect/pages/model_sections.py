"""Page sections about a trained model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields, replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.inspect.activations import Inputs, apply_and_capture
from jaxformer.inspect.attention import CROSS
from jaxformer.inspect.gradients import per_example_gradients
from jaxformer.inspect.heads import HeadStatistics, ablate_heads, head_statistics, target_mask
from jaxformer.inspect.pages.attention import AttentionLayer, AttentionSection, Prediction
from jaxformer.inspect.pages.charts import Heatmap, heads_heatmap
from jaxformer.inspect.pages.labels import describe_head, head_label, layer_label, position_unit, stream_label
from jaxformer.inspect.pages.page import Section, Table
from jaxformer.inspect.residual_stream import logit_attribution, logit_lens
from jaxformer.models.objective import Params
from jaxformer.ops.precision import upcast

MAPS = ("*attention.pattern", "reader.pattern")
"""Names of attention maps."""
N_ALTERNATIVES = 3
"""Most likely tokens per cell of the logit lens."""
N_TOP_TOKENS = 6
"""Most likely tokens per prediction."""
N_PREVIEW_TOKENS = 8
"""Tokens in the label of an example."""
HEAD_COLUMNS = (
    *("head", "description", *(field.name.replace("_", " ") for field in fields(HeadStatistics))),
    *("mean ablation", "estimate", "zero ablation", "estimate"),
)
ABOUT_HEADS = (
    "Means over rows, one per query: entropy in nats and distance to the attended positions, over all rows; entropy as "
    "a fraction of its maximum, over rows with more than one visible position; weight on the first position and on the "
    "previous one, over all rows but the first; weight on earlier positions with the same token, and on those that "
    "followed them (induction), over rows that have one. Then the increase in loss under mean and zero "
    "ablation of the head, each with its first-order estimate from one gradient."
)

TokenText = Callable[[int], str]
"""Function from a token to its text."""


def attention_section(
    model: nn.Module, params: Params, inputs: Inputs, token_text: TokenText, mask_token: int | None = None
) -> AttentionSection:
    """Return the attention maps of one example, and the probability of each of its tokens. Its inputs are a text; or a
    source with its padding mask, and a target that begins with the start token. `mask_token` is given for a masked
    language model, whose logits predict the same position, not the next."""
    call = jax.jit(lambda params: apply_and_capture(model, params, *inputs, names=MAPS, missing_ok=True))
    logits_TV, maps = jax.device_get(call(params))
    tokens = [np.asarray(x) for x in inputs if x is not None and jnp.ndim(x) == 1 and x.dtype == jnp.int32]
    names = ("text",) if len(tokens) == 1 else ("source", "target")
    texts = {name: [token_text(int(token)) for token in text] for name, text in zip(names, tokens, strict=True)}
    layers = [
        AttentionLayer(
            layer_label(name.removesuffix(".pattern")),
            *_sides(name, names),
            np.reshape(weights, (-1, *weights.shape[-2:])),
        )
        for name, weights in sorted(maps.items(), key=lambda item: CROSS not in item[0])  # cross-attention first
    ]
    predictions, prefix = {}, _prefix_length(inputs)
    if logits_TV.ndim == 2 and len(logits_TV) == len(tokens[-1]):
        all_predictions = _predictions(np.asarray(logits_TV, np.float64), tokens[-1], token_text, mask_token)
        predictions = {names[-1]: [None if i < prefix - 1 else p for i, p in enumerate(all_predictions)]}
    about = (
        "Point at a token, or tap it to pin it: the stronger the colour of another token, the larger the selected "
        "head's attention weight on it. Each thumbnail is the attention map of a head, a row per query."
    )
    if prefix:
        about += f" The first {prefix} tokens are the prefix, which is visible to all and not predicted."
    if not layers:
        about = "Point at a token, or tap it to pin it, for the most likely tokens after it."
    elif mask_token is not None:
        about += " A mask shows the most likely tokens in its place."
    return AttentionSection("Attention maps" if layers else "Next tokens", texts, layers, predictions, about=about)


def _prefix_length(inputs: Inputs) -> int:
    """Return the number of prefix tokens for a prefix language model; 0 for other models."""
    return int(inputs[1]) if len(inputs) == 2 and jnp.ndim(inputs[1]) == 0 else 0


def _sides(name: str, texts: Sequence[str]) -> tuple[str, str]:
    """Return the names of the texts that the queries and the keys of an attention map belong to."""
    if CROSS in name or name.startswith("reader"):
        return texts[-1], texts[0]
    side = texts[-1] if name.startswith("decoder") else texts[0]
    return side, side


def _softmax(logits_TV: np.ndarray) -> np.ndarray:
    """Return probabilities; NaN for rows that are not finite."""
    with np.errstate(invalid="ignore"):
        return np.exp(logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True))


def _likeliest(p: np.ndarray, n: int) -> np.ndarray:
    """Return the n likeliest tokens in order, `(…, n)`, for probabilities `(…, V)`; sorting all would take seconds."""
    n = min(n, p.shape[-1])
    tokens = np.argpartition(-p, n - 1, axis=-1)[..., :n]
    order = np.argsort(-np.take_along_axis(p, tokens, axis=-1), axis=-1, kind="stable")
    return np.take_along_axis(tokens, order, axis=-1)


@jax.jit
def _top(logits_TV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the `N_ALTERNATIVES` largest probabilities in order, and their tokens, each `(T, N)`."""
    return jax.lax.top_k(jax.nn.softmax(upcast(logits_TV), axis=-1), min(N_ALTERNATIVES, logits_TV.shape[-1]))


def _predictions(
    logits_TV: np.ndarray, tokens_T: np.ndarray, token_text: TokenText, mask_token: int | None
) -> Iterator[Prediction | None]:
    """Yield the prediction after each token; for a masked language model, the prediction for each mask."""
    p_TV = _softmax(logits_TV)
    for position, token in enumerate(tokens_T):
        p_V = p_TV[position]
        probabilities = [(token_text(int(other)), float(p_V[other])) for other in _likeliest(p_V, N_TOP_TOKENS)]
        if mask_token is not None:
            yield Prediction("In place of the mask", probabilities) if token == mask_token else None
            continue
        next_token = int(tokens_T[position + 1]) if position + 1 < len(tokens_T) else None
        actual = None if next_token is None else (token_text(next_token), float(p_V[next_token]))
        yield Prediction(f"Next token after “{token_text(int(token))}”", probabilities, actual)


def residual_stream_sections(model: nn.Module, params: Params, inputs: tuple, token_text: TokenText) -> list[Section]:
    """Return the logit lens and the direct logit attribution of a decoder; `[]` for a model without a residual stream
    that they apply to."""
    if not contract_of(model).has_residual_stream:
        return []
    tokens_T = np.asarray(inputs[0])
    try:
        lens = logit_lens(model, params, *inputs)
        last_TV = list(lens.values())[-1]
        next_T = np.append(tokens_T[1:], np.argmax(last_TV[-1]))
        parts = logit_attribution(model, params, *inputs, target_T=jnp.asarray(next_T))
    except ValueError:
        return []
    start = max(0, _prefix_length(inputs) - 1)  # predictions begin at the prefix's last token
    tokens_T, next_T = tokens_T[start:], next_T[start:]
    likeliest = {name: [x_TN[start:] for x_TN in jax.device_get(_top(x_TV))] for name, x_TV in lens.items()}
    attributions = {name: x[..., start:] for name, x in jax.device_get(parts).items()}
    labels = [_label(token_text(int(token))) for token in tokens_T]
    return [
        _lens_heatmap(likeliest, labels, token_text),
        _attribution_heatmap(attributions, labels, next_T, token_text),
    ]


def _lens_heatmap(lens: Mapping[str, Sequence[np.ndarray]], labels: Sequence[str], token_text: TokenText) -> Heatmap:
    """Draw the likeliest tokens of each stream, given as in `_top`."""
    rows, top_p, top, notes = [], [], [], []
    for name, (p_TN, likeliest_TN) in lens.items():
        rows.append(stream_label(name))
        top_p.append(p_TN[:, 0])
        top.append([_label(token_text(int(row[0]))) for row in likeliest_TN])
        row_notes = []
        for label, p_N, likeliest in zip(labels, p_TN, likeliest_TN, strict=True):
            tokens = ", ".join(f"“{token_text(int(t))}” {p:.1%}" for t, p in zip(likeliest, p_N, strict=True))
            row_notes.append(f"{rows[-1]}, next after “{label}”: {tokens}")
        notes.append(row_notes)
    about = (
        "The most likely next token per position, were the residual stream unembedded after the embedding or a layer; "
        "the stronger the colour, the larger its probability. The last row is the model's prediction."
    )
    return Heatmap(
        "Logit lens", np.stack(top_p), rows, labels, largest=1, texts=top, notes=notes, cell=(64, 28), about=about
    )


def _attribution_heatmap(
    parts: Mapping[str, np.ndarray], labels: Sequence[str], next_T: np.ndarray, token_text: TokenText
) -> Heatmap:
    rows: dict[str, np.ndarray] = {}
    for name, values in parts.items():
        layer = name.rpartition(".")[0]
        if np.ndim(values) == 2:
            heads_HT = np.asarray(values, np.float64)
            rows |= {head_label(layer, head): heads_HT[head] for head in range(len(heads_HT))}
        else:
            rows[part_label(name)] = np.asarray(values, np.float64)
    after = [f"for “{token_text(int(token))}”" for token in next_T]
    about = (
        "Contribution of each head, each MLP and the embedding to the logit of the next token (at the last position, "
        "of the most likely one): orange is positive, blue negative."
    )
    logits_RT = np.stack(list(rows.values()))
    return Heatmap(
        "Direct logit attribution",
        logits_RT,
        list(rows),
        labels,
        "diverging",
        column_notes=after,
        cell=(46, 22),
        about=about,
    )


def part_label(name: str) -> str:
    """Return "MLP 0" for `blocks.0.mlp` and what it writes, `blocks.0.mlp_out`; other names unchanged."""
    match = re.fullmatch(r"blocks\.(\d+)\.mlp(?:_out)?", name)
    return f"MLP {match[1]}" if match else name


def head_sections(
    model: nn.Module, params: Params, batch: Batch, progress: Callable[[str], object] = lambda _: None
) -> list[Section]:
    """Return head ablation and head statistics over a batch; `[]` for a model without attention. `progress` is called
    with a description of each layer's ablation before it is made."""
    statistics = head_statistics(model, params, *batch.inputs, target_mask_BT=target_mask(batch))
    if not statistics:
        return []
    ablation = ablate_heads(model, params, batch, lambda layer: progress(f"ablation of heads, {layer_label(layer)}"))
    rises = {layer_label(layer): np.asarray(ablation.mean[layer]).tolist() for layer in statistics}
    about = f"Increase in loss, from {ablation.loss:.4f} nats, when a head's output is replaced by its mean everywhere."
    heatmap = heads_heatmap("Head ablation", rises, "{:+z.3f}", scale="diverging", cell=(72, 34), about=about)
    effects = (ablation.mean, ablation.mean_estimate, ablation.zero, ablation.zero_estimate)
    rows: list[list[str | float]] = [
        [
            head_label(layer, head),
            describe_head(statistics[layer], head, position_unit(contract_of(model).patches, layer)),
            *(float(x_H[head]) for x_H in (*astuple(statistics[layer]), *(e[layer] for e in effects))),
        ]
        for layer in statistics
        for head in range(len(statistics[layer].entropy))
    ]
    return [heatmap, Table("Head statistics", HEAD_COLUMNS, rows, about=ABOUT_HEADS)]


def with_ablation(section: Section, heatmap: Section) -> Section:
    """Return attention maps with the measured ablation of their heads, from the first of `head_sections`; other
    sections unchanged."""
    if not isinstance(section, AttentionSection) or not isinstance(heatmap, Heatmap):
        return section
    rises = dict(zip(heatmap.rows, np.asarray(heatmap.values).tolist(), strict=True))
    layers = [replace(x, ablation=rises.get(x.name, [])[: x.weights_HTS.shape[-3]]) for x in section.layers]
    return replace(section, layers=layers)


def gradient_sections(model: nn.Module, params: Params, batch: Batch, token_text: TokenText | None) -> list[Section]:
    """Return the per-example gradients of a batch; `[]` without a cross-entropy, or for a single example. `token_text`
    is given for a model whose first input is a text."""
    if contract_of(model).task is Task.CONTRASTIVE or len(batch.targets) < 2:
        return []
    gradients = per_example_gradients(model, params, batch)

    def example_name(b: int) -> str:
        if token_text is None:
            return str(b)
        beginning = "".join(token_text(int(t)) for t in np.asarray(batch.inputs[0])[b][:N_PREVIEW_TOKENS])
        return f"{b}: {beginning.replace('␣', ' ')}…"  # where a line may break

    columns = (gradients.loss_B.tolist(), gradients.norm_B.tolist(), gradients.cosine_B.tolist())
    rows = [[example_name(b), *numbers] for b, numbers in enumerate(zip(*columns, strict=True))]
    scale = gradients.noise_scale
    noise = f"is {scale:.3g} examples" if np.isfinite(scale) else "is too large to estimate from so few examples"
    about = (
        "Gradient of each example's loss: its norm, and its cosine similarity with the mean gradient, whose norm is "
        f"{gradients.mean_norm:.3g}. The gradient noise scale, the batch size at which signal equals noise, {noise} "
        "(McCandlish et al. 2018)."
    )
    return [Table("Per-example gradients", ("example", "loss", "gradient norm", "cosine"), rows, about=about)]


def _label(text: str) -> str:
    """Return a token's text as a label of at most 10 characters."""
    return text if len(text) <= 10 else f"{text[:9]}…"
