"""Granting: answers a worker's request for work with a lease, an evaluation, or the reason to wait. It chooses nothing
itself, and the ledger makes sure that no two workers get the same shard.
Next: ../policy/leases.py, which chooses; ../ledger/rounds.py, which records the lease."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from blocktrain.data.shards import CorpusIndex
from blocktrain.data.windows import STEPS_PER_SHARDS, shards_of_steps
from blocktrain.errors import RequestRefused
from blocktrain.spec import Phase, RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import Blocks, recorded_version
from blocktrain.swarm.coordinator.trust.auditing import Auditing
from blocktrain.swarm.coordinator.trust.vetting import Vetting
from blocktrain.swarm.ledger.database import retry_on_conflict
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import EvaluationLease, LeaseRecord, Standing, Version
from blocktrain.swarm.policy.evaluations import MOST_LEASES, Seat, may_evaluate, that_counts
from blocktrain.swarm.policy.leases import NoWork, OpenPhase, WorkerFacts, choose_work
from blocktrain.swarm.policy.rounds import Round
from blocktrain.swarm.policy.standing import refusal_of
from blocktrain.swarm.policy.track_record import TrackRecord, usual_steps_per_s
from blocktrain.swarm.signatures import require_signature
from blocktrain.wire.messages import (
    MAX_LEASE_SHARDS,
    PROTOCOL_VERSION,
    Blob,
    EvaluateLease,
    Finished,
    LeaseReply,
    LeaseRequest,
    TrainLease,
    Wait,
)

LONGEST_WAIT_S, OPENING_WAIT_S = 5.0, 0.5
EVALUATION_S = 600.0
EVALUATION_WINDOWS = 200
GRANT_TRIES = 5
SLOWEST_STEPS_PER_S = 1e-6  # what is slower is planned as this: dates stay finite


@dataclass(frozen=True)
class LeaseShards:
    """Which files of a prepared corpus some steps read."""

    spec: RunSpec
    index: CorpusIndex

    @property
    def sizes(self) -> Sequence[int]:
        return [entry.num_tokens for entry in self.index.splits["train"]]

    def of(self, phase: Phase, shard: int, steps: range) -> tuple[Blob, ...]:
        found = shards_of_steps(self, self.spec.model.context + 1, self.spec.draw_seed, phase.block, shard, steps)
        entries = [self.index.splits["train"][number] for number in found]
        blobs = [Blob(sha256=each.sha256, num_bytes=each.num_tokens * self.index.token_bytes) for each in entries]
        return tuple(blobs[:MAX_LEASE_SHARDS])


class Granting:
    """`memory_bytes` says what training a phase takes. `corpus_index` is the sha256 of a prepared corpus's index."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        blobs: Blobs,
        blocks: Blocks,
        memory_bytes: Callable[[Phase], int],
        run_id: str,
        auditing: Auditing,
        vetting: Vetting,
        corpus_index: str | None,
    ) -> None:
        self._spec, self._ledger, self._blobs, self._blocks = spec, ledger, blobs, blocks
        self._memory_bytes, self._run_id, self._corpus_index = memory_bytes, run_id, corpus_index
        self._auditing, self._vetting = auditing, vetting
        self._usual: dict[int, tuple[int, float | None]] = {}  # phase: a round's number, and the usual speed in it

    @cached_property
    def _shards(self) -> LeaseShards | None:
        """Read at the first request: a coordinator starts even if the corpus cannot be read."""
        if self._corpus_index is None:
            return None
        index = bytes(self._blobs.get(self._corpus_index))
        return LeaseShards(self._spec, CorpusIndex.model_validate_json(index))

    def require_fit(self, request: LeaseRequest) -> None:
        """Validates protocol, signature and phase. Does not read the ledger."""
        if request.protocol != PROTOCOL_VERSION:
            raise RequestRefused(
                f"this worker speaks protocol {request.protocol}, the coordinator {PROTOCOL_VERSION}: "
                f"install the coordinator's version of blocktrain",
                code="protocol",
            )
        require_signature(request, self._run_id)
        if request.phase is not None and request.phase >= len(self._spec.phases):
            raise RequestRefused(
                f"this worker has phase {request.phase}, the run has phases 0 to {len(self._spec.phases) - 1}: "
                f"ask without one",
                code="phase",
            )

    def _admit(self, ledger: Ledger, request: LeaseRequest, now_s: float, access_token: str | None) -> None:
        """Refuses a number that this worker has used before: an overheard request cannot be sent again."""
        said = (request.name, request.device, request.memory_bytes, request.steps_per_s)
        if not ledger.see_worker(request.worker, *said, now_s, request.nonce):
            last = ledger.last_nonce(request.worker)
            raise RequestRefused(
                f"request {request.nonce} came after request {last} of this worker: ask with a larger number",
                code="replayed",
                number=last,
            )
        most = self._spec.swarm.keys_per_token
        if access_token is not None and not ledger.note_token(request.worker, access_token, most):
            raise RequestRefused(
                f"{most} workers' keys have used this access token (swarm.keys_per_token): use a key that has, or ask "
                f"the operator for another invite",
                code="keys",
            )
        if refusal := refusal_of(ledger.exclusion(request.worker)):
            raise RequestRefused(refusal, code="excluded")

    @retry_on_conflict
    def work(
        self, request: LeaseRequest, now_s: float, admitted: bool = False, access_token: str | None = None
    ) -> tuple[LeaseReply, Standing]:
        """The answer, and how things stood. A worker is seen and answered in one transaction: a replay gets nothing,
        and where there is one writer at a time no other worker is given work in between. It does not wait for the
        disk: a worker whose lease a power cut took asks for another, and an update is synced with its lease."""
        _ = self._shards  # read here if it never was: inside the transaction it would take a second connection
        with self._ledger.transaction(synced=False) as transaction:
            if not admitted:
                self._admit(transaction, request, now_s, access_token)
            standing = transaction.standing()
            return self._answer(transaction, request, now_s, standing), standing

    def _answer(self, ledger: Ledger, request: LeaseRequest, now_s: float, standing: Standing) -> LeaseReply:
        if standing.paused:
            return Wait(seconds=LONGEST_WAIT_S, reason="the run is paused")
        newest, known = ledger.newest(), ledger.track_record(request.worker)
        finished = sum(phase.finished for phase in standing.phases) == len(self._spec.phases)
        can_evaluate = newest and (finished or not known.owed)
        if can_evaluate and (evaluation := self._evaluation(ledger, request, now_s, newest, finished)):
            return evaluation
        if finished:
            return Finished(reason="every phase is trained: blocktrain export fetches the model")
        if vetting := self._vetting.offer(ledger, request, now_s, standing.rounds):
            return vetting
        if audit := self._auditing.offer(ledger, request, now_s, standing.rounds):
            return audit
        if not standing.rounds:
            return Wait(seconds=OPENING_WAIT_S, reason="the next phase is being opened")
        return self._training(ledger, self._facts(request, known), now_s, newest, standing.rounds)

    def _training(
        self,
        ledger: Ledger,
        worker: WorkerFacts,
        now_s: float,
        newest: Mapping[int, Version],
        rounds: Mapping[int, Round],
    ) -> LeaseReply:
        for _ in range(GRANT_TRIES):
            phases = [
                OpenPhase(
                    x,
                    self._memory_bytes(x),
                    self._usual_speed(ledger, rounds[x.index]),
                    held=self._auditing.holds(ledger, rounds[x.index], now_s),
                )
                for x in self._spec.phases
                if x.index in rounds
            ]
            grant = choose_work(worker, phases, rounds, now_s, self._spec.swarm)
            if isinstance(grant, NoWork):
                return Wait(seconds=min(grant.retry_s, LONGEST_WAIT_S), reason=grant.reason)
            if lease := ledger.grant(grant, rounds[grant.phase], now_s):
                base = {block: _version(ledger, newest, block, number) for block, number in grant.base.items()}
                return self._message(ledger, lease, base, now_s, newest)
            rounds = ledger.open_rounds()  # another worker was given work in between
        return Wait(seconds=0.5, reason="many workers ask at once")

    def _facts(self, request: LeaseRequest, known: TrackRecord) -> WorkerFacts:
        """The speed that the worker claims buys nothing: what it has delivered counts."""
        held = () if request.phase is None else self._spec.phases[request.phase].blocks
        speed = None if known.steps_per_s is None else max(known.steps_per_s, SLOWEST_STEPS_PER_S)
        return WorkerFacts(
            name=request.worker,
            memory_bytes=request.memory_bytes,
            steps_per_s=speed,
            blocks=frozenset(held),
            owed=known.owed,
            delivered=known.delivered,
        )

    def _usual_speed(self, ledger: Ledger, round: Round) -> float | None:
        """Of the workers of the phase, read once per round."""
        known, usual = self._usual.get(round.phase, (-1, None))
        if known != round.number:
            usual = usual_steps_per_s(ledger.measured_speeds(round.phase))
            self._usual[round.phase] = round.number, usual
        return usual

    def _message(
        self,
        ledger: Ledger,
        lease: LeaseRecord,
        base: Mapping[int, Version],
        now_s: float,
        newest: Mapping[int, Version],
    ) -> TrainLease:
        phase, reference, shards = self._spec.phases[lease.phase], self._blocks.reference, self._shards
        end = lease.step_start + lease.steps
        steps, following = range(lease.step_start, end), range(end, end + STEPS_PER_SHARDS)
        around = (*phase.below, *phase.ahead)
        if around and lease.granted_s < now_s:  # renewed: with the versions of then, as an audit gets them
            newest = ledger.newest_at(lease.granted_s)
        return TrainLease(
            lease=lease.id,
            phase=lease.phase,
            shard=lease.shard,
            step_start=lease.step_start,
            steps=lease.steps,
            time_left_s=max(0.0, lease.deadline_at_s - now_s),
            afresh=self._spec.swarm.has_audits and ledger.is_in_company(lease),
            trained=tuple(reference(base[block]) for block in phase.blocks),
            below=tuple(reference(newest[block]) for block in phase.below),
            ahead=tuple(reference(newest[block]) for block in phase.ahead if block in newest),
            text=shards.of(phase, lease.shard, steps) if shards else (),
            next_text=shards.of(phase, lease.shard, following) if shards else (),
        )

    def _evaluation(
        self, ledger: Ledger, request: LeaseRequest, now_s: float, newest: Mapping[int, Version], finished: bool
    ) -> EvaluateLease | None:
        """Every so many rounds, and when all is trained, the next workers that ask score the composed model, each on
        its own. It consists of the blocks that have a version by then."""
        leases = ledger.evaluation_leases(limit=2 * MOST_LEASES)
        asked = [x for x in leases if x.versions == leases[-1].versions]  # for the newest model that is evaluated
        seats = [Seat(x.worker, x.reported, not x.reported and now_s < x.deadline_at_s) for x in asked]
        versions = {block: version.version for block, version in newest.items()}
        if not self._is_due(versions, asked, seats, finished):
            if not asked or not may_evaluate(request.worker, seats, self._is_confirmed(ledger, asked[-1].versions)):
                return None
            versions = dict(asked[-1].versions)
        granted = ledger.grant_evaluation(request.worker, versions, now_s, now_s + EVALUATION_S)
        blocks = [_version(ledger, newest, block, number) for block, number in versions.items()]
        return EvaluateLease(
            lease=str(granted.id),
            time_left_s=EVALUATION_S,
            blocks=tuple(self._blocks.reference(version) for version in blocks),
            max_windows=EVALUATION_WINDOWS,
        )

    def _is_confirmed(self, ledger: Ledger, versions: Mapping[int, int]) -> bool:
        found = that_counts([x for x in ledger.consistent_manifest().evaluations if x.versions == versions])
        return found is not None and found[1]

    def _is_due(
        self, newest: Mapping[int, int], asked: Sequence[EvaluationLease], seats: Sequence[Seat], finished: bool
    ) -> bool:
        """Whether the newest model is to be evaluated, instead of the one that workers were last asked about. It waits
        for workers that are still at that one, but not for long: they may be dead."""
        seen = asked[-1].versions if any(seat.reported or seat.open for seat in seats) else {}
        moved = max(version - seen.get(block, -1) for block, version in newest.items())
        if finished:
            return moved >= 1
        return moved >= self._spec.swarm.evaluate_every * (2 if any(seat.open for seat in seats) else 1)


def _version(ledger: Ledger, newest: Mapping[int, Version], block: int, number: int) -> Version:
    """Most often the newest. A round that was opened since that was read is based on a later one."""
    if block in newest and newest[block].version == number:
        return newest[block]
    return recorded_version(ledger, block, number)
