"""Connections to the database: a request that held one while it waits for another would block all others, as soon as as
many requests as there are connections come at once, for example after a restart."""

from __future__ import annotations

import threading
from collections import Counter

from sqlalchemy import event


def test_a_request_never_holds_two_connections_even_as_the_first_one_of_a_new_coordinator(house):
    held, most = Counter[int](), 0

    def take(*_):
        nonlocal most
        held[threading.get_ident()] += 1
        most = max(most, held[threading.get_ident()])

    def give_back(*_):
        held[threading.get_ident()] -= 1

    event.listen(house.ledger.database.engine, "checkout", take)
    event.listen(house.ledger.database.engine, "checkin", give_back)
    house.member().work()
    house.ask("GET", "/v1/status", role="viewer")
    assert most == 1
