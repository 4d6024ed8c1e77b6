"""Page section about lenses."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.contract import contract_of
from jaxformer.inspect.lenses import Lens, agreement, jacobian_lens, regression_lens
from jaxformer.inspect.pages.charts import Axis, Grid, Line, Lines
from jaxformer.inspect.pages.page import Section, Table
from jaxformer.models.objective import Params, is_causal_lm
from jaxformer.train.evaluate import ValidationData

MAX_TOKENS = 64
"""Maximum tokens of a text that lenses are fitted to."""
POSITIONS_PER_FEATURE, JACOBIAN_TEXTS, N_MEASURED = 10, 4, 16
"""Positions per feature of the residual stream for the regression, texts for the mean Jacobian, and texts that lenses
are measured on."""
ABOUT = (
    "How early the model knows what it will predict: the residual stream after the embedding and each block, "
    "taken for the last one as it is (logit lens), after the mean Jacobian of the blocks between (Jacobian lens), or "
    "after a linear regression of the last one on it (regression lens), on texts that they were not fitted to. First "
    "the fraction of positions where the most likely token is the model's, then the divergence from its distribution."
)


def lens_sections(
    model: nn.Module, params: Params, data: ValidationData, progress: Callable[[str], object] = lambda _: None
) -> list[Section]:
    """Return how well three lenses predict a decoder's predictions; `[]` for a model that they do not apply to. They
    are measured on some held-out texts, and fitted to others."""
    contract = contract_of(model)
    if not is_causal_lm(model) or not contract.has_residual_stream or contract.has_prefix or contract.fixed_length:
        return []
    T = min(MAX_TOKENS, model.config.context_length)
    n = -(-POSITIONS_PER_FEATURE * model.config.d_model // T) + N_MEASURED
    n_windows = -(-n // (model.config.context_length // T))
    batch = next(data.val_batches(n_windows, n_windows))
    if len(batch.inputs) > 1:  # packed documents
        return []
    tokens_BT, weights_BT = np.asarray(batch.inputs[0]), np.ones_like(batch.targets)
    if batch.weights is not None:  # 0 in windows that fill the batch
        weights_BT = batch.weights
    pieces = tokens_BT.shape[1] // T
    texts_BT, weights_BT = (x[:, : pieces * T].reshape(-1, T) for x in (tokens_BT, weights_BT))
    texts = [jnp.asarray(text_T) for text_T in texts_BT[weights_BT.all(axis=1)][:n]]
    fitted, measured = texts[N_MEASURED:], texts[:N_MEASURED]
    if not fitted:
        return []
    progress(f"lenses, on {len(texts):,} held-out texts of {T} tokens")
    try:
        lenses: dict[str, Lens] = {
            "logit": None,
            "Jacobian": jacobian_lens(model, params, fitted[:JACOBIAN_TEXTS], jax.random.key(0)),
            "regression": regression_lens(model, params, fitted),
        }
    except ValueError:  # the stream is no sum of parts
        return []
    results = {name: agreement(model, params, lens, measured) for name, lens in lenses.items()}
    x, blocks = Axis("blocks"), range(model.config.n_blocks + 1)
    curves = [
        Lines(title, [Line(blocks, [x[i] for x in of.values()], name, points=True) for name, of in results.items()],
              x, Axis(unit, limits=limits))
        for i, (title, unit, limits) in enumerate((("Same token", "fraction", (0, 1)), ("Divergence", "nats", None)))
    ]  # fmt: skip
    columns = ("stream", *(f"{name}, {unit}" for name in results for unit in ("same token", "nats")))
    rows: list[list[str | float]] = [
        [name, *(float(x) for of in results.values() for x in of[name])] for name in results["logit"]
    ]
    return [Grid("Lenses", curves, about=ABOUT), Table("Lenses by block", columns, rows)]
