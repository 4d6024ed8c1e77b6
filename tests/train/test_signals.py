"""Signals that a program notices, and what a second one does."""

import signal

import pytest

from jaxformer.train.signals import record_signals


@pytest.mark.parametrize(("number", "then"), [(signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, None)])
def test_the_first_signal_is_recorded_and_a_second_has_its_own_effect(number, then):
    before = signal.getsignal(number)
    with record_signals(number) as received:
        assert not received.is_set()
        signal.raise_signal(number)
        assert received.is_set() and int(received) == number
        if then is None:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        else:
            assert signal.getsignal(number) is then
    assert signal.getsignal(number) is before


def test_a_hangup_that_is_ignored_remains_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with record_signals(signal.SIGHUP, signal.SIGTERM) as received:
            signal.raise_signal(signal.SIGHUP)
            assert not received.is_set()
            signal.raise_signal(signal.SIGTERM)
            assert received.number == signal.SIGTERM and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
