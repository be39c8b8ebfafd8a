"""The text of a run at a worker: all of it if it is raw bytes. Of a prepared corpus only the shards that leases need
are fetched; the next ones come while the worker trains, and the oldest go when the cache is full. Next: worker.py."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from blocktrain.data.corpus import Corpus
from blocktrain.data.shards import CorpusIndex, ShardEntry, TokenShards
from blocktrain.data.tokenizer import tokenizer_of_run
from blocktrain.errors import CoordinatorUnreachable, CorpusError, RequestRefused
from blocktrain.io.files import mapped
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.messages import INDEX_BLOB, TOKENIZER_BLOB, Blob, RunInfo, TrainLease

DEFAULT_CACHE_BYTES = 2 * 10**9
FEWEST_SHARDS = 4  # that the cache holds, however small it is: those of a lease and the next ones


class CorpusCache:
    """`corpus` reads shards through this cache."""

    def __init__(self, client: CoordinatorClient, info: RunInfo, folder: Path, cache_bytes: int) -> None:
        self._client, self._info, self._folder, self._cache_bytes = client, info, folder, cache_bytes
        self._shards: OrderedDict[str, int] = OrderedDict()  # those that were used, the newest last; their sizes
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}  # by shard, so that none is fetched twice at the same time
        self._fetcher: threading.Thread | None = None
        self.corpus = self._prepared() if INDEX_BLOB in info.corpus else self._raw()

    def needed_blobs(self) -> set[str]:
        """What must stay in the folder."""
        if INDEX_BLOB not in self._info.corpus:
            return {blob.sha256 for blob in self._info.corpus.values()}
        small = {blob.sha256 for name, blob in self._info.corpus.items() if name in (INDEX_BLOB, TOKENIZER_BLOB)}
        with self._lock:
            return small | set(self._shards)

    def fetch_ahead(self, lease: TrainLease) -> None:
        """Fetches the shards that the lease names, and those after them, in a thread of its own. A shard that does not
        come is fetched again when it is needed."""
        train = self.corpus.train
        if not isinstance(train, TokenShards) or (self._fetcher is not None and self._fetcher.is_alive()):
            return
        numbers = {entry.sha256: number for number, entry in enumerate(train.entries)}
        named = dict.fromkeys(blob.sha256 for blob in (*lease.text, *lease.next_text))
        if strange := [sha256 for sha256 in named if sha256 not in numbers]:
            raise CorpusError(
                f"the lease names a shard {strange[0][:12]}… that is not in the index of the text: ask the operator of "
                f"the coordinator"
            )
        largest = max(entry.num_tokens for entry in train.entries) * self._token_bytes
        room = max(FEWEST_SHARDS, self._cache_bytes // largest)  # more would push out what is needed first
        self._fetcher = train.open_ahead([numbers[sha256] for sha256 in named][:room])

    def _raw(self) -> Corpus:
        parts = {split: np.frombuffer(self._get(blob), dtype=np.uint8) for split, blob in self._info.corpus.items()}
        return Corpus(parts["train"], parts["valid"], parts["test"], self._info.corpus_sha256)

    def _prepared(self) -> Corpus:
        blobs = self._info.corpus
        try:
            index = CorpusIndex.model_validate_json(bytes(self._get(blobs[INDEX_BLOB])))
        except ValidationError as error:
            raise CorpusError(
                f"the coordinator's index of the text cannot be read ({error.errors()[0]['msg']}): install the "
                f"coordinator's version of blocktrain"
            ) from None
        file = bytes(self._get(blobs[TOKENIZER_BLOB])) if TOKENIZER_BLOB in blobs else None
        tokenizer = tokenizer_of_run(index.tokenizer, file)
        if index.sha256 != self._info.corpus_sha256 or tokenizer.sha256 != index.tokenizer_sha256:
            raise CorpusError("the coordinator's index of the text is not the one of its run: ask its operator")
        self._token_bytes = index.token_bytes
        train, valid, test = (
            TokenShards(index, split, tokenizer, self._open_shard) for split in ("train", "valid", "test")
        )
        return Corpus(train, valid, test, index.sha256, tokenizer)

    def _open_shard(self, entry: ShardEntry) -> tuple[Path, memoryview]:
        num_bytes = entry.num_tokens * self._token_bytes
        with self._lock:
            opening = self._opening.setdefault(entry.sha256, threading.Lock())
        with opening:
            data = self._here(entry.sha256) or self._fetched(Blob(sha256=entry.sha256, num_bytes=num_bytes))
        with self._lock:
            self._shards[entry.sha256] = num_bytes
            self._shards.move_to_end(entry.sha256)
            while len(self._shards) > FEWEST_SHARDS and sum(self._shards.values()) > self._cache_bytes:
                oldest, _ = self._shards.popitem(last=False)
                with suppress(OSError):
                    (self._folder / oldest).unlink()
        return self._folder / entry.sha256, data

    def _here(self, sha256: str) -> memoryview | None:
        """A shard that this worker has used: it was checked then."""
        if sha256 in self._shards:
            with suppress(OSError):
                return mapped(self._folder / sha256)
        return None

    def _fetched(self, blob: Blob) -> memoryview:
        try:
            return self._get(blob)
        except (RequestRefused, CoordinatorUnreachable) as error:
            if isinstance(error, CoordinatorUnreachable) and not error.answered:
                raise
            raise CorpusError(
                f"a shard of the text cannot be fetched ({error}): ask the operator of the coordinator to start it "
                f"again with its whole command (--corpus …), which stores the text again, then start the worker again"
            ) from None

    def _get(self, blob: Blob) -> memoryview:
        return self._client.download(blob, self._folder)
