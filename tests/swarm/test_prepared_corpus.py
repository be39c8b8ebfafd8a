"""A swarm on a prepared corpus: its workers fetch the shards that they need, and train what one machine trains."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.cli.shared.block_source import RunSource
from blocktrain.data import shards
from blocktrain.data.corpus import load_corpus, with_tokenizer
from blocktrain.data.prepare import Plan, prepare
from blocktrain.data.shards import PreparedCorpus, shard_file
from blocktrain.data.windows import STEPS_PER_SHARDS, shards_of_steps
from blocktrain.errors import BlockTrainError, CorpusError
from blocktrain.io.arrays import as_arrays
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.io.files import mapped
from blocktrain.model.block import block_shapes, build_block
from blocktrain.spec import RunSpec, preset
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.local import served_here
from blocktrain.swarm.signatures import public_half, sign
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.corpus_cache import FEWEST_SHARDS, CorpusCache
from blocktrain.swarm.worker.export import export_model
from blocktrain.swarm.worker.worker import Worker
from blocktrain.train.run import train_run
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import PROTOCOL_VERSION, Blob, LeaseRequest, TrainLease

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
def test_a_swarm_of_one_trains_what_one_machine_trains_and_gives_its_tokenizer_to_exports_and_stages(
    tmp_path, spec, corpus, cache_bytes
):
    with serving(spec, tmp_path / "coordinator") as (invite, _):
        work(invite, tmp_path / "worker", cache_bytes=cache_bytes)
        with CoordinatorClient(invite) as client:
            together = export_model(client, client.manifest(), tmp_path / "export", tmp_path / "cache")
            served = RunSource(client, tmp_path / "cache").newest([0, 1])
    alone = RunDirectory.create(tmp_path / "alone", spec, corpus.index.sha256)
    train_run(alone, load_corpus(spec.corpus, spec.model.context))
    assert all(map(torch.equal, weights(together), weights(alone)))
    assert together.tokenizer_file() == served.info.tokenizer.file == corpus.tokenizer.file
    assert (len(shards_in(tmp_path / "worker", corpus)) <= FEWEST_SHARDS) is (cache_bytes == 1)


def test_a_worker_fetches_two_shards_before_its_first_step(tmp_path, spec, corpus):
    fetched: list[set[str]] = []

    def report(event) -> None:
        if event.kind in ("lease", "step"):
            fetched.append(shards_in(tmp_path / "worker", corpus))

    with serving(spec, tmp_path / "coordinator") as (invite, _):
        work(invite, tmp_path / "worker", report=report, stop=lambda: len(fetched) > 1)
    assert len(corpus.index.splits["train"]) > 10
    assert fetched[0] == set()
    assert len(fetched[1]) == 2


def test_the_text_before_the_first_step_is_bounded_whatever_the_corpus_is(tmp_path, spec, corpus):
    """Counted with small shards. With those of prepare, two of them leave 2 MiB for the index and the tokenizer."""
    counted: list[int] = []

    def report(event) -> None:
        if event.kind == "step" and not counted:
            with CoordinatorClient(invite) as client:
                text = {blob.sha256 for blob in client.run_info().corpus.values()}
            files = [path for path in (tmp_path / "worker" / "blobs").iterdir() if path.name in text]
            counted.append(sum(path.stat().st_size for path in files))

    with serving(spec, tmp_path / "coordinator") as (invite, _):
        work(invite, tmp_path / "worker", report=report, stop=lambda: bool(counted))
        with CoordinatorClient(invite) as client:
            small = [client.run_info().corpus[name].num_bytes for name in ("index", "tokenizer")]
    assert 0 < counted[0] <= 2 * SHARD_BYTES + sum(small)
    assert len(corpus.index.splits["train"]) > 10
    assert 2 * shards.SHARD_BYTES + 2 * 2**20 <= 32 * 2**20


def test_a_lease_names_the_shards_that_its_steps_read_and_the_next_ones(tmp_path, spec, corpus):
    spec = spec.with_(**{"swarm.round_steps": STEPS_PER_SHARDS + 6, "train.steps": 4 * STEPS_PER_SHARDS})
    key, said = Ed25519PrivateKey.generate(), {"name": "w", "device": "cpu", "memory_bytes": 2**33, "steps_per_s": 1.0}
    with serving(spec, tmp_path / "coordinator") as (invite, _), CoordinatorClient(invite) as client:
        request = LeaseRequest(protocol=PROTOCOL_VERSION, nonce=1, worker=public_half(key), **said)
        lease = client.lease(lambda: sign(request, key, client.run_info().run))
    train = corpus.split("train")
    text, following = (
        shards_of_steps(train, spec.model.context + 1, spec.seed, 0, lease.shard, steps)
        for steps in (range(lease.steps), range(lease.steps, lease.steps + STEPS_PER_SHARDS))
    )
    assert [blob.sha256 for blob in lease.text] == [train.entries[number].sha256 for number in text]
    assert [blob.sha256 for blob in lease.next_text] == [train.entries[number].sha256 for number in following]
    assert len(lease.text) == 4


def test_a_shard_that_is_not_in_the_index_is_not_fetched(tmp_path, spec, corpus):
    foreign = Blob(sha256="0" * 64, num_bytes=2**40)
    with serving(spec, tmp_path / "coordinator") as (invite, _), CoordinatorClient(invite) as client:
        cache = CorpusCache(client, client.run_info(), tmp_path / "blobs", 10**9)
        where = {"phase": 0, "shard": 0, "step_start": 0, "steps": 1, "time_left_s": 1.0}
        lease = TrainLease(lease="x", **where, trained=(), below=(), ahead=(), text=(foreign,))
        with pytest.raises(CorpusError, match="names a shard 000000000000… that is not in the index"):
            cache.fetch_ahead(lease)


class Client:
    """Gives the blobs of a prepared corpus. While it fetches the first shard, `meanwhile` runs in another thread."""

    def __init__(self, corpus: PreparedCorpus) -> None:
        self._files = {path.stem: path for path in (corpus.folder / "shards").iterdir()}
        self._small = {name: corpus.folder / f"{name}.json" for name in ("index", "tokenizer")}
        self.info = SimpleNamespace(
            corpus={name: SimpleNamespace(sha256=name) for name in self._small}, corpus_sha256=corpus.index.sha256
        )
        self.fetched: list[str] = []
        self.meanwhile: Callable[[], object] | None = None
        self._again = threading.Event()

    def download(self, blob: Blob, cache: Path) -> memoryview:
        if blob.sha256 in self._small:
            return mapped(self._small[blob.sha256])
        self.fetched.append(blob.sha256)
        if self.fetched.count(blob.sha256) > 1:
            self._again.set()
        elif self.meanwhile:
            threading.Thread(target=self.meanwhile).start()
            self._again.wait(0.1)
        cache.mkdir(exist_ok=True)
        shutil.copy(self._files[blob.sha256], cache / blob.sha256)
        return mapped(cache / blob.sha256)


def test_two_threads_that_need_a_shard_fetch_it_once(tmp_path, corpus):
    client, ahead = Client(corpus), list[threading.Thread]()
    train = CorpusCache(client, client.info, tmp_path / "blobs", 10**9).corpus.train
    client.meanwhile = lambda: ahead.append(train.open_ahead([0]))
    train.take(np.array([0]))
    ahead[0].join()
    assert client.fetched == [train.entries[0].sha256]


@pytest.mark.parametrize("cache_bytes, num_fetched", [(10**9, 6), (1, FEWEST_SHARDS)])
def test_the_shards_of_a_lease_and_the_next_ones_are_fetched_as_many_as_the_cache_holds(
    tmp_path, corpus, cache_bytes, num_fetched
):
    client = Client(corpus)
    cache = CorpusCache(client, client.info, tmp_path / "blobs", cache_bytes)
    named = [Blob(sha256=entry.sha256, num_bytes=SHARD_BYTES) for entry in corpus.index.splits["train"][:6]]
    where = {"phase": 0, "shard": 0, "step_start": 0, "steps": 1, "time_left_s": 1.0}
    cache.fetch_ahead(TrainLease(lease="x", **where, trained=(), below=(), ahead=(), text=named[:3], next_text=named))
    cache._fetcher.join()
    assert client.fetched == [blob.sha256 for blob in named[:num_fetched]]


@pytest.mark.parametrize(
    "lost, complaint",
    [
        ("before it joins", r"blob [0-9a-f]{64} is not in .*: restore it from a copy.* whole command .--corpus"),
        (
            "lease",
            r"a shard of the text cannot be fetched .*blob [0-9a-f]{64}.*: ask the operator .* again .*--corpus",
        ),
    ],
)
def test_a_shard_that_a_worker_cannot_get_is_named(tmp_path, spec, corpus, lost, complaint):
    with serving(spec, tmp_path / "coordinator") as (invite, blobs):

        def lose(event: str) -> None:
            for entry in corpus.index.splits["train"] if event == lost else ():
                blobs.delete(entry.sha256)

        lose("before it joins")
        with pytest.raises(BlockTrainError, match=complaint):
            work(invite, tmp_path / "worker", report=lambda event: lose(event.kind))


def test_a_coordinator_does_not_start_on_a_damaged_shard(tmp_path, spec, corpus):
    folder = shutil.copytree(corpus.folder, tmp_path / "corpus")
    path = shard_file(folder, corpus.index.splits["train"][3].sha256)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    complaint = rf"{path.name} is damaged \(its hash is .* instead of {path.name[:12]}…\): restore it from a copy"
    with (
        pytest.raises(CorpusError, match=complaint),
        serving(spec.with_(**{"corpus.source": str(folder)}), tmp_path / "coordinator"),
    ):
        pass


def test_a_coordinator_that_starts_again_writes_only_the_shards_that_are_lost_or_damaged(tmp_path, spec, corpus):
    loaded, ledger = load_corpus(spec.corpus, spec.model.context), Ledger(tmp_path / "ledger.db")
    with closing(ledger):
        found_run(spec, loaded, ledger, Blobs(tmp_path / "blobs"), now_s=0.0)
        files = [tmp_path / "blobs" / "blobs" / entry.sha256 for entry in corpus.index.splits["train"]]
        written = [file.stat().st_mtime_ns for file in files]
        files[1].unlink()
        files[2].write_bytes(b"?")
        found_run(spec, loaded, ledger, Blobs(tmp_path / "blobs"), now_s=1.0)
    again = [file.stat().st_mtime_ns for file in files]
    assert [number for number, pair in enumerate(zip(written, again, strict=True)) if len(set(pair)) > 1] == [1, 2]
    assert files[2].stat().st_size == SHARD_BYTES


def test_the_index_that_workers_get_names_no_file_of_the_coordinator(tmp_path, corpus):
    tokenizer = tmp_path / "mine.json"
    tokenizer.write_bytes(corpus.tokenizer.file)
    source = corpus.folder.parent / "rows.jsonl"
    prepare(Plan((str(source),), str(tokenizer), shard_bytes=SHARD_BYTES), tmp_path / "corpus")
    spec = preset("tiny").with_(**{"corpus.source": str(tmp_path / "corpus"), "train.windows": 2})
    spec = with_tokenizer(spec, load_corpus(spec.corpus, spec.model.context))
    with serving(spec, tmp_path / "coordinator") as (invite, blobs), CoordinatorClient(invite) as client:
        info = client.run_info()
        index = bytes(blobs.get(info.corpus["index"].sha256))
    assert b"rows.jsonl" not in index
    assert str(tmp_path).encode() not in index
    assert str(tmp_path) not in json.dumps(info.spec)
    assert (json.loads(index)["tokenizer"], info.spec["corpus"]["tokenizer"]) == ("mine.json", "mine.json")
    assert json.loads(index)["tokenizer_sha256"] == corpus.tokenizer.sha256
