"""Setup: what happens once per run, before its first coordinator serves it. The spec goes to the ledger and the corpus
to the blobs, where every coordinator of the run finds them. Next: coordinator.py."""

from __future__ import annotations

from contextlib import suppress

from pydantic import ValidationError

from blocktrain.data.corpus import SPLITS, Corpus
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Run
from blocktrain.wire.messages import PROTOCOL_VERSION


def found_run(spec: RunSpec, corpus: Corpus, ledger: Ledger, blobs: Blobs, now_s: float) -> Run:
    """The run of this ledger. A repeat changes nothing. Another spec or corpus in the same ledger is refused."""
    there = ledger.run()
    if there is not None and _same_spec(there.spec, spec):  # as it was written then, perhaps by an older version
        text, digest = there.spec, there.spec_digest
    else:
        text, digest = spec.model_dump_json(), spec.digest()
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


def _same_spec(text: str, spec: RunSpec) -> bool:
    with suppress(ValidationError):
        return RunSpec.model_validate_json(text) == spec
    return False
