"""Connections to the database: a request that held one while it waits for another would block all others, as soon as as
many requests as there are connections come at once, for example after a restart."""

from __future__ import annotations

import threading
from collections import Counter


def test_a_request_never_holds_two_connections_even_as_the_first_one_of_a_new_coordinator(house, monkeypatch):
    held, most = Counter[int](), 0

    def take():
        nonlocal most
        held[threading.get_ident()] += 1
        most = max(most, held[threading.get_ident()])

    def give_back():
        held[threading.get_ident()] -= 1

    def noted(note, call):
        def noting(*args):
            note()
            return call(*args)

        return noting

    file = house.ledger.database.file
    monkeypatch.setattr(file, "take", noted(take, file.take))
    monkeypatch.setattr(file, "give_back", noted(give_back, file.give_back))
    house.member().work()
    house.ask("GET", "/v1/status", role="viewer")
    assert most == 1
