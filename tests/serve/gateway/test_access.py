"""API keys, and the limit on concurrent texts."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from blocktrain.errors import ConfigError
from blocktrain.serve.gateway.access import ApiKeys, ConcurrencyLimit
from blocktrain.serve.gateway.openai import ApiError

ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"


@pytest.mark.parametrize("header", [f"Bearer {ALICE}", f"bearer {ALICE}", f"Bearer  {ALICE} "])
def test_a_known_key_is_accepted_under_a_name_of_its_own(header):
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


def test_a_request_for_more_texts_than_may_be_written_is_refused_until_others_end():
    limit = ConcurrencyLimit(3)
    with limit.hold(2):
        with (
            pytest.raises(ApiError, match="2 of 3 texts are being written and 2 more do not fit") as raised,
            limit.hold(2),
        ):
            pass
        assert (raised.value.status, raised.value.retry_after_s) == (429, 1.0)
        with limit.hold(1):
            assert limit.in_use == 3
    with pytest.raises(ZeroDivisionError), limit.hold(3):
        raise ZeroDivisionError
    assert limit.in_use == 0


def test_no_caller_can_take_all_seats():
    limit = ConcurrencyLimit(8)
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(limit.hold(1, "alice"))
        with pytest.raises(ApiError, match="6 of your texts are being written, the rest is kept for others"):
            stack.enter_context(limit.hold(1, "alice"))
        stack.enter_context(limit.hold(2, "bob"))
        with pytest.raises(ApiError, match="8 of 8 texts"):
            stack.enter_context(limit.hold(1, "carol"))
    assert limit.in_use == 0
    with limit.hold(6, "alice"):  # nothing is remembered
        pass
