"""A swarm on a prepared corpus: its workers fetch the shards that they need, and train what one machine trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.data.corpus import load_corpus, with_tokenizer
from blocktrain.data.prepare import Plan, prepare
from blocktrain.data.shards import PreparedCorpus
from blocktrain.errors import BlockTrainError
from blocktrain.io.arrays import as_arrays
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes, build_block
from blocktrain.spec import RunSpec, preset
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.local import served_here
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.corpus_cache import FEWEST_SHARDS
from blocktrain.swarm.worker.export import export_model
from blocktrain.swarm.worker.worker import Worker
from blocktrain.train.run import train_run
from blocktrain.wire.invite import Invite

TOKEN, SHARD_BYTES = "a-token-for-the-workers", 4096


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    """More than ten shards in train."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [f"{n} bottles of beer on wall {n * n}, and {n**3} bottles of wine. {n**5 % 997}" * 2 for n in range(600)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return prepare(Plan((str(folder / "rows.jsonl"),), "bpe:300", shard_bytes=SHARD_BYTES), folder / "corpus")


@pytest.fixture
def spec(corpus: PreparedCorpus) -> RunSpec:
    exact = {"swarm.update": "fp32", "swarm.download": "fp32", "swarm.round_steps": 2, "train.steps": 4}
    spec = preset("tiny").with_(**{"corpus.source": str(corpus.folder), "train.windows": 2, **exact})
    return with_tokenizer(spec, load_corpus(spec.corpus, spec.model.context))


@contextmanager
def serving(spec: RunSpec, folder: Path) -> Iterator[tuple[Invite, Blobs]]:
    folder.mkdir()
    ledger, blobs = Ledger(folder / "ledger.db"), Blobs(folder / "blobs")
    found_run(spec, load_corpus(spec.corpus, spec.model.context), ledger, blobs, now_s=0.0)
    ledger.add_access_token("workers", "worker", TOKEN, 0.0)
    initial = lambda block: as_arrays(build_block(spec, block).state_dict())  # noqa: E731
    coordinator = Coordinator(spec, ledger, blobs, initial_block=initial)
    with closing(ledger), served_here(coordinator, ledger) as port:
        yield Invite("127.0.0.1", port, TOKEN), blobs


def work(invite: Invite, home: Path, **options: object) -> None:
    with CoordinatorClient(invite, patience_s=1) as client:
        Worker(client, home, key=Ed25519PrivateKey.generate(), name="w", memory_bytes=2**33, **options).run()


def weights(run: RunDirectory) -> list[torch.Tensor]:
    blocks = [run.load_block(block, block_shapes(run.spec, block)) for block in range(run.spec.model.blocks)]
    return [tensor for block in blocks for tensor in block.values()]


def shards_in(home: Path, corpus: PreparedCorpus) -> set[str]:
    names = {entry.sha256 for entries in corpus.index.splits.values() for entry in entries}
    return names & {path.name for path in (home / "blobs").iterdir()}


@pytest.mark.parametrize("cache_bytes", [10**9, 1], ids=["a large cache", "a small cache"])
def test_a_swarm_of_one_trains_what_one_machine_trains_and_exports_its_tokenizer(tmp_path, spec, corpus, cache_bytes):
    with serving(spec, tmp_path / "coordinator") as (invite, _):
        work(invite, tmp_path / "worker", cache_bytes=cache_bytes)
        with CoordinatorClient(invite) as client:
            together = export_model(client, client.manifest(), tmp_path / "export", tmp_path / "cache")
    alone = RunDirectory.create(tmp_path / "alone", spec, corpus.index.sha256)
    train_run(alone, load_corpus(spec.corpus, spec.model.context))
    assert all(map(torch.equal, weights(together), weights(alone)))
    assert together.tokenizer_file() == corpus.tokenizer.file
    assert (len(shards_in(tmp_path / "worker", corpus)) <= FEWEST_SHARDS) is (cache_bytes == 1)


def test_a_worker_fetches_two_shards_before_its_first_step(tmp_path, spec, corpus):
    fetched: list[set[str]] = []

    def report(event) -> None:
        if event.kind == "lease":
            fetched.append(shards_in(tmp_path / "worker", corpus))
        if event.kind == "step":
            fetched.append(shards_in(tmp_path / "worker", corpus))

    with serving(spec, tmp_path / "coordinator") as (invite, _):
        work(invite, tmp_path / "worker", report=report, stop=lambda: len(fetched) > 1)
    assert len(corpus.index.splits["train"]) > 10
    assert fetched[0] == set()
    assert 2 <= len(fetched[1]) <= 4  # those of the lease, and perhaps the next ones already


def test_a_shard_that_a_worker_cannot_get_is_named(tmp_path, spec, corpus):
    with serving(spec, tmp_path / "coordinator") as (invite, blobs):
        for entry in corpus.index.splits["train"]:
            blobs.delete(entry.sha256)
        with pytest.raises(BlockTrainError, match=r"blob [0-9a-f]{12}"):
            work(invite, tmp_path / "worker")


def test_the_index_that_workers_get_names_no_file_of_the_coordinator(tmp_path, spec, corpus):
    with serving(spec, tmp_path / "coordinator") as (invite, blobs), CoordinatorClient(invite) as client:
        index = bytes(blobs.get(client.run_info().corpus["index"].sha256))
    assert b"rows.jsonl" not in index
    assert json.loads(index)["tokenizer_sha256"] == corpus.tokenizer.sha256
