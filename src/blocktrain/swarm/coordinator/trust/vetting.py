"""Vetting: has the updates of a round scored on held-out text before they are merged. It freezes which updates the
merge takes, draws the workers that score them, takes in what they report, and says what is left out. It decides nothing
itself, and no round waits for it longer than for its workers.
Next: ../../policy/vetting.py, which decides; ../../ledger/vettings.py, which keeps the facts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from blocktrain.errors import RequestRefused
from blocktrain.spec import Phase, RunSpec
from blocktrain.swarm.coordinator.blocks import Blocks, before, recorded_version
from blocktrain.swarm.ledger.database import retry_on_conflict
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import MergeWeight, Update, VettingRecord
from blocktrain.swarm.policy.averaging.base import FEWEST
from blocktrain.swarm.policy.rounds import Round
from blocktrain.swarm.policy.vetting import (
    HELD_OUT_TOKENS,
    SCORERS,
    VettingVerdict,
    divided,
    may_vet,
    seats_for,
    verdict_of,
)
from blocktrain.swarm.signatures import require_signature
from blocktrain.wire.messages import Blob, BlockVersion, LeaseRequest, VetLease, VetNotice, VetUpdate

PATIENCE_SHARE = 0.25  # of a vetting's time, after which anyone may score
DRAWS = 2**31  # different choices of held-out windows
TOO_LATE = "vetting: it came after the updates of the phase's last round were scored"


class Vetting:
    """`chance` gives numbers from 0 to 1 that nobody can foresee. `ring` wakes workers that wait for work."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        blocks: Blocks,
        memory_bytes: Callable[[Phase], int],
        run_id: str,
        chance: Callable[[], float],
        ring: Callable[[], None],
    ) -> None:
        self._spec, self._ledger, self._blocks = spec, ledger, blocks
        self._memory_bytes, self._run_id, self._chance, self._ring = memory_bytes, run_id, chance, ring

    # What is merged

    def sifted(
        self, round: Round, updates: Sequence[Update], last: bool, now_s: float
    ) -> tuple[list[Update], list[MergeWeight]] | None:
        """The updates to merge, and those that are left out, with the reason. None until these have been scored. What
        arrives meanwhile waits for the next round; in the last one of a phase it is left out."""
        if not self._spec.swarm.vetting:
            return list(updates), []
        vettings = self._ledger.vettings(round.phase, round.number)
        if not vettings and len(updates) < FEWEST:
            return list(updates), []
        if not vettings:
            self._open(round, updates, now_s)
            return None
        if not all(vetting.closed_s is not None or self._close(vetting, now_s) for vetting in vettings):
            return None
        harmful = {id: why for x in self._ledger.vettings(round.phase, round.number) for id, why in x.harmful.items()}
        scored = {id for vetting in vettings for id in vetting.updates}
        out = {x.id: harmful[x.id] for x in updates if x.id in harmful}
        out |= {x.id: TOO_LATE for x in updates if x.id not in scored and last}
        kept = [x for x in updates if x.id in scored and x.id not in out]
        if not kept:  # an admin has removed all that was scored and good
            return list(updates), []
        return kept, [MergeWeight(id, 0.0, 0.0, why) for id, why in out.items()]

    def _open(self, round: Round, updates: Sequence[Update], now_s: float) -> None:
        groups = divided([update.id for update in updates], self._chance())
        draw = random.Random(str(self._chance()))
        workers = sorted({lease.worker for lease in round.reported} - self._ledger.contradicted_scorers())
        chosen = [draw.sample(workers, min(SCORERS, len(workers))) for _ in groups]
        deadline_at_s = now_s + max(round.limit_s, self._spec.swarm.deadline_floor_s)
        self._ledger.open_vettings(round, groups, chosen, draw.randrange(DRAWS), now_s, deadline_at_s)
        self._ring()

    @retry_on_conflict
    def _close(self, vetting: VettingRecord, now_s: float) -> bool:
        """True if its verdict is known."""
        with self._ledger.transaction() as ledger:
            found = self._verdict(ledger, vetting, now_s)
            if found is not None:
                ledger.close_vetting(vetting, found, now_s)
        return found is not None

    def _verdict(self, ledger: Ledger, vetting: VettingRecord, now_s: float) -> VettingVerdict | None:
        return verdict_of(vetting.reports, self._voters(ledger, vetting), now_s >= vetting.deadline_at_s)

    def _voters(self, ledger: Ledger, vetting: VettingRecord) -> int:
        """The workers that could score: those of the round, unless others contradicted them before."""
        records = {update.worker for id in vetting.updates if (update := ledger.update(id))}
        reporters = {report.worker for report in vetting.reports}
        return len((records | set(vetting.chosen) | reporters) - ledger.contradicted_scorers())

    # Who scores

    def offer(
        self, ledger: Ledger, request: LeaseRequest, now_s: float, rounds: Mapping[int, Round]
    ) -> VetLease | None:
        """A vetting of an open round that this worker should score."""
        if not self._spec.swarm.vetting:
            return None
        for round in rounds.values():
            for vetting in ledger.vettings(round.phase, round.number):
                if self._is_for(ledger, vetting, request, now_s):
                    seat = ledger.grant_vetting(vetting, request.worker, now_s)
                    return self._message(ledger, vetting, round, seat.id, now_s)
        return None

    def _is_for(self, ledger: Ledger, vetting: VettingRecord, request: LeaseRequest, now_s: float) -> bool:
        if vetting.closed_s is not None or now_s >= vetting.deadline_at_s:
            return False
        if any(seat.worker == request.worker for seat in vetting.seats):  # asks again: it was restarted
            return all(seat.losses is None for seat in vetting.seats if seat.worker == request.worker)
        if request.worker in ledger.contradicted_scorers():
            return False
        if self._memory_bytes(self._spec.phases[vetting.phase]) > request.memory_bytes:
            return False
        asked = [seat.worker for seat in vetting.seats]
        wanted = seats_for(vetting.reports, self._voters(ledger, vetting))
        patience_s = PATIENCE_SHARE * (vetting.deadline_at_s - vetting.opened_s)
        impatient = now_s >= vetting.opened_s + patience_s
        anyone = impatient or wanted > SCORERS
        silent = sum(seat.losses is None and now_s >= seat.granted_s + patience_s for seat in vetting.seats)
        return len(asked) - silent < wanted and may_vet(request.worker, asked, vetting.chosen, anyone)

    def _message(self, ledger: Ledger, vetting: VettingRecord, round: Round, seat: str, now_s: float) -> VetLease:
        """The same for every worker: the versions of when the vetting was opened."""
        phase, around = self._spec.phases[vetting.phase], ledger.newest_at(vetting.opened_s)
        updates = [update for id in vetting.updates if (update := ledger.update(id))]
        total = sum(update.weight for update in updates)
        return VetLease(
            lease=seat,
            time_left_s=max(0.0, vetting.deadline_at_s - now_s),
            phase=vetting.phase,
            draw=vetting.draw,
            batches=-(-HELD_OUT_TOKENS // (self._spec.train.windows * self._spec.model.context)),
            trained=self._references(ledger, {block: round.base[block] for block in phase.blocks}),
            below=tuple(self._blocks.reference(around[block]) for block in phase.below),
            ahead=tuple(self._blocks.reference(around[block]) for block in phase.ahead if block in around),
            updates=tuple(self._vet_update(ledger, update, update.weight / total) for update in updates),
        )

    def _vet_update(self, ledger: Ledger, update: Update, share: float) -> VetUpdate:
        by_course = self._blocks.codec(update.phase).uses_course
        return VetUpdate(
            payload=Blob(sha256=update.id, num_bytes=update.num_bytes),
            share=share,
            base=self._references(ledger, update.base),
            earlier=self._references(ledger, before(update.base)) if by_course else (),
        )

    def _references(self, ledger: Ledger, versions: Mapping[int, int]) -> tuple[BlockVersion, ...]:
        return tuple(self._blocks.reference(recorded_version(ledger, *key)) for key in versions.items())

    # What they report

    def report(self, notice: VetNotice) -> None:
        """Takes in the scores of a worker. The loop closes the vetting when there are enough."""
        require_signature(notice, self._run_id)
        found = self._ledger.vet_seat(notice.lease)
        if found is None or found[0].worker != notice.worker:
            raise RequestRefused(f"there is no vetting {notice.lease[:80]} of yours: ask for a lease", code="lease")
        expected = len(found[1].updates)
        if (len(notice.alone), len(notice.without)) != (expected, expected):
            raise RequestRefused(
                f"scores of {len(notice.alone)} updates alone and {len(notice.without)} left out were sent, and "
                f"{expected} of each are expected: score every update of the lease",
                code="scores",
            )
        if found[1].closed_s is None:  # or it is too late to count
            losses = notice.model_dump(mode="json", exclude={"lease", "worker", "signature"})
            self._ledger.record_vetting(notice.lease, losses, notice.signature)
            self._ring()
