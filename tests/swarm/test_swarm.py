"""A real coordinator behind a real server on loopback, and real workers. Together they train as one machine does."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.data.corpus import load_corpus
from blocktrain.errors import RequestRefused
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import build_block
from blocktrain.model.stack import BlockModel
from blocktrain.spec import Denoise, EndToEnd, Phase, RunSpec, Stacked, load_spec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.server import served_here
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.train.run import load_model, train_run
from blocktrain.wire.invite import Invite
from blocktrain.wire.safetensors import decode

TOKEN = "a-token-for-the-workers"
EXACT = {"swarm.update": "fp32", "swarm.download": "fp32", "swarm.round_steps": 2, "swarm.audit_share": 0.0}


@contextmanager
def serving(spec: RunSpec, folder: Path) -> Iterator[Invite]:
    folder.mkdir(exist_ok=True)
    ledger, blobs = Ledger(folder / "ledger.db"), Blobs(folder / "blobs")
    corpus = load_corpus(spec.corpus, spec.model.context)
    found_run(spec, corpus, ledger, blobs, now_s=0.0)
    if not ledger.access_tokens():
        ledger.add_access_token("workers", "worker", TOKEN, 0.0)
    coordinator = Coordinator(
        spec, ledger, blobs, initial_block=lambda block: as_arrays(build_block(spec, block).state_dict())
    )
    with closing(ledger), served_here(coordinator, ledger) as port:
        yield Invite("127.0.0.1", port, TOKEN)


def work(invite: Invite, home: Path, **options) -> None:
    """Runs a worker until the run is finished, or until `stop` says so."""
    with CoordinatorClient(invite, patience_s=100) as client:
        Worker(client, home, key=Ed25519PrivateKey.generate(), name="w", memory_bytes=2**33, **options).run()


def status(invite: Invite) -> dict:
    with CoordinatorClient(invite) as client:
        return client.status()


def swarm_model(invite: Invite, spec: RunSpec, home: Path) -> BlockModel:
    with CoordinatorClient(invite) as client:
        blocks = {x.block: as_tensors(decode(client.download(x.tensors, home))[0]) for x in client.manifest().blocks}
    return BlockModel.from_tensors(spec, blocks)


def weights(model: BlockModel) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def locally(spec: RunSpec, path: Path) -> BlockModel:
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(path, spec, corpus.sha256)
    train_run(run, corpus)
    return load_model(run)


@pytest.mark.parametrize("audits", [{}, {"swarm.audit_share": 0.05, "swarm.round_steps": 10, "train.steps": 20}])
def test_a_swarm_of_one_trains_exactly_what_local_training_trains(tmp_path, tiny, audits):
    spec = tiny(Stacked(), **EXACT | audits)
    assert spec.swarm.has_audits == bool(audits)
    with serving(spec, tmp_path / "coordinator") as invite:
        work(invite, tmp_path / "worker")
        together = swarm_model(invite, spec, tmp_path / "worker" / "blobs")
    assert torch.equal(weights(together), weights(locally(spec, tmp_path / "local")))


@pytest.mark.parametrize("objective", [Stacked(), Denoise()], ids=["stacked", "denoise"])
def test_three_workers_lower_the_held_out_loss(tmp_path, tiny, objective):
    spec = tiny(objective, **{"swarm.round_steps": 5, "train.steps": 10, "swarm.evaluate_every": 1})
    with serving(spec, tmp_path / "coordinator") as invite:
        team = [threading.Thread(target=work, args=(invite, tmp_path / f"w{i}")) for i in range(3)]
        for member in team:
            member.start()
        for member in team:
            member.join()
        facts = status(invite)
    assert all(phase["finished"] for phase in facts["phases"])
    assert len(facts["workers"]) == 3
    assert facts["evaluations"][-1]["scores"][-1]["nats_per_byte"] < 5.0


def test_a_restarted_coordinator_goes_on_with_the_same_run(tmp_path, tiny):
    spec = tiny(Stacked(), **EXACT)
    submitted: list[str] = []

    def report(event) -> None:
        if event.kind == "submitted":
            submitted.append(event.text)

    with serving(spec, tmp_path / "coordinator") as invite:
        work(invite, tmp_path / "w", report=report, stop=lambda: len(submitted) >= 2)
    with serving(spec, tmp_path / "coordinator") as invite:
        work(invite, tmp_path / "w")
        assert all(phase["finished"] for phase in status(invite)["phases"])


# One block: every worker trains the whole model


WHOLE = {"model.blocks": 1, "model.layers": 2}


def test_a_swarm_of_one_with_one_block_is_local_training_of_the_whole_model(tmp_path, tiny):
    spec = tiny(EndToEnd(), **WHOLE, **EXACT)
    with serving(spec, tmp_path / "coordinator") as invite:
        work(invite, tmp_path / "worker")
        together = swarm_model(invite, spec, tmp_path / "worker" / "blobs")
    assert torch.equal(weights(together), weights(locally(spec, tmp_path / "local")))


def test_workers_of_one_block_and_an_outer_nesterov_train_as_diloco_does(tmp_path, tiny):
    outer = {"swarm.outer": "nesterov", "swarm.round_steps": 4, "train.steps": 12, "swarm.evaluate_every": 1}
    spec = tiny(EndToEnd(), **WHOLE, **outer)
    with serving(spec, tmp_path / "coordinator") as invite:
        team = [threading.Thread(target=work, args=(invite, tmp_path / f"w{i}")) for i in range(2)]
        for member in team:
            member.start()
        for member in team:
            member.join()
        facts = status(invite)
    with closing(Ledger(tmp_path / "coordinator" / "ledger.db")) as ledger:
        initial, *merged = ledger.versions(0)
        assert len(ledger.workers()) == 2
    assert initial.momentum_sha256 is None
    assert len({version.momentum_sha256 for version in merged} - {None}) == len(merged) >= 3
    assert facts["evaluations"][-1]["scores"][-1]["nats_per_byte"] < 5.0


def test_the_run_of_the_documentation_is_one_of_a_whole_model(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "method.md").read_text(encoding="utf-8")
    (tmp_path / "run.toml").write_text(page.partition("```toml")[2].partition("```")[0], encoding="utf-8")
    spec = load_spec(tmp_path / "run.toml")
    assert (spec.model.blocks, spec.swarm.outer, spec.phases) == (1, "nesterov", (Phase(0, (0,), (), (), 2000),))


@pytest.mark.parametrize("token", ["not-a-token-of-this-run"])
def test_a_wrong_token_is_refused_with_the_remedy(tmp_path, tiny, token):
    with serving(tiny(Stacked()), tmp_path / "coordinator") as invite:
        stranger = Invite(invite.host, invite.port, token)
        with (
            CoordinatorClient(stranger) as client,
            pytest.raises(RequestRefused, match="ask the operator"),
        ):
            client.run_info()


def test_a_receipt_does_not_wait_for_the_merge(house, member):
    lease = member.lease()
    data = member.payload(lease)
    assert member.upload(lease.lease, data).status_code == 200
    assert house.ask_only("POST", "/v1/updates", json=member.notice(lease, data)).status_code == 200
    assert house.coordinator.loop.due.is_set()
    assert {version for _, version in house.weights()} == {0}
    waiting = house.ask_only("POST", "/v1/leases", json=member.request()).json()
    assert waiting["reason"] == "round 0 is being merged"
    house.settle()
    assert {version for _, version in house.weights()} == {0, 1}
    member.work()


def test_a_worker_that_comes_before_a_phase_is_open_waits_for_it(house, member):
    answer = house.ask_only("POST", "/v1/leases", json=member.request()).json()
    assert answer["reason"] == "the next phase is being opened"
    house.settle()
    member.lease()


def test_a_phase_begins_with_the_deadline_that_the_phase_before_has_learned(new_house):
    """Otherwise every phase would begin with rounds that wait for absent workers as long as a round may take."""
    house = new_house(**{"train.steps": 8, "swarm.deadline_ceiling_s": 900.0})
    member = house.member()
    limits_s = []
    for _ in range(4):  # rounds of two steps: the first phase
        lease = member.lease()
        limits_s.append(lease.time_left_s)
        house.now_s += 30
        assert member.send(lease, member.payload(lease)).status_code == 200
    lease = member.lease()
    assert limits_s == [900, 900, 900, 45]
    assert (lease.phase, lease.time_left_s) == (1, 45)
    round = house.coordinator.watching.status()["phases"][1]["round"]
    assert (round["limit_s"], round["limit_reason"]) == (45, "median 30.0 s, spread 0.0 s of 4 rounds")
