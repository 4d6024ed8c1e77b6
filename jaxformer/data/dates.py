"""Synthetic pairs of a date in one of many languages and the same date in ISO 8601.

Date formats are those of Babel's copy of the Unicode Common Locale Data Repository; some differ between versions of
Babel. Tokens are bytes.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from jaxformer.config import DataConfig, Fixed, ModelConfig
from jaxformer.config.fields import Length
from jaxformer.data.infer_config import describe_changes, infer_vocab_size
from jaxformer.data.pairs import Pair, PairDataset, check_seq2seq
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.errors import UserError, import_extra

if TYPE_CHECKING:
    from babel import Locale

WRITING = "writing dates in many languages"

Form = Literal["short", "medium", "long", "full"]
FORMS: tuple[Form, ...] = get_args(Form)
"""Babel's formats, such as 27/9/23 and Wednesday, 27 September 2023."""
LOCALES = (
    "af", "bg", "ca", "cs", "cy", "da", "de", "el", "en_AU", "en_CA", "en_GB", "en_US", "es", "et", "eu", "fi",
    "fr", "fr_CA", "ga", "gl", "he", "hr", "hu", "id", "is", "it", "ja", "ko", "lt", "lv", "ms", "nb", "nl", "pl",
    "pt_BR", "pt_PT", "ro", "ru", "sk", "sl", "sr", "sv", "sw", "tr", "uk", "vi", "zh", "zh_Hant",
)  # fmt: skip
"""Locales whose longest dates have at most 64 bytes."""
FIRST, LAST = datetime.date(1950, 1, 1), datetime.date(2049, 12, 31)
"""A range of a hundred years, so that two-digit years are unambiguous."""
VAL_FRACTION = 0.1
"""Fraction of the days in the validation split, in every language and form."""


@dataclass(frozen=True)
class DatesConfig(DataConfig):
    """Dates to convert to ISO 8601, the same for every seed; training and validation share no day."""

    n_pairs: Length = 20_000
    """Number of training pairs."""
    n_held_out: Length = 1000
    """Number of validation pairs."""
    locales: tuple[str, ...] = LOCALES
    """Babel's names of locales, sampled uniformly."""
    forms: tuple[Form, ...] = FORMS
    """Formats, with equal numbers of dates."""

    def load(
        self, model: ModelConfig, batch_size: int, seed: int, tokenizer: Tokenizer | None = None, fixed: Fixed = None
    ) -> PairDataset:
        model = check_seq2seq(model)
        train, val = split_days()
        splits = self.draw(train, self.n_pairs), self.draw(val, self.n_held_out)
        tokenizer = tokenizer or Tokenizer.train([], 257)
        inferred, name = infer_vocab_size(model, tokenizer), f"dates in {len(self.locales)} locales"
        data = PairDataset(name, splits, tokenizer, inferred, batch_size, seed)
        data.notes = describe_changes(model, inferred, f"{name} need {tokenizer.vocab_size:,} tokens")
        return data

    def draw(self, days: np.ndarray, n: int) -> list[Pair]:
        """Return n pairs of random days, given as ordinals, in random locales, with equal numbers in each form."""
        rng = np.random.Generator(np.random.Philox(key=[0, 1]))
        days_N, locales_N = days[rng.integers(len(days), size=n)], rng.integers(len(self.locales), size=n)
        forms_N = np.arange(n) * len(self.forms) // n
        return [
            write_date(datetime.date.fromordinal(int(day)), self.locales[locale], self.forms[form])
            for day, locale, form in zip(days_N, locales_N, forms_N, strict=True)
        ]


def split_days() -> tuple[np.ndarray, np.ndarray]:
    """Return the days of the training and of the validation split, as ordinals."""
    days = np.arange(FIRST.toordinal(), LAST.toordinal() + 1)
    np.random.Generator(np.random.Philox(key=[0, 0])).shuffle(days)
    n_val = round(VAL_FRACTION * len(days))
    return days[n_val:], days[:n_val]


def write_date(day: datetime.date, locale: str, form: Form) -> Pair:
    """Return a day in a locale's format and in ISO 8601, such as ('de 27. September 2023', '2023-09-27'). The locale's
    name is a prefix, without which 3/4/2021 would be ambiguous. Raises `UserError` if the locale is unknown to Babel,
    or Babel is not installed."""
    text = import_extra("babel.dates", WRITING).format_date(day, form, locale=_locale(locale))
    return Pair(f"{locale} {text}", day.isoformat())


@cache
def _locale(name: str) -> Locale:
    babel = import_extra("babel", WRITING)
    try:
        return babel.Locale.parse(name)
    except (babel.UnknownLocaleError, ValueError) as error:
        raise UserError(f"the locale {name!r} is not known to Babel; give one such as {LOCALES[0]}.") from error
