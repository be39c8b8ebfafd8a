"""EventSocket: a ZeroMQ socket on the event loop. One callback takes all messages that have come; zmq.asyncio makes
futures and further turns of the loop for each. zmq's own errors pass through. Next: sockets.py opens these sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import zmq

Frames = Sequence[bytes]
IN_A_ROW = 16  # messages; then it is the turn of other callbacks
_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)


class EventSocket:
    """Opened and closed inside a running event loop. Messages leave in the order in which they were given."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.plain = socket
        self._loop, self._descriptor = asyncio.get_running_loop(), int(socket.get(zmq.FD))
        self._take: Callable[[list[bytes]], None] | None = None
        self._unsent: deque[tuple[Frames, asyncio.Future[None]]] = deque()
        self._looking = False  # or about to
        self._loop.add_reader(self._descriptor, self._look)

    def receive(self, take: Callable[[list[bytes]], None]) -> None:
        """From now on `take` is called with the frames of each message."""
        self._take = take
        self._look_soon()

    def post(self, frames: Frames) -> bool:
        """Sends at once, or returns False: the other side is away or slow, or earlier messages wait."""
        if self._unsent:
            return False
        try:
            self.plain.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._look_again()
        return True

    async def send(self, frames: Frames) -> None:
        """Waits while the other side is away or slow."""
        sent: asyncio.Future[None] = self._loop.create_future()
        self._unsent.append((frames, sent))
        self._send_waiting()
        await sent

    def connect(self, endpoint: str) -> None:
        self.plain.connect(endpoint)

    def close(self) -> None:
        if self.plain.closed:
            return
        self._loop.remove_reader(self._descriptor)
        self.plain.close(linger=0)
        for _, sent in self._unsent:
            if not sent.done():
                sent.set_exception(zmq.ZMQError(zmq.ENOTSOCK))
        self._unsent.clear()

    def _look(self) -> None:
        """The descriptor tells that something has changed, once: everything that may have changed is looked at."""
        self._looking = True
        try:
            more = self._receive_some()
        except BaseException:
            more = True
            raise
        finally:
            self._looking = False
            if more:
                self._look_soon()
        self._send_waiting()

    def _receive_some(self) -> bool:
        """Whether there may be more."""
        for _ in range(IN_A_ROW):
            if self.plain.closed:
                return False
            # Asked in any case: until then the descriptor stays readable, and the event loop would not rest.
            has_come = int(self.plain.get(zmq.EVENTS)) & _READABLE
            if not has_come or self._take is None:
                return False
            self._take(self.plain.recv_multipart(zmq.NOBLOCK))
        return True

    def _send_waiting(self) -> None:
        while self._unsent and not self.plain.closed:
            frames, sent = self._unsent[0]
            if not sent.done():  # otherwise its sender no longer waits
                try:
                    self.plain.send_multipart(frames, zmq.NOBLOCK)
                except zmq.Again:
                    break
                except zmq.ZMQError as error:
                    sent.set_exception(error)
                else:
                    sent.set_result(None)
            self._unsent.popleft()
        self._look_again()

    def _look_again(self) -> None:
        """Sending notices what has come and that there is room again, and then the descriptor no longer tells."""
        if self._looking or self.plain.closed:
            return
        waits_for = _READABLE if self._take is not None else 0
        if self._unsent and self.plain.type == zmq.DEALER:  # a ROUTER has room while any of its peers has
            waits_for |= _WRITABLE
        if waits_for and int(self.plain.get(zmq.EVENTS)) & waits_for:
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)
