"""Synthetic pairs of dates."""

import datetime
from dataclasses import replace

import numpy as np
import pytest

from jaxformer.data.dates import FORMS, LOCALES, DatesConfig, split_days, write_date
from jaxformer.errors import UserError
from jaxformer.models.recurrent import RecurrentConfig

DAY = datetime.date(2023, 9, 7)
MODEL = RecurrentConfig(257, 64)


@pytest.mark.parametrize(
    ("locale", "form", "source"),
    [
        ("en_US", "short", "en_US 9/7/23"),
        ("en_GB", "short", "en_GB 07/09/2023"),
        ("de", "long", "de 7. September 2023"),
        ("fr", "full", "fr jeudi 7 septembre 2023"),
        ("ja", "long", "ja 2023年9月7日"),
        ("hu", "full", "hu 2023. szeptember 7., csütörtök"),
    ],
)
def test_dates_have_the_format_of_their_locale(locale, form, source):
    assert write_date(DAY, locale, form) == (source, "2023-09-07")


def test_splits_partition_the_days():
    train, held_out = split_days()
    assert len(train) + len(held_out) == 36_525  # 100 years, 25 of them leap years: 2000 is one
    assert len(held_out) == 3652
    together = np.sort(np.concatenate([train, held_out]))
    np.testing.assert_array_equal(together, np.arange(together[0], together[-1] + 1))
    assert {datetime.date.fromordinal(int(day)).month for day in held_out} == set(range(1, 13))


def test_dates_are_uniform_over_days_locales_and_forms():
    pairs = DatesConfig().draw(split_days()[0], 1000)
    assert pairs == DatesConfig().draw(split_days()[0], 1000)
    assert len(set(pairs)) > 990  # of seven million
    assert {pair.source.partition(" ")[0] for pair in pairs} == set(LOCALES)  # missed once in 30 million times
    for form, quarter in zip(FORMS, np.array_split(np.arange(1000), 4), strict=True):
        for i in quarter:
            locale = pairs[i].source.partition(" ")[0]
            assert pairs[i] == write_date(datetime.date.fromisoformat(pairs[i].target), locale, form)


def test_splits_have_no_day_in_common():
    data = DatesConfig(n_pairs=400, n_held_out=80).load(MODEL, 8, 0)
    held_out = {datetime.date.fromordinal(int(day)).isoformat() for day in split_days()[1]}
    assert {pair.target for pair in data.val} <= held_out
    observed = set()
    for step in range(data.steps_per_epoch):
        observed |= {data.tokenizer.decode(row) for row in data.batch(step).targets}
    assert len(observed) > 350 and not observed & held_out


def test_every_source_fits_the_context_and_is_unambiguous():
    """Check all months and weekdays, and the first and last years, in all locales and forms."""
    days = [datetime.date(2024, month, 20 + i) for month in range(1, 13) for i in range(7)]
    days += [datetime.date(year, month, 3) for year in (1950, 2049) for month in (4, 11, 12)]
    for locale in LOCALES:
        for form in FORMS:
            sources = [write_date(day, locale, form).source for day in days]
            assert len(set(sources)) == len(days), (locale, form)
            assert max(len(source.encode()) for source in sources) <= 64, (locale, form)


def test_tokens_are_bytes_and_targets_have_eleven_tokens():
    data = DatesConfig(n_pairs=100, n_held_out=8, locales=("ja", "en_US"), forms=("long", "short")).load(MODEL, 10, 0)
    assert data.tokenizer.vocab_size == 257
    batch = data.batch(3)
    assert batch.targets.shape == (10, 11) and batch.weights.all()
    assert [len(data.tokenizer.token_bytes[token]) for token in batch.targets[0]] == [1] * 10 + [0]
    for source_S, valid_S in zip(*batch.inputs[:2], strict=True):
        text = data.tokenizer.decode(source_S[valid_S])
        assert text.startswith(("ja ", "en_US ")) and valid_S.sum() == len(text.encode())


def test_seed_changes_the_order_not_the_dates():
    config = DatesConfig(n_pairs=64, n_held_out=8)
    one, another = (config.load(MODEL, 8, seed) for seed in (0, 1))
    assert one.fingerprint == another.fingerprint
    assert one.val == another.val
    assert not np.array_equal(one.batch(0).targets, another.batch(0).targets)
    assert replace(config, forms=("full",)).load(MODEL, 8, 0).fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"locales": ("xx_YY",)}, "the locale 'xx_YY' is not known"),
        ({"locales": ("not a locale",)}, "the locale 'not a locale' is not known"),
        ({"forms": ("tiny",)}, "`data.forms` is 'tiny'; it must be one of short, medium, long, full"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DatesConfig(**fields).load(MODEL, 8, 0)
