"""What a trained model does, as sections of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Task, contract_of
from jaxformer.data.dataset import Batch
from jaxformer.errors import UserError
from jaxformer.inspect.attention import CROSS
from jaxformer.inspect.gradients import example_gradients
from jaxformer.inspect.heads import ablate_heads, counts_of, head_statistics
from jaxformer.inspect.page import Figure, Layer, Reading, Section, Table, plain
from jaxformer.inspect.residual_stream import logit_attribution, logit_lens
from jaxformer.inspect.saturation import saturation
from jaxformer.inspect.trace import LOGITS, trace, trace_names
from jaxformer.models.decoder import Decoder
from jaxformer.models.objective import Params

WEIGHTS = ("*attention.weights", "reader.weights")
RIVALS = 3
TEMPERATURES = tuple(2.0**power for power in range(3, -9, -1))
PLACE = 46
"""Pixels for a place of a text."""
TOLD_OF_HEADS = (
    "head", "entropy", "of the most", "distance", "first", "previous", "duplicate", "induction",
    "without it", "estimated", "with zeros", "estimated",
)  # fmt: skip
ABOUT_HEADS = (
    "Means over rows: entropy in nats and as a share of what it could be; places to what it looks at; weight on the "
    "first token, on the one before, on earlier ones that are the same, and on what followed these (induction). Then "
    "the rise of the loss without the head, with its mean or zeros in its place, and what one gradient says of each."
)
ABOUT_GRADIENTS = (
    "The scores of blocks.0.attention are divided by ever lower temperatures. Where attention is one-hot, no gradient "
    "reaches the scores: ∂L/∂z = w (u - Σ w u) is 0, whatever u is. That of W_Q is the scores' times the keys over the "
    "temperature, and so can rise until rows are one-hot to rounding."
)

BEGINNING = 8
"""Tokens that tell a text from others."""

Words = Callable[[int], str]
"""A token's text."""


def reading(
    model: nn.Module, params: Params, inputs: tuple[Any, ...], words: Words, mask: int | None = None
) -> Reading:
    """Where each head looks in a text, and what chance each token had.

    Args:
      inputs: one example: a text, or a source, where it has tokens, and a target that starts with a token of its own.
      mask: the token that stands for those to be filled in, of a masked language model; of all others the logits at a
        place are of the next token.
    """
    found = jax.device_get(jax.jit(lambda params: trace(model, params, *inputs, names=(*WEIGHTS, LOGITS)))(params))
    tokens = [np.asarray(x) for x in inputs if x is not None and jnp.ndim(x) == 1 and x.dtype == jnp.int32]
    names = ("text",) if len(tokens) == 1 else ("source", "target")
    texts = {name: [words(int(token)) for token in of_it] for name, of_it in zip(names, tokens, strict=True)}
    layers = [
        Layer(
            name.removesuffix(".weights"), *_sides(name, names), np.reshape(found[name], (-1, *found[name].shape[-2:]))
        )
        for name in trace_names(model, params, *inputs, names=WEIGHTS)
    ]
    logits_TV = found[LOGITS]
    said = {}
    if logits_TV.ndim == 2 and len(logits_TV) == len(tokens[-1]):
        chances = _chances(np.asarray(logits_TV, np.float64), tokens[-1], words, mask)
        said = {names[-1]: ["" if at < _prefix(inputs) else chance for at, chance in enumerate(chances)]}
    about = (
        "Point at a token, or tap it to hold on to it: the stronger the colour of others, the more the chosen head "
        "looks at them from there. Each small picture is a head, with a row for each token that looks."
    )
    if _prefix(inputs):
        about += f" The first {_prefix(inputs)} tokens are the prefix, which all see and none is predicted of."
    return Reading("What the heads look at" if layers else "Tokens", texts, layers, said, about if layers else "")


def _prefix(inputs: tuple[Any, ...]) -> int:
    """How many of the first tokens a prefix language model is given; 0 for another model."""
    return int(inputs[1]) if len(inputs) == 2 and jnp.ndim(inputs[1]) == 0 else 0


def _sides(name: str, names: Sequence[str]) -> tuple[str, str]:
    """Which text looks, and which it looks at."""
    if CROSS in name or name.startswith("reader"):
        return names[-1], names[0]
    side = names[-1] if name.startswith("decoder") else names[0]
    return side, side


def _chances(logits_TV: np.ndarray, tokens_T: np.ndarray, words: Words, mask: int | None) -> Iterator[str]:
    """A sentence for each token."""
    p_TV = np.exp(logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True))

    def likeliest(p_V: np.ndarray, without: int = -1) -> str:
        best = [int(token) for token in np.argsort(-p_V)[: RIVALS + 1] if token != without][:RIVALS]
        return ", ".join(f"“{words(token)}” {p_V[token]:.1%}" for token in best)

    for place, token in enumerate(tokens_T):
        if mask is not None:
            yield f"Likeliest here: {likeliest(p_TV[place])}." if token == mask else ""
        elif place:
            p_V = p_TV[place - 1]
            yield f"It had a chance of {p_V[token]:.1%}; others: {likeliest(p_V, int(token))}."
        else:
            yield ""


def stream(model: nn.Module, params: Params, inputs: tuple[Any, ...], words: Words) -> list[Section]:
    """What a decoder's stream would say after each block, and who spoke for the token that follows; nothing for a model
    whose stream is not read so."""
    if not isinstance(model, Decoder):
        return []
    tokens_T = np.asarray(inputs[0])
    try:
        lens = {name: np.asarray(x, np.float64) for name, x in logit_lens(model, params, *inputs).items()}
        last_TV = list(lens.values())[-1]
        next_T = np.append(tokens_T[1:], last_TV[-1].argmax())
        parts = logit_attribution(model, params, *inputs, wanted_T=jnp.asarray(next_T))
    except UserError:
        return []
    if start := max(0, _prefix(inputs) - 1):  # what the model predicts begins here
        tokens_T, next_T = tokens_T[start:], next_T[start:]
        lens = {name: x_TV[start:] for name, x_TV in lens.items()}
        parts = {name: x[..., start:] for name, x in parts.items()}
    ticks = {
        "tickvals": list(range(len(tokens_T))),
        "ticktext": [_tick(words(int(t))) for t in tokens_T],
        "tickangle": -45,
    }
    layout = {
        "xaxis": {**ticks, "showgrid": False, "side": "top"},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    width = PLACE * len(tokens_T) + 160
    return [_lens_figure(lens, layout, width, words), _attribution_figure(parts, next_T, layout, width, words)]


def _lens_figure(lens: Mapping[str, np.ndarray], layout: dict[str, Any], width: int, words: Words) -> Figure:
    chances, best, hover = [], [], []
    for logits_TV in lens.values():
        p_TV = np.exp(logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True))
        likeliest_TN = np.argsort(-p_TV, axis=-1)[:, :RIVALS]
        chances.append(p_TV.max(axis=-1).round(5).tolist())
        best.append([_tick(words(int(row[0]))) for row in likeliest_TN])
        hover.append([
            ", ".join(f"“{plain(words(int(token)))}” {p_V[token]:.1%}" for token in row)
            for row, p_V in zip(likeliest_TN, p_TV, strict=True)
        ])  # fmt: skip
    trace = {
        "type": "heatmap", "z": chances, "y": list(lens), "text": best, "texttemplate": "%{text}", "customdata": hover,
        "textfont": {"size": 10}, "zmin": 0, "zmax": 1, "colorscale": "sequential", "xgap": 1, "ygap": 1,
        "hovertemplate": "%{y}, after “%{x}”: %{customdata}<extra></extra>",
    }  # fmt: skip
    about = (
        "The token that would follow each place, were the stream read out after the embedding or a block (logit lens); "
        "the stronger the colour, the surer. The last row is what the model says."
    )
    return Figure("Logit lens", [trace], layout | {"height": 140 + 30 * len(lens)}, about, width)


def _attribution_figure(
    parts: Mapping[str, jax.Array], next_T: np.ndarray, layout: dict[str, Any], width: int, words: Words
) -> Figure:
    rows: dict[str, list[float]] = {}
    for name, given in parts.items():
        by_head = np.asarray(given, np.float64)
        if by_head.ndim == 1:
            rows[name] = by_head.round(4).tolist()
        else:
            rows |= {f"{name.removesuffix('s')} {head}": x_T.round(4).tolist() for head, x_T in enumerate(by_head)}
    most = float(np.abs(list(rows.values())).max())
    names = [plain(words(int(token))) for token in next_T]
    trace = {
        "type": "heatmap", "z": list(rows.values()), "y": list(rows), "customdata": [names] * len(rows),
        "zmin": -most, "zmax": most, "colorscale": "diverging", "xgap": 1, "ygap": 1,
        "hovertemplate": "%{y}, after “%{x}”: %{z:+.2f} for “%{customdata}”<extra></extra>",
    }  # fmt: skip
    about = (
        "What each part wrote into the stream for or against the logit of the token that follows (direct logit "
        "attribution; at the last place, of the likeliest one)."
    )
    return Figure("Who spoke for the next token", [trace], layout | {"height": 140 + 22 * len(rows)}, about, width)


def heads(model: nn.Module, params: Params, batch: Batch) -> list[Section]:
    """What each head does over several examples, and what the loss would be without it; nothing for a model that has
    none."""
    looks = head_statistics(model, params, *batch.inputs, counts_BT=counts_of(batch))
    if not looks:
        return []
    without = ablate_heads(model, params, batch)
    layers, most = list(looks), max(len(looks[name].entropy) for name in looks)
    z = [np.pad(np.asarray(without.mean[name], np.float64), (0, most - len(without.mean[name])), constant_values=np.nan)
         for name in layers]  # fmt: skip
    reach = float(np.nanmax(np.abs(z))) or 1.0
    trace = {
        "type": "heatmap", "z": [row.tolist() for row in z], "x": [f"head {head}" for head in range(most)], "y": layers,
        "texttemplate": "%{z:+.3f}", "zmin": -reach, "zmax": reach, "colorscale": "diverging", "xgap": 2, "ygap": 2,
        "hovertemplate": "%{x} of %{y}: %{z:+.5f} nats<extra></extra>",
    }  # fmt: skip
    layout = {
        "height": 120 + 34 * len(layers), "yaxis": {"autorange": "reversed", "showgrid": False},
        "xaxis": {"showgrid": False},
    }  # fmt: skip
    about = f"By how much the loss, {without.loss:.4f} nats, rises where a head gives its mean at every place instead."
    rows: list[list[str | float]] = []
    for name in layers:
        look = {field: np.asarray(value) for field, value in asdict(looks[name]).items()}
        for head in range(len(look["entropy"])):
            effects = (without.mean, without.mean_estimate, without.zero, without.zero_estimate)
            rows.append(
                [
                    f"{name}, head {head}",
                    *(float(x[head]) for x in look.values()),
                    *(float(e[name][head]) for e in effects),
                ]
            )
    return [
        Figure("The loss without each head", [trace], layout, about, 90 * most + 180),
        Table("What each head does", TOLD_OF_HEADS, rows, ABOUT_HEADS),
    ]


def gradients_over_entropy(model: nn.Module, params: Params, batch: Batch) -> list[Section]:
    """What becomes of gradients in a decoder's first block as its attention becomes one-hot; nothing for another
    model."""
    layer = "blocks.0.attention"
    if not isinstance(model, Decoder) or f"{layer}.weights" not in trace_names(
        model, params, *jax.tree.map(lambda x: x[0], batch.inputs)
    ):
        return []
    rows = [row for row in saturation(model, params, batch, TEMPERATURES, layer) if row.entropy > 0 and row.scores > 0]
    if not rows:
        return []
    looks = (("scores", "of the scores", "solid"), ("scores_by_hand", "the same by hand", "dot"),
             ("W_Q", "of W_Q", "solid"), ("W_K", "of W_K", "solid"))  # fmt: skip
    traces = [
        {
            "type": "scatter", "mode": "lines+markers", "x": [row.entropy for row in rows], "name": label,
            "y": [getattr(row, name) for row in rows], "line": {"colour": number, "dash": dash, "width": 2},
            "customdata": [row.temperature for row in rows],
            "hovertemplate": "entropy %{x:.4g}, temperature %{customdata:.4g}: %{y:.4g}<extra>%{fullData.name}</extra>",
        }
        for number, (name, label, dash) in enumerate(looks)
    ]  # fmt: skip
    axis = {"type": "log", "exponentformat": "power"}
    layout = {
        "xaxis": {"title": {"text": "entropy of a row, nats"}, **axis, "autorange": "reversed"},
        "yaxis": {"title": {"text": "norm of the gradient"}, **axis},
    }
    return [Figure("Gradients as attention becomes one-hot", traces, layout, ABOUT_GRADIENTS)]


def examples(model: nn.Module, params: Params, batch: Batch, words: Words | None) -> list[Section]:
    """What each example's own gradient is, and how they agree.

    Args:
      words: of models that read a text first.
    """
    if contract_of(model).task is Task.CONTRASTIVE or len(batch.targets) < 2:
        return []
    found = example_gradients(model, params, batch)

    def name(b: int) -> str:
        if words is None:
            return str(b)
        begins = [words(int(token)) for token in np.asarray(batch.inputs[0])[b][:BEGINNING]]
        return f"{b}: {''.join(begins)}…"

    rows = [
        [name(b), loss, norm, cosine]
        for b, (loss, norm, cosine) in enumerate(
            zip(found.loss_B.tolist(), found.norm_B.tolist(), found.cosine_B.tolist(), strict=True)
        )
    ]
    scale = found.noise_scale
    noise = f"is as large as signal in a batch of {scale:.3g} examples" if np.isfinite(scale) else "drowns all signal"
    about = (
        "The gradient of each example's own loss: its norm, and its cosine with the mean of all, whose norm is "
        f"{found.mean_norm:.3g}. By how they differ, noise {noise} (the gradient noise scale, McCandlish et al. 2018)."
    )
    return [Table("What each example asks for", ("example", "loss", "gradient", "cosine"), rows, about)]


def _tick(text: str) -> str:
    """A token as a label."""
    shown = text.replace("\n", "⏎")
    return plain(shown if len(shown) <= 10 else f"{shown[:9]}…")
