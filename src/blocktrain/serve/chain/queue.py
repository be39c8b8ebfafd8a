"""The waiting room of a stage: who is let in, who is taken next and with whom, who is sent away. No socket and no
thread; the clock is an argument. Next: stage.py, which computes what is taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from blocktrain.serve.chain.messages import Walk
from blocktrain.serve.traversal import Traversal


@dataclass(frozen=True)
class Arrival:
    """A walk that has arrived."""

    walk: Walk
    traversal: Traversal
    num_bytes: int
    arrived_s: float

    @property
    def key(self) -> tuple[str, int]:
        """What waits once: a walk, or a piece of it."""
        return self.walk.id, self.traversal.piece.first if self.traversal.piece else 0

    @property
    def rows(self) -> int:
        tails, draft = self.traversal.tails, self.traversal.draft
        return max(1, tails.size(0) if tails is not None else 0, draft.candidates if draft else 0)

    def left_s(self, now_s: float) -> float:
        return self.walk.expires_s - (now_s - self.arrived_s)


class WaitingRoom:
    """First come, first served, in batches of one version. A walk, or a piece of one, waits once: a newer attempt takes
    its place."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self.limit, self.max_bytes = limit, max_bytes
        self._waiting: OrderedDict[tuple[str, int], Arrival] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, work: Arrival) -> bool:
        """False: full. One alone is always let in, however large."""
        others = [each for each in self._waiting.values() if each.key != work.key]
        total_bytes = work.num_bytes + sum(each.num_bytes for each in others)
        if others and (len(others) >= self.limit or total_bytes > self.max_bytes):
            return False
        self._waiting[work.key] = work
        return True

    def take(self, max_rows: int) -> list[Arrival]:
        """The oldest and whoever fits beside it: the same version, at most so many rows (but at least one work)."""
        taken: list[Arrival] = []
        rows = 0
        for work in tuple(self._waiting.values()):
            if taken and (work.walk.version != taken[0].walk.version or rows + work.rows > max_rows):
                continue
            taken.append(self._waiting.pop(work.key))
            rows += work.rows
        return taken

    def drop(self, unwanted: Callable[[Arrival], bool]) -> list[Arrival]:
        dropped = [work for work in self._waiting.values() if unwanted(work)]
        for work in dropped:
            del self._waiting[work.key]
        return dropped


class Recent:
    """The last so many names: what was cancelled may still be on its way here."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, name: Hashable) -> None:
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._limit:
            self._names.popitem(last=False)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._names
