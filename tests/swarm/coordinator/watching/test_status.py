"""What people see of a run: events in order, curves that stay small, metrics for Prometheus, a pause that lasts."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from blocktrain.swarm.coordinator.watching.curves import answer_of, thinned
from blocktrain.swarm.coordinator.watching.status import NEW_SAMPLES, step_work
from blocktrain.swarm.signatures import sign
from blocktrain.wire.messages import EvaluationNotice, Sample
from blocktrain.wire.people_messages import Curves

SCORES = (
    {"path": "stack", "reading": "block 0", "nats_per_byte": 3.0},
    {"path": "stack", "reading": "combined", "nats_per_byte": 2.0},
    {"path": "euler", "reading": "last", "nats_per_byte": 9.0},
)


def evaluate(house, member, combine=None, samples=()) -> None:
    """The newest versions, scored by that member."""
    lease = house.ledger.grant_evaluation(member.id, house.ledger.consistent_manifest().versions, 0.0, 1e9)
    notice = EvaluationNotice(
        lease=str(lease.id), worker=member.id, scores=SCORES, combine=combine or {}, samples=samples
    )
    body = sign(notice, member.key, house.run).model_dump(mode="json")
    assert house.ask("POST", "/v1/evaluations", json=body).status_code == 204


def test_samples_of_the_first_and_the_newest_evaluations_are_shown_with_their_loss(house, member):
    assert house.ask("GET", "/v1/status").json()["samples"] == []
    member.work()
    for number in range(NEW_SAMPLES + 3):
        evaluate(house, member, samples=(Sample(prompt="In the ", text=f"end {number}"),))
    shown = house.ask("GET", "/v1/status").json()["samples"]
    assert [each["samples"] for each in shown] == [
        [{"prompt": "In the ", "text": f"end {number}"}] for number in (0, *range(3, NEW_SAMPLES + 3))
    ]
    assert {each["nats_per_byte"] for each in shown} == {2.0}


def test_an_evaluation_is_an_event_with_its_loss(house, member):
    member.work()
    evaluate(house, member)
    assert house.ask("GET", "/v1/status").json()["events"][-1]["text"] == "2.0000 nats/byte on the valid split"


@pytest.mark.parametrize("field, text", [("text", "x" * 201), ("prompt", "x" * 101), ("text", "a\x00b")])
def test_a_sample_that_is_too_long_or_cannot_be_stored_is_refused(field, text):
    with pytest.raises(ValidationError):
        Sample(**{"prompt": "a", "text": "b", field: text})


def test_the_time_that_is_left_is_known_when_a_round_has_closed(house, member):
    assert house.ask("GET", "/v1/status").json()["time_left_s"] is None
    lease = member.lease()
    house.now_s += 10
    member.send(lease, member.payload(lease))
    house.coordinator.loop.tick()
    status = house.ask("GET", "/v1/status").json()
    done = {phase["phase"]: phase["step"] for phase in status["phases"]}
    work = {phase.index: step_work(house.spec, phase.index) for phase in house.spec.phases}
    left = sum((phase.steps - done.get(phase.index, 0)) * work[phase.index] for phase in house.spec.phases)
    assert status["time_left_s"] == pytest.approx(10 * left / (done[0] * work[0]))
    house.now_s += 3
    assert house.ask("GET", "/v1/status").json()["time_left_s"] == pytest.approx(status["time_left_s"] - 3)


def test_the_time_that_is_left_of_a_run_that_stands_still_is_not_zero(house, member):
    member.work()
    house.now_s += 10
    member.work()
    house.coordinator.loop.tick()
    house.now_s += 100_000
    left_s = house.ask("GET", "/v1/status").json()["time_left_s"]
    house.now_s += 1_000
    assert house.ask("GET", "/v1/status").json()["time_left_s"] == left_s > 0


def test_the_time_that_is_left_is_known_when_a_phase_begins_after_another(house, member):
    house.coordinator.loop.tick()
    while house.ledger.phases()[-1].phase == 0:
        lease = member.lease()
        house.now_s += 10
        member.send(lease, member.payload(lease))
        house.coordinator.loop.tick()
    status = house.ask("GET", "/v1/status").json()
    assert [phase["finished"] for phase in status["phases"]] == [True, False]
    assert status["time_left_s"] > 0


def events(house, **page: int) -> list[dict]:
    return house.ask("GET", "/v1/events", "viewer", params=page).json()


def test_events_tell_what_happened_in_order_and_then_only_the_news(house, member, another_member):
    another_member.lease()  # never heard of again
    member.work()
    house.now_s += 5000
    house.coordinator.loop.tick()
    lease = member.lease()
    member.send(lease, member.payload(lease, 1e9))
    listed = events(house)
    assert [event["kind"] for event in listed] == ["joined", "joined", "late", "merged", "refused"]
    assert listed[2]["data"] == {"phase": 0, "round": 0, "worker": another_member.id}
    assert "1 given up" in listed[3]["text"]
    assert listed[4]["data"]["code"] == "norm"
    assert events(house, after=listed[2]["number"]) == listed[3:]
    assert events(house, before=listed[1]["number"]) == listed[:1]
    assert house.ask("GET", "/v1/status").json()["events"] == listed


def test_a_round_that_is_extended_is_an_event(new_house):
    house = new_house(**{"swarm.min_updates": 2})
    first, second = house.member(), house.member()
    second.lease()
    first.work()
    house.now_s += 1000
    house.coordinator.loop.tick()
    assert "min_updates = 2 needed" in next(event["text"] for event in events(house) if event["kind"] == "extended")


def test_refusals_without_end_do_not_fill_the_ledger(house, monkeypatch):
    monkeypatch.setattr("blocktrain.swarm.ledger.reports.KEPT_EVENTS", 20)
    monkeypatch.setattr("blocktrain.swarm.ledger.reports.PRUNE_EVERY", 10)
    for n in range(100):
        house.ledger.add_event("refused", str(n), 1.0)
    kept = [event.text for event in house.ledger.events()]
    assert 20 <= len(kept) <= 30
    assert kept[-1] == "99"


def test_curves_show_the_loss_of_every_round_and_the_held_out_score(house, member, another_member):
    first, second = member.lease(), another_member.lease()
    for one, lease, loss in ((member, first, 4.0), (another_member, second, 2.0)):
        assert one.send(lease, one.payload(lease, loss * 1e-3), loss=loss, steps=1, tokens=512).status_code == 200
    evaluate(house, member)
    curves = Curves.model_validate(house.ask("GET", "/v1/curves", "viewer").json())
    (curve,) = curves.training
    assert (curve.phase, curve.blocks) == (0, (0, 1))
    assert [(x.round, x.step, x.nats_per_byte, x.updates, x.tokens) for x in curve.points] == [(0, 0, 3.0, 2, 1024)]
    (point,) = curves.held_out
    assert (point.reading, point.nats_per_byte, point.versions) == ("combined", 2.0, {0: 1, 1: 1})


@pytest.mark.parametrize("count, kept", [(0, 0), (1, 1), (500, 500), (501, 251), (10**5, 500)])
def test_a_long_curve_is_thinned_and_ends_with_the_newest(count, kept):
    points = thinned(range(count))
    assert len(points) == kept
    assert points == sorted(points)
    assert not count or points[-1] == count - 1


@pytest.mark.parametrize("scores", [[], [{"path": "stack"}], [{"path": "p", "reading": "r", "nats_per_byte": "low"}]])
def test_scores_that_are_none_make_no_point(scores):
    assert answer_of(scores) is None


def test_metrics_are_what_prometheus_reads(house, member):
    member.work()
    evaluate(house, member)
    text = house.ask("GET", "/metrics", "viewer").text
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["blocktrain_phase_step", "0"] == 2
    assert found["blocktrain_block_version", "1"] == 1
    assert found["blocktrain_updates_total",] == 1
    assert found["blocktrain_held_out_nats_per_byte",] == 2.0
    assert found["blocktrain_http_responses_total", "200"] >= 4
    assert found["blocktrain_paused",] == 0


# Pausing


def test_a_pause_lasts_over_a_restart_until_an_admin_ends_it(house, member):
    assert house.ask("POST", "/v1/pause", "admin").status_code == 204
    house.restart()
    answer = house.ask("POST", "/v1/leases", json=member.request()).json()
    assert (answer["kind"], answer["reason"]) == ("wait", "the run is paused")
    assert house.ask("GET", "/v1/status", "viewer").json()["paused"] is True
    assert house.ask("POST", "/v1/resume", "admin").status_code == 204
    assert member.lease().kind == "train"


def test_who_is_at_work_when_a_run_is_paused_hands_in_what_it_has(house, member):
    lease = member.lease()
    house.ask("POST", "/v1/pause", "admin")
    assert member.send(lease, member.payload(lease)).status_code == 200


def test_pausing_twice_is_one_event(house):
    for path in ("/v1/pause", "/v1/pause", "/v1/resume", "/v1/resume"):
        assert house.ask("POST", path, "admin").status_code == 204
    assert [event["kind"] for event in events(house)] == ["paused", "resumed"]


@pytest.mark.parametrize("role", ["worker", "viewer"])
@pytest.mark.parametrize("path", ["/v1/pause", "/v1/resume"])
def test_only_an_admin_pauses(house, path, role):
    answer = house.ask("POST", path, role)
    assert (answer.status_code, answer.json()["code"]) == (403, "role")


# The manifest


def test_the_composition_s_weights_come_only_with_the_versions_they_were_fitted_to(new_house):
    house = new_house(**{"model.blocks": 2})
    member = house.member()
    member.work()
    evaluate(house, member, {"stack": (0.25, 0.75)})
    assert house.ask("GET", "/v1/manifest").json()["combine"] == {"stack": [0.25, 0.75]}
    member.work()  # every block one version on
    manifest = house.ask("GET", "/v1/manifest").json()
    assert manifest["combine"] == {}
    assert [block["version"] for block in manifest["blocks"]] == [2, 2]
    assert manifest["steps"] == {"0": 4}


def test_a_manifest_is_read_in_one_piece_while_a_round_closes(house, member, monkeypatch):
    """Nothing that is recorded after its one look at the ledger is in any part of it."""
    member.work()
    real = house.ledger.consistent_manifest

    def then_it_moves_on():
        found = real()
        monkeypatch.undo()
        member.work()
        return found

    monkeypatch.setattr(house.ledger, "consistent_manifest", then_it_moves_on)
    manifest = house.coordinator.manifest()
    assert ([block.version for block in manifest.blocks], manifest.steps) == ([1, 1], {0: 2})
