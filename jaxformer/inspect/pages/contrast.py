"""Page sections about two texts: what in the model makes their predictions differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxformer.inspect.pages.charts import Heatmap
from jaxformer.inspect.pages.labels import head_label, layer_label
from jaxformer.inspect.pages.model_sections import TokenText, part_label
from jaxformer.inspect.pages.page import Section, Table
from jaxformer.inspect.patching import patch_activations
from jaxformer.inspect.paths import path_attribution
from jaxformer.models.objective import Params

N_EDGES, N_EXACT = 40, 10
"""Paths on a page, and those of them that are computed exactly."""
AGREES = {True: "right", False: "wrong", None: "not checked"}
"""Text for `Edge.is_linear`."""


def contrast_sections(
    model: nn.Module,
    params: Params,
    text_T: jax.Array,
    other_T: jax.Array,
    token_text: TokenText,
    progress: Callable[[str], object] = lambda _: None,
) -> list[Section]:
    """Return how a decoder's prediction after a text changes with activations of another text, of as many tokens: the
    residual stream at each position, and what each part writes to each later part. The second section is omitted for a
    model whose stream is no sum of parts. `progress` is called with the name of each before it is made."""
    # Parameters are an argument: as constants, they would be in the program several times.
    predict = jax.jit(lambda params, tokens_T: model.apply({"params": params}, tokens_T)[-1])
    before_V, after_V = (
        np.asarray(jax.nn.log_softmax(predict(params, tokens_T)), np.float64) for tokens_T in (text_T, other_T)
    )
    token, rival = int(before_V.argmax()), int(after_V.argmax())
    if rival == token:
        rises_V = after_V - before_V
        rises_V[token] = -np.inf
        rival = int(rises_V.argmax())

    def preference(logits_TV: Any) -> Any:
        return logits_TV[-1, token] - logits_TV[-1, rival]

    what = f"the logit of “{token_text(token)}” minus that of “{token_text(rival)}”"
    names = ("blocks.*.resid_pre", f"blocks.{model.config.n_blocks - 1}.resid_post")
    progress(f"patching, {(model.config.n_blocks + 1) * len(text_T):,} forward passes")
    patched = patch_activations(model, params, (text_T,), (other_T,), names, preference)
    texts = [[token_text(int(token)) for token in tokens] for tokens in (text_T, other_T)]
    streams = Heatmap(
        "Patching",
        np.stack(list(patched.values())) - (before_V[token] - before_V[rival]),
        [f"before {layer_label(f'blocks.{i}')}" for i in range(model.config.n_blocks)] + ["at the end"],
        [a if a == b else f"{a} / {b}" for a, b in zip(*texts, strict=True)],
        "diverging",
        cell=(72, 22),
        about=(
            f"{what[0].upper()}{what[1:]} is {preference(before_V[None]):z.2f} after the text, and "
            f"{preference(after_V[None]):z.2f} after the other. A cell is its change if the residual stream at one "
            "position, before one layer, is replaced by the other text's: orange is a rise, blue a fall."
        ),
    )
    progress("paths")
    try:
        edges = path_attribution(model, params, (text_T,), (other_T,), preference, N_EXACT)
    except ValueError:
        return [streams]
    rows: list[list[str | float]] = [
        [_part(e.source), _part(e.target), e.estimate, np.nan if e.exact is None else e.exact, AGREES[e.is_linear]]
        for e in edges[:N_EDGES]
    ]
    about = (
        f"Change of {what} if one part reads what an earlier part writes for the other text, and all other parts read "
        f"what it writes for the text: estimated from one gradient, and computed for the {N_EXACT} largest. The "
        "estimate is of first order, and counts as wrong if the exact effect has the other sign, or is not from half "
        "to twice as large."
    )
    return [streams, Table("Paths", ("from", "to", "estimate", "exact", "the estimate is"), rows, about=about)]


def _part(name: str) -> str:
    """Return "head 0.2", "attention 1", "MLP 0" and so on for names of `Edge`."""
    if match := re.fullmatch(r"(blocks\.\d+\.attention)\.z\.(\d+)", name):
        return head_label(match[1], int(match[2]))
    match = re.fullmatch(r"blocks\.(\d+)\.attention", name)
    return f"attention {match[1]}" if match else part_label(name)
