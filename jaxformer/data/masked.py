"""Text with masked tokens for masked language models (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from jaxformer.config import TokenModelConfig
from jaxformer.config.fields import Range
from jaxformer.data.counts import token_loss
from jaxformer.data.dataset import VALIDATION_SEED, Batch, step_rng
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.tokens import Corpus
from jaxformer.data.windows import TextConfig, TextDataset, eval_batches
from jaxformer.errors import UserError

MASKED_BELOW, REPLACED_BELOW = 0.8, 0.9
"""Upper bounds of a uniform sample for masking and replacing a chosen token: 80% become the mask token, 10% a random
token, and 10% stay, so that the model must also represent unmasked tokens."""


@dataclass(frozen=True)
class MaskedTextConfig(TextConfig):
    """Text, cut into windows with masked tokens. The model's vocabulary has one token more than the text's: the last,
    the mask."""

    n_extra_tokens = 1
    masked_fraction: Annotated[float, Range(above=0, most=1, hint=", such as 0.15")] = 0.15
    """Fraction of the tokens to predict."""

    def build_dataset(self, model: TokenModelConfig, corpus: Corpus, batch_size: int, seed: int) -> MaskedTextDataset:
        if (mask := mask_token(model, corpus.tokenizer)) != model.vocab_size - 1:
            problem = (
                f"the mask token is {mask}, but masked training uses the vocabulary's last, {model.vocab_size - 1}"
            )
            raise UserError(f"{problem}; fine-tune this model as a classifier, with `config='classify'`.")
        return MaskedTextDataset(self, model, corpus, batch_size, seed)


class MaskedTextDataset(TextDataset):
    """A corpus in windows in which random tokens, chosen anew in each batch, are predicted from the rest."""

    has_bits_per_byte = False  # bits per byte of a pseudo-likelihood are not comparable

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        B, T, fraction = self.windows.batch_size, self.model.context_length, self.config.masked_fraction
        draws_BT = step_rng(self.seed, step).random((B, T))
        weight = np.float32(1 / max(1, (draws_BT < fraction).sum()))
        targets_BT = self.windows.batch(step, rows)[:, :T]
        tokens_BT, chosen_BT = mask_tokens(targets_BT, draws_BT[rows], fraction, self.model.vocab_size - 1)
        return Batch((tokens_BT, np.ones(tokens_BT.shape, bool)), targets_BT, chosen_BT * weight)

    def val_batches(self, batch_size: int, n: int | None = None) -> Iterator[Batch]:
        T, fraction, rng = self.model.context_length, self.config.masked_fraction, step_rng(VALIDATION_SEED, 0)
        for targets_BT, weights_BT in eval_batches(self.val.tokens, T, T, batch_size, n):
            draws_BT = rng.random(targets_BT.shape)
            tokens_BT, chosen_BT = mask_tokens(targets_BT, draws_BT, fraction, self.model.vocab_size - 1)
            valid_BT = weights_BT > 0
            valid_BT[:, 0] = True  # attention needs a position, even in padding windows
            yield Batch((tokens_BT, valid_BT), targets_BT, weights_BT * chosen_BT)

    def describe(self) -> str:
        return (
            f"{super().describe()}; {self.config.masked_fraction:.0%} of the tokens masked; "
            f"unigram cross-entropy {self.unigram_entropy():.2f} nats per token"
        )

    def unigram_entropy(self) -> float:
        """Return the cross-entropy of the validation text under the unigram distribution of the training text, with
        add-one smoothing (Laplace), in nats per token."""
        return token_loss(self.corpus.train.tokens, self.corpus.val.tokens, self.model.vocab_size - 1)


def mask_token(model: TokenModelConfig, tokenizer: Tokenizer) -> int:
    """Return the id of the mask token: the published tokenizer's, or the last of the model's vocabulary."""
    return model.vocab_size - 1 if tokenizer.mask_token is None else tokenizer.mask_token


def mask_tokens(
    tokens_BT: np.ndarray, draws_BT: np.ndarray, fraction: float, mask_token: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the masked tokens, int32, and a mask of the positions to predict, bool, both `(B, T)`. `draws_BT` are
    uniform in [0, 1), one per token for all its random choices; `fraction` of the tokens are predicted; `mask_token` is
    above all other ids."""
    relative_BT = draws_BT / fraction  # uniform below 1 for the chosen tokens
    random_BT = np.floor((relative_BT - MASKED_BELOW) / (REPLACED_BELOW - MASKED_BELOW) * mask_token)
    random_BT = np.clip(random_BT, 0, mask_token - 1).astype(np.int32)
    replaced_BT = np.where(relative_BT < REPLACED_BELOW, random_BT, tokens_BT)
    masked_BT = np.where(relative_BT < MASKED_BELOW, np.int32(mask_token), replaced_BT).astype(np.int32)
    return masked_BT, draws_BT < fraction
