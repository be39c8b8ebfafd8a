"""Who may come in, and how many at once."""

from __future__ import annotations

import pytest

from blocktrain.errors import ConfigError
from blocktrain.serve.gateway.access import MAX_REMEMBERED, ApiKeys, RateLimit, Seats
from blocktrain.serve.gateway.openai import ApiError

ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"


@pytest.mark.parametrize("header", [f"Bearer {ALICE}", f"bearer {ALICE}", f"Bearer  {ALICE} "])
def test_a_known_key_opens_the_door_under_a_name_of_its_own(header):
    keys = ApiKeys([BOB, ALICE])
    assert keys.caller(header) == keys.caller(f"Bearer {ALICE}") != keys.caller(f"Bearer {BOB}")


@pytest.mark.parametrize(
    "header, code",
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        (f"Basic {ALICE}", "missing_api_key"),
        (ALICE, "missing_api_key"),
        (f"Bearer {ALICE[:-1]}", "invalid_api_key"),
        (f"Bearer {ALICE}x", "invalid_api_key"),
        ("Bearer \udcff", "invalid_api_key"),
    ],
)
def test_nothing_else_does(header, code):
    with pytest.raises(ApiError) as raised:
        ApiKeys([ALICE]).caller(header)
    assert (raised.value.status, raised.value.code) == (401, code)
    assert ALICE not in str(raised.value)


def test_without_keys_everybody_may_come():
    assert ApiKeys().caller(None) is None
    assert not ApiKeys()


@pytest.mark.parametrize("key", ["", "short", "with\nanew line in it", "schlüssel-mit-umlaut"])
def test_a_key_that_is_none_is_refused_without_being_repeated(key):
    with pytest.raises(ConfigError, match="API key 2 of 2") as raised:
        ApiKeys([ALICE, key])
    assert not key or key not in str(raised.value)


def test_a_rate_is_a_minute_s_worth_at_once_and_then_as_time_goes():
    now_s = 0.0
    rate = RateLimit(2, clock=lambda: now_s)
    rate.take("alice")
    rate.take("alice")
    with pytest.raises(ApiError, match="more than 2 requests a minute: try again in 30 s") as raised:
        rate.take("alice")
    assert (raised.value.status, raised.value.retry_after_s) == (429, 30)
    rate.take("bob")
    now_s = 30.0
    rate.take("alice")


def test_rates_of_strangers_do_not_fill_the_memory():
    rate = RateLimit(1, clock=lambda: 0.0)
    for number in range(MAX_REMEMBERED + 10):
        rate.take(str(number))
    assert len(rate._buckets) == MAX_REMEMBERED


def test_who_finds_no_seat_is_sent_away_and_who_leaves_frees_it():
    seats = Seats(3)
    with seats.held(2):
        with (
            pytest.raises(ApiError, match="2 of 3 texts are being written and 2 more do not fit") as raised,
            seats.held(2),
        ):
            pass
        assert (raised.value.status, raised.value.retry_after_s) == (429, 1.0)
        with seats.held(1):
            assert seats.taken == 3
    with pytest.raises(ZeroDivisionError), seats.held(3):
        raise ZeroDivisionError
    assert seats.taken == 0
