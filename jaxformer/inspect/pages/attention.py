"""Page section with the attention of every head from each token of a text, and the next-token probabilities."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxformer.inspect.pages.page import Section, embed, rounded


@dataclass(frozen=True)
class AttentionLayer:
    """Attention map of one layer over the texts of an `AttentionSection`."""

    name: str
    rows: str
    """Name of the text that the queries belong to."""
    columns: str
    """Name of the text that the keys belong to."""
    weights_HTS: np.ndarray
    """Attention weights; rows sum to 1. In a film, `(frames, H, T, S)`."""
    ablation: Sequence[float] = ()
    """Increase in loss under mean ablation of each head, in nats; empty if it is not measured."""


@dataclass(frozen=True)
class Prediction:
    """A model's prediction for the token after a token, or for a masked token."""

    heading: str
    """Subject of the prediction, such as 'Next token after “the”'."""
    probabilities: Sequence[tuple[str, float]]
    """Most likely tokens and their probabilities."""
    actual: tuple[str, float] | None = None
    """The actual token and its probability; None if there is none."""


@dataclass(frozen=True)
class AttentionSection(Section):
    """Texts as tokens; pointing at a token shows a head's attention from it."""

    texts: Mapping[str, Sequence[str]]
    """Tokens of each text, by its name."""
    layers: Sequence[AttentionLayer]
    predictions: Mapping[str, Sequence[Prediction | None]] = field(default_factory=dict)
    """One prediction per token of a text, by the text's name."""

    def body(self) -> str:
        """Return the HTML element. Weights are base64 bytes round(255·√w), where the root preserves small ones; causal
        maps have only their lower triangles. Non-finite weights are 0."""
        layers = []
        for layer in self.layers:
            bytes_HTS = np.rint(255 * np.sqrt(np.nan_to_num(layer.weights_HTS))).astype(np.uint8)
            causal = layer.rows == layer.columns and not np.triu(bytes_HTS, 1).any()
            stored = bytes_HTS[..., np.tri(bytes_HTS.shape[-1], dtype=bool)] if causal else bytes_HTS
            frames = stored if layer.weights_HTS.ndim == 4 else stored[None]
            layers.append(
                {
                    "name": layer.name,
                    "rows": layer.rows,
                    "columns": layer.columns,
                    "heads": layer.weights_HTS.shape[-3],
                    "causal": causal,
                    "ablation": rounded(list(layer.ablation)) or None,
                    "frames": [base64.b64encode(frame.tobytes()).decode() for frame in frames],
                }
            )
        predictions = {
            name: [p and [p.heading, as_bars(p.probabilities, p.actual)] for p in row]
            for name, row in self.predictions.items()
        }
        texts = {name: list(tokens) for name, tokens in self.texts.items()}
        return embed("attention", {"texts": texts, "predictions": predictions, "layers": layers})


def as_bars(probabilities: Sequence[tuple[str, float]], actual: tuple[str, float] | None) -> list:
    """Return `[label, probability, is_actual]` for each bar of a prediction; the actual token is appended if missing.
    Tokens may have equal labels, such as parts of characters."""
    bars = [[label, rounded(p, 4), (label, p) == actual] for label, p in probabilities]
    if actual is not None and not any(is_actual for *_, is_actual in bars):
        bars.append([actual[0], rounded(actual[1], 4), True])
    return bars
