"""The coordinator's loop: what follows from the facts that requests record. Phases open, rounds are extended or merged,
versions appear. It runs beside the requests, in one thread of the server, and does nothing that another coordinator of
the same ledger may not do at the same time.
Next: ../policy/rounds.py, which decides; merging.py, which makes the versions."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from blocktrain.errors import BlobError, BlockTrainError, StorageError
from blocktrain.spec import Phase, RunSpec, Stacked
from blocktrain.swarm.coordinator.bell import Bell
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import Blocks, own_blobs
from blocktrain.swarm.coordinator.merging import Merger
from blocktrain.swarm.coordinator.quotas import Quotas
from blocktrain.swarm.coordinator.trust.auditing import Auditing
from blocktrain.swarm.coordinator.trust.vetting import Vetting
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import MergeWeight, Standing, Update
from blocktrain.swarm.policy.rounds import Round, decide, learned_limit_s, next_round, open_phases, open_round
from blocktrain.swarm.policy.standing import votes_of, weight_factor
from blocktrain.swarm.run_clock import RunClock
from blocktrain.wire.safetensors import continue_block, encode_chunks

TICK_S = 1.0  # between two looks when no request wakes the loop: deadlines pass without any
SHORTEST_TICK_S = 0.05  # the same where a lease is soon overdue
STOP_S = 5.0  # that a merge under way is waited for when the server stops
UNWANTED_S = 3600.0  # until a blob or an upload that nothing needs is deleted
UNWANTED_FULL_S = 300.0  # the same while storage is full
PRUNE_EVERY_S = 60.0  # at most, however short the rounds are
PRUNE_EVERY_FULL_S = 5.0  # while storage is full
REPAIR_EVERY_S = 10.0  # while a version that is merged again cannot be stored


class CoordinatorLoop:
    """Requests wake it (`follow`). A server runs it in a thread (`running`); a test or a simulation, which has a clock
    of its own, does its pending work at once (`settle`)."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        blobs: Blobs,
        blocks: Blocks,
        quotas: Quotas,
        auditing: Auditing,
        vetting: Vetting,
        bell: Bell,
        clock: Callable[[], float],
    ) -> None:
        self._spec, self._ledger, self._blobs, self._blocks, self._quotas = spec, ledger, blobs, blocks, quotas
        self._auditing, self._vetting, self._bell, self._clock = auditing, vetting, bell, clock
        self._merger = Merger(spec.swarm, blocks, blobs)
        self.due = threading.Event()
        # Two threads of one server never merge the same round. Between servers, the ledger decides.
        self._turn = threading.Lock()
        self._pruned_s, self._first_tick_s = -math.inf, math.inf
        self._said_damaged, self._repair_s = set[str](), -math.inf
        self._look_at_s = math.inf  # the next time that it looks without being woken
        self._shortage: str | None = None  # of storage, as it was last reported
        # As the dates of files are. If the machine's clock is set, no young file becomes an old one.
        self.wall_clock: Callable[[], float] = RunClock(0.0)

    # When it runs

    def follow(self, standing: Standing) -> None:
        """Wakes the loop if something is due by these facts."""
        now_s = self._clock()
        decisions = (decide(round, now_s, self._spec.swarm).action for round in standing.rounds.values())
        is_due = any(action != "wait" for action in decisions) or self._unopened(standing)
        if is_due or self._overdue_at_s(standing, now_s) < self._look_at_s:
            self.due.set()

    def pause_s(self) -> float:
        """Until it looks again, if no request wakes it before."""
        return min(TICK_S, max(0.0, self._look_at_s - self._clock()))

    def settle(self) -> None:
        """Does everything that is due now."""
        self.due.set()
        while self.due.is_set():
            self.due.clear()
            self.tick()

    @contextmanager
    def running(self, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
        """In a thread, while the `with` block runs. `say` gets one line per event of the run, and one per error."""
        stopped = threading.Event()
        thread = threading.Thread(target=self._run, args=(stopped, say), name="coordinator loop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            self.due.set()
            thread.join(STOP_S)

    def _run(self, stopped: threading.Event, say: Callable[[str], None]) -> None:
        """An error is said once while it lasts, and does not end the loop."""
        said, newest = "", None
        while not stopped.is_set():
            self.due.clear()
            try:
                self.tick()
                newest = self._say_news(newest, say)
                said = ""
            except Exception as error:
                sentence = str(error) if isinstance(error, BlockTrainError) else f"unexpected {error!r}"
                if sentence != said:
                    say(f"error: {' '.join(sentence.split())}")
                said = sentence
            self.due.wait(self.pause_s())

    def _say_news(self, newest: int | None, say: Callable[[str], None]) -> int:
        """The events since the last time; at the start, none of those that are there."""
        events = self._ledger.events(after=newest or 0)
        if newest is not None:
            for event in events:
                say(f"{time.strftime('%H:%M:%S', time.localtime(event.at_s))} {event.kind} {event.text}")
        return events[-1].number if events else newest or 0

    # What it does

    def tick(self) -> None:
        """Opens the phases whose turn it is, extends or merges the rounds that are due."""
        with self._turn, own_blobs():
            self._look_at_s = self._clock() + TICK_S  # also if something fails below
            standing = self._ledger.standing()
            now_s = self._now_s(standing)
            if math.isinf(self._first_tick_s):
                standing = self._forgiven(standing, now_s)
            self._tidy(now_s)
            self._repair(now_s)
            for round in standing.rounds.values():
                decision = decide(round, now_s, self._spec.swarm)
                if decision.action == "extend":
                    self._ledger.extend_round(round, decision.deadline_at_s, decision.reason)
                elif decision.action == "close":
                    self._merge(round, decision.reason, now_s)
                    standing = self._ledger.standing()  # a phase may have ended
            overdue_at_s = max(now_s + SHORTEST_TICK_S, self._overdue_at_s(standing, now_s))
            self._look_at_s = min(self._look_at_s, overdue_at_s)
            for phase in self._unopened(standing):
                self._open(phase, now_s)
                self._bell.ring()

    def _now_s(self, standing: Standing) -> float:
        """Not before what another coordinator, whose clock is ahead, has recorded."""
        if isinstance(self._clock, RunClock):
            moments_s = (s for x in standing.rounds.values() for s in (x.opened_s, *(y.granted_s for y in x.leases)))
            self._clock.not_before(max(moments_s, default=0.0))
        return self._clock()

    def _overdue_at_s(self, standing: Standing, now_s: float) -> float:
        """When the next awaited lease of a round is overdue: no request comes then."""
        return min((x.overdue_at_s(now_s, self._spec.swarm) for x in standing.rounds.values()), default=math.inf)

    def _forgiven(self, standing: Standing, now_s: float) -> Standing:
        """Nobody could report while no coordinator ran: rounds whose workers are not taken for dead get that time back,
        as far as any round may take so long. Workers that found nobody ask again within about as much."""
        away_s = now_s - self._ledger.latest_moment_s()
        for round in standing.rounds.values():
            deadline_at_s = min(now_s + min(away_s, round.limit_s), round.ceiling_at_s)
            if round.at_work(now_s) and deadline_at_s > round.deadline_at_s:
                reason = f"a coordinator started, {away_s:.0f} s after the last news: deadline moved"
                self._ledger.extend_round(round, deadline_at_s, reason)
        return self._ledger.standing()

    def _unopened(self, standing: Standing) -> list[Phase]:
        """The phases whose turn it is and that no coordinator has opened."""
        phases = {phase.phase: phase.finished for phase in standing.phases}
        due = open_phases(self._spec, {index for index, finished in phases.items() if finished})
        return [phase for phase in due if phase.index not in phases]

    def _open(self, phase: Phase, now_s: float) -> None:
        """The first round of a phase. The initial version of each of its blocks is recorded before it."""
        newest = self._ledger.consistent_manifest().blocks
        initial: dict[int, str] = {}
        for block in phase.blocks:
            if block not in newest:
                tensors = self._blocks.initial_block(block)
                if block - 1 in newest and isinstance(self._spec.objective, Stacked):
                    tensors = continue_block(tensors, self._blocks.tensors(newest[block - 1].sha256))
                initial[block] = self._blobs.put(encode_chunks(tensors))
        self._ledger.add_initial_blocks(initial, now_s)
        newest = self._ledger.consistent_manifest().blocks
        base = {block: newest[block].version for block in phase.blocks}
        limit_s, _ = learned_limit_s(self._ledger.past_round_times_s(phase.index), self._spec.swarm)
        self._ledger.open_phase(open_round(phase, 0, base, 0, limit_s, now_s, self._spec.swarm))

    def _merge(self, round: Round, reason: str, now_s: float) -> None:
        phase = self._spec.phases[round.phase]
        reported = {lease.worker for lease in round.reported}
        # An update that came after the decision did not move the schedule: it goes into the next round, if any.
        updates = [x for x in self._ledger.waiting_updates(round.phase) if x.base != round.base or x.worker in reported]
        if not updates:
            return  # since the decision they were left out, or merged by another coordinator
        if self._auditing.holds(self._ledger, round, now_s):
            return
        past_s = self._ledger.past_round_times_s(round.phase)
        limit_s, _ = learned_limit_s([*past_s, *([round.took_s] if round.took_s else [])], self._spec.swarm)
        following = next_round(round, phase, limit_s, now_s, self._spec.swarm)
        sifted = self._vetting.sifted(round, updates, following is None, now_s)
        if sifted is None:
            return  # workers score the updates first
        updates, left_out = sifted
        weights = [*self._weights(round.phase, updates), *left_out]
        versions = list(self._merger.versions(round, updates, weights))
        if self._ledger.merge(round, versions, weights, following, now_s, reason):
            self._auditing.close_old(round.phase, {version.block: version.version for version in versions}, now_s)
            self._bell.ring()
            if now_s >= self._pruned_s + PRUNE_EVERY_S:
                self._prune(now_s)

    def _weights(self, phase: int, updates: Sequence[Update]) -> list[MergeWeight]:
        workers = {update.worker for update in updates}
        standings, participants = self._ledger.key_standings(workers), self._ledger.participants(workers)
        factors = [weight_factor(standings[update.worker], self._spec.swarm) for update in updates]
        votes = votes_of([participants[update.worker] for update in updates])
        return self._merger.weigh(phase, updates, self._ledger.recent_norms(phase), factors, votes)

    def _tidy(self, now_s: float) -> None:
        """Frees storage by time, and before anything that needs some: a full disk would allow no merge."""
        self._first_tick_s = min(self._first_tick_s, now_s)
        full = self._quotas.state.problem is not None
        if now_s < max(self._pruned_s, self._first_tick_s) + (PRUNE_EVERY_FULL_S if full else PRUNE_EVERY_S):
            return
        problem = self._quotas.measure().problem
        if (problem is None) != (self._shortage is None):
            with suppress(StorageError):  # the ledger may be on the same disk
                self._ledger.add_event("storage", problem or "there is room again", now_s)
        self._shortage = problem
        self._prune(now_s)

    def _repair(self, now_s: float) -> None:
        """Merges versions again whose blobs were found damaged. Each is an event, once until it is damaged again. What
        cannot be stored now is tried again later."""
        if now_s < self._repair_s:
            return
        for sha256 in sorted(self._blobs.damaged - self._said_damaged):
            try:
                merged_again = self._merged_again(sha256)
            except StorageError:
                self._repair_s = now_s + REPAIR_EVERY_S
                continue
            if merged_again:
                self._blobs.damaged.discard(sha256)
            else:
                self._said_damaged.add(sha256)
            outcome = "it was merged again from its updates" if merged_again else "restore it from a copy"
            self._ledger.add_event("damaged", f"blob {sha256}: {outcome}", now_s, {"blob": sha256})

    def _merged_again(self, sha256: str) -> bool:
        for version in self._ledger.versions_with(sha256):
            if version.phase is not None and version.round is not None:
                updates = self._ledger.merged_updates(version.phase, version.round)
                weights = self._ledger.merge_weights(version.phase, version.round)
                base = self._ledger.base_of(version.phase, version.round)
                with suppress(BlobError):  # what it was merged from is gone
                    self._merger.again(version.phase, version.round, base, updates, weights)
                    self._blobs.get(sha256)
                    return True
        return False

    def _prune(self, now_s: float) -> None:
        """Deletes blobs and uploads that nothing needs any more. A young one may be about to be recorded: it stays, the
        less long the less room there is."""
        self._pruned_s = now_s
        live = self._ledger.live_blobs(self._spec.swarm.keep_versions)
        age_s = UNWANTED_S if self._quotas.state.problem is None else UNWANTED_FULL_S
        before_s = self.wall_clock() - age_s
        self._blobs.prune(live, before_s)
        self._blobs.discard_uploads(before_s)
        self._ledger.prune_events()
