"""Orders of an admin about liars: ban a worker, lift a ban, roll a block back to a kept version, or remove what one
worker contributed. Each is recorded in the ledger, and an event.
Next: ../../ledger/rollbacks.py, what is recorded; ../merging.py, which merges again."""

from __future__ import annotations

from collections.abc import Sequence

from blocktrain.errors import BlobError, RequestRefused, TensorError
from blocktrain.spec import RunSpec
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.merging import Merger, PastMerge
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import NewVersion
from blocktrain.swarm.policy.rounds import Round, open_round
from blocktrain.wire.people_messages import BanOrder, RollbackOrder


class Orders:
    def __init__(self, spec: RunSpec, ledger: Ledger, blobs: Blobs, merger: Merger) -> None:
        self._spec, self._ledger, self._blobs, self._merger = spec, ledger, blobs, merger

    # Bans

    def ban(self, order: BanOrder, now_s: float) -> str:
        """Does it, and says what was done."""
        worker = self._worker(order.worker)
        if order.lifted:
            if not self._ledger.lift_exclusion(worker, now_s):
                raise RequestRefused(f"{alias_of(worker)} is neither banned nor quarantined", code="order")
            return f"{alias_of(worker)} may work again"
        self._ledger.exclude(worker, "banned", order.reason, now_s)
        return f"{alias_of(worker)} is banned: it gets no work, and what it sent and is not merged is left out"

    def _worker(self, named: str) -> str:
        """A worker by its key, the beginning of its key, or its alias."""
        known = [worker.id for worker in self._ledger.workers()]
        found = [x for x in known if x.startswith(named.lower()) or alias_of(x).lower() == named.lower()]
        if len(found) != 1:
            many = f"{len(found)} workers are" if found else "no worker is"
            raise RequestRefused(
                f'{many} called "{named[:80]}": give a key, its beginning or an alias as blocktrain status shows it',
                code="order",
            )
        return found[0]

    # Rollbacks

    def roll_back(self, order: RollbackOrder, now_s: float) -> str:
        if order.without is not None:
            return self._remove(self._worker(order.without), now_s)
        if order.block is None or order.version is None:
            raise RequestRefused("give a block and a version, or a worker whose updates to remove", code="order")
        return self._return(order.block, order.version, now_s)

    def _return(self, block: int, version: int, now_s: float) -> str:
        """The blocks of a phase are trained together, and go back together."""
        opened = self._open_round(block)
        past = [x.round for x in self._ledger.rounds(opened.phase, limit=10**6) if x.round.base.get(block) == version]
        if not past or version == opened.base[block]:
            raise RequestRefused(
                f"version {version} of block {block} is not an earlier version of its open phase, whose newest is "
                f"{opened.base[block]}: choose one that blocktrain status and the events show",
                code="order",
            )
        target = past[-1]
        versions = []
        for each, number in target.base.items():
            found = self._ledger.version(each, number)
            assert found is not None, "a round is based on versions that there are"
            if not self._blobs.exists(found.sha256):
                raise RequestRefused(
                    f"version {number} of block {each} was deleted: the newest {self._spec.swarm.keep_versions} are "
                    f"kept (swarm.keep_versions)",
                    code="order",
                )
            versions.append(NewVersion(block=each, version=opened.base[each] + 1, sha256=found.sha256))
        reason = f"an admin returned to version {version} of block {block}"
        self._record(opened, versions, dict(target.base), target.step_start, None, reason, now_s)
        return f"version {versions[0].version} of block {versions[0].block} is what version {version} was; {reason}"

    def _remove(self, worker: str, now_s: float) -> str:
        """In each open phase, every round since the worker's first one is merged again without it."""
        done = []
        for opened in self._ledger.standing().rounds.values():
            if rounds := self._ledger.rounds_with(worker, opened.phase):
                self._remove_from(opened, worker, rounds, now_s)
                done.append(f"phase {opened.phase + 1}: {len(rounds)} rounds")
        if not done:
            raise RequestRefused(f"no version of an open phase holds an update of {alias_of(worker)}", code="order")
        return f"merged again without {alias_of(worker)}: {', '.join(done)}"

    def _remove_from(self, opened: Round, worker: str, rounds: Sequence[int], now_s: float) -> None:
        if self._spec.swarm.outer != "plain":
            raise RequestRefused(
                'only runs with swarm.outer = "plain" can be merged again without a worker: the momentum of earlier '
                "versions is not kept; return to a version from before it joined",
                code="order",
            )
        past = past_merges(self._ledger, opened.phase, rounds[0], opened.number, worker)
        try:
            merged = self._merger.without(opened.phase, past)
        except (BlobError, TensorError) as error:
            raise RequestRefused(
                f"its updates cannot be removed, because what was merged since is no longer kept ({error}): return to "
                f"a version from before it joined",
                code="order",
            ) from None
        versions = [
            NewVersion(block=block, version=opened.base[block] + 1, sha256=sha256) for block, sha256 in merged.items()
        ]
        reason = f"an admin removed what {alias_of(worker)} contributed since round {rounds[0]}"
        self._record(opened, versions, dict(past[0].base), opened.step_start, worker, reason, now_s)

    def _open_round(self, block: int) -> Round:
        for opened in self._ledger.standing().rounds.values():
            if block in opened.base:
                return opened
        raise RequestRefused(
            f"block {block} is not being trained now: only blocks of open phases can be rolled back", code="order"
        )

    def _record(
        self,
        opened: Round,
        versions: Sequence[NewVersion],
        sources: dict[int, int],
        step_start: int,
        worker: str | None,
        reason: str,
        now_s: float,
    ) -> None:
        base = {version.block: version.version for version in versions}
        phase, number = self._spec.phases[opened.phase], opened.number + 1
        following = open_round(phase, number, base, step_start, opened.limit_s, now_s, self._spec.swarm)
        if not self._ledger.roll_back(opened, versions, sources, following, worker, reason, now_s):
            raise RequestRefused("a round was merged just now: try again", code="order")


def past_merges(ledger: Ledger, phase: int, first: int, before: int, worker: str) -> list[PastMerge]:
    """The rounds from `first` to `before` as they were merged, without the updates of the worker."""
    return [
        PastMerge(
            ledger.base_of(phase, number),
            [x for x in ledger.merged_updates(phase, number) if x.worker != worker],
            ledger.merge_weights(phase, number),
        )
        for number in ledger.merged_rounds(phase, first, before)
    ]
