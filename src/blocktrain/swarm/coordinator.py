"""Coordinator: turns requests into decisions of rounds.py, merges of averaging.py and facts of ledger.py. It holds no
state of its own: several may share one ledger. It never builds a model; newborn blocks are given to it.
Next: service.py, the HTTP routes in front of it."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from torch import Tensor

from blocktrain.checkpoint import continue_block
from blocktrain.errors import BlobError, RequestRefused, StorageError, TensorError
from blocktrain.spec import Phase, RunSpec, Stacked
from blocktrain.swarm.averaging import Part, check_norm, merge, outer_step
from blocktrain.swarm.blobs import Blobs
from blocktrain.swarm.ledger import Ledger
from blocktrain.swarm.ledger_records import LeaseRecord, NewUpdate, NewVersion, Update, Version
from blocktrain.swarm.rounds import (
    NoWork,
    OpenPhase,
    Refusal,
    Round,
    WorkerFacts,
    choose_work,
    decide,
    learned_deadline_s,
    next_round,
    open_phases,
    open_round,
    staleness_weight,
)
from blocktrain.wire.codecs import CodecSettings, update_settings
from blocktrain.wire.deltas import EncodedUpdate, encode_difference, max_update_bytes, read_update
from blocktrain.wire.messages import (
    PROTOCOL_VERSION,
    Blob,
    BlockVersion,
    EvaluateLease,
    EvaluationNotice,
    Finished,
    LeaseReply,
    LeaseRequest,
    ModelManifest,
    RunInfo,
    TrainLease,
    UpdateNotice,
    UpdateReceipt,
    Wait,
)
from blocktrain.wire.tensors import decode, encode

Tensors = dict[str, Tensor]
LONGEST_WAIT_S = 5.0
EVALUATION_S = 600.0
EVALUATION_WINDOWS = 200
GRANT_TRIES = 5
SLOWEST_STEPS_PER_S = 1e-6  # what is slower is planned as this: dates stay finite
UNWANTED_S = 3600.0  # until a blob or an upload that nothing needs is forgotten
KEPT_EVENTS = 10_000


class Coordinator:
    """`newborn` makes an untrained block's tensors; `memory_bytes` says what training a phase takes."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        blobs: Blobs,
        *,
        newborn: Callable[[int], Tensors],
        memory_bytes: Callable[[Phase], int] = lambda _: 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spec, self._ledger, self._blobs = spec, ledger, blobs
        self._newborn, self._memory_bytes, self._clock = newborn, memory_bytes, clock
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}
        # Threads of one server take turns: nobody merges what another is merging. Between servers the ledger decides.
        self._turn = threading.RLock()

    # What workers and people ask

    def info(self) -> RunInfo:
        run = self._ledger.run()
        assert run is not None, "a coordinator is started on a ledger with a run"
        with _own_blobs():
            corpus = {split: self._blob(sha256) for split, sha256 in run.corpus.items()}
        return RunInfo(
            spec=self._spec.model_dump(mode="json"),
            spec_sha256=run.spec_sha256,
            corpus_sha256=run.corpus_sha256,
            corpus=corpus,
        )

    def lease(self, request: LeaseRequest) -> LeaseReply:
        now_s = self._clock()
        if request.protocol != PROTOCOL_VERSION:
            raise RequestRefused(
                f"this worker speaks protocol {request.protocol}, the coordinator {PROTOCOL_VERSION}: "
                f"install the coordinator's version of blocktrain",
                code="protocol",
            )
        if request.phase is not None and request.phase >= len(self._spec.phases):
            raise RequestRefused(
                f"phase {request.phase} is held by this worker, the run has phases 0 to {len(self._spec.phases) - 1}: "
                f"ask without one",
                code="phase",
            )
        self._ledger.see_worker(
            request.worker, request.name, request.device, request.memory_bytes, request.steps_per_s, now_s
        )
        with self._turn, _own_blobs():
            self.tick()
            run = self._ledger.run()
            if run is not None and run.paused:
                return Wait(seconds=LONGEST_WAIT_S, reason="the run is paused")
            return self._evaluation_lease(request, now_s) or self._train_lease(request, now_s)

    def expect(self, lease_id: str, end: int, size: int) -> None:
        """Whether a part that ends there may be sent, asked before its bytes are read. More than an update of the
        phase takes is refused."""
        lease = self._require_lease(lease_id)
        limit = max_update_bytes(self._codec(lease.phase), self._flat_shapes(lease.phase))
        if max(size, end) > limit:
            raise RequestRefused(
                f"an upload of {max(size, end)} bytes was announced, an update of this phase takes "
                f"at most {limit}: send the update in codec {self._spec.swarm.update}",
                code="oversized",
            )
        if end > size:
            raise RequestRefused(
                f"a part up to byte {end} of an upload of {size} bytes was announced: send no more than the upload",
                code="oversized",
            )

    def receive(self, lease_id: str, sha256: str, offset: int, size: int, data: bytes) -> int:
        """A part of an upload; the bytes that are safe now."""
        self.expect(lease_id, offset + len(data), size)
        if self._blobs.exists(sha256):
            return size
        return self._blobs.append(_upload_id(lease_id, sha256), offset, data)

    def received(self, lease_id: str, sha256: str) -> int:
        self._require_lease(lease_id)
        if self._blobs.exists(sha256):
            return self._blobs.size(sha256)
        return self._blobs.received(_upload_id(lease_id, sha256))

    def update(self, notice: UpdateNotice) -> UpdateReceipt:
        """Take an update in: signed, whole, sane, not too old. When this returns it survives a kill. What is refused
        leaves an event for people to see, and nothing else."""
        try:
            with _own_blobs():
                return self._taken_in(notice)
        except RequestRefused as refused:
            data = {"code": refused.code, "worker": notice.worker, "lease": notice.lease}
            self._ledger.add_event("refused", str(refused), self._clock(), data)
            raise

    def _taken_in(self, notice: UpdateNotice) -> UpdateReceipt:
        lease = self._require_lease(notice.lease)
        _require_signature(notice.worker, notice.signature, notice.signed_bytes())
        if lease.worker != notice.worker:
            raise RequestRefused("this lease belongs to another worker: ask for one of your own", code="owner")
        if known := self._ledger.update(notice.payload.sha256):
            if known.lease != lease.id:
                raise RequestRefused("the same bytes came for another lease: send what this one gave", code="copied")
            return _receipt(known, duplicate=True)
        if lease.state == "reported":
            raise RequestRefused(
                f"lease {lease.id[:12]}… has reported its update and this is another: ask for a new lease",
                code="reported",
            )
        facts = self._mergeable(notice, lease)
        data = self._payload(notice)
        norm = self._norm(data, facts)
        self._blobs.put(data)
        with self._turn:
            self.tick()
            # What was merged while the bytes were being read may have made it too old.
            new = replace(self._mergeable(notice, lease), norm=norm)
            recorded, duplicate = self._ledger.record_update(new)
            self.tick()
        self._blobs.discard(_upload_id(notice.lease, notice.payload.sha256))
        return _receipt(recorded, duplicate)

    def evaluation(self, notice: EvaluationNotice) -> None:
        _require_signature(notice.worker, notice.signature, notice.signed_bytes())
        lease = self._ledger.evaluation_lease(int(notice.lease)) if _is_number(notice.lease) else None
        if lease is None or lease.worker != notice.worker:
            raise RequestRefused(f"there is no evaluation {notice.lease} of yours: ask for a lease", code="lease")
        self._ledger.record_evaluation(lease.id, "valid", list(notice.scores), notice.combine, self._clock())

    def manifest(self) -> ModelManifest:
        info, newest = self.info(), self._ledger.consistent_manifest()
        with _own_blobs():
            blocks = tuple(self._reference(version) for version in newest.blocks.values())
        return ModelManifest(
            spec=info.spec,
            spec_sha256=info.spec_sha256,
            corpus_sha256=info.corpus_sha256,
            blocks=blocks,
            finished=tuple(phase.phase for phase in self._ledger.phases() if phase.finished),
            combine=dict(newest.combine),
        )

    def status(self) -> dict[str, Any]:
        """Everything a person may want to see, from the ledger."""
        now_s = self._clock()
        rounds = self._ledger.open_rounds()
        return {
            "name": self._spec.name,
            "now_s": now_s,
            "paused": bool((run := self._ledger.run()) and run.paused),
            "phases": [
                {
                    "phase": phase.phase,
                    "blocks": list(self._spec.phases[phase.phase].blocks),
                    "step": phase.step,
                    "steps": self._spec.phases[phase.phase].steps,
                    "finished": phase.finished,
                    "round": _round_status(rounds[phase.phase], now_s, self._spec) if phase.phase in rounds else None,
                }
                for phase in self._ledger.phases()
            ],
            "num_phases": len(self._spec.phases),
            "versions": self._ledger.consistent_manifest().versions,
            "workers": [asdict(worker) for worker in self._ledger.workers()],
            "evaluations": [asdict(evaluation) for evaluation in self._ledger.evaluations()],
        }

    def blob_size(self, sha256: str) -> int:
        return self._blobs.size(sha256)

    def blob_range(self, sha256: str, start: int, end: int) -> bytes:
        return self._blobs.get_range(sha256, start, end)

    # What follows from the facts

    def tick(self) -> None:
        """Open the phases whose turn it is, extend or merge the rounds that are due. Any number may do it at once."""
        with self._turn, _own_blobs():
            now_s = self._clock()
            for round in self._ledger.open_rounds().values():
                decision = decide(round, now_s, self._spec.swarm)
                if decision.action == "extend":
                    self._ledger.extend_round(round, decision.deadline_s, decision.reason)
                elif decision.action == "close":
                    self._merge(round, decision.reason, now_s)
            known = {phase.phase for phase in self._ledger.phases()}
            for phase in open_phases(self._spec, self._finished()):
                if phase.index not in known:
                    self._open(phase, now_s)

    def _finished(self) -> set[int]:
        return {phase.phase for phase in self._ledger.phases() if phase.finished}

    def _open(self, phase: Phase, now_s: float) -> None:
        """The first round of a phase. Blocks that nobody has trained are born now."""
        newest = self._ledger.consistent_manifest().blocks
        born: dict[int, str] = {}
        for block in phase.blocks:
            if block not in newest:
                tensors = self._newborn(block)
                if block - 1 in newest and isinstance(self._spec.objective, Stacked):
                    tensors = continue_block(tensors, self._tensors(newest[block - 1].sha256))
                born[block] = self._blobs.put(encode(tensors))
        self._ledger.add_genesis(born, now_s)
        newest = self._ledger.consistent_manifest().blocks
        base = {block: newest[block].version for block in phase.blocks}
        limit_s, _ = learned_deadline_s([], self._spec.swarm)
        self._ledger.open_phase(open_round(phase, 0, base, 0, limit_s, now_s, self._spec.swarm))

    def _merge(self, round: Round, reason: str, now_s: float) -> None:
        phase = self._spec.phases[round.phase]
        reported = {lease.worker for lease in round.reported}
        # One that came after the decision did not move the schedule: it goes into the next round.
        updates = [x for x in self._ledger.waiting_updates(round.phase) if x.base != round.base or x.worker in reported]
        versions = [self._merged(block, round, updates) for block in phase.blocks]
        past = [record.round.took_s for record in self._ledger.rounds(round.phase)]
        limit_s, _ = learned_deadline_s([took_s for took_s in (*past, round.took_s) if took_s], self._spec.swarm)
        following = next_round(round, phase, limit_s, now_s, self._spec.swarm)
        if self._ledger.merge(round, versions, [update.id for update in updates], following, now_s, reason):
            text = f"phase {round.phase}, round {round.number}: {reason}"
            self._ledger.add_event("merged", text, now_s, {"updates": len(updates)})
            self._prune()

    def _merged(self, block: int, round: Round, updates: Sequence[Update]) -> NewVersion:
        """A block's next version, tensor by tensor: one update is in memory at a time."""
        spec, version = self._spec.swarm, round.base[block]
        current = self._ledger.version(block, version)
        assert current is not None
        base = self._tensors(current.sha256)
        momentum = self._tensors(current.momentum_sha256) if current.momentum_sha256 else {}
        after: Tensors = {}
        for name, theta in base.items():
            parts = [self._part(update, block, name) for update in updates]
            after[name], moved = outer_step(theta, merge(parts, theta.numel(), spec), momentum.get(name), spec)
            if moved is not None:
                momentum[name] = moved
        difference = None
        if spec.download != "fp32":
            data, after = encode_difference(base, after, CodecSettings(spec.download))
            difference = self._blobs.put(data)
        return NewVersion(
            block=block,
            version=version + 1,
            sha256=self._blobs.put(encode(after)),
            momentum_sha256=self._blobs.put(encode(momentum)) if momentum else None,
            difference_sha256=difference,
        )

    def _part(self, update: Update, block: int, name: str) -> Part:
        def read(start: int, stop: int) -> Tensor:
            encoded = self._opened(self._blobs.get(update.id), update.phase)
            built_on = self._base_of(update.base, (block,))[f"{block}.{name}"] if encoded.needs_base else None
            return encoded.delta(f"{block}.{name}", built_on).flatten()[start:stop]

        return Part(read, update.weight, update.norm)

    def _codec(self, phase: int) -> CodecSettings:
        """The widest that updates of this phase may have: that of its last round."""
        steps = self._spec.phases[phase].steps
        return update_settings(self._spec.swarm, steps, steps)

    def _opened(self, data: bytes, phase: int) -> EncodedUpdate:
        return read_update(data, self._flat_shapes(phase), expected=self._codec(phase))

    def _mergeable(self, notice: UpdateNotice, lease: LeaseRecord) -> NewUpdate:
        """The facts of an update that may be merged, all but its norm; RequestRefused where it may not."""
        records = {record.round.number: record.round for record in self._ledger.rounds(lease.phase)}
        if lease.round not in records:
            raise RequestRefused(f"round {lease.round} is long over: fetch the block again", code="stale")
        base, newest = records[lease.round].base, max(records)
        block = self._spec.phases[lease.phase].block
        staleness = staleness_weight(base[block], records[newest].base[block], self._spec.swarm)
        if isinstance(staleness, Refusal):
            raise RequestRefused(staleness.reason, code="stale")
        if lease.phase in self._finished():
            raise RequestRefused(f"phase {lease.phase} is finished: ask for other work", code="stale")
        if notice.steps > lease.steps or notice.tokens != notice.steps * self._spec.step_bytes:
            raise RequestRefused(
                f"{notice.steps} steps and {notice.tokens} tokens were reported, the lease was for {lease.steps} steps "
                f"of {self._spec.step_bytes} tokens: report what was done",
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
            lag=records[newest].base[block] - base[block],
            weight=notice.tokens * staleness,
            loss=notice.loss,
            received_s=self._clock(),
            signature=notice.signature,
        )

    def _payload(self, notice: UpdateNotice) -> bytes:
        """The bytes that were uploaded, whole; they become a blob only when they are accepted."""
        announced, upload_id = notice.payload, _upload_id(notice.lease, notice.payload.sha256)
        known = self._blobs.exists(announced.sha256)
        data = self._blobs.get(announced.sha256) if known else self._blobs.uploaded(upload_id)
        if len(data) != announced.num_bytes:
            raise RequestRefused(
                f"{len(data)} bytes have come of an update of {announced.num_bytes}: upload exactly those, and then "
                f"announce it",
                code="truncated",
            )
        if (found := hashlib.sha256(data).hexdigest()) != announced.sha256:
            self._blobs.discard(upload_id)
            raise RequestRefused(
                f"the uploaded bytes have sha256 {found[:12]}… and {announced.sha256[:12]}… was announced: they were "
                f"discarded, upload them again",
                code="hash",
            )
        return data

    def _norm(self, data: bytes, facts: NewUpdate) -> float:
        """Decode the update once: its norm, or the reason why it cannot be merged."""
        phase = self._spec.phases[facts.phase]
        try:
            encoded = self._opened(data, facts.phase)
            built_on = self._base_of(facts.base, phase.blocks) if encoded.needs_base else None
            norm = math.sqrt(encoded.squared_norm(built_on) / facts.steps)
        except TensorError as error:
            raise RequestRefused(str(error), code=error.code) from None
        verdict = check_norm(norm, self._ledger.recent_norms(facts.phase), self._spec.swarm)
        if not verdict.accepted:
            raise RequestRefused(verdict.reason, code="norm")
        return norm

    # Leases

    def _train_lease(self, request: LeaseRequest, now_s: float) -> LeaseReply:
        for _ in range(GRANT_TRIES):
            rounds = self._ledger.open_rounds()
            phases = [OpenPhase(x, self._memory_bytes(x)) for x in self._spec.phases if x.index in rounds]
            if not phases and len(self._finished()) == len(self._spec.phases):
                return Finished(reason="every phase is trained: blocktrain export fetches the model")
            held = self._held_blocks(request.phase)
            speed = max(request.steps_per_s, SLOWEST_STEPS_PER_S) if request.steps_per_s else None
            facts = WorkerFacts(request.worker, request.memory_bytes, speed, held)
            grant = choose_work(facts, phases, rounds, now_s, self._spec.swarm)
            if isinstance(grant, NoWork):
                return Wait(seconds=min(grant.retry_s, LONGEST_WAIT_S), reason=grant.reason)
            if lease := self._ledger.grant(grant, rounds[grant.phase], now_s):
                return self._lease_message(lease, grant.base, now_s)
        return Wait(seconds=0.5, reason="many workers ask at once")

    def _held_blocks(self, phase: int | None) -> frozenset[int]:
        return frozenset() if phase is None else frozenset(self._spec.phases[phase].blocks)

    def _lease_message(self, lease: LeaseRecord, base: Mapping[int, int], now_s: float) -> TrainLease:
        phase, newest = self._spec.phases[lease.phase], self._ledger.consistent_manifest().blocks
        return TrainLease(
            lease=lease.id,
            phase=lease.phase,
            shard=lease.shard,
            step_start=lease.step_start,
            steps=lease.steps,
            deadline_s=max(0.0, lease.deadline_s - now_s),
            trained=tuple(self._reference(self._version(block, base[block])) for block in phase.blocks),
            below=tuple(self._reference(newest[block]) for block in phase.below),
            ahead=tuple(self._reference(newest[block]) for block in phase.ahead if block in newest),
        )

    def _evaluation_lease(self, request: LeaseRequest, now_s: float) -> EvaluateLease | None:
        """Every so many rounds, and when all is trained, the next worker that asks scores the composed model."""
        newest = self._ledger.consistent_manifest()
        if len(newest.blocks) < self._spec.model.blocks:
            return None
        lease = self._ledger.evaluation_lease()
        if lease is not None and not lease.reported and now_s < lease.deadline_s:
            return None
        seen = dict(lease.versions) if lease is not None and lease.reported else {}
        moved = max(version - seen.get(block, -1) for block, version in newest.versions.items())
        all_done = len(self._finished()) == len(self._spec.phases)
        if moved < (1 if all_done else self._spec.swarm.evaluate_every):
            return None
        granted = self._ledger.grant_evaluation(request.worker, newest.versions, now_s, now_s + EVALUATION_S)
        return EvaluateLease(
            lease=str(granted.id),
            deadline_s=EVALUATION_S,
            blocks=tuple(self._reference(version) for version in newest.blocks.values()),
            max_windows=EVALUATION_WINDOWS,
        )

    # Small things

    def _require_lease(self, lease_id: str) -> LeaseRecord:
        lease = self._ledger.lease(lease_id)
        if lease is None:
            raise RequestRefused(f"there is no lease {lease_id[:80]}: ask for one", code="lease")
        return lease

    def _version(self, block: int, version: int) -> Version:
        found = self._ledger.version(block, version)
        assert found is not None, f"version {version} of block {block} is in an open round"
        return found

    def _reference(self, version: Version) -> BlockVersion:
        difference = self._blob(version.difference_sha256) if version.difference_sha256 else None
        return BlockVersion(
            block=version.block, version=version.version, tensors=self._blob(version.sha256), from_previous=difference
        )

    def _blob(self, sha256: str) -> Blob:
        return Blob(sha256=sha256, num_bytes=self._blobs.size(sha256))

    def _tensors(self, sha256: str) -> Tensors:
        return decode(self._blobs.get(sha256))[0]

    def _base_of(self, versions: Mapping[int, int], blocks: Sequence[int]) -> Tensors:
        """The tensors that an update was built on, under the names of an update: "1.readout"."""
        return {
            f"{block}.{name}": tensor
            for block in blocks
            for name, tensor in self._tensors(self._version(block, versions[block]).sha256).items()
        }

    def _flat_shapes(self, phase: int) -> dict[str, tuple[int, ...]]:
        if phase not in self._shapes:
            self._shapes[phase] = {
                f"{block}.{name}": tuple(tensor.shape)
                for block in self._spec.phases[phase].blocks
                for name, tensor in self._newborn(block).items()
            }
        return self._shapes[phase]

    def _prune(self) -> None:
        """Forget blobs and uploads that nothing needs any more; young ones may be about to be recorded."""
        live, before_s = self._ledger.live_blobs(self._spec.swarm.keep_versions), self._clock() - UNWANTED_S
        for sha256 in list(self._blobs.iterate(before_s=before_s)):
            if sha256 not in live:
                self._blobs.delete(sha256)
        self._blobs.discard_uploads(before_s)
        self._ledger.prune_events(KEPT_EVENTS)


@contextmanager
def _own_blobs() -> Iterator[None]:
    """A blob that the coordinator itself misses is no fault of whoever asked: they may ask again when it is back."""
    try:
        yield
    except BlobError as error:
        raise StorageError(str(error)) from None


def _upload_id(lease: str, sha256: str) -> str:
    return hashlib.sha256(f"{lease} {sha256}".encode()).hexdigest()


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 16  # what the ledger can hold


def _require_signature(worker: str, signature: str, data: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(worker)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        raise RequestRefused(
            "the signature is not the worker's: sign with the key that asked", code="signature"
        ) from None


def _receipt(update: Update, duplicate: bool) -> UpdateReceipt:
    return UpdateReceipt(update=update.id, lag=update.lag, weight=update.weight, duplicate=duplicate)


def _round_status(round: Round, now_s: float, spec: RunSpec) -> dict[str, Any]:
    decision = decide(round, now_s, spec.swarm)
    return {
        "number": round.number,
        "reason": decision.reason,
        "deadline_s": round.deadline_s - now_s,
        "leases": [asdict(lease) for lease in round.leases],
    }
