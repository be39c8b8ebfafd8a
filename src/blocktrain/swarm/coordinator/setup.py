"""Setup: what happens once per run, before its first coordinator serves it. The spec goes to the ledger and the corpus
to the blobs, where every coordinator of the run finds them. Next: coordinator.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from blocktrain.data.corpus import Corpus, raw_bytes
from blocktrain.data.shards import SPLITS
from blocktrain.errors import ConfigError
from blocktrain.settings import public_name
from blocktrain.spec import LATER_SWARM_SETTINGS, RunSpec, first_difference, parse_spec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Run
from blocktrain.wire.messages import INDEX_BLOB, PROTOCOL_VERSION, TOKENIZER_BLOB
from blocktrain.wire.safetensors import Tensors, encode_chunks


def found_run(spec: RunSpec, corpus: Corpus, ledger: Ledger, blobs: Blobs, now_s: float) -> Run:
    """The run of this ledger. A repeat changes nothing. Another spec or corpus in the same ledger is refused."""
    text, digest = spec.model_dump_json(), spec.digest()
    there = ledger.run()
    if there is not None and _require_same(there, spec, corpus, ledger.database.where):
        text, digest = there.spec, there.spec_digest  # as they were written then, perhaps by an older version
    return ledger.create_run(
        Run(
            spec=text,
            spec_digest=digest,
            corpus_sha256=corpus.sha256,
            corpus=_stored(corpus, blobs),
            protocol=PROTOCOL_VERSION,
            created_s=now_s,
        )
    )


def _stored(corpus: Corpus, blobs: Blobs) -> dict[str, str]:
    """What the blobs hold of the text. Raw bytes: each split. A prepared corpus: its index, its tokenizer and every
    shard. The index tells workers nothing about the files of this machine."""
    if corpus.prepared is None:
        return {split: blobs.put(raw_bytes(corpus.split(split)).tobytes()) for split in SPLITS}
    index = corpus.prepared.index
    public = index.model_copy(update={"sources": (), "longest": (), "tokenizer": public_name(index.tokenizer)})
    stored = {INDEX_BLOB: blobs.put(public.model_dump_json().encode())}
    if corpus.tokenizer.file is not None:
        stored[TOKENIZER_BLOB] = blobs.put(corpus.tokenizer.file)
    for split in SPLITS:
        shards = corpus.prepared.split(split)
        for number, entry in enumerate(index.splits[split]):
            if not blobs.has_whole(entry.sha256, entry.num_tokens * index.token_bytes):
                blobs.put(shards.bytes_of(number), entry.sha256)
            stored[f"{split}/{number}"] = entry.sha256
    return stored


def begin_blocks(
    spec: RunSpec, ledger: Ledger, blobs: Blobs, initial_block: Callable[[int], Tensors], now_s: float
) -> None:
    """A run that starts from a model has a version of every block from the beginning: those that are frozen or trained
    later are there too. A repeat changes nothing."""
    if not has_its_start(spec, ledger):
        stored = {block: blobs.put(encode_chunks(initial_block(block))) for block in range(spec.model.blocks)}
        ledger.add_initial_blocks(stored, now_s)


def has_its_start(spec: RunSpec, ledger: Ledger) -> bool:
    """Whether the ledger needs no model to start from, because it has its blocks or makes new ones."""
    return spec.train.start_sha256 is None or len(ledger.newest()) == spec.model.blocks


def continued_run(ledger: Ledger) -> Run:
    """The run that this ledger holds, for a coordinator that is started without settings."""
    run = ledger.run()
    if run is None:
        raise ConfigError(
            f"the ledger at {ledger.database.where} holds no run and no settings were given: "
            f"name a TOML file or --preset, or the --dir of a run"
        )
    return ledger.create_run(replace(run, protocol=PROTOCOL_VERSION))  # which refuses another protocol


def spec_of(run: Run) -> RunSpec:
    """A run that an older version founded goes on as it was."""
    settings = json.loads(run.spec)
    settings["swarm"] = LATER_SWARM_SETTINGS | settings.get("swarm", {})
    return parse_spec(settings, origin="the run's ledger", warn=False)


def _require_same(there: Run, spec: RunSpec, corpus: Corpus, where: str) -> bool:
    """False if the spec that is there cannot be read any more. The same text at another place is the same text."""
    old: RunSpec | None = None
    with suppress(ConfigError):
        old = spec_of(there)
    if old is None:
        return False
    if corpus.sha256 == there.corpus_sha256:
        spec = spec.with_(**{"corpus.source": old.corpus.source})
    if different := first_difference(old, spec):
        new = "another schema for this one (--ledger …?schema=NAME)" if "://" in where else "another --dir for this one"
        raise ConfigError(
            f"the ledger at {where} {different}: use the same settings, or give none to continue that run, or name "
            f"{new}"
        )
    return True
