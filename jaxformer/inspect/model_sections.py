"""Sections of a page that show a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.inspect.attention import CROSS
from jaxformer.inspect.capture import apply_and_capture, capture_shapes
from jaxformer.inspect.gradients import per_example_gradients
from jaxformer.inspect.heads import ablate_heads, head_statistics, target_mask
from jaxformer.inspect.page import AttentionLayer, AttentionSection, Figure, Section, Table, plain
from jaxformer.inspect.residual_stream import logit_attribution, logit_lens
from jaxformer.inspect.saturation import saturation
from jaxformer.models.objective import Params

MAPS = ("*attention.weights", "reader.weights")
"""Names of attention maps."""
N_ALTERNATIVES = 3
TEMPERATURES = tuple(2.0**power for power in range(3, -9, -1))
POSITION_PIXELS = 46
"""Width of a position of a text."""
N_PREVIEW_TOKENS = 8
"""Tokens that identify an example."""
HEAD_COLUMNS = (
    "head", "entropy", "of its maximum", "distance", "first", "previous", "duplicate", "induction",
    "mean ablation", "estimate", "zero ablation", "estimate",
)  # fmt: skip
ABOUT_HEADS = (
    "Means over rows: entropy in nats and as a share of its maximum; distance to the attended positions; weight on the "
    "first token, on the previous one, on earlier ones that are the same, and on those that followed them (induction). "
    "Then the rise of the loss under mean and zero ablation of the head, each with its estimate from one gradient."
)
ABOUT_SATURATION = (
    "The scores of blocks.0.attention are divided by ever lower temperatures. Where attention is one-hot, no gradient "
    "reaches the scores: ∂L/∂z = w (u - Σ w u) is 0, whatever u is. That of W_Q is the scores' times the keys over the "
    "temperature, and so can rise until rows are one-hot to rounding."
)

TokenText = Callable[[int], str]
"""Text of a token."""


def attention_section(
    model: nn.Module, params: Params, inputs: tuple[Any, ...], token_text: TokenText, mask_token: int | None = None
) -> AttentionSection:
    """Return the attention maps of one example, and the probability of each of its tokens. Its inputs are a text; or a
    source, with its padding mask, and a target that begins with the start token. With a `mask_token`, that of a masked
    language model, logits are of the same position, not of the next."""
    call = jax.jit(lambda params: apply_and_capture(model, params, *inputs, names=MAPS, missing_ok=True))
    logits_TV, maps = jax.device_get(call(params))
    tokens = [np.asarray(x) for x in inputs if x is not None and jnp.ndim(x) == 1 and x.dtype == jnp.int32]
    names = ("text",) if len(tokens) == 1 else ("source", "target")
    texts = {name: [token_text(int(token)) for token in text] for name, text in zip(names, tokens, strict=True)}
    layers = [
        AttentionLayer(
            name.removesuffix(".weights"), *_sides(name, names), np.reshape(weights, (-1, *weights.shape[-2:]))
        )
        for name, weights in maps.items()
    ]
    notes, prefix = {}, _prefix_length(inputs)
    if logits_TV.ndim == 2 and len(logits_TV) == len(tokens[-1]):
        all_notes = _token_notes(np.asarray(logits_TV, np.float64), tokens[-1], token_text, mask_token)
        notes = {names[-1]: ["" if i < prefix else note for i, note in enumerate(all_notes)]}
    about = (
        "Point at a token, or tap it to pin it: the stronger the colour of another token, the larger the weight of the "
        "chosen head on it from there. Each thumbnail is the attention map of a head, a row per query."
    )
    if prefix:
        about += f" The first {prefix} tokens are the prefix, which is visible to all and not predicted."
    return AttentionSection("Attention maps" if layers else "Tokens", texts, layers, notes, about if layers else "")


def _prefix_length(inputs: tuple[Any, ...]) -> int:
    """Return the tokens in the prefix of a prefix language model; 0 for another model."""
    return int(inputs[1]) if len(inputs) == 2 and jnp.ndim(inputs[1]) == 0 else 0


def _sides(name: str, texts: Sequence[str]) -> tuple[str, str]:
    """Return the texts that the queries and the keys of an attention map are of."""
    if CROSS in name or name.startswith("reader"):
        return texts[-1], texts[0]
    side = texts[-1] if name.startswith("decoder") else texts[0]
    return side, side


def _softmax(logits_TV: np.ndarray) -> np.ndarray:
    return np.exp(logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True))


def _token_notes(
    logits_TV: np.ndarray, tokens_T: np.ndarray, token_text: TokenText, mask_token: int | None
) -> Iterator[str]:
    """Yield a sentence for each token: its probability and the likeliest alternatives."""
    p_TV = _softmax(logits_TV)

    def likeliest(p_V: np.ndarray, except_token: int = -1) -> str:
        top = [int(token) for token in np.argsort(-p_V)[: N_ALTERNATIVES + 1] if token != except_token]
        return ", ".join(f"“{token_text(token)}” {p_V[token]:.1%}" for token in top[:N_ALTERNATIVES])

    for position, token in enumerate(tokens_T):
        if mask_token is not None:
            yield f"Likeliest here: {likeliest(p_TV[position])}." if token == mask_token else ""
        elif position:
            p_V = p_TV[position - 1]
            yield f"Probability {p_V[token]:.1%}; alternatives: {likeliest(p_V, int(token))}."
        else:
            yield ""


def residual_stream_sections(model: nn.Module, params: Params, inputs: tuple, token_text: TokenText) -> list[Section]:
    """Return the logit lens and the direct logit attribution of a decoder; `[]` for a model without such a stream."""
    if not contract_of(model).has_residual_stream:
        return []
    tokens_T = np.asarray(inputs[0])
    try:
        lens = {name: np.asarray(x, np.float64) for name, x in logit_lens(model, params, *inputs).items()}
        last_TV = list(lens.values())[-1]
        next_T = np.append(tokens_T[1:], last_TV[-1].argmax())
        parts = logit_attribution(model, params, *inputs, target_T=jnp.asarray(next_T))
    except UserError:
        return []
    start = max(0, _prefix_length(inputs) - 1)  # predictions begin at the prefix's last token
    tokens_T, next_T = tokens_T[start:], next_T[start:]
    lens = {name: x_TV[start:] for name, x_TV in lens.items()}
    attributions = {name: x[..., start:] for name, x in parts.items()}
    labels = [_label(token_text(int(token))) for token in tokens_T]
    layout = _heatmap_layout(tickvals=list(range(len(labels))), ticktext=labels, tickangle=-45, side="top")
    width = POSITION_PIXELS * len(labels) + 160
    attribution = _attribution_figure(attributions, next_T, layout, width, token_text)
    return [_lens_figure(lens, layout, width, token_text), attribution]


def _heatmap(z: Sequence[Sequence[float]], y: Sequence[str], low: float, high: float, **more: Any) -> dict[str, Any]:
    """Return a heatmap of rows `y`; its colours are sequential from 0, else diverging."""
    colours = {"zmin": low, "zmax": high, "colorscale": "diverging" if low else "sequential"}
    return {"type": "heatmap", "z": z, "y": list(y), "xgap": 1, "ygap": 1} | colours | more


def _heatmap_layout(**xaxis: Any) -> dict[str, Any]:
    return {"xaxis": {"showgrid": False, **xaxis}, "yaxis": {"autorange": "reversed", "showgrid": False}}


def _lens_figure(lens: Mapping[str, np.ndarray], layout: dict[str, Any], width: int, token_text: TokenText) -> Figure:
    top_p, top, hover = [], [], []
    for logits_TV in lens.values():
        p_TV = _softmax(logits_TV)
        likeliest_TN = np.argsort(-p_TV, axis=-1)[:, :N_ALTERNATIVES]
        top_p.append(p_TV.max(axis=-1).round(5).tolist())
        top.append([_label(token_text(int(row[0]))) for row in likeliest_TN])
        hover.append([
            ", ".join(f"“{plain(token_text(int(token)))}” {p_V[token]:.1%}" for token in row)
            for row, p_V in zip(likeliest_TN, p_TV, strict=True)
        ])  # fmt: skip
    heatmap = _heatmap(
        top_p, list(lens), 0, 1, text=top, texttemplate="%{text}", textfont={"size": 10}, customdata=hover,
        hovertemplate="%{y}, after “%{x}”: %{customdata}<extra></extra>",
    )  # fmt: skip
    about = (
        "The likeliest next token per position, were the residual stream unembedded after the embedding or a block; "
        "the stronger the colour, the larger its probability. The last row is the model's prediction."
    )
    return Figure("Logit lens", [heatmap], layout | {"height": 140 + 30 * len(lens)}, about, width)


def _attribution_figure(
    parts: Mapping[str, jax.Array], next_T: np.ndarray, layout: dict[str, Any], width: int, token_text: TokenText
) -> Figure:
    rows: dict[str, list[float]] = {}
    for name, values in parts.items():
        if np.ndim(values) == 1:
            rows[name] = np.asarray(values, np.float64).round(4).tolist()
        for head, x_T in enumerate(np.asarray(values, np.float64) if np.ndim(values) == 2 else ()):
            rows[f"{name.removesuffix('s')} {head}"] = x_T.round(4).tolist()
    largest = float(np.abs(list(rows.values())).max())
    heatmap = _heatmap(
        list(rows.values()), list(rows), -largest, largest,
        customdata=[[plain(token_text(int(token))) for token in next_T]] * len(rows),
        hovertemplate="%{y}, after “%{x}”: %{z:+.2f} for “%{customdata}”<extra></extra>",
    )  # fmt: skip
    about = (
        "What each part adds to the residual stream for or against the logit of the token that follows (at the last "
        "position, of the likeliest one)."
    )
    return Figure("Direct logit attribution", [heatmap], layout | {"height": 140 + 22 * len(rows)}, about, width)


def head_sections(model: nn.Module, params: Params, batch: Batch) -> list[Section]:
    """Return head ablation and head statistics over a batch; `[]` for a model without attention."""
    statistics = head_statistics(model, params, *batch.inputs, target_mask_BT=target_mask(batch))
    if not statistics:
        return []
    ablation = ablate_heads(model, params, batch)
    layers, n_heads = list(statistics), max(len(layer.entropy) for layer in statistics.values())
    z = [np.pad(np.asarray(ablation.mean[layer], np.float64), (0, n_heads - len(ablation.mean[layer])),
                constant_values=np.nan) for layer in layers]  # fmt: skip
    largest = float(np.nanmax(np.abs(z))) or 1.0
    heatmap = _heatmap(
        [row.tolist() for row in z], layers, -largest, largest, x=[f"head {head}" for head in range(n_heads)],
        texttemplate="%{z:+.3f}", xgap=2, ygap=2, hovertemplate="%{x} of %{y}: %{z:+.5f} nats<extra></extra>",
    )  # fmt: skip
    layout = {"height": 120 + 34 * len(layers), **_heatmap_layout()}
    about = f"Rise of the loss, {ablation.loss:.4f} nats, where a head's output is replaced by its mean everywhere."
    effects = (ablation.mean, ablation.mean_estimate, ablation.zero, ablation.zero_estimate)
    rows: list[list[str | float]] = [
        [
            f"{layer}, head {head}",
            *(float(x_H[head]) for x_H in (*astuple(statistics[layer]), *(e[layer] for e in effects))),
        ]
        for layer in layers
        for head in range(len(statistics[layer].entropy))
    ]
    return [
        Figure("Head ablation", [heatmap], layout, about, 90 * n_heads + 180),
        Table("Head statistics", HEAD_COLUMNS, rows, ABOUT_HEADS),
    ]


def saturation_sections(model: nn.Module, params: Params, batch: Batch) -> list[Section]:
    """Return the gradients of a decoder's first layer of attention as it becomes one-hot; `[]` for another model."""
    layer, first = "blocks.0.attention", jax.tree.map(lambda x: x[0], batch.inputs)
    if contract_of(model).task is not Task.CAUSAL_LM or not capture_shapes(
        model, params, *first, names=f"{layer}.weights", missing_ok=True
    ):
        return []
    rows = [row for row in saturation(model, params, batch, TEMPERATURES, layer) if row.entropy > 0 and row.scores > 0]
    if not rows:
        return []
    curves = (("scores", "of the scores", "solid"), ("scores_by_hand", "the same by hand", "dot"),
              ("W_Q", "of W_Q", "solid"), ("W_K", "of W_K", "solid"))  # fmt: skip
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "x": [row.entropy for row in rows], "name": label,
            "y": [getattr(row, name) for row in rows], "line": {"colour": number, "dash": dash, "width": 2},
            "customdata": [row.temperature for row in rows],
            "hovertemplate": "entropy %{x:.4g}, temperature %{customdata:.4g}: %{y:.4g}<extra>%{fullData.name}</extra>",
        }
        for number, (name, label, dash) in enumerate(curves)
    ]  # fmt: skip
    axis = {"type": "log", "exponentformat": "power"}
    layout = {
        "xaxis": {"title": {"text": "attention entropy, nats"}, **axis, "autorange": "reversed"},
        "yaxis": {"title": {"text": "norm of the gradient"}, **axis},
    }
    return [Figure("Attention saturation", traces, layout, ABOUT_SATURATION)]


def gradient_sections(model: nn.Module, params: Params, batch: Batch, token_text: TokenText | None) -> list[Section]:
    """Return the per-example gradients of a batch; `[]` without a cross-entropy, or for a single example. `token_text`
    is given for a model that reads a text first."""
    if contract_of(model).task is Task.CONTRASTIVE or len(batch.targets) < 2:
        return []
    gradients = per_example_gradients(model, params, batch)

    def example_name(b: int) -> str:
        if token_text is None:
            return str(b)
        return f"{b}: {''.join(token_text(int(t)) for t in np.asarray(batch.inputs[0])[b][:N_PREVIEW_TOKENS])}…"

    columns = (gradients.loss_B.tolist(), gradients.norm_B.tolist(), gradients.cosine_B.tolist())
    rows = [[example_name(b), *numbers] for b, numbers in enumerate(zip(*columns, strict=True))]
    scale = gradients.noise_scale
    noise = f"is {scale:.3g} examples" if np.isfinite(scale) else "is too large for so few examples to show"
    about = (
        "The gradient of each example's own loss: its norm, and its cosine with the mean of all, whose norm is "
        f"{gradients.mean_norm:.3g}. The gradient noise scale, the batch size with as much signal as noise, {noise} "
        "(McCandlish et al. 2018)."
    )
    return [Table("Per-example gradients", ("example", "loss", "gradient norm", "cosine"), rows, about)]


def _label(text: str) -> str:
    """Return a token's text as a label of at most 10 characters."""
    text = text.replace("\n", "⏎")
    return plain(text if len(text) <= 10 else f"{text[:9]}…")
