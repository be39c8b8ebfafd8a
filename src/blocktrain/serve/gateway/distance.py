"""Distant: adds simulated network delay to a model, to compare decoding modes on one machine. Only the waiting is
simulated: the traversals are real. Next: completion.py, which uses it when a request asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from blocktrain.serve.traversal import Forward, ModelInfo, Traversal


class Distant:
    """Every traversal takes as much longer as its messages would be on their way: from the gateway to the first stage,
    from stage to stage, and back, half a round trip each."""

    def __init__(
        self, forward: Forward, rtt_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._forward, self._rtt_s, self._sleep = forward, rtt_s, sleep

    @property
    def info(self) -> ModelInfo:
        return self._forward.info

    async def __call__(self, traversal: Traversal) -> Traversal:
        reply = await self._forward(traversal)
        await self._sleep((len(reply.trace) + 1) * self._rtt_s / 2)
        return reply

    async def forget(self, session: str) -> None:
        await self._forward.forget(session)
