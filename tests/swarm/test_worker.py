"""A worker at a real coordinator, without sockets: what it keeps when things go wrong, and what it throws away."""

import hashlib
import os
import time

import httpx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.swarm.client import CoordinatorClient
from blocktrain.swarm.worker import Worker, prune_cache
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import Problem

SHORT = {"train.steps": 6, "swarm.update": "sparse", "swarm.update_ratio": 20.0}


class InHouse(httpx.BaseTransport):
    """Every request goes to the house itself, but for the updates that are planned to be refused."""

    def __init__(self, house, refused=()):
        self._house, self._refused, self._updates = house, refused, 0

    def handle_request(self, request):
        if request.url.path == "/v1/updates":
            self._updates += 1
            if self._updates in self._refused:
                return httpx.Response(409, json=Problem(code="stale", message="too late", retry=False).model_dump())
        wanted = {key: request.headers[key] for key in ("range", "content-type") if key in request.headers}
        path = request.url.raw_path.decode()
        answer = self._house.ask(request.method, path, content=request.read(), headers=wanted)
        return httpx.Response(answer.status_code, content=answer.content)


@pytest.fixture
def hire(tmp_path):
    """A worker of the house; it stops after so many updates, or with the run."""

    def hired(house, updates=None, refused=(), **options):
        reports = []
        client = CoordinatorClient(Invite("coordinator.test", 1, "token"), transport=InHouse(house, refused))

        def stop():
            return updates is not None and sum(x.kind == "submitted" for x in reports) >= updates

        worker = Worker(
            client, tmp_path, key=Ed25519PrivateKey.generate(), memory_bytes=2**33, device=torch.device("cpu"),
            report=reports.append, stop=stop, sleep=lambda _: None, **options,
        )  # fmt: skip
        worker.reports = reports
        return worker

    return hired


def kinds(worker):
    return [report.kind for report in worker.reports if report.kind in ("submitted", "refused", "finished")]


def test_a_refused_update_leaves_the_unsent_part_and_the_optimiser_as_they_were(new_house, hire):
    worker, unsent, trainers = hire(new_house(**SHORT), updates=2, refused={2}), [], []
    go_on, submit = worker._go_on_after, worker._submit

    def watched_submit(*arguments):
        unsent.append(worker._feedback.state())
        trainers.append(worker._trainer)
        return submit(*arguments)

    def watched_go_on(refused):
        unsent.append(worker._feedback.state())
        go_on(refused)

    worker._submit, worker._go_on_after = watched_submit, watched_go_on
    worker.run()
    assert kinds(worker) == ["submitted", "refused", "submitted"]
    before, _, after, _ = unsent
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainers[0] is trainers[2]


def test_a_restarted_worker_has_lost_what_it_had_not_sent_and_finishes_the_run(new_house, hire):
    house = new_house(**SHORT)
    hire(house, updates=2).run()
    second = hire(house)
    second.run()
    assert kinds(second)[-1] == "finished"
    assert not house.refusals()


def test_the_cache_holds_the_corpus_and_what_the_last_lease_needed(new_house, hire, tmp_path):
    house = new_house(**SHORT)
    worker = hire(house, wall_clock=lambda: time.time() + 1000.0)
    worker.run()
    cached = {file.name for file in (tmp_path / "blobs").iterdir()}
    corpus = set(house.ledger.run().corpus.values())
    assert corpus <= cached
    assert len(cached - corpus) <= 2 * house.spec.model.blocks
    assert house.ledger.versions(0)[0].sha256 not in cached


def test_blocks_that_only_run_lie_whole_in_files_even_where_only_the_difference_was_fetched(new_house, hire, tmp_path):
    worker = hire(new_house(**{"train.steps": 4}))
    mapped, put_down = [], worker._put_down

    def watched(version, tensors):
        mapped.append(version)
        return put_down(version, tensors)

    worker._put_down = watched
    worker.run()
    assert len(mapped) == len(set(mapped))  # once a version, not once a lease
    from_difference = [version for version in mapped if version.version > 0]
    assert from_difference
    for version in from_difference:
        file = tmp_path / "blobs" / version.tensors.sha256
        assert hashlib.sha256(file.read_bytes()).hexdigest() == version.tensors.sha256


def test_a_cached_blob_goes_when_it_is_neither_wanted_nor_new(tmp_path):
    for name, age_s in {"wanted": 100, "old": 100, "new": 1}.items():
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (1000 - age_s, 1000 - age_s))
    prune_cache(tmp_path, {"wanted"}, before_s=940)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new", "wanted"]


def test_a_cache_that_does_not_exist_needs_no_pruning(tmp_path):
    prune_cache(tmp_path / "blobs", set(), before_s=0.0)
