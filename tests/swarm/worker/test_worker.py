"""A worker with a real coordinator, without sockets: what it keeps when things go wrong, and what it removes. The
clocks are virtual, so that no deadline passes on a busy machine."""

import hashlib
import json
import threading
import time
from contextlib import suppress
from itertools import count

import httpx
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.errors import TensorError
from blocktrain.spec import Stacked
from blocktrain.swarm.signatures import is_signed, sign
from blocktrain.swarm.worker.block_cache import BlockCache
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.train.memory_estimate import MemoryPlan
from blocktrain.train.streamed import StreamedTrainer
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import Blob, BlockVersion, Problem, UpdateReceipt
from blocktrain.wire.recipes import Recipe, RecipeUpdate
from blocktrain.wire.safetensors import decode, flat
from blocktrain.wire.updates import encode_update

SHORT = {"train.steps": 6, "swarm.update": "sparse", "swarm.update_ratio": 20.0}


class InHouse(httpx.BaseTransport):
    """Every request goes to the house itself, but for the updates that are planned to be refused."""

    def __init__(self, house, refused=()):
        self._house, self._refused, self._updates = house, refused, 0
        self.fetched = []  # hashes of blobs

    def handle_request(self, request):
        if request.url.path == "/v1/updates":
            self._updates += 1
            if self._updates in self._refused:
                return httpx.Response(409, json=Problem(code="stale", message="too late", retry=False).model_dump())
        wanted = {key: request.headers[key] for key in ("range", "content-type") if key in request.headers}
        path = request.url.raw_path.decode()
        if path.startswith("/v1/blobs/"):
            self.fetched.append(path.rpartition("/")[2])
        answer = self._house.ask(request.method, path, content=request.read(), headers=wanted)
        return httpx.Response(answer.status_code, content=answer.content)


@pytest.fixture
def hire(tmp_path):
    """A worker of the house; it stops after so many updates, or with the run."""

    def hired(house, updates=None, refused=(), home=tmp_path, memory_bytes=2**33, key=None, **options):
        reports, transport = [], InHouse(house, refused)
        client = CoordinatorClient(Invite("coordinator.test", 1, "token"), transport=transport)

        def stop():
            return updates is not None and sum(x.kind == "submitted" for x in reports) >= updates

        milliseconds = count()
        worker = Worker(
            client, home, key=key or Ed25519PrivateKey.generate(), memory_bytes=memory_bytes,
            device=torch.device("cpu"),
            report=reports.append, stop=stop, clock=lambda: next(milliseconds) / 1000, sleep=lambda _: None, **options,
        )  # fmt: skip
        worker.reports, worker.fetched = reports, transport.fetched
        return worker

    return hired


def kinds(worker):
    return [report.kind for report in worker.reports if report.kind in ("submitted", "refused", "finished")]


def test_a_refused_update_leaves_the_unsent_part_and_the_optimiser_as_they_were(new_house, hire):
    worker, unsent, trainers = hire(new_house(**SHORT), updates=2, refused={2}), [], []
    go_on, submit = worker._continue_after, worker._submit

    def watched_submit(*arguments):
        unsent.append(dict(worker._feedback.unsent))
        trainers.append(worker._trainer)
        return submit(*arguments)

    def watched_go_on(refused):
        unsent.append(dict(worker._feedback.unsent))
        go_on(refused)

    worker._submit, worker._continue_after = watched_submit, watched_go_on
    worker.run()
    assert kinds(worker) == ["submitted", "refused", "submitted"]
    before, _, after, _ = unsent
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert trainers[0] is trainers[2]


def test_a_restarted_worker_has_lost_what_it_had_not_sent_and_finishes_the_run(new_house, hire):
    house = new_house(**SHORT)
    hire(house, updates=2).run()
    second = hire(house)
    second.run()
    assert kinds(second)[-1] == "finished"
    assert not house.refusals()


def test_a_worker_whose_clock_was_once_ahead_goes_on(new_house, hire):
    house = new_house(**SHORT)
    member = house.member()
    member.nonces = count(2**52)
    member.work()
    worker = hire(house, key=member.key)
    worker.run()
    assert kinds(worker)[-1] == "finished"
    assert house.ledger.last_nonce(member.id) > 2**52


def receipts(home):
    return [json.loads(line) for line in (home / "receipts.jsonl").read_text().splitlines()]


def test_a_worker_keeps_the_receipts_that_the_coordinator_has_signed(new_house, hire, tmp_path):
    house = new_house(**SHORT)
    worker = hire(house, updates=2)
    worker.run()
    kept = receipts(tmp_path)
    assert [x["update"] for x in kept] == [x.update.id for x in house.ledger.contributions()]
    for each in kept:
        run = each.pop("run")
        assert is_signed(UpdateReceipt(**each), run)
        assert not is_signed(UpdateReceipt(**{**each, "weight": 0.0}), run)


def test_a_receipt_that_no_coordinator_of_the_run_has_signed_is_not_believed(new_house, hire, tmp_path):
    house = new_house(**SHORT)
    worker = hire(house, updates=1)
    real, forged = worker._client.send, []

    def forge(*arguments):
        sent, receipt = real(*arguments)
        if forged:
            return sent, receipt
        forged.append(sign(receipt, Ed25519PrivateKey.generate(), house.run))
        return sent, forged[0]

    worker._client.send = forge
    worker.run()
    assert kinds(worker) == ["refused", "submitted"]
    assert "not signed by a coordinator of the run" in next(x.text for x in worker.reports if x.kind == "refused")
    assert len(receipts(tmp_path)) == 1


def test_the_cache_holds_the_corpus_and_what_the_last_lease_needed(new_house, hire, tmp_path):
    house = new_house(**SHORT)
    worker = hire(house, wall_clock=lambda: time.time() + 1000.0)
    worker.run()
    cached = {file.name for file in (tmp_path / "blobs").iterdir()}
    corpus = set(house.ledger.run().corpus.values())
    assert corpus <= cached
    assert len(cached - corpus) <= 2 * house.spec.model.blocks
    assert house.ledger.versions(0)[0].sha256 not in cached


@pytest.mark.parametrize("update", ["fp32", "vector"])
def test_blocks_that_only_run_lie_whole_in_files_even_where_only_the_way_to_them_was_fetched(
    new_house, hire, tmp_path, monkeypatch, update
):
    mapped, put_down = [], BlockCache._move_to_file

    def watched(cache, version, tensors):
        mapped.append(version)
        return put_down(cache, version, tensors)

    monkeypatch.setattr(BlockCache, "_move_to_file", watched)
    hire(new_house(**{"train.steps": 4, "swarm.update": update})).run()
    assert len(mapped) == len(set(mapped))  # once a version, not once a lease
    from_difference = [version for version in mapped if version.version > 0]
    assert from_difference
    for version in from_difference:
        file = tmp_path / "blobs" / version.tensors.sha256
        assert hashlib.sha256(file.read_bytes()).hexdigest() == version.tensors.sha256


VECTOR = {"train.steps": 6, "swarm.update": "vector", "swarm.update_ratio": 20.0}


def updates_of(house):
    return {entry.update.id: entry.update for entry in house.ledger.contributions()}


def test_a_worker_goes_by_the_course_of_its_blocks_from_their_second_version_on(new_house, hire):
    house = new_house(**VECTOR)
    hire(house).run()
    flags = [
        (update.phase, "from_course" in decode(house.blobs.get(sha256))[1])
        for sha256, update in updates_of(house).items()
    ]
    assert [by_course for phase, by_course in flags if phase == 0] == [False, True, True]


def test_a_worker_that_is_alone_makes_every_version_itself(new_house, hire):
    house = new_house(**VECTOR)
    worker = hire(house)
    worker.run()
    versions = {version.sha256 for block in (0, 1) for version in house.ledger.versions(block)}
    assert len(versions) > 5
    assert not (versions | updates_of(house).keys()) & set(worker.fetched)


def test_an_initial_block_whose_bytes_differ_here_is_fetched(new_house, hire, monkeypatch):
    monkeypatch.setattr("blocktrain.swarm.worker.worker.build_block", lambda spec, block: torch.nn.Linear(1, 1))
    house = new_house(**VECTOR)
    worker = hire(house, updates=1)
    worker.run()
    assert {house.ledger.version(block, 0).sha256 for block in (0, 1)} <= set(worker.fetched)


def run_in_step(worker, both_ask):
    """Asks for each lease only when the other worker asks too: neither gets ahead by a round. Once one has finished,
    the other need not wait any more."""
    request = worker._request

    def waiting_request():
        with suppress(threading.BrokenBarrierError):
            both_ask.wait()
        return request()

    worker._request = waiting_request
    try:
        worker.run()
    finally:
        both_ask.abort()


def test_two_workers_follow_each_others_updates_to_the_same_bits(new_house, hire, tmp_path):
    house = new_house(**VECTOR | {"train.steps": 4, "swarm.min_updates": 2})
    workers, both_ask = [hire(house, home=tmp_path / name) for name in ("ada", "bob")], threading.Barrier(2)
    threads = [threading.Thread(target=run_in_step, args=(worker, both_ask)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    merged = {version.sha256 for block in (0, 1) for version in house.ledger.versions(block) if version.version > 0}
    for worker in workers:
        others = {sha256 for sha256, update in updates_of(house).items() if update.worker != worker._public_key}
        own = updates_of(house).keys() - others
        assert others & set(worker.fetched)
        assert not (own | merged) & set(worker.fetched)


def test_of_blocks_that_are_trained_no_more_one_version_stays(new_house, hire):
    worker = hire(new_house(**VECTOR))
    worker.run()
    trained = worker._trainer.phase.blocks
    held = [block for block, _ in worker._block_cache._held if block not in trained]
    assert held
    assert len(held) == len(set(held))


def test_who_has_not_seen_the_course_fetches_versions_whole_until_it_has(new_house, hire, tmp_path):
    house = new_house(**VECTOR)
    hire(house, updates=2, home=tmp_path / "ada").run()
    bob = hire(house, updates=2, home=tmp_path / "bob")
    bob.run()
    assert house.ledger.version(0, 2).sha256 in bob.fetched
    assert not house.refusals()


def test_an_update_that_is_not_there_any_more_is_no_obstacle(new_house, hire, tmp_path):
    house = new_house(**VECTOR)
    worker = hire(house)
    submit = worker._submit

    def forgetful(lease, payload, *arguments):
        receipt = submit(lease, payload, *arguments)
        for place in (house.folder / "blobs", tmp_path / "blobs"):
            for file in place.rglob(hashlib.sha256(payload).hexdigest()):
                file.unlink()
        return receipt

    worker._submit = forgetful
    worker.run()
    assert kinds(worker)[-1] == "finished"
    assert house.ledger.version(0, 1).sha256 in worker.fetched


NO_BLOB = Blob(sha256="0" * 64, num_bytes=1)
TENSORS = {"up": np.ones((3, 4), np.float32)}


class RecipeFor:
    """A coordinator that describes every version by an update of these blocks."""

    def __init__(self, *blocks):
        base = flat(dict.fromkeys(blocks, TENSORS))
        recipe = Recipe(blocks=blocks, updates=(RecipeUpdate(payload=NO_BLOB, share=1.0),))
        self._blobs = [recipe.encode(), encode_update(base, base, make_codec("int8"))]

    def download(self, blob, folder):
        return self._blobs.pop(0)


@pytest.mark.parametrize("block", [1, 10**6])
def test_a_recipe_for_another_block_is_refused_in_our_words(tmp_path, block):
    shapes = [{"up": (3, 4)}] * 2
    cache = BlockCache(
        RecipeFor(block), tmp_path, shapes=lambda index: shapes[index], make_initial=None, keep_earlier=False
    )
    cache._held = {(0, 1): TENSORS}
    version = BlockVersion(block=0, version=2, tensors=NO_BLOB, from_previous=NO_BLOB)
    with pytest.raises(TensorError, match="version 2 of block 0 cannot be read"):
        cache.trained([version])


@pytest.mark.parametrize("schedule", ["whole", "progressive"])
@pytest.mark.parametrize("update", ["fp32", "int8", "vector"])
def test_a_worker_that_streams_blocks_sends_what_a_larger_machine_sends(
    schedule, update, new_house, hire, tmp_path, monkeypatch
):
    settings = {"train.steps": 4, "swarm.round_steps": 2, "swarm.update": update, "swarm.update_ratio": 20.0}
    objective, versions = Stacked(schedule=schedule), []
    for streamed in (False, True):
        for module in (
            "swarm.worker.worker",
            "train.streamed",
        ):  # with all windows at once, so that bits can be compared
            monkeypatch.setattr(f"blocktrain.{module}.memory_plan", lambda *_, s=streamed: MemoryPlan(s, 8, 0))
        house = new_house(objective=objective, **settings)
        hire(house, home=tmp_path / str(streamed)).run()
        versions.append({block: version.sha256 for block, version in house.ledger.newest().items()})
    assert versions[0] == versions[1]


def test_a_worker_with_little_memory_finishes_the_run(new_house, hire):
    house = new_house(objective=Stacked(schedule="whole"), **SHORT)
    worker = hire(house, memory_bytes=1)
    worker.run()
    assert kinds(worker)[-1] == "finished"
    assert isinstance(worker._trainer, StreamedTrainer)
