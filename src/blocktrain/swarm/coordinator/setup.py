"""Founding: what happens once in the life of a run, before the first coordinator serves it. The spec and the text are
put where every coordinator of the run finds them. Next: coordinator.py."""

from __future__ import annotations

from blocktrain.data.corpus import SPLITS, Corpus
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Run
from blocktrain.wire.messages import PROTOCOL_VERSION


def found_run(spec: RunSpec, corpus: Corpus, ledger: Ledger, blobs: Blobs, now_s: float) -> Run:
    """The run of this ledger. Founding it again changes nothing; another spec or text in the same ledger is refused."""
    text, there = spec.model_dump_json(), ledger.run()
    # Older versions kept a hash of the text. The run goes on with that one.
    digest = there.spec_digest if there is not None and there.spec == text else spec.digest()
    return ledger.create_run(
        Run(
            spec=text,
            spec_digest=digest,
            corpus_sha256=corpus.sha256,
            corpus={split: blobs.put(corpus.split(split).tobytes()) for split in SPLITS},
            protocol=PROTOCOL_VERSION,
            created_s=now_s,
        )
    )
