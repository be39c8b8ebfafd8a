"""Coordinator: what workers and people ask, and what follows from the facts: phases open, rounds close, versions come.
It holds no state of its own: several may share one ledger. It never builds a model; newborn blocks are given to it.
Next: service.py, the HTTP routes in front of it; granting.py, intake.py, merging.py and watching.py, its parts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from blocktrain.spec import Phase, RunSpec, Stacked
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import Blocks, Tensors, own_blobs
from blocktrain.swarm.coordinator.granting import Granting
from blocktrain.swarm.coordinator.intake import Intake, Recorded
from blocktrain.swarm.coordinator.merging import Merger
from blocktrain.swarm.coordinator.status import Watching
from blocktrain.swarm.coordinator.wakeup import Bell
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import NewUpdate, Standing
from blocktrain.swarm.policy.rounds import Round, decide, learned_deadline_s, next_round, open_phases, open_round
from blocktrain.wire.messages import (
    LeaseReply,
    LeaseRequest,
    ModelManifest,
    RunInfo,
    UpdateNotice,
    UpdateReceipt,
)
from blocktrain.wire.safetensors import continue_block, encode_chunks

UNWANTED_S = 3600.0  # until a blob or an upload that nothing needs is forgotten
PRUNE_EVERY_S = 60.0  # at most, however short the rounds are


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
        self._spec, self._ledger, self.blobs, self._clock = spec, ledger, blobs, clock
        self._blocks = Blocks(spec, ledger, blobs, newborn)
        self._granting = Granting(spec, ledger, self._blocks, memory_bytes)
        self.intake = Intake(spec, ledger, blobs, self._blocks, clock)
        self._merger = Merger(spec.swarm, self._blocks, blobs)
        self.watching = Watching(spec, ledger, clock)
        # Threads of one server take turns: nobody merges what another is merging. Between servers the ledger decides.
        self._turn = threading.RLock()
        # Called when something is due, so that somebody ticks soon. Without it whoever asks does it, and waits for it.
        self.wake: Callable[[], None] | None = None
        self.bell = Bell()
        self._pruned_s = -math.inf

    # What workers and people ask

    def info(self) -> RunInfo:
        run = self._ledger.run()
        assert run is not None, "a coordinator is started on a ledger with a run"
        with own_blobs():
            corpus = {split: self._blocks.blob(sha256) for split, sha256 in run.corpus.items()}
        return RunInfo(
            spec=self._spec.model_dump(mode="json"),
            spec_digest=run.spec_digest,
            corpus_sha256=run.corpus_sha256,
            corpus=corpus,
        )

    def lease(self, request: LeaseRequest, admitted: bool = False) -> LeaseReply:
        """`admitted`: this very request was told to wait, and is asked once more."""
        self._granting.require_fit(request)
        if self.wake is None:
            self._follow(self._ledger.standing())
        with own_blobs():
            reply, standing = self._granting.work(request, self._clock(), admitted)
        self._follow(standing)
        return reply

    def update(self, notice: UpdateNotice) -> UpdateReceipt:
        return self.intake.update(notice, self._record)

    def _record(self, facts: Callable[[], NewUpdate]) -> Recorded:
        """Closes what is due before an update comes in, and what is due because of it."""
        if self.wake is None:
            self._follow(self._ledger.standing())
        kept, standing = self._ledger.together(lambda: (self._ledger.record_update(facts()), self._ledger.standing()))
        self._follow(standing)
        return kept

    def manifest(self) -> ModelManifest:
        info, newest = self.info(), self._ledger.consistent_manifest()
        with own_blobs():
            blocks = tuple(self._blocks.reference(version) for version in newest.blocks.values())
        return ModelManifest(
            spec=info.spec,
            spec_digest=info.spec_digest,
            corpus_sha256=info.corpus_sha256,
            blocks=blocks,
            finished=tuple(phase.phase for phase in newest.phases if phase.finished),
            steps={phase.phase: phase.step for phase in newest.phases},
            combine=dict(newest.combine),
        )

    def pause(self, paused: bool) -> None:
        """Workers at work may hand in what they have; nobody gets more until it goes on."""
        self._ledger.set_paused(paused, self._clock())
        self.bell.ring()

    # What follows from the facts

    def _follow(self, standing: Standing) -> None:
        """What is due is done, or on its way."""
        if self._is_due(standing):
            (self.wake or self.tick)()

    def _is_due(self, standing: Standing) -> bool:
        now_s = self._clock()
        decisions = (decide(round, now_s, self._spec.swarm).action for round in standing.rounds.values())
        return any(action != "wait" for action in decisions) or bool(self._unopened(standing))

    def _unopened(self, standing: Standing) -> list[Phase]:
        """The phases whose turn it is and that nobody has opened."""
        phases = {phase.phase: phase.finished for phase in standing.phases}
        due = open_phases(self._spec, {index for index, finished in phases.items() if finished})
        return [phase for phase in due if phase.index not in phases]

    def tick(self) -> None:
        """Open the phases whose turn it is, extend or merge the rounds that are due. Any number may do it at once."""
        with self._turn, own_blobs():
            now_s, standing = self._clock(), self._ledger.standing()
            for round in standing.rounds.values():
                decision = decide(round, now_s, self._spec.swarm)
                if decision.action == "extend":
                    self._ledger.extend_round(round, decision.deadline_s, decision.reason)
                elif decision.action == "close":
                    self._merge(round, decision.reason, now_s)
                    standing = self._ledger.standing()  # a phase may have ended
            for phase in self._unopened(standing):
                self._open(phase, now_s)
                self.bell.ring()

    def _open(self, phase: Phase, now_s: float) -> None:
        """The first round of a phase. Blocks that nobody has trained are born now."""
        newest = self._ledger.consistent_manifest().blocks
        born: dict[int, str] = {}
        for block in phase.blocks:
            if block not in newest:
                tensors = self._blocks.newborn(block)
                if block - 1 in newest and isinstance(self._spec.objective, Stacked):
                    tensors = continue_block(tensors, self._blocks.tensors(newest[block - 1].sha256))
                born[block] = self.blobs.put(encode_chunks(tensors))
        self._ledger.add_genesis(born, now_s)
        newest = self._ledger.consistent_manifest().blocks
        base = {block: newest[block].version for block in phase.blocks}
        limit_s, _ = learned_deadline_s(self._ledger.past_round_times_s(phase.index), self._spec.swarm)
        self._ledger.open_phase(open_round(phase, 0, base, 0, limit_s, now_s, self._spec.swarm))

    def _merge(self, round: Round, reason: str, now_s: float) -> None:
        phase = self._spec.phases[round.phase]
        reported = {lease.worker for lease in round.reported}
        # One that came after the decision did not move the schedule: it goes into the next round, if there is one.
        updates = [x for x in self._ledger.waiting_updates(round.phase) if x.base != round.base or x.worker in reported]
        versions = list(self._merger.versions(round, updates))
        past_s = self._ledger.past_round_times_s(round.phase)
        limit_s, _ = learned_deadline_s([*past_s, *([round.took_s] if round.took_s else [])], self._spec.swarm)
        following = next_round(round, phase, limit_s, now_s, self._spec.swarm)
        if self._ledger.merge(round, versions, [update.id for update in updates], following, now_s, reason):
            self.bell.ring()
            if now_s >= self._pruned_s + PRUNE_EVERY_S:
                self._pruned_s = now_s
                self._prune()

    def _prune(self) -> None:
        """Forget blobs and uploads that nothing needs any more; young ones may be about to be recorded."""
        live, before_s = self._ledger.live_blobs(self._spec.swarm.keep_versions), self._clock() - UNWANTED_S
        for sha256 in list(self.blobs.iterate(before_s=before_s)):
            if sha256 not in live:
                self.blobs.delete(sha256)
        self.blobs.discard_uploads(before_s)
        self._ledger.prune_events()
