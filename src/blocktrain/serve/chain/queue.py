"""The queue of a stage: which traversals are admitted, and which form the next batch. No socket and no thread; the
clock is an argument. Next: stage.py computes the batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from blocktrain.serve.chain.messages import Advance
from blocktrain.serve.traversal import Traversal


@dataclass(frozen=True)
class Arrival:
    """A traversal that has arrived at a stage."""

    message: Advance
    traversal: Traversal
    num_bytes: int
    arrived_s: float

    @property
    def key(self) -> tuple[str, int]:
        """Identifies a traversal, or one piece of it."""
        return self.message.id, self.traversal.piece.first if self.traversal.piece else 0

    @property
    def rows(self) -> int:
        tails, draft = self.traversal.tails, self.traversal.draft
        return max(1, tails.size(0) if tails is not None else 0, draft.candidates if draft else 0)

    def time_left_s(self, now_s: float) -> float:
        return self.message.time_left_s - (now_s - self.arrived_s)


class ArrivalQueue:
    """First in, first out, in batches of one version. A traversal (or piece) is in the queue once: a newer attempt
    replaces the older one."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self.limit, self.max_bytes = limit, max_bytes
        self._waiting: OrderedDict[tuple[str, int], Arrival] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, arrival: Arrival) -> bool:
        """False if the queue is full. An empty queue admits one arrival of any size."""
        others = [each for each in self._waiting.values() if each.key != arrival.key]
        total_bytes = arrival.num_bytes + sum(each.num_bytes for each in others)
        if others and (len(others) >= self.limit or total_bytes > self.max_bytes):
            return False
        self._waiting[arrival.key] = arrival
        if arrival.traversal.piece is not None:
            self._waiting.move_to_end(arrival.key)  # behind the earlier pieces of its own attempt
        return True

    def take(self, max_rows: int) -> list[Arrival]:
        """The oldest arrival and all others of its version that fit: at most `max_rows` rows, but at least one
        arrival."""
        taken: list[Arrival] = []
        rows = 0
        for arrival in tuple(self._waiting.values()):
            if taken and (arrival.message.version != taken[0].message.version or rows + arrival.rows > max_rows):
                continue
            taken.append(self._waiting.pop(arrival.key))
            rows += arrival.rows
        return taken

    def drop(self, unwanted: Callable[[Arrival], bool]) -> list[Arrival]:
        dropped = [arrival for arrival in self._waiting.values() if unwanted(arrival)]
        for arrival in dropped:
            del self._waiting[arrival.key]
        return dropped


class Recent:
    """The last `limit` names. A cancelled traversal may still be on its way here."""

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
