"""A stage's queue: bounded, in order, one version at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.chain.messages import Advance, Head
from blocktrain.serve.chain.queue import Arrival, ArrivalQueue, Recent
from blocktrain.serve.traversal import Draft, Piece, Traversal


def arrival(id: str, version: str = "v1", rows: int = 1, num_bytes: int = 1, attempt: int = 1) -> Arrival:
    traversal = Traversal(f"session of {id}", b"text", tails=torch.zeros(rows, 1, dtype=torch.uint8))
    head = Head.of(traversal)
    message = Advance(id=id, attempt=attempt, version=version, reply_to="ab", route=(), time_left_s=5, head=head)
    return Arrival(message, traversal, num_bytes, arrived_s=100.0)


def queue(*arrivals: Arrival, limit: int = 10, max_bytes: int = 1000) -> ArrivalQueue:
    made = ArrivalQueue(limit, max_bytes)
    for each in arrivals:
        assert made.admit(each)
    return made


def ids(arrivals: list[Arrival]) -> list[str]:
    return [each.message.id for each in arrivals]


def test_a_full_queue_admits_nothing():
    waiting = queue(arrival("a"), arrival("b"), limit=2)
    assert not waiting.admit(arrival("c"))
    waiting = queue(arrival("a", num_bytes=900))
    assert not waiting.admit(arrival("b", num_bytes=200))
    assert ids(waiting.take(9)) == ["a"]


def test_one_alone_is_let_in_however_large():
    assert ids(queue(arrival("a", num_bytes=10**9)).take(1)) == ["a"]


def test_a_newer_attempt_takes_the_place_of_the_older():
    waiting = queue(arrival("a", attempt=1), limit=1)
    assert waiting.admit(arrival("a", attempt=2))
    (taken,) = waiting.take(9)
    assert taken.message.attempt == 2


def test_pieces_of_a_newer_attempt_keep_their_order():
    def piece(first, attempt):
        made = arrival("a", attempt=attempt)
        return replace(made, traversal=made.traversal.with_(piece=Piece(f"stream {attempt}", first, 3)))

    waiting = queue(piece(1, attempt=1), piece(0, attempt=2), piece(1, attempt=2))
    assert [(each.message.attempt, each.traversal.piece.first) for each in waiting.take(9)] == [(2, 0), (2, 1)]


def test_a_batch_is_of_one_version_and_begins_with_the_oldest():
    waiting = queue(arrival("a"), arrival("b", "v2"), arrival("c"))
    assert [ids(waiting.take(9)), ids(waiting.take(9)), ids(waiting.take(9))] == [["a", "c"], ["b"], []]


@given(st.lists(st.integers(1, 9), max_size=10), st.integers(1, 9))
def test_everybody_is_taken_once_and_batches_keep_their_bound(rows, max_rows):
    waiting, taken = queue(*(arrival(str(n), rows=each) for n, each in enumerate(rows))), []
    while batch := waiting.take(max_rows):
        assert sum(each.rows for each in batch) <= max_rows or len(batch) == 1
        taken += ids(batch)
    assert sorted(taken) == sorted(map(str, range(len(rows))))


def test_rows_are_counted_before_they_are_drafted():
    drafting = arrival("a").traversal.with_(tails=None, draft=Draft(3, candidates=7))
    assert Arrival(arrival("a").message, drafting, 1, 0.0).rows == 7


def test_time_runs_while_one_waits():
    assert arrival("a").time_left_s(now_s=103.0) == 2.0


def test_who_is_not_wanted_any_more_goes():
    waiting = queue(arrival("a"), arrival("b"))
    assert ids(waiting.drop(lambda each: each.message.id == "a")) == ["a"]
    assert ids(waiting.take(9)) == ["b"]


def test_only_the_last_names_are_remembered():
    recent = Recent(2)
    for name in ("a", "b", "a", "c"):
        recent.add(name)
    assert ("a" in recent, "b" in recent, "c" in recent) == (True, False, True)
