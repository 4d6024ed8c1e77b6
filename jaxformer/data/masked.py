"""Text with some tokens left out, to be told from what stands before and after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.data.corpus import Corpus, TextConfig
from jaxformer.data.dataset import HELD_OUT_SEED, Batch, step_rng
from jaxformer.data.windows import TextDataset, eval_batches
from jaxformer.errors import UserError

HIDDEN, REPLACED = 0.8, 0.9
"""Of 10 chosen tokens, 8 are hidden by the mask token, another stands in place of the ninth, and the tenth is kept
(Devlin et al. 2019, section 3.1): where a token stands, the model cannot know whether it is the right one."""


@dataclass(frozen=True)
class MaskedTextConfig(TextConfig):
    """Which text, cut into windows in which some tokens are left out (a cloze test). The vocabulary of the model has
    one token more than the text's, its last: the mask."""

    n_extra_tokens = 1
    masked_fraction: float = 0.15
    """Share of the tokens that are to be predicted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.masked_fraction <= 1:
            raise UserError(
                f"data.masked_fraction is {self.masked_fraction}; it must be above 0 and at most 1, such as 0.15."
            )

    def check(self, model: TokenModelConfig) -> None:
        if model.vocab_size < 258:
            raise UserError(f"vocab_size is {model.vocab_size}; bytes, end-of-text and the mask need at least 258.")

    def make(self, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> MaskedTextDataset:
        return MaskedTextDataset(self, model, corpus, batch_size, seed)


class MaskedTextDataset(TextDataset):
    """A corpus in windows of which some tokens, chosen anew for each batch, are to be predicted from the others."""

    def __init__(
        self, config: MaskedTextConfig, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int
    ) -> None:
        """Raises `UserError` where one of its parts is too short."""
        super().__init__(config, model, corpus, batch_size, seed)
        self.fraction, self.seed = config.masked_fraction, seed
        self.token_lengths = None  # bits of some bytes, with the others given, compare with nothing

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        B, T = self.windows.batch_size, self.model.context_length
        draws_BT = step_rng(self.seed, step).random((B, T))
        weight = np.float32(1 / max(1, (draws_BT < self.fraction).sum()))
        targets_BT = self.windows.batch(step, rows)[:, :T]
        tokens_BT, chosen_BT = mask_tokens(targets_BT, draws_BT[rows], self.fraction, self.model.vocab_size - 1)
        return Batch((tokens_BT, np.ones(tokens_BT.shape, bool)), targets_BT, chosen_BT * weight)

    def held_out(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        T, draw = self.model.context_length, step_rng(HELD_OUT_SEED, 0)
        for targets_BT, weights_BT in eval_batches(self.val.tokens, T, T, batch_size, n):
            draws_BT = draw.random(targets_BT.shape)
            tokens_BT, chosen_BT = mask_tokens(targets_BT, draws_BT, self.fraction, self.model.vocab_size - 1)
            valid_BT = weights_BT > 0
            valid_BT[:, 0] = True  # also of a window that only fills up: there must be something to see
            yield Batch((tokens_BT, valid_BT), targets_BT, weights_BT * chosen_BT)

    def describe(self) -> str:
        return (
            f"{super().describe()}; {self.fraction:.0%} are to be told from the others: "
            f"by how frequent each token is, they cost {self.unigram_entropy():.2f} nats each"
        )

    def unigram_entropy(self) -> float:
        """Nats a held-out token costs who knows nothing but how often each stands in the training text; every token is
        counted once more than it does (Laplace's rule)."""
        counts_V = np.bincount(self.corpus.train.tokens, minlength=self.model.vocab_size - 1) + 1
        nll_V = np.log(counts_V.sum()) - np.log(counts_V)
        return float(nll_V[self.corpus.val.tokens].mean())


def mask_tokens(
    tokens_BT: np.ndarray, draws_BT: np.ndarray, fraction: float, mask_token: int
) -> tuple[np.ndarray, np.ndarray]:
    """What the model reads, int32, and which tokens it is to predict.

    Args:
      draws_BT: uniform from 0 up to 1; one decides all that befalls a token.
      fraction: share of the tokens to predict.
      mask_token: above all others.
    """
    share_BT = draws_BT / fraction  # of the chosen ones uniform below 1, of those replaced uniform between the two
    other_BT = np.floor((share_BT - HIDDEN) / (REPLACED - HIDDEN) * mask_token)
    other_BT = np.clip(other_BT, 0, mask_token - 1).astype(np.int32)
    replaced_BT = np.where(share_BT < REPLACED, other_BT, tokens_BT)
    return np.where(share_BT < HIDDEN, np.int32(mask_token), replaced_BT).astype(np.int32), draws_BT < fraction
