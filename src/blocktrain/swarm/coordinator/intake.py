"""Intake: checks what workers send, and refuses it with a reason and its code. What the announcement shows is checked
before the bytes are read. A refusal changes nothing. It records no updates: coordinator.py does.
Next: ../policy/averaging/norms.py, which judges norms; ../ledger/updates.py, which keeps updates."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from io import SEEK_END
from typing import BinaryIO

from blocktrain.errors import RequestRefused, TensorError, foreign_bytes
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs, Uploaded, direct_id, upload_id
from blocktrain.swarm.coordinator.blocks import Blocks
from blocktrain.swarm.coordinator.quotas import Quotas
from blocktrain.swarm.coordinator.watching.curves import answer_of
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import LeaseRecord, NewUpdate, Update
from blocktrain.swarm.policy.averaging.norms import check_against_weights, check_norm
from blocktrain.swarm.policy.evaluations import fault_in
from blocktrain.swarm.policy.rounds import Refusal, staleness_weight
from blocktrain.swarm.signatures import require_signature
from blocktrain.wire.messages import Blob, EvaluationNotice, UpdateNotice
from blocktrain.wire.safetensors import Shapes
from blocktrain.wire.updates import max_update_bytes, read_update

OPENED_AT_ONCE = 2
KNOWN_LEASES = 1024


@dataclass(frozen=True)
class CheckedUpdate:
    """An update that may be merged, its bytes kept as a blob. It is not recorded yet."""

    notice: UpdateNotice
    lease: LeaseRecord
    norm: float


class Intake:
    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        blobs: Blobs,
        blocks: Blocks,
        quotas: Quotas,
        clock: Callable[[], float],
        run_id: str,
    ) -> None:
        self._spec, self._ledger, self._blobs, self._blocks, self._clock = spec, ledger, blobs, blocks, clock
        self._quotas, self._run_id = quotas, run_id
        # At most this many updates are in memory at a time, however many arrive at once.
        self.opening = threading.BoundedSemaphore(OPENED_AT_ONCE)
        # A lease never changes its phase: the parts of an upload need not look it up again.
        self._leased_phase = lru_cache(KNOWN_LEASES)(lambda lease_id: _require_lease(ledger, lease_id).phase)

    # Bytes

    def expect(self, lease_id: str, end: int, size: int, access_token: str = "") -> None:
        """Refuses a part of an upload before its bytes are read, if it is larger than an update of the phase can be, or
        if there is no room for it."""
        limit = self._most_bytes(lease_id)
        if max(size, end) > limit:
            raise RequestRefused(
                f"an upload of {max(size, end)} bytes was announced, an update of this phase takes "
                f"at most {limit}: send the update in codec {self._spec.swarm.update}",
                code="oversized",
            )
        if end > size:
            raise RequestRefused(
                f"a part that ends at byte {end} was announced for an upload of {size} bytes: send no more than that",
                code="oversized",
            )
        self._quotas.admit(lease_id, access_token, end)

    def _most_bytes(self, lease_id: str) -> int:
        phase = self._leased_phase(lease_id)
        return max_update_bytes(self._blocks.codec(phase), self._blocks.shapes(phase))

    def receive(
        self, lease_id: str, sha256: str, offset: int, size: int, part: bytes | BinaryIO, access_token: str = ""
    ) -> int:
        """Stores a part of an upload. Returns the bytes that are there now. A part that is a file is not read. A lease
        has one upload: the first part of another one replaces it."""
        num_bytes = len(part) if isinstance(part, bytes) else part.seek(0, SEEK_END)
        self.expect(lease_id, offset + num_bytes, size, access_token)
        if self._blobs.is_whole(sha256):
            return size
        for other in self._blobs.uploads_of(lease_id) if offset == 0 else ():
            if other != upload_id(lease_id, sha256):
                self._blobs.discard(other)
        return self._blobs.append(upload_id(lease_id, sha256), offset, part)

    def received(self, lease_id: str, sha256: str) -> int:
        self._leased_phase(lease_id)
        if self._blobs.is_whole(sha256):
            return self._blobs.size(sha256)
        return self._blobs.received(upload_id(lease_id, sha256))

    def upload_url(self, lease_id: str, size: int, access_token: str) -> str | None:
        """Where a worker may put a whole upload itself. What arrives there is checked as every other upload is."""
        url = self._blobs.upload_url(lease_id, size)
        if url is not None:
            self.expect(lease_id, size, size, access_token)
        return url

    # Updates

    def check(self, notice: UpdateNotice, part: BinaryIO | None = None) -> CheckedUpdate | Update:
        """Signed, whole, sane and not too old, or RequestRefused. Its bytes, which came with it as this `part` or were
        uploaded before, are a blob when this returns. An update that was recorded before is returned as it was."""
        with self._ledger.snapshot() as seen:
            lease, facts = self._look_up(seen, notice)
        if isinstance(facts, Update):
            if facts.id in self._blobs.damaged and (part or self.received(lease.id, facts.id) == facts.num_bytes):
                self._blobs.keep(self._uploaded(notice, part), facts.id)  # it was sent again
            return facts
        require_tensors(notice.tensors, self._blocks.shapes(lease.phase))
        with self.opening:
            upload = self._arrived(notice, part)
            with self._blobs.syncing(upload) as is_synced:
                self._require_whole(upload, notice.payload)
                norm = self._norm(upload.data, facts)
            self._blobs.keep(upload, notice.payload.sha256, is_synced)
            self._quotas.finished(notice.lease)
            del upload  # before the next one is opened
        return CheckedUpdate(notice, lease, norm)

    def facts(self, ledger: Ledger, checked: CheckedUpdate) -> NewUpdate:
        """What to record of it as things stand in this ledger; RequestRefused if it may not be merged any more."""
        return replace(self._mergeable(ledger, checked.notice, checked.lease), norm=checked.norm)

    def _look_up(self, ledger: Ledger, notice: UpdateNotice) -> tuple[LeaseRecord, NewUpdate | Update]:
        """Its lease and its facts, or the update itself if it was recorded before."""
        lease = _require_lease(ledger, notice.lease)
        require_signature(notice, self._run_id)
        if lease.worker != notice.worker:
            raise RequestRefused("this lease belongs to another worker: ask for one of your own", code="owner")
        if known := ledger.update(notice.payload.sha256):
            if known.lease != lease.id:
                raise RequestRefused(
                    "the same bytes were sent for another lease: send this lease's update", code="copied"
                )
            return lease, known
        if lease.state == "reported":
            raise RequestRefused(
                f"lease {lease.id[:12]}… has reported its update and this is another: ask for a new lease",
                code="reported",
            )
        return lease, self._mergeable(ledger, notice, lease)

    def _mergeable(self, ledger: Ledger, notice: UpdateNotice, lease: LeaseRecord) -> NewUpdate:
        """The facts of an update that may be merged, all but its norm. RequestRefused if it may not."""
        bases, finished = ledger.bases(lease.phase, limit=self._spec.swarm.max_lag + 2)
        if lease.round not in bases:
            raise RequestRefused(f"round {lease.round} is long over: fetch the block again", code="stale")
        base, newest = bases[lease.round], bases[max(bases)]
        block = self._spec.phases[lease.phase].block
        staleness = staleness_weight(base[block], newest[block], self._spec.swarm)
        if isinstance(staleness, Refusal):
            raise RequestRefused(staleness.reason, code="stale")
        if finished:
            raise phase_over(lease.phase)
        if notice.steps > lease.steps or notice.tokens != notice.steps * self._spec.step_tokens:
            raise RequestRefused(
                f"{notice.steps} steps and {notice.tokens} tokens were reported, the lease was for {lease.steps} steps "
                f"of {self._spec.step_tokens} tokens: report what was done",
                code="steps",
            )
        return NewUpdate(
            id=notice.payload.sha256,
            lease=lease.id,
            worker=notice.worker,
            phase=lease.phase,
            base=dict(base),
            tokens=notice.tokens,
            steps=notice.steps,
            codec=self._spec.swarm.update,
            num_bytes=notice.payload.num_bytes,
            norm=0.0,
            lag=newest[block] - base[block],
            weight=notice.tokens * staleness,
            loss=notice.loss,
            received_s=self._clock(),
            signature=notice.signature,
        )

    @contextmanager
    def opened(self, notice: UpdateNotice, part: BinaryIO | None) -> Iterator[Uploaded]:
        """The bytes of an update while they are checked, in memory only then."""
        with self.opening:
            yield self._uploaded(notice, part)

    def _uploaded(self, notice: UpdateNotice, part: BinaryIO | None) -> Uploaded:
        """The bytes that came with the notice or were uploaded before, complete. They become a blob only when they are
        accepted."""
        upload = self._arrived(notice, part)
        self._require_whole(upload, notice.payload)
        return upload

    def _arrived(self, notice: UpdateNotice, part: BinaryIO | None) -> Uploaded:
        return self._stored(notice) if part is None else self._blobs.whole(part)

    def _require_whole(self, upload: Uploaded, announced: Blob) -> None:
        require_announced(announced, len(upload.data))
        if (found := hashlib.sha256(upload.data).hexdigest()) != announced.sha256:
            if upload.id is not None:
                self._blobs.discard(upload.id)
            raise RequestRefused(
                f"the uploaded bytes have sha256 {found[:12]}… and {announced.sha256[:12]}… was announced: they were "
                f"discarded, upload them again",
                code="hash",
            )

    def _stored(self, notice: UpdateNotice) -> Uploaded:
        sha256, name = notice.payload.sha256, upload_id(notice.lease, notice.payload.sha256)
        kept = self._blobs.is_whole(sha256)
        if not kept:
            upload = self._blobs.uploaded(name, limit := self._most_bytes(notice.lease))
            if self._blobs.is_bucket and not upload.data:
                upload = self._blobs.uploaded(direct_id(notice.lease), limit)
            kept = len(upload.data) < notice.payload.num_bytes and self._blobs.is_whole(sha256)  # by another request
        return Uploaded(name, self._blobs.get(sha256), None) if kept else upload

    def _norm(self, data: memoryview, facts: NewUpdate) -> float:
        """Decodes the update once. Its norm divided by the root of its steps, or the reason why it cannot be merged."""
        blocks = self._spec.phases[facts.phase].blocks
        try:
            with foreign_bytes(TensorError, "the update"):
                encoded = read_update(data, self._blocks.shapes(facts.phase), expected=self._blocks.codec(facts.phase))
                whole = math.sqrt(encoded.squared_norm(*self._blocks.around(encoded, facts.base)))
        except TensorError as error:
            raise RequestRefused(str(error), code=error.code) from None
        norm = whole / math.sqrt(facts.steps)
        for verdict in (
            check_against_weights(whole, self._blocks.norm(facts.base, blocks), self._spec.swarm),
            check_norm(norm, self._ledger.recent_norms(facts.phase), self._spec.swarm),
        ):
            if not verdict.accepted:
                raise RequestRefused(verdict.reason, code="norm")
        return norm

    # Evaluations

    def evaluation(self, notice: EvaluationNotice) -> None:
        require_signature(notice, self._run_id)
        lease = self._ledger.evaluation_lease(int(notice.lease)) if _is_number(notice.lease) else None
        if lease is None or lease.worker != notice.worker:
            raise RequestRefused(f"there is no evaluation {notice.lease} of yours: ask for a lease", code="lease")
        if fault := fault_in(notice.scores, notice.combine, lease.versions, self._spec):
            raise RequestRefused(f"{fault}: send what this version of blocktrain computes", code="evaluation")
        samples = [sample.model_dump() for sample in notice.samples]
        loss = (answer_of(notice.scores) or {}).get("nats_per_byte")
        self._ledger.record_evaluation(
            lease.id, "valid", list(notice.scores), notice.combine, self._clock(), samples, loss
        )


def _require_lease(ledger: Ledger, lease_id: str) -> LeaseRecord:
    lease = ledger.lease(lease_id)
    if lease is None and (found := ledger.audit_lease(lease_id)):
        lease = replace(found[1].lease, id=lease_id, worker=found[0].worker)
    if lease is None:
        raise RequestRefused(f"there is no lease {lease_id[:80]}: ask for one", code="lease")
    return lease


def require_announced(payload: Blob, num_bytes: int) -> None:
    if num_bytes != payload.num_bytes:
        raise RequestRefused(
            f"{num_bytes} bytes of the update have arrived, {payload.num_bytes} were announced: upload exactly those, "
            f"then announce the update",
            code="truncated",
        )


def require_tensors(announced: Shapes, expected: Shapes) -> None:
    """Refuses announced tensors that are not those of the phase, before their bytes are read."""
    remedy = "train the blocks that were leased, with the spec of the run"
    if missing := sorted(expected.keys() - announced.keys()):
        raise RequestRefused(f'tensor "{missing[0]}" is missing{_more(missing)}: {remedy}', code="missing")
    if extra := sorted(announced.keys() - expected.keys()):
        raise RequestRefused(f'tensor "{extra[0]}" is not part of the phase{_more(extra)}: {remedy}', code="extra")
    for name, shape in expected.items():
        if tuple(announced[name]) != shape:
            raise RequestRefused(
                f'tensor "{name}" has shape {tuple(announced[name])} and {shape} is expected: {remedy}', code="shapes"
            )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 16  # what the ledger can hold


def phase_over(phase: int) -> RequestRefused:
    return RequestRefused(f"phase {phase + 1} is finished: ask for other work", code="stale")
