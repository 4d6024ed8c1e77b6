"""Text of which a beginning is given, and the rest is to be predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.data.corpus import Corpus, TextConfig
from jaxformer.data.dataset import HELD_OUT_SEED, Batch, step_rng
from jaxformer.data.windows import TextDataset
from jaxformer.errors import UserError
from jaxformer.fields import at_least


@dataclass(frozen=True)
class PrefixTextConfig(TextConfig):
    """Which text, cut into windows that begin with a prefix, whose length is drawn anew for each (Raffel et al. 2020,
    section 3.2): the model sees it in both directions and predicts what follows, token by token."""

    shortest_prefix: int = 1
    """In tokens."""
    longest_prefix: int | None = None
    """In tokens; without it, the context length, which leaves one token to predict."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "shortest_prefix")
        if self.longest_prefix is not None:
            at_least(self, self.shortest_prefix, "longest_prefix")

    def check(self, model: TokenModelConfig) -> None:
        for name in ("shortest_prefix", "longest_prefix"):
            if (getattr(self, name) or 0) > model.context_length:
                raise UserError(
                    f"data.{name} is {getattr(self, name)}; it must be at most the model's context_length, "
                    f"{model.context_length}."
                )

    def make(self, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> PrefixTextDataset:
        return PrefixTextDataset(self, model, corpus, batch_size, seed)


class PrefixTextDataset(TextDataset):
    """A corpus in windows of which each has a prefix; every token after it is to be predicted from all before it."""

    def __init__(
        self, config: PrefixTextConfig, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int
    ) -> None:
        """Raises `UserError` where one of its parts is too short."""
        super().__init__(config, model, corpus, batch_size, seed)
        self.shortest, self.longest = config.shortest_prefix, config.longest_prefix or model.context_length
        self.seed = seed

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        prefix_B, predicted_BT = self._prefixes(step_rng(self.seed, step), self.windows.batch_size)
        batch = super().batch(step, rows)
        weights_BT = predicted_BT / np.float32(np.count_nonzero(predicted_BT))
        return Batch((*batch.inputs, prefix_B[rows]), batch.targets, weights_BT[rows])

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        draw = step_rng(HELD_OUT_SEED, 0)
        for batch in super().held_out(batch_size, n):
            prefix_B, predicted_BT = self._prefixes(draw, batch_size)
            yield Batch((*batch.inputs, prefix_B), batch.targets, batch.weights * predicted_BT)

    def _prefixes(self, draw: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Their lengths, `(n,)` int32, and which targets are not in them, `(n, T)`."""
        # A window takes one number, so that what it draws does not depend on the batch's size.
        prefix_B = self.shortest + np.floor(draw.random(n) * (self.longest + 1 - self.shortest)).astype(np.int32)
        return prefix_B, np.arange(1, self.model.context_length + 1) >= prefix_B[:, None]  # target t is token t + 1

    def describe(self) -> str:
        return f"{super().describe()}; prefixes of {self.shortest:,} to {self.longest:,} tokens"
