"""Rates: a burst goes through, then as many a second as were allowed, each on its own, on a clock that tests move."""

from __future__ import annotations

import pytest

from blocktrain.errors import ConfigError
from blocktrain.http.rate_limit import Rate, RateLimiter


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_goes_through_and_then_the_rate():
    clock = Clock()
    limiter = RateLimiter(Rate.per_second(2, burst_s=5), clock)
    assert [limiter.wait_s("ada") for _ in range(11)] == [0] * 10 + [0.5]
    clock.now_s += 1.0
    assert [limiter.wait_s("ada") for _ in range(3)] == [0, 0, 0.5]


def test_one_who_asks_too_often_keeps_nobody_else_waiting():
    limiter = RateLimiter(Rate.per_second(1, burst_s=1), Clock())
    assert [limiter.wait_s(key) for key in ("ada", "ada", "bob")] == [0, 1.0, 0]


def test_a_clock_that_goes_back_gives_and_takes_nothing():
    clock = Clock()
    limiter = RateLimiter(Rate.per_second(1, burst_s=2), clock)
    limiter.wait_s("ada")
    clock.now_s -= 100
    assert [limiter.wait_s("ada"), limiter.wait_s("ada")] == [0, 1.0]


def test_no_number_of_strangers_takes_more_memory_than_was_set_aside():
    limiter = RateLimiter(Rate.per_second(1, burst_s=1), Clock(), max_keys=10)
    for stranger in range(1000):
        limiter.wait_s(stranger)
    assert len(limiter) == 10
    assert limiter.wait_s(999) == 1.0  # of those who asked last, nothing is forgotten


@pytest.mark.parametrize("per_s, burst_s", [(0, 10), (-1, 10), (float("nan"), 1), (1, 0.5)])
def test_a_rate_that_lets_nobody_in_is_refused(per_s, burst_s):
    with pytest.raises(ConfigError, match="allow at least one"):
        Rate.per_second(per_s, burst_s)


def test_a_rate_per_minute_is_exact():
    clock = Clock()
    limiter = RateLimiter(Rate(7, window_s=60.0), clock)
    assert [limiter.wait_s("alice") for _ in range(8)] == [0] * 7 + [60 / 7]
    assert limiter.wait_s("bob") == 0
    clock.now_s = 60 / 7
    assert limiter.wait_s("alice") == 0
