"""Where a sequence-to-sequence model looks in its source while it writes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.inspect.attention import CROSS, named_attention_maps
from jaxformer.models.inputs import check_example
from jaxformer.models.objective import Params
from jaxformer.models.recurrent import Recurrent


def alignment(model: nn.Module, params: Params, source_S: jax.Array, target_T: jax.Array) -> jax.Array | None:
    """How much each place of the source counts for what follows each token of the target, `(T, S)` float32, rows that
    sum to 1: the weights of a recurrent model's attention (Bahdanau et al. 2015, figure 3), or those of a transformer's
    last cross-attention, the mean over its heads. None for a model that has one vector of the source.

    Args:
      source_S: int32 tokens, all of them.
      target_T: int32 tokens, of which the first starts the target.
    """
    valid_S = jnp.ones(len(source_S), bool)
    check_example(model, source_S, valid_S, target_T)
    if isinstance(model, Recurrent):
        if model.config.attention == "none":
            return None
        found = model.apply({"params": params}, source_S, valid_S, target_T, method="alignment")
        assert isinstance(found, jax.Array)
        return found
    maps = named_attention_maps(model, params, source_S, valid_S, target_T)
    return [weights for name, weights in maps.items() if name.endswith(CROSS)][-1].mean(axis=0)


def draw_alignment(weights_TS: np.ndarray, source: Sequence[str], target: Sequence[str], file: Path) -> None:
    """Draw weights as a picture, a row for each token of the target as it is written, dark where it looks.

    Args:
      source, target: what stands for each token; spaces and line breaks are shown as signs.
    """
    from matplotlib.figure import Figure  # slow to import, and only needed here

    T, S = weights_TS.shape
    figure = Figure(figsize=(1.5 + 0.22 * S, 1.5 + 0.22 * T), layout="constrained")
    axes = figure.subplots()
    axes.imshow(weights_TS, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    signs = str.maketrans({" ": "␣", "\n": "⏎", "$": r"\$"})
    axes.set_xticks(
        range(S), [text.translate(signs) for text in source], rotation=90 if max(map(len, source)) > 1 else 0
    )
    axes.set_yticks(range(T), [text.translate(signs) or "(end)" for text in target])
    axes.set(xlabel="source", ylabel="target, as it is written")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a script that the font lacks is drawn as boxes
        figure.savefig(file, dpi=120)
