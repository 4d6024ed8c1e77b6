"""Alignment between a target and its source in sequence-to-sequence models."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import Task, contract_of
from jaxformer.errors import UserError, import_extra
from jaxformer.inspect.activations import Activations, capture
from jaxformer.inspect.attention import CROSS
from jaxformer.inspect.of_run import of_run
from jaxformer.models.inputs import check_example
from jaxformer.models.objective import Params


@of_run
def alignment(model: nn.Module, params: Params, source_S: jax.Array, target_T: jax.Array) -> jax.Array | None:
    """Return the attention over the source when predicting each next target token, `(T, S)` float32, rows sum to 1.

    For a recurrent model this is the attention of its decoder (Bahdanau et al. 2015, figure 3), or None if the model
    encodes the source as one vector; for a transformer, the mean over the heads of the last cross-attention.

    Args:
      source_S: int32 tokens, without padding; with a run, also a text.
      target_T: int32 tokens, the first of which is the start token; with a run, also a text, before which it is put.

    Raises:
      TypeError: the model reads no source.
    """
    if contract_of(model).task not in (Task.SEQUENCE_TO_SEQUENCE, Task.OTHER):
        raise TypeError(f"a {type(model).__name__} reads no source; give a sequence-to-sequence model")
    valid_S = jnp.ones(len(source_S), bool)
    check_example(model, source_S, valid_S, target_T)
    maps = list(_source_weights(model, params, source_S, valid_S, target_T).values())
    if not maps:
        return None
    return maps[-1] if maps[-1].ndim == 2 else maps[-1].mean(axis=0)


@partial(jax.jit, static_argnames="model")
def _source_weights(model: nn.Module, params: Params, *inputs: jax.Array) -> Activations:
    names = ("reader.pattern", f"*{CROSS}.pattern")
    return capture(model, params, *inputs, names=names, missing_ok=True)


def _import_figures() -> ModuleType:
    """Return matplotlib's module of figures, which need no backend: if that of MPLBACKEND, such as a notebook's, is not
    installed, matplotlib cannot be imported otherwise. Raises as `import_extra` does."""
    purpose = "drawing an alignment"
    try:
        return import_extra("matplotlib.figure", purpose)
    except UserError:
        if "matplotlib" in sys.modules or (backend := os.environ.pop("MPLBACKEND", None)) is None:
            raise
    for part in [name for name in sys.modules if name.startswith("matplotlib.")]:
        del sys.modules[part]  # of the import that failed
    try:
        return import_extra("matplotlib.figure", purpose)
    finally:
        os.environ["MPLBACKEND"] = backend


def draw_alignment(weights_TS: np.ndarray, source: Sequence[str], target: Sequence[str], file: Path) -> None:
    """Draw an alignment as a PNG, one row per target token; darker cells have larger weights.

    Args:
      weights_TS: see `alignment`.
      source: text of each source token; spaces and line breaks are shown as symbols.
      target: text of each predicted target token; an empty string is the end of the text.
      file: path of the PNG.

    Raises:
      UserError: matplotlib is not installed, or cannot be imported.
    """
    Figure = _import_figures().Figure
    T, S = weights_TS.shape
    figure = Figure(figsize=(1.5 + 0.22 * S, 1.5 + 0.22 * T), layout="constrained")
    axes = figure.subplots()
    axes.imshow(weights_TS, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    symbols = str.maketrans({" ": "␣", "\n": "⏎", "$": r"\$"})
    rotation = 90 if max(map(len, source)) > 1 else 0
    axes.set_xticks(range(S), [text.translate(symbols) for text in source], rotation=rotation)
    axes.set_yticks(range(T), [text.translate(symbols) or "(end)" for text in target])
    axes.set(xlabel="source", ylabel="target")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font may lack a script; matplotlib then draws boxes
        figure.savefig(file, dpi=120)
