"""The hours of the day at which a machine works for others. Pure: no clock.
Next: cli/commands/swarm/worker.py, which looks at the clock."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import time

from blocktrain.errors import ConfigError

HOURS = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})")


@dataclass(frozen=True)
class WorkingHours:
    """From one time of the day to another, perhaps after midnight. In the machine's own time zone."""

    begin: time
    end: time

    def is_open(self, now: time) -> bool:
        if self.begin < self.end:
            return self.begin <= now < self.end
        return now >= self.begin or now < self.end

    def __str__(self) -> str:
        return f"{self.begin:%H:%M}-{self.end:%H:%M}"


def parse_schedule(text: str) -> WorkingHours:
    match = HOURS.fullmatch(text.strip())
    with suppress(ValueError):
        begin, end = (time(int(match[i]), int(match[i + 1])) for i in (1, 3)) if match else (time(), time())
        if begin != end:
            return WorkingHours(begin, end)
    raise ConfigError(f'--schedule "{text}" is not understood: give two times of a day, like "22:00-07:00"')
