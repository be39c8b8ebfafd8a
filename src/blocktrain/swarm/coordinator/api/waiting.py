"""A request for work that waits until there is some: it is asked again when the bell rings, or after a while. routes.py
and the simulator wait for it, each in its own way. Next: granting.py, which answers; bell.py, which wakes it."""

from __future__ import annotations

import re
from collections.abc import Callable

from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.wire.messages import LeaseReply, LeaseRequest, Wait

LONGEST_WAIT_S = 10.0  # for a lease request when there is no work
RETRY_LEASE_S = 1.0  # another coordinator of the same ledger cannot wake this one, so it looks this often
PREFER_WAIT = re.compile(r"\bwait=([0-9]{1,5})\b")


class WaitingRequest:
    """One request for work, which may be asked several times. `prefer` is its header of this name (RFC 7240)."""

    def __init__(
        self,
        coordinator: Coordinator,
        asked: LeaseRequest,
        prefer: str,
        clock: Callable[[], float],
        access_token: str = "",
    ) -> None:
        match = PREFER_WAIT.search(prefer)
        self._wait_s = min(float(match[1]), LONGEST_WAIT_S) if match else 0.0
        self._coordinator, self._asked, self._clock, self._access_token = coordinator, asked, clock, access_token
        self._end_at_s, self._admitted, self.worker = clock() + self._wait_s, False, asked.worker

    def ask(self) -> LeaseReply:
        """The answer of this moment."""
        bell = self._coordinator.bell
        self.rung = bell.rung
        reply = self._coordinator.lease(self._asked, self._admitted, self._access_token)
        left_s, self._admitted = self._end_at_s - self._clock(), True
        self.ask_again_in_s: float | None = None  # or sooner, when the bell was rung more often than `rung` times
        if not self._wait_s or not isinstance(reply, Wait):
            return reply
        if left_s <= 0 or bell.ended:
            return reply.model_copy(update={"seconds": 0.0})
        self.ask_again_in_s = min(left_s, RETRY_LEASE_S)
        return reply
