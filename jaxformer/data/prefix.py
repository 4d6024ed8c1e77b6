"""Text with prefixes for prefix language models (Raffel et al. 2020, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.config.fields import Positive, Range
from jaxformer.data.dataset import VALIDATION_SEED, Batch, step_rng
from jaxformer.data.tokens import Corpus
from jaxformer.data.windows import TextConfig, TextDataset
from jaxformer.errors import UserError


@dataclass(frozen=True)
class PrefixTextConfig(TextConfig):
    """Text, cut into windows with a prefix of random length, within which attention is bidirectional; each token after
    it is predicted from all tokens before."""

    shortest_prefix: Positive = 1
    """Minimum prefix length in tokens."""
    longest_prefix: int | None = None
    """Maximum prefix length in tokens; by default the context length, which leaves one token to predict."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest_prefix is not None:
            Range(least=self.shortest_prefix).check("`data.longest_prefix`", self.longest_prefix)

    def build_dataset(self, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> PrefixTextDataset:
        for name in ("shortest_prefix", "longest_prefix"):
            if (getattr(self, name) or 0) > model.context_length:
                limit = f"it must be at most the model's context_length, {model.context_length}"
                raise UserError(f"`data.{name}` is {getattr(self, name)}; {limit}.")
        return PrefixTextDataset(self, model, corpus, batch_size, seed)


class PrefixTextDataset(TextDataset):
    """A corpus in windows with prefixes; every token after the prefix is predicted from all tokens before. Inputs are
    tokens `(B, T)` and prefix lengths `(B,)`, both int32."""

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        prefix_B, predicted_BT = self._draw_prefixes(step_rng(self.seed, step), self.windows.batch_size)
        batch = super().batch(step, rows)
        weights_BT = predicted_BT / np.float32(np.count_nonzero(predicted_BT))
        return Batch((*batch.inputs, prefix_B[rows]), batch.targets, weights_BT[rows])

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        rng = step_rng(VALIDATION_SEED, 0)
        for batch in super().val_batches(batch_size, n):
            prefix_B, predicted_BT = self._draw_prefixes(rng, batch_size)
            weights_BT = batch.weights * predicted_BT[:, : batch.weights.shape[1]]  # a short text has a short window
            yield Batch((*batch.inputs, prefix_B), batch.targets, weights_BT)

    def _draw_prefixes(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return n prefix lengths, `(n,)` int32, and a mask of the targets after them, `(n, T)`."""
        # One random number per window, so that a window's prefix does not depend on the batch size.
        shortest, longest = self._range
        prefix_B = shortest + np.floor(rng.random(n) * (longest + 1 - shortest)).astype(np.int32)
        return prefix_B, np.arange(1, self.model.context_length + 1) >= prefix_B[:, None]  # target t is token t + 1

    @property
    def _range(self) -> tuple[int, int]:
        return self.config.shortest_prefix, self.config.longest_prefix or self.model.context_length

    def describe(self) -> str:
        shortest, longest = self._range
        return f"{super().describe()}; prefixes of {shortest:,} to {longest:,} tokens"
