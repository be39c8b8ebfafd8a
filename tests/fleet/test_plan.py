"""What a fleet is made of, and which part of it fits a cluster."""

from __future__ import annotations

import pytest

from blocktrain.errors import ConfigError
from blocktrain.fleet.plan import Share, Store, in_order, namespace_of, require_room, workers_to_add, workers_to_stop

GB = 10**9
SMALL, GPU = Share(1, 0, GB), Share(1, 1, 4 * GB)
LARGE_NODE, SMALL_NODE = {"CPU": 8, "GPU": 2, "memory": 32 * GB}, {"CPU": 2, "memory": 4 * GB}


def total(nodes):
    return {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU", "memory")}


@pytest.mark.parametrize(
    "nodes, workers, worker, stages, fits",
    [
        ([LARGE_NODE], 8, SMALL, 0, 8),
        ([LARGE_NODE], 9, SMALL, 0, 8),  # too few CPUs
        ([LARGE_NODE, SMALL_NODE], 7, SMALL, 3, 10),
        ([LARGE_NODE], 3, GPU, 0, 2),  # too few GPUs
        ([SMALL_NODE, SMALL_NODE], 1, Share(1, 0, 5 * GB), 0, 0),  # enough memory, but on no machine
        ([SMALL_NODE, SMALL_NODE], 1, Share(3, 0, GB), 0, 0),
        ([], 1, SMALL, 0, 0),
    ],
)
def test_a_fleet_that_does_not_fit_is_refused_with_what_is_there(nodes, workers, worker, stages, fits):
    if fits == workers + stages:
        require_room(workers, worker, stages, SMALL, nodes, total(nodes))
        return
    with pytest.raises(ConfigError, match=rf"room for {fits} of {workers + stages} .*ask for fewer \(--workers"):
        require_room(workers, worker, stages, SMALL, nodes, total(nodes))


def test_what_others_have_reserved_is_not_free():
    with pytest.raises(ConfigError, match="room for 1 of 2"):
        require_room(2, SMALL, 0, SMALL, [LARGE_NODE], {"CPU": 1.5, "memory": 32 * GB})


def test_scaling_fills_gaps_and_stops_the_highest_numbers():
    there = ["coordinator", "worker-1", "worker-10", "worker-2", "gateway"]
    assert workers_to_add(there, 5) == ["worker-3", "worker-4"]
    assert workers_to_add(there, 3) == []
    assert workers_to_stop(there, 1) == ["worker-2", "worker-10"]
    assert workers_to_stop(there, 5) == []


def test_members_are_listed_by_role_and_number():
    assert in_order(["gateway", "worker-10", "stage-1", "worker-9", "coordinator"]) == [
        "coordinator",
        "worker-9",
        "worker-10",
        "stage-1",
        "gateway",
    ]


@pytest.mark.parametrize(
    "store, words, is_shared",
    [
        (Store(), "", False),
        (Store(ledger="postgresql://me@db/x"), "--ledger postgresql://me@db/x", False),
        (Store(blobs="s3://b/run", presigned=True), "--blobs s3://b/run --presigned", False),
        (Store(blobs="s3://b/run", presigned=False), "--blobs s3://b/run --no-presigned", False),
        (Store("postgresql://me@db/x", "s3://b/run"), "--ledger postgresql://me@db/x --blobs s3://b/run", True),
    ],
)
def test_a_coordinator_moves_only_with_both_a_database_and_a_bucket(store, words, is_shared):
    assert " ".join(store.words) == words
    assert store.is_shared == is_shared


@pytest.mark.parametrize("ledger", ["postgresql://me:secret@db/x", "postgresql://db/x?password=secret"])
def test_a_password_in_a_url_that_all_machines_would_see_is_refused(ledger):
    with pytest.raises(ConfigError, match="leave it out of the URL, and put it into ~") as refused:
        Store(ledger)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a" * 41, "a/b"])
def test_a_wrong_name_is_refused(name):
    with pytest.raises(ConfigError, match="is not a valid fleet name"):
        namespace_of(name)
