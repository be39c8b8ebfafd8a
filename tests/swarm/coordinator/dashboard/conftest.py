"""Runs whose dashboard a browser opens: one that is trained, and one that goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).parent))
from dashboard_steps import HOSTILE, Visits, served, work


@pytest.fixture(scope="module")
def trained(new_house: Callable, tmp_path_factory) -> Iterator[str]:
    """A run that two real workers have trained to its end, both in every round, and one with a hostile name has
    joined."""
    house = new_house(**{"train.steps": 4, "swarm.evaluate_every": 1, "swarm.min_updates": 2})
    with house.coordinator.loop.running(), served(house) as url:
        threads = [
            threading.Thread(target=work, args=(url, tmp_path_factory.mktemp("home"), name)) for name in ("ada", "alan")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        guest = house.member()
        house.ask("POST", "/v1/leases", json=guest.request(name=HOSTILE, device=HOSTILE))
        yield url


@pytest.fixture
def running(new_house: Callable, visit: Visits) -> Iterator[tuple[Any, str]]:
    """A run whose clock stands until a test moves it."""
    house = new_house()
    with served(house) as url:
        yield house, url
        visit.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visits]:
    visits = Visits(browser)
    yield visits
    visits.close()
    assert visits.complaints == []
