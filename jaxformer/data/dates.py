"""Dates as people of many languages write them, to ISO 8601: pairs to learn from, made and not downloaded.

How a language writes dates is from the Unicode Common Locale Data Repository, which comes with Babel; another version
of Babel may write some differently. Tokens are bytes.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from babel import Locale, UnknownLocaleError
from babel.dates import format_date

from jaxformer.errors import UserError

FORMS = ("short", "medium", "long", "full")
"""From 27/9/23 to Wednesday, 27 September 2023."""
LOCALES = (
    "af", "bg", "ca", "cs", "cy", "da", "de", "el", "en_AU", "en_CA", "en_GB", "en_US", "es", "et", "eu", "fi",
    "fr", "fr_CA", "ga", "gl", "he", "hr", "hu", "id", "is", "it", "ja", "ko", "lt", "lv", "ms", "nb", "nl", "pl",
    "pt_BR", "pt_PT", "ro", "ru", "sk", "sl", "sr", "sv", "sw", "tr", "uk", "vi", "zh", "zh_Hant",
)  # fmt: skip
"""Whose longest dates have no more than 64 bytes."""
FIRST, LAST = datetime.date(1950, 1, 1), datetime.date(2049, 12, 31)
"""A hundred years, so that two digits name one of them."""
HELD_OUT = 0.1
"""Share of these days that are not for training, in whatever language or form."""

EDGE = 256
"""The token before and after a target."""
VOCAB_SIZE = 257
SOURCE_LENGTH, TARGET_LENGTH = 64, 12
"""Tokens of a source with its padding, and of a target: ten characters and an edge on each side."""


class DatePair(NamedTuple):
    """One date, twice."""

    source: str
    """The locale's name and the date, 'de 27. September 2023': by 3/4/2021 alone, one means March and another April."""
    target: str
    """'2023-09-27'."""
    locale: str
    form: str


class DateBatch(NamedTuple):
    """Pairs as tokens."""

    source_BS: np.ndarray
    """int32, padded on the right with zeros."""
    valid_BS: np.ndarray
    """True where a token stands."""
    target_BT: np.ndarray
    """int32; the first and the last token are `EDGE`."""


@lru_cache
def split_days() -> tuple[np.ndarray, np.ndarray]:
    """The days to train on and those held out, as ordinals; always the same."""
    days = np.arange(FIRST.toordinal(), LAST.toordinal() + 1)
    np.random.Generator(np.random.Philox(key=[0, 0])).shuffle(days)
    n_held_out = round(HELD_OUT * len(days))
    return days[n_held_out:], days[:n_held_out]


@dataclass(frozen=True, eq=False)
class Dates:
    """Pairs without end: `dates[i]` depends on the days, the seed and i alone.

    Attributes:
      days: ordinals to draw from, one of `split_days`.
      seed: at least 0.
      locales, forms: what else to draw from, each alike.

    Raises:
      UserError: Babel knows no such locale, there is no such form, or nothing to draw from.
    """

    days: np.ndarray
    seed: int
    locales: tuple[str, ...] = LOCALES
    forms: tuple[str, ...] = FORMS

    def __post_init__(self) -> None:
        for name in ("days", "locales", "forms"):
            if not len(getattr(self, name)):
                raise UserError(f"there are no {name} to draw dates from; give at least 1.")
        for locale in self.locales:
            _locale(locale)
        for form in self.forms:
            if form not in FORMS:
                raise UserError(f"the form of a date is {form!r}; it must be one of {', '.join(FORMS)}.")

    def __getitem__(self, index: int) -> DatePair:
        draw = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        day, locale, form = (int(draw.integers(len(each))) for each in (self.days, self.locales, self.forms))
        return write_date(datetime.date.fromordinal(int(self.days[day])), self.locales[locale], self.forms[form])

    def batch(self, indices: Sequence[int] | np.ndarray) -> DateBatch:
        """Some pairs as tokens, all of the same lengths."""
        return as_tokens([self[int(index)] for index in indices])


def write_date(day: datetime.date, locale: str, form: str) -> DatePair:
    """A day in one locale's form.

    Raises:
      UserError: Babel knows no such locale.
    """
    text = format_date(day, form, locale=_locale(locale))
    return DatePair(f"{locale} {text}", day.isoformat(), locale, form)


def as_tokens(pairs: Sequence[DatePair]) -> DateBatch:
    """Pairs as bytes.

    Raises:
      UserError: a source is longer than `SOURCE_LENGTH`.
    """
    source_BS = np.zeros((len(pairs), SOURCE_LENGTH), np.int32)
    valid_BS = np.zeros((len(pairs), SOURCE_LENGTH), bool)
    target_BT = np.full((len(pairs), TARGET_LENGTH), EDGE, np.int32)
    for i, pair in enumerate(pairs):
        source = pair.source.encode()
        if len(source) > SOURCE_LENGTH:
            raise UserError(
                f"{pair.source!r} has {len(source)} bytes, more than the {SOURCE_LENGTH} of a source; leave out the "
                f"locale {pair.locale}."
            )
        source_BS[i, : len(source)] = list(source)
        valid_BS[i, : len(source)] = True
        target_BT[i, 1:-1] = list(pair.target.encode())
    return DateBatch(source_BS, valid_BS, target_BT)


def as_text(tokens: Sequence[int] | np.ndarray) -> str:
    """What tokens of a target say, up to the edge at their end; bytes that are no UTF-8 become U+FFFD."""
    said = [int(token) for token in tokens]
    start = 1 if said[:1] == [EDGE] else 0
    end = said.index(EDGE, start) if EDGE in said[start:] else len(said)
    return bytes(said[start:end]).decode("utf-8", "replace")


@cache
def _locale(name: str) -> Locale:
    try:
        return Locale.parse(name)
    except (UnknownLocaleError, ValueError) as error:
        raise UserError(f"the locale {name!r} is not known to Babel; give one such as {LOCALES[0]}.") from error
