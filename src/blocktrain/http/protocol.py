"""uvicorn's HTTP protocol with bounds: a client that sends too much, or too slowly, or does not read its answer, is
refused or disconnected. Costs one counter per chunk of a body. Next: limits.py, the bounds; server.py, the server."""

from __future__ import annotations

from contextlib import suppress
from http import HTTPStatus

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from blocktrain.http.limits import HttpLimits

MAX_PIPELINED = 8  # requests that wait behind another on their connection
LINGER_S, LINGER_BYTES = 2.0, 2**20  # how long, and how much, of a refused body is thrown away
State = tuple[str, int, int]  # what a connection waits for, and numbers that change with its progress


class _Refused(Exception):
    """Ends the parser's work; the answer is `BoundedProtocol.refusal`."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. The server calls `check` twice per second."""

    def __init__(self, config: uvicorn.Config, server_state: ServerState, limits: HttpLimits) -> None:
        super().__init__(config, server_state, {})
        self._limits = limits
        self._in_headers, self._in_body, self._lingers = True, False, False
        self._num_requests = self._num_pauses = self._header_bytes = self._received_bytes = 0
        self._refusal = (400, "the request is not HTTP/1.1")
        self._seen: State = ("headers", 0, 0)
        self._since_s: float | None = None

    # What comes in

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._lingers:
            if self._received_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        if not self._in_body and not self._in_headers:
            self._begin_headers()
        if self._in_headers:
            room = self._limits.max_header_bytes - self._header_bytes
            self._header_bytes += len(data)
            if len(data) > room:  # the headers must end in what is left of their room; a body may follow
                super().data_received(data[:room])
                if self._in_headers and not self.transport.is_closing():
                    self._refuse(431, f"the headers have more than {self._limits.max_header_bytes} bytes: send less")
                data = data[room:]
        if self.parser is not None and not self.transport.is_closing() and not self._lingers:
            super().data_received(data)

    def _begin_headers(self) -> None:
        self._in_headers, self._in_body, self._header_bytes = True, False, 0
        self._num_requests += 1

    def on_message_begin(self) -> None:
        if not self._in_headers:  # it came right behind another request
            self._begin_headers()
        self._num_headers = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1  # trailers count too
        if self._num_headers > self._limits.max_headers:
            self._fail(431, f"there are more than {self._limits.max_headers} headers: send fewer")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(429, f"more than {MAX_PIPELINED} requests wait on one connection: wait for the answers")
        self._in_headers, self._in_body = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A first chunk stays what it is: added to a bytearray, it would be copied now and once more for the app."""
        if not self.cycle.body:
            self.cycle.body = b""  # type: ignore[assignment]
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    # What goes out

    def on_response_complete(self) -> None:
        """An answer before the end of the body is a refusal: the rest is not waited for. It is thrown away for a
        moment, because a connection that is closed with unread bytes loses the answer on its way."""
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._lingers, self._received_bytes = True, 0
            self._unset_keepalive_if_required()
            if self.transport.can_write_eof():
                with suppress(OSError):  # the client is gone, and the transport has not noticed yet
                    self.transport.write_eof()

    def pause_writing(self) -> None:
        self._num_pauses += 1
        super().pause_writing()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it when the parser fails."""
        self._refuse(*self._refusal)

    def _fail(self, status: int, message: str) -> None:
        self._refusal = (status, message)
        raise _Refused

    def _refuse(self, status: int, message: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of an answer there is no room for another
            return
        body = f"{message}\n".encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    # Time

    def check(self, now_s: float) -> None:
        """Ends the connection if it has waited too long for its client."""
        state = self._state()
        if state != self._seen or self._since_s is None:
            self._seen, self._since_s = state, now_s
        elif now_s - self._since_s >= self._patience_s(state[0]):
            if state[0] == "headers" and self._header_bytes:
                self._refuse(408, f"the headers did not end in {self._limits.header_s:g} s: send them at once")
            else:
                self.transport.abort()

    def _state(self) -> State:
        unsent = self.transport.get_write_buffer_size() // self._limits.progress_bytes
        if self.transport.is_closing():
            return "closing", 0, unsent
        if self._lingers:
            return "lingering", 0, 0
        if self.flow.write_paused:
            return "unread", self._num_pauses, unsent
        if self._in_headers:
            return "headers", self._num_requests, 0
        if self._in_body and not self.flow.read_paused and not self.cycle.waiting_for_100_continue:
            return "body", self._num_requests, self._received_bytes // self._limits.progress_bytes
        return "at work", 0, 0  # or idle, where uvicorn's own timer ends it

    def _patience_s(self, state: str) -> float:
        limits = self._limits
        patience_s = {
            "closing": limits.unread_s,
            "lingering": LINGER_S,
            "unread": limits.unread_s,
            "headers": limits.header_s,
            "body": limits.progress_s,
        }
        return patience_s.get(state, float("inf"))
