"""Granting: a worker's request for work into a lease, an evaluation, or the reason to wait. leases.py chooses, the
ledger makes sure that nobody else was given the same. Next: leases.py; coordinator.py, which asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from blocktrain.errors import RequestRefused
from blocktrain.spec import Phase, RunSpec
from blocktrain.swarm.coordinator.blocks import Blocks
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import LeaseRecord, Standing, Version
from blocktrain.swarm.policy.leases import NoWork, OpenPhase, WorkerFacts, choose_work
from blocktrain.swarm.policy.rounds import Round
from blocktrain.swarm.signatures import require_signature
from blocktrain.wire.messages import (
    PROTOCOL_VERSION,
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


class Granting:
    """`memory_bytes` says what training a phase takes."""

    def __init__(self, spec: RunSpec, ledger: Ledger, blocks: Blocks, memory_bytes: Callable[[Phase], int]) -> None:
        self._spec, self._ledger, self._blocks, self._memory_bytes = spec, ledger, blocks, memory_bytes

    def require_fit(self, request: LeaseRequest) -> None:
        """Whoever asks is who it says, and can be understood; told without looking at the ledger."""
        if request.protocol != PROTOCOL_VERSION:
            raise RequestRefused(
                f"this worker speaks protocol {request.protocol}, the coordinator {PROTOCOL_VERSION}: "
                f"install the coordinator's version of blocktrain",
                code="protocol",
            )
        require_signature(request)
        if request.phase is not None and request.phase >= len(self._spec.phases):
            raise RequestRefused(
                f"phase {request.phase} is held by this worker, the run has phases 0 to {len(self._spec.phases) - 1}: "
                f"ask without one",
                code="phase",
            )

    def _admit(self, request: LeaseRequest, now_s: float) -> None:
        """Asked for the first time with this number: a request that somebody else has overheard is worth nothing."""
        said = (request.name, request.device, request.memory_bytes, request.steps_per_s)
        if not self._ledger.see_worker(request.worker, *said, now_s, request.nonce):
            raise RequestRefused(
                f"request {request.nonce} of this worker, or a later one, has come already: give every request a "
                f"larger number, and set this machine's clock if it went back",
                code="replayed",
            )

    def work(self, request: LeaseRequest, now_s: float, admitted: bool = False) -> tuple[LeaseReply, Standing]:
        """The answer, and how things stood. A worker is seen and answered in one transaction: a replay gets nothing,
        and where there is one writer at a time nobody is given work in between. Nobody waits for the disk: whose
        lease a power cut took asks for another, and an update that is taken in is synced with its lease."""
        return self._ledger.together(lambda: self._seen_and_answered(request, now_s, admitted), synced=False)

    def _seen_and_answered(self, request: LeaseRequest, now_s: float, admitted: bool) -> tuple[LeaseReply, Standing]:
        if not admitted:
            self._admit(request, now_s)
        standing = self._ledger.standing()
        return self._answer(request, now_s, standing), standing

    def _answer(self, request: LeaseRequest, now_s: float, standing: Standing) -> LeaseReply:
        if standing.paused:
            return Wait(seconds=LONGEST_WAIT_S, reason="the run is paused")
        newest, finished = self._ledger.newest(), self._all_finished(standing)
        if evaluation := self._evaluation(request, now_s, newest, finished):
            return evaluation
        if finished:
            return Finished(reason="every phase is trained: blocktrain export fetches the model")
        return self._training(request, now_s, newest, standing.rounds)

    def _training(
        self, request: LeaseRequest, now_s: float, newest: Mapping[int, Version], rounds: Mapping[int, Round]
    ) -> LeaseReply:
        if not rounds:
            return Wait(seconds=OPENING_WAIT_S, reason="the next phase is being opened")
        for _ in range(GRANT_TRIES):
            phases = [OpenPhase(x, self._memory_bytes(x)) for x in self._spec.phases if x.index in rounds]
            grant = choose_work(self._facts(request), phases, rounds, now_s, self._spec.swarm)
            if isinstance(grant, NoWork):
                return Wait(seconds=min(grant.retry_s, LONGEST_WAIT_S), reason=grant.reason)
            if lease := self._ledger.grant(grant, rounds[grant.phase], now_s):
                return self._message(lease, grant.base, now_s, newest)
            rounds = self._ledger.open_rounds()  # another was given work in between
        return Wait(seconds=0.5, reason="many workers ask at once")

    def _facts(self, request: LeaseRequest) -> WorkerFacts:
        held = () if request.phase is None else self._spec.phases[request.phase].blocks
        speed = max(request.steps_per_s, SLOWEST_STEPS_PER_S) if request.steps_per_s else None
        return WorkerFacts(request.worker, request.memory_bytes, speed, frozenset(held))

    def _message(
        self, lease: LeaseRecord, base: Mapping[int, int], now_s: float, newest: Mapping[int, Version]
    ) -> TrainLease:
        phase, reference = self._spec.phases[lease.phase], self._blocks.reference
        known = {(version.block, version.version): version for version in newest.values()}
        wanted = [(block, base[block]) for block in phase.blocks]
        return TrainLease(
            lease=lease.id,
            phase=lease.phase,
            shard=lease.shard,
            step_start=lease.step_start,
            steps=lease.steps,
            deadline_s=max(0.0, lease.deadline_s - now_s),
            trained=tuple(reference(known.get(key) or self._blocks.version(*key)) for key in wanted),
            below=tuple(reference(newest[block]) for block in phase.below),
            ahead=tuple(reference(newest[block]) for block in phase.ahead if block in newest),
        )

    def _evaluation(
        self, request: LeaseRequest, now_s: float, newest: Mapping[int, Version], finished: bool
    ) -> EvaluateLease | None:
        """Every so many rounds, and when all is trained, the next worker that asks scores the composed model: the
        blocks that are born, which answer alone until the next one continues them."""
        if not newest:
            return None
        lease = self._ledger.evaluation_lease()
        if lease is not None and not lease.reported and now_s < lease.deadline_s:
            return None
        versions = {block: version.version for block, version in newest.items()}
        seen = dict(lease.versions) if lease is not None and lease.reported else {}
        moved = max(version - seen.get(block, -1) for block, version in versions.items())
        if moved < (1 if finished else self._spec.swarm.evaluate_every):
            return None
        granted = self._ledger.grant_evaluation(request.worker, versions, now_s, now_s + EVALUATION_S)
        return EvaluateLease(
            lease=str(granted.id),
            deadline_s=EVALUATION_S,
            blocks=tuple(self._blocks.reference(version) for version in newest.values()),
            max_windows=EVALUATION_WINDOWS,
        )

    def _all_finished(self, standing: Standing) -> bool:
        return sum(phase.finished for phase in standing.phases) == len(self._spec.phases)
