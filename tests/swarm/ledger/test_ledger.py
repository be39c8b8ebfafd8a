"""The ledger in a real SQLite file and in a real PostgreSQL: the run, tokens, workers, rounds, leases and updates.
Merges: test_merging.py. Faults: test_faults.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from threading import Barrier

import pytest
from ledger_steps import (
    ADA,
    BOB,
    EVE,
    FIRST,
    RUN,
    an_update,
    lease,
    merge,
    report,
)

from blocktrain.errors import ConfigError, LedgerConflict
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import RoundLoss
from blocktrain.swarm.policy.rounds import Grant, LateUpdate

# The run, tokens, workers


def test_a_run_is_there_when_the_ledger_is_opened_again(ledger, where):
    assert ledger.run() is None
    assert ledger.create_run(replace(RUN, corpus={"train": "d" * 64})).corpus == {"train": "d" * 64}
    assert ledger.set_paused(True, now_s=1.0)
    with closing(Ledger(where)) as again:
        assert again.create_run(RUN) == again.run() == replace(RUN, corpus={"train": "d" * 64}, paused=True)


@pytest.mark.parametrize(
    "other, what",
    [({"spec_digest": "6" * 64}, "spec"), ({"corpus_sha256": "d" * 64}, "corpus")],
)
def test_a_ledger_of_another_run_is_refused_with_the_remedy(ledger, other, what):
    ledger.create_run(RUN)
    with pytest.raises(ConfigError, match=f"another {what}.*: continue that run .* or give this one another ledger"):
        ledger.create_run(replace(RUN, **other))
    assert ledger.run() == RUN


def test_a_run_of_a_newer_protocol_is_refused_and_one_of_an_older_protocol_goes_on(ledger):
    ledger.create_run(RUN)
    with pytest.raises(ConfigError, match="speaks 0: install the version that founded the run, or a later one"):
        ledger.create_run(replace(RUN, protocol=0))
    assert ledger.create_run(replace(RUN, protocol=2)) == RUN


def test_a_token_opens_its_role_until_it_is_revoked(ledger):
    ledger.add_access_token("first", "admin", "secret-1", now_s=1.0)
    ledger.add_access_token("second", "worker", "secret-2", now_s=2.0)
    assert (ledger.role_of("secret-1"), ledger.role_of("secret-2"), ledger.role_of("x")) == ("admin", "worker", None)
    assert ledger.revoke_access_token("first", now_s=3.0)
    assert not ledger.revoke_access_token("first", now_s=4.0)
    assert (ledger.role_of("secret-1"), ledger.role_of("secret-2")) == (None, "worker")
    assert [(x.name, x.role, x.revoked_s) for x in ledger.access_tokens()] == [
        ("first", "admin", 3.0),
        ("second", "worker", None),
    ]


def test_a_name_is_of_one_access_token_until_that_is_revoked(ledger):
    ledger.add_access_token("lab", "worker", "secret-1", now_s=1.0)
    remedy = "choose another name, or revoke that one first"
    with pytest.raises(ConfigError, match=f'an access token "lab" already: {remedy}'):
        ledger.add_access_token("lab", "admin", "secret-2", now_s=2.0)
    ledger.revoke_access_token("lab", now_s=3.0)
    ledger.add_access_token("lab", "viewer", "secret-3", now_s=4.0)
    assert (ledger.role_of("secret-2"), ledger.role_of("secret-3")) == (None, "viewer")


def test_keys_of_an_added_access_token_are_one_participant_and_those_of_the_runs_own_invite_one_each(started):
    for name, role in (("worker", "worker"), ("eve", "worker"), ("lab", "admin")):
        started.add_access_token(name, role, f"secret of {name}", now_s=1.0)
    keys = [f"{k:064x}" for k in range(6)]
    for key, name in zip(keys, ("worker", "worker", "eve", "eve", "lab", "lab"), strict=True):
        started.see_worker(key, "w", "cpu", 1, 1.0, now_s=1.0, nonce=1)
        assert started.note_token(key, f"secret of {name}", most=9)
    own, eve = keys[:2] + keys[4:], keys[2:4]
    found = started.participants([*keys, ADA])
    assert {key: found[key] for key in (*own, ADA)} == {key: key for key in (*own, ADA)}
    assert found[eve[0]] == found[eve[1]] not in (*keys, ADA)


def test_an_unknown_role_is_refused_with_those_there_are(ledger):
    with pytest.raises(ConfigError, match='no role "root": choose one of admin, worker, viewer'):
        ledger.add_access_token("lab", "root", "secret", now_s=1.0)


def test_a_token_itself_is_nowhere_in_the_database(tmp_path):
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        ledger.add_access_token("lab", "worker", "the-secret-itself", now_s=1.0)
    assert not any(b"the-secret-itself" in path.read_bytes() for path in tmp_path.iterdir())


def test_a_worker_is_what_it_last_said_and_all_it_contributed(started):
    assert started.see_worker(ADA, "ada", "cuda", 2**40, 9.0, now_s=500.0, nonce=2)
    first = report(started, ADA)
    merge(started, started.open_rounds()[0], [first])
    report(started, ADA)
    started.record_update(an_update(lease(started, BOB), BOB, refused="absurd norm"))
    ada, bob, _ = started.workers()
    assert (ada.name, ada.device, ada.memory_bytes, ada.steps_per_s) == ("ada", "cuda", 2**40, 9.0)
    assert (ada.first_seen_s, ada.last_seen_s) == (100.0, 500.0)
    assert (ada.updates, ada.tokens, bob.updates, bob.tokens) == (2, 10**10, 0, 0)


# Rounds and leases


def test_a_round_comes_back_as_the_decisions_left_it(started):
    mine = started.open_rounds()[0]
    assert mine == FIRST
    grant = Grant(ADA, 0, 0, mine.base, 0, 0, 8, 105.0, 161.0, "because")
    granted = started.grant(grant, mine, now_s=101.0)
    assert started.open_rounds()[0] == mine.with_grant(grant, 101.0)
    started.record_update(an_update(granted.id, steps=7))
    assert started.open_rounds()[0] == mine.with_grant(grant, 101.0).with_report(ADA, 7, 110.0)


def test_a_phase_opens_once(started):
    assert not started.open_phase(replace(FIRST, number=7))
    assert started.open_rounds() == {0: FIRST}


def test_asking_again_renews_the_lease(started):
    assert lease(started, ADA, now_s=101.0) == lease(started, ADA, now_s=150.0)
    (renewed,) = started.open_rounds()[0].leases
    assert (renewed.granted_s, renewed.deadline_at_s) == (150.0, 210.0)


def test_asking_again_for_a_lease_that_still_runs_writes_nothing(started):
    lease(started, ADA)
    round = started.open_rounds()[0]
    (own,) = round.leases
    said = list[str]()
    started.database.watch(lambda sql: said.append(sql.split()[0]))
    times = (own.due_s, own.deadline_at_s)
    again = Grant(ADA, 0, 0, round.base, own.shard, 0, own.steps, *times, "it has it", granted_s=own.granted_s)
    granted = started.grant(again, round, now_s=120.0)
    assert granted is not None
    assert (granted.granted_s, set(said)) == (own.granted_s, {"SELECT"})


def test_a_grant_decided_on_an_older_state_is_not_given(started):
    seen = started.open_rounds()[0]
    lease(started, ADA)
    late_decision = Grant(BOB, 0, 0, seen.base, 0, 0, 10, 105.0, 161.0, "shard 0 was free")
    assert started.grant(late_decision, seen, now_s=102.0) is None
    assert [x.worker for x in started.open_rounds()[0].leases] == [ADA]


def test_what_another_coordinator_writes_is_seen_in_a_round_that_was_read_before(started, where):
    lease(started, ADA)
    with closing(Ledger(where)) as other:
        lease(other, BOB)
        report(other, BOB)
        assert started.open_rounds() == other.open_rounds()
    assert [x.worker for x in started.open_rounds()[0].reported] == [BOB]


def test_a_round_that_is_known_is_the_one_in_the_database(started, where):
    """What a ledger keeps in memory after its own writes is what another ledger reads."""
    for now_s, who in enumerate((ADA, BOB, ADA)):
        lease(started, who, now_s=101.0 + now_s)
    report(started, ADA)
    with closing(Ledger(where)) as other:
        assert started.open_rounds() == other.open_rounds()


def test_the_writes_of_a_transaction_are_kept_together_or_not_at_all(started):
    before = started.open_rounds()

    def fail() -> None:
        with started.transaction() as transaction:
            lease(transaction, ADA)
            assert [x.worker for x in transaction.open_rounds()[0].leases] == [ADA]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert started.open_rounds() == before
    with started.transaction() as transaction:
        lease(transaction, ADA)
    assert [x.worker for x in started.open_rounds()[0].leases] == [ADA]


def test_two_coordinators_never_give_one_shard_twice(started, where):
    seen, barrier = started.open_rounds()[0], Barrier(2)

    def race(worker: str) -> bool:
        with closing(Ledger(where)) as coordinator:
            barrier.wait()
            grant = Grant(worker, 0, 0, seen.base, 0, 0, 10, 105.0, 161.0, "")
            return coordinator.grant(grant, seen, 101.0) is not None

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(race, [ADA, BOB])) == [False, True]
    assert [x.shard for x in started.open_rounds()[0].leases] == [0]


def test_a_round_is_extended_once_by_the_first_coordinator(started):
    seen = started.open_rounds()[0]
    assert started.extend_round(seen, 300.0, "too few")
    assert not started.extend_round(seen, 360.0, "too few")
    (record,) = started.rounds(0)
    assert (record.round.deadline_at_s, record.extensions, record.reason) == (300.0, 1, "too few")


# Updates


def test_sending_the_same_update_twice_gives_the_first_back(started):
    new = an_update(lease(started, ADA))
    recorded, duplicate = started.record_update(new)
    assert not duplicate
    assert started.record_update(replace(new, received_s=999.0)) == (recorded, True)
    assert started.waiting_updates(0) == (recorded,)


def test_an_update_reports_its_lease_and_a_refused_one_does_not(started):
    mine, other = lease(started, ADA), lease(started, BOB)
    started.record_update(an_update(mine))
    started.record_update(an_update(other, BOB, refused="NaN in block 0"))
    assert (started.lease(mine).state, started.lease(other).state) == ("reported", "open")
    assert [x.worker for x in started.open_rounds()[0].reported] == [ADA]
    assert [x.lease for x in started.waiting_updates(0)] == [mine]


def test_after_a_refusal_the_lease_may_report_something_better(started):
    mine = lease(started, ADA)
    started.record_update(an_update(mine, text="wild", refused="absurd norm"))
    assert started.record_update(an_update(mine, text="tame"))[1] is False


def test_a_second_update_for_one_lease_is_refused_with_the_remedy(started):
    mine = lease(started, ADA)
    started.record_update(an_update(mine, text="one"))
    with pytest.raises(LedgerConflict, match=f"lease {mine} has reported .*: .* ask for a new one"):
        started.record_update(an_update(mine, text="two"))
    assert len(started.waiting_updates(0)) == 1


def test_an_update_without_a_lease_changes_nothing(started):
    with pytest.raises(LedgerConflict, match="refused a contradiction"):
        started.record_update(an_update("no-such-lease"))
    assert started.contributions() == ()


def test_deadlines_are_learned_from_the_times_of_closed_rounds_without_their_late_updates(started):
    in_time, late = lease(started, ADA), lease(started, BOB)
    merge(started, started.open_rounds()[0], [started.record_update(an_update(in_time))[0].id])
    second = started.record_update(an_update(late, BOB, received_s=900.0))[0].id
    merge(started, started.open_rounds()[0], [second, report(started, EVE), report(started, ADA)])
    closed = [record.round for record in started.rounds(0) if record.closed_s is not None]
    assert started.past_round_times_s(0) == [round.took_s for round in closed] == [9.0, 9.0]


def test_an_update_after_its_round_waits_for_the_next_as_a_late_one(started):
    in_time, late = lease(started, ADA), lease(started, BOB)
    first = started.record_update(an_update(in_time))[0].id
    assert merge(started, started.open_rounds()[0], [first])
    assert started.lease(late).state == "expired"
    second = started.record_update(an_update(late, BOB, received_s=900.0))[0].id
    assert started.open_rounds()[0].late == (LateUpdate(BOB, 0, 1),)
    assert [x.round.took_s for x in started.rounds(0)] == [9.0, None]
    third = report(started, EVE)
    assert merge(started, started.open_rounds()[0], [second, third])
    assert [[x.worker for x in record.round.reported] for record in started.rounds(0)] == [[ADA], [EVE], []]
    assert started.rounds(0)[1].round.late == (LateUpdate(BOB, 0, 1),)


def test_contributions_are_listed_in_order_page_by_page(started):
    ids = [report(started, ADA), report(started, BOB)]
    refused = started.record_update(an_update(lease(started, EVE), EVE, refused="too stale"))[0].id
    merge(started, started.open_rounds()[0], ids)
    first, second = started.contributions(limit=2)
    (third,) = started.contributions(after=second.update.number)
    assert [x.update.id for x in (first, second, third)] == [*ids, refused]
    assert [(x.worker_name, x.round, x.shard, x.update.merged_round) for x in (first, second, third)] == [
        ("a", 0, 0, 0),
        ("b", 0, 1, 0),
        ("e", 0, 2, None),
    ]


def test_norms_are_those_of_the_updates_merged_last(started):
    for norm in (1.0, 2.0):
        ids = [started.record_update(an_update(lease(started, ADA), norm=norm))[0].id]
        merge(started, started.open_rounds()[0], ids)
    report(started, ADA)
    assert started.recent_norms(0) == (2.0, 1.0)
    assert started.recent_norms(0, limit=1) == (2.0,)


def test_the_loss_of_a_round_is_that_of_its_updates_weighed_by_tokens(started):
    ids = [
        started.record_update(an_update(lease(started, worker), worker, loss=loss, tokens=tokens))[0].id
        for worker, loss, tokens in ((ADA, 1.0, 10**12), (BOB, 4.0, 2 * 10**12))
    ]
    merge(started, started.open_rounds()[0], ids)
    report(started, EVE)  # not merged yet
    expected = RoundLoss(phase=0, round=0, step=0, at_s=200.0, loss=3.0, updates=2, tokens=3e12)
    assert started.round_losses() == (expected,)
