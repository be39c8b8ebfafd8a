"""Invariants: what must hold after every event, whatever happened. They read the ledger's rows with SQL of their own,
merge each version again, and compute it once more by the definition of a mean, so that a defect of the code under test
does not hide itself.
Next: world.py, which asks after every event; ../swarm/verify.py, which checks a real run."""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from blocktrain.errors import BlobError, StorageError
from blocktrain.sim.disk import SimDisk
from blocktrain.sim.tasks import Scheduler
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blocks import Blocks
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.merging import Merger
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.open_rounds import OpenRounds
from blocktrain.swarm.ledger.records import MergeWeight, Standing
from blocktrain.swarm.policy.rounds import LONGEST_LIMITS
from blocktrain.swarm.verify import HashedBlobs
from blocktrain.wire.safetensors import Array
from blocktrain.wire.updates import read_update

SLACK_S = 8.0  # a few looks of the loop, and the gaps between its transactions
NO_PROGRESS_LIMITS = 8.0  # of the longest limit, without a new version while all is well
MEAN_TOLERANCE = 0.1  # of a step, that the download's codec may change
COMPARE_EVERY = 6  # changes of the ledger

VERSIONS = "SELECT block, version, sha256, phase, round FROM versions ORDER BY block, version"
ROUNDS = "SELECT phase, number, step_start, opened_s, limit_s, deadline_s, closed_s FROM rounds ORDER BY phase, number"
HAS_REPORTED = "EXISTS (SELECT 1 FROM updates WHERE lease = leases.id AND refused IS NULL)"
STATE = f"CASE WHEN {HAS_REPORTED} THEN 'reported' ELSE state END"
LEASES = f"SELECT id, phase, round, shard, worker, granted_s, deadline_s, {STATE} FROM leases ORDER BY granted_s, id"
UPDATES = "SELECT id, lease, phase, merged_phase, merged_round, refused FROM updates ORDER BY number"


class Broken(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Running(Protocol):
    coordinator: Coordinator | None
    ledger: Ledger | None


class Checker:
    def __init__(
        self, spec: RunSpec, disk: SimDisk, scheduler: Scheduler, initial_blocks: Mapping[int, dict[str, Array]]
    ) -> None:
        self._spec, self._disk, self._scheduler, self._initial_blocks = spec, disk, scheduler, initial_blocks
        self._acknowledged: set[str] = set()
        self._merged: dict[str, tuple[int, int]] = {}  # update: the round that it became a part of
        self._versions: dict[tuple[int, int], str] = {}
        self._leases: dict[str, tuple[float, float]] = {}  # granted, deadline
        self._seen_s: dict[tuple[str, float], float] = {}  # lease and its grant: the true time that it was seen
        self._open: dict[int, tuple[int, float, float]] = {}  # phase: round, limit, since when it may not wait long
        self._steps: dict[tuple[int, int], int] = {}
        self._defects: list[str] = []
        self.is_finished = False
        self._calm_s = self._progress_s = 0.0
        self._changes = 0
        self._is_loss_unnoticed = False
        self._machines: Sequence[Running] = ()
        self._reader = self._opened()

    def _opened(self) -> sqlite3.Connection:
        self._seen_version = -1
        return sqlite3.connect(self._disk.ledger_path, isolation_level=None)

    def reopen(self, forgiving: bool) -> None:
        """After a power cut. If fsync had lied (`forgiving`), what it pretended to keep may be lost."""
        self._reader.close()
        self._reader = self._opened()
        if forgiving:
            there = {id for (id,) in self._reader.execute("SELECT id FROM updates")}
            self._acknowledged &= there
        # What was not synced, or lied about, may be undone: leases, merges and the rounds that they opened.
        self._leases.clear()
        self._is_loss_unnoticed = not self._disk.has_noted_head(self._reader)
        if forgiving:
            merged = {id for id, *_, round, _ in self._reader.execute(UPDATES) if round is not None}
            self._merged = {id: where for id, where in self._merged.items() if id in merged}
            self._versions = {(b, v): sha for b, v, sha, *_ in self._reader.execute(VERSIONS)}
            self._steps.clear()

    def close(self) -> None:
        self._reader.close()

    @property
    def num_acknowledged(self) -> int:
        return len(self._acknowledged)

    @property
    def num_merges(self) -> int:
        return len({version for version in self._versions if version[1]})

    def facts(self) -> bytes:
        """For comparing two courses of one schedule."""
        rows = {query: self._reader.execute(query).fetchall() for query in (VERSIONS, ROUNDS, LEASES, UPDATES)}
        return json.dumps(rows).encode()

    # What the world tells

    def acknowledged(self, update: str) -> None:
        self._acknowledged.add(update)

    def loss_was_noticed(self) -> None:
        """By the server, when it opened the ledger after an fsync that lied."""
        self._is_loss_unnoticed = False

    def coordinator_started(self) -> None:
        if self._is_loss_unnoticed:
            self.defect("a coordinator started on a ledger that lost acknowledged updates, and said nothing")

    def defect(self, text: str) -> None:
        self._defects.append(text)

    def disturbed(self) -> None:
        """A fault has just happened: rounds may be late by as much."""
        self._calm_s = self._scheduler.now_s

    def repairable_blobs(self) -> list[str]:
        """Blobs of versions whose round's updates are kept: the newest of each block."""
        newest = "SELECT max(version) FROM versions w WHERE w.block = v.block"
        query = f"SELECT sha256 FROM versions v WHERE version > 0 AND version = ({newest})"
        return sorted(sha256 for (sha256,) in self._reader.execute(query))

    # After every event

    def look(self, healthy: bool, calm: bool, machines: Iterable[Running]) -> None:
        self._machines = tuple(machines)
        if self._defects:
            raise Broken("no unexpected errors", self._defects[0])
        if not healthy:
            self.disturbed()
        (version,) = self._reader.execute("PRAGMA data_version").fetchone()
        if version != self._seen_version:
            self._seen_version = version
            self._changes += 1
            self._check_rows()
            if self._changes % COMPARE_EVERY == 0:
                self._check_replay(self._machines)
        self._check_ceilings()
        if not calm:
            self._progress_s = self._scheduler.now_s
        longest_s = NO_PROGRESS_LIMITS * self._spec.swarm.deadline_ceiling_s
        if not self.is_finished and self._scheduler.now_s > self._progress_s + longest_s:
            raise Broken("progress", f"no new version for {longest_s:.0f} s while all is well")

    def _check_rows(self) -> None:
        read = self._reader.execute
        read("BEGIN")
        try:
            versions, rounds = read(VERSIONS).fetchall(), read(ROUNDS).fetchall()
            leases, updates = read(LEASES).fetchall(), read(UPDATES).fetchall()
            phases = read("SELECT phase, finished FROM phases").fetchall()
        finally:
            read("COMMIT")
        finished = {phase for phase, is_finished in phases if is_finished}
        self.is_finished = len(finished) == len(self._spec.phases)
        self._check_updates(updates, finished)
        self._check_leases(leases, rounds, updates)
        self._check_rounds(rounds, updates)
        self._check_versions(versions)

    def _check_updates(self, updates: Sequence[Any], finished: set[int]) -> None:
        rows = {
            id: (phase, merged_phase, merged_round, refused)
            for id, _, phase, merged_phase, merged_round, refused in updates
        }
        for id in self._acknowledged:
            if id not in rows:
                raise Broken("acknowledged updates are kept", f"update {id[:12]} was acknowledged and is gone")
            phase, _, merged_round, refused = rows[id]
            if refused is None and merged_round is None and phase in finished:
                raise Broken("acknowledged updates are merged", f"phase {phase} ended without update {id[:12]}")
        for id, (_, merged_phase, merged_round, _) in rows.items():
            where = (merged_phase, merged_round)
            if merged_round is not None and self._merged.setdefault(id, where) != where:
                raise Broken("updates are merged once", f"update {id[:12]} moved from {self._merged[id]} to {where}")
        for id in self._merged.keys() - {id for id, row in rows.items() if row[2] is not None}:
            raise Broken("updates are merged once", f"update {id[:12]} was merged and is not any more")
        reported = [lease for _, lease, *_, refused in updates if refused is None]
        if len(set(reported)) < len(reported):
            raise Broken("updates are merged once", "two updates of one lease were accepted")

    def _check_leases(self, leases: Sequence[Any], rounds: Sequence[Any], updates: Sequence[Any]) -> None:
        limits = {(phase, number): limit_s for phase, number, _, _, limit_s, *_ in rounds}
        closed = {(phase, number) for phase, number, *_, closed_s in rounds if closed_s is not None}
        holders: dict[tuple[int, int, int], list[Any]] = {}
        for row in leases:
            id, phase, round, shard, _, granted_s, deadline_at_s, state = row
            if state == "open" and (phase, round) in closed:
                raise Broken("leases expire", f"lease {id[:24]} is open in a round that is closed")
            self._seen_s.setdefault((id, granted_s), self._scheduler.now_s)
            before = self._leases.get(id)
            if before and before[0] == granted_s and before[1] != deadline_at_s:
                raise Broken(
                    "renewals move nothing", f"lease {id[:24]} moved its deadline by {deadline_at_s - before[1]:.1f} s"
                )
            self._leases[id] = granted_s, deadline_at_s
            for other in holders.setdefault((phase, round, shard), []):
                if granted_s < other[6] + limits[phase, round] and other[7] != "expired":
                    raise Broken(
                        "no work is given twice", f"shard {shard} of round {round} to {id[-8:]} and {other[0][-8:]}"
                    )
            holders[phase, round, shard].append(row)

    def _check_rounds(self, rounds: Sequence[Any], updates: Sequence[Any]) -> None:
        merged = {(phase, round) for _, _, _, phase, round, refused in updates if refused is None}
        newest: dict[int, tuple[int, int]] = {}
        self._open = {}
        for phase, number, step_start, _, limit_s, _, closed_s in rounds:
            if self._steps.setdefault((phase, number), step_start) != step_start:
                raise Broken("rounds are monotone", f"round {number} of phase {phase} starts at another step")
            if phase in newest and (number != newest[phase][0] + 1 or step_start <= newest[phase][1]):
                raise Broken("rounds are monotone", f"round {number} of phase {phase} follows {newest[phase]}")
            newest[phase] = number, step_start
            if closed_s is not None and (phase, number) not in merged:
                raise Broken("rounds are monotone", f"round {number} of phase {phase} closed without an update")
            if closed_s is None:
                self._open[phase] = number, limit_s, self._first_report_s(phase, number)

    def _first_report_s(self, phase: int, number: int) -> float:
        """The true time at which the first lease of the round that has reported was given; infinite if none has."""
        query = f"SELECT id, granted_s FROM leases WHERE phase = ? AND round = ? AND {HAS_REPORTED}"
        rows = self._reader.execute(query, (phase, number)).fetchall()
        return min((self._seen_s[id, granted_s] for id, granted_s in rows), default=float("inf"))

    def _check_ceilings(self) -> None:
        now_s = self._scheduler.now_s
        for phase, (number, limit_s, first_s) in self._open.items():
            if limit_s > self._spec.swarm.deadline_ceiling_s:
                raise Broken(
                    "no round waits past its ceiling", f"round {number} of phase {phase} may take {limit_s:.0f} s"
                )
            waited_s = now_s - max(first_s, self._calm_s)
            limits = LONGEST_LIMITS + self._spec.swarm.vetting  # scoring its updates may take one more
            if waited_s > limits * limit_s + SLACK_S:
                raise Broken(
                    "no round waits past its ceiling", f"round {number} of phase {phase} waits {waited_s:.0f} s"
                )

    def _check_replay(self, machines: Iterable[Running]) -> None:
        """What a coordinator keeps in memory is what a new one reads from the ledger."""
        for machine in machines:
            if machine.ledger is not None and not self._disk.is_ledger_full:
                fresh = copy.copy(machine.ledger)
                fresh._open = OpenRounds()
                new, known = (self._comparable(x.standing()) for x in (fresh, machine.ledger))
                if new != known:
                    raise Broken("a new coordinator has the same state", _difference(new, known))

    def _comparable(self, standing: Standing) -> Standing:
        """A worker may have leases in two phases. Then the older one keeps the track record that it was given with."""
        if all(len(group) == 1 for group in self._spec.groups):
            return standing
        rounds = {
            phase: replace(round, leases=tuple(replace(x, owed=0, delivered=0) for x in round.leases))
            for phase, round in standing.rounds.items()
        }
        return replace(standing, rounds=rounds)

    # Versions

    def _check_versions(self, versions: Sequence[Any]) -> None:
        found = {(block, version): sha256 for block, version, sha256, *_ in versions}
        for key, sha256 in self._versions.items():
            if found.get(key) != sha256:
                raise Broken("versions are monotone", f"version {key[1]} of block {key[0]} changed or is gone")
        new = [row for row in versions if (row[0], row[1]) not in self._versions]
        for block, version, *_ in new:
            if version and (block, version - 1) not in found:
                raise Broken("versions are monotone", f"version {version} of block {block} has none before it")
        self._versions = found
        if new:
            self._progress_s = self._scheduler.now_s
        for phase, round in sorted({(row[3], row[4]) for row in new if row[3] is not None}):
            self._check_merge(phase, round, {row[0]: row[2] for row in versions if row[3:5] == (phase, round)})

    def _check_merge(self, phase: int, round: int, made: Mapping[int, str]) -> None:
        """The versions of a round, merged again: bit for bit by the real code, and nearly by the definition."""
        ledger = next(x.ledger for x in self._machines if x.ledger)  # the one that has just merged, at least
        blobs = HashedBlobs(self._disk.folder / "blobs")
        blocks = Blocks(self._spec, ledger, blobs, lambda block: dict(self._initial_blocks[block]))
        updates, base = ledger.merged_updates(phase, round), ledger.base_of(phase, round)
        weights = ledger.merge_weights(phase, round)
        try:
            merger = Merger(self._spec.swarm, blocks, blobs)
            again = {x.block: x.sha256 for x in merger.again(phase, round, base, updates, weights)}
            if again != made:
                raise Broken("versions are merged again bit for bit", f"phase {phase}, round {round}: other bytes")
            if self._spec.swarm.outer == "plain":
                self._check_mean(phase, made, blocks, updates, weights, base)
        except (BlobError, StorageError):
            pass  # a blob was damaged meanwhile

    def _check_mean(
        self,
        phase: int,
        made: Mapping[int, str],
        blocks: Blocks,
        updates: Sequence[Any],
        weights: Sequence[MergeWeight],
        base: Mapping[int, int],
    ) -> None:
        """The step is Σ w·s·Δ / Σ w with the weights and scales that the ledger has."""
        total = sum(each.weight for each in weights)
        shares = {each.update: each.weight * each.scale / total for each in weights}
        before, shapes = blocks.named(base), blocks.shapes(phase)
        mean = {name: np.zeros(int(np.prod(shape))) for name, shape in shapes.items()}
        for update in updates:
            encoded = read_update(blocks._blobs.get(update.id), shapes, expected=blocks.codec(phase))
            own, earlier = blocks.around(encoded, update.base)
            for name, sum_ in mean.items():
                delta = np.concatenate(list(encoded.pieces(name, own.get(name), earlier.get(name))))
                sum_ += shares[update.id] * delta
        moved = {block: blocks.tensors(sha256) for block, sha256 in made.items()}
        error = step = 0.0
        for name, delta in mean.items():
            block, _, inner = name.partition(".")
            after = np.asarray(moved[int(block)][inner], np.float64).ravel()
            error += float(np.sum((after - (np.asarray(before[name], np.float64).ravel() - delta)) ** 2))
            step += float(np.sum(delta**2))
        if error > MEAN_TOLERANCE**2 * step:
            raise Broken(
                "updates are merged once", f"phase {phase}: the step is not the mean of its {len(updates)} updates"
            )

    # At the end

    def at_the_end(self, machine: Running) -> None:
        coordinator, ledger = machine.coordinator, machine.ledger
        assert coordinator is not None
        assert ledger is not None
        self._check_rows()
        live, kept = ledger.live_blobs(self._spec.swarm.keep_versions), set(coordinator.blobs.iterate())
        if lost := live - kept:
            raise Broken("what is needed is stored", f"{len(lost)} blobs are missing, one is {min(lost)[:12]}")
        if unwanted := kept - live:
            raise Broken("storage is bounded", f"{len(unwanted)} blobs that nothing needs are kept forever")
        blobs = coordinator.blobs
        held = {"uploads": len(list(blobs.storage.list("uploads"))), "staged": len(list(blobs.storage.list("staging")))}
        held["checked"] = max(0, len(blobs._checked) - len(kept))
        held["quotas"] = len(coordinator.quotas._unfinished)
        if any(held.values()):
            raise Broken("storage is bounded", f"hours later these are left: {held}")


def _difference(new: Any, known: Any) -> str:
    for phase, round in new.rounds.items():
        other = known.rounds.get(phase)
        if other != round:
            return f"phase {phase}: the ledger gives {round}, memory has {other}"
    return f"the ledger gives {new.phases}, memory has {known.phases}"
