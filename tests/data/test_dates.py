import datetime

import numpy as np
import pytest

from jaxformer.data import dates
from jaxformer.data.dates import EDGE, FORMS, LOCALES, Dates, as_text, as_tokens, split_days, write_date
from jaxformer.errors import UserError

DAY = datetime.date(2023, 9, 7)


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
def test_a_date_as_people_there_write_it(locale, form, source):
    assert write_date(DAY, locale, form) == (source, "2023-09-07", locale, form)


def test_days_are_held_out_and_none_is_lost():
    train, held_out = split_days()
    assert len(train) + len(held_out) == 36_525  # 100 years, 25 of them leap years: 2000 is one
    assert len(held_out) == 3652
    together = np.sort(np.concatenate([train, held_out]))
    np.testing.assert_array_equal(together, np.arange(together[0], together[-1] + 1))
    assert {datetime.date.fromordinal(int(day)).month for day in held_out} == set(range(1, 13))


def test_a_pair_depends_on_seed_and_index_alone():
    train, held_out = split_days()
    one, again = Dates(train, seed=3), Dates(train, seed=3)
    forwards, backwards = [one[i] for i in range(50)], [again[i] for i in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) == 50  # of seven million
    assert forwards != [Dates(train, seed=4)[i] for i in range(50)]
    targets = {datetime.date.fromordinal(int(day)).isoformat() for day in held_out}
    assert not targets & {pair.target for pair in forwards}
    assert all(Dates(held_out, seed=0)[i].target in targets for i in range(50))


def test_all_locales_and_forms_are_drawn():
    pairs = [Dates(split_days()[0], seed=0)[i] for i in range(1000)]
    assert {pair.locale for pair in pairs} == set(LOCALES)  # one of 48 is missed once in 30 million times
    counts = [sum(pair.form == form for pair in pairs) for form in FORMS]
    assert all(180 < count < 320 for count in counts)  # 250 each, with a standard deviation of 14


def test_every_source_fits_and_names_one_date():
    """Each month, each weekday, and the first and the last years of the range, in all locales and forms."""
    days = [datetime.date(2024, month, 20 + i) for month in range(1, 13) for i in range(7)]
    days += [datetime.date(year, month, 3) for year in (1950, 2049) for month in (4, 11, 12)]
    for locale in LOCALES:
        for form in FORMS:
            sources = [write_date(day, locale, form).source for day in days]
            assert len(set(sources)) == len(days), (locale, form)
            assert max(len(source.encode()) for source in sources) <= dates.SOURCE_LENGTH, (locale, form)


def test_tokens_are_bytes_with_an_edge_on_each_side_of_the_target():
    pairs = [write_date(DAY, "ja", "long"), write_date(DAY, "en_US", "short")]
    source_BS, valid_BS, target_BT = as_tokens(pairs)
    assert source_BS.shape == valid_BS.shape == (2, 64) and target_BT.shape == (2, 12)
    assert bytes(source_BS[0][valid_BS[0]].tolist()).decode() == "ja 2023年9月7日"
    assert valid_BS.sum(axis=1).tolist() == [18, 12]  # three bytes each of 年, 月 and 日
    assert valid_BS[1].tolist() == [True] * 12 + [False] * 52 and not source_BS[1, 12:].any()
    assert target_BT[0].tolist() == [EDGE, *b"2023-09-07", EDGE]
    assert as_text(target_BT[0]) == as_text(target_BT[0, 1:]) == as_text(target_BT[0, :-1]) == "2023-09-07"
    assert max(source_BS.max(), target_BT.max()) < dates.VOCAB_SIZE
    batch = Dates(split_days()[0], seed=0).batch(range(5, 9))
    alone = Dates(split_days()[0], seed=0).batch([7])
    for together, one in zip(batch, alone, strict=True):
        np.testing.assert_array_equal(together[2], one[0])


def test_as_text_takes_what_a_model_may_write():
    assert as_text([EDGE, EDGE, 65]) == ""
    assert as_text([65, 0xFF, EDGE, 66]) == "A\ufffd"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"locales": ("de", "xx_YY")}, "the locale 'xx_YY' is not known"),
        ({"locales": ("not a locale",)}, "the locale 'not a locale' is not known"),
        ({"locales": ()}, "no locales"),
        ({"forms": ("tiny",)}, "'tiny'; it must be one of short, medium, long, full"),
        ({"days": np.zeros(0, int)}, "no days"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_from_is_the_users_error(fields, said):
    with pytest.raises(UserError, match=said):
        Dates(**{"days": split_days()[0], "seed": 0} | fields)


def test_a_locale_whose_dates_are_too_long_is_named():
    with pytest.raises(UserError, match="leave out the locale th"):
        as_tokens([write_date(DAY, "th", "full")])
