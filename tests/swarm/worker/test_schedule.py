"""Hours of the day, and what cannot be understood."""

from __future__ import annotations

from datetime import time

import pytest

from blocktrain.errors import ConfigError
from blocktrain.swarm.worker.schedule import parse_schedule


@pytest.mark.parametrize(
    "text, now, is_open",
    [
        ("22:00-07:00", time(22, 0), True),
        ("22:00-07:00", time(3, 30), True),
        ("22:00-07:00", time(7, 0), False),
        ("22:00-07:00", time(21, 59, 59), False),
        ("9:30-17:00", time(9, 30), True),
        ("9:30-17:00", time(17, 0), False),
        ("00:00-06:00", time(0, 0), True),
    ],
)
def test_the_hours_may_cross_midnight_and_end_before_their_last_minute(text, now, is_open):
    assert parse_schedule(text).is_open(now) is is_open


@pytest.mark.parametrize("text", ["", "22-7", "22:00", "25:00-07:00", "22:60-07:00", "22:00-22:00", "night"])
def test_what_is_no_pair_of_times_is_refused(text):
    with pytest.raises(ConfigError, match=r'give two times of a day, like "22:00-07:00"'):
        parse_schedule(text)
