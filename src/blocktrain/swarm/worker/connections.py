"""HTTP/1.1 connections to one coordinator, by the standard library: requests and answers are httpx's, but one request
takes a fifth of the processor time of `httpx.Client`, and a large answer is read in large pieces. It knows neither
redirects nor proxies. Next: client.py, which uses it."""

from __future__ import annotations

import selectors
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection

import httpx

READ_BYTES = 2**18  # of an answer, at most at once: what has come is kept when the connection breaks


class Connections:
    """Threads may share it: each request has a connection of its own, which is kept for the next one."""

    def __init__(self, host: str, port: int, timeout_s: float, context: ssl.SSLContext | None) -> None:
        self._host, self._port, self._timeout_s, self._context = host, port, timeout_s, context
        self._idle, self._is_closed = deque[HTTPConnection](), False

    def send(self, request: httpx.Request, *, stream: bool) -> httpx.Response:
        """The answer; of a `stream`, the body is read when it is asked for. Raises httpx.TransportError."""
        connection = self._connection()
        try:
            with _as_httpx(request):
                answer = _answer_of(connection, request)
        except BaseException:
            connection.close()
            raise
        body = _Body(answer, connection, self._keep, request)
        response = httpx.Response(answer.status, headers=answer.getheaders(), stream=body, request=request)
        if not stream:
            try:
                response.read()
            except BaseException:
                response.close()
                raise
        return response

    def close(self) -> None:
        """Also a connection that another thread uses now is closed, when its answer was read."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _keep(self, connection: HTTPConnection) -> None:
        self._idle.append(connection)
        if self._is_closed:
            self.close()

    def _connection(self) -> HTTPConnection:
        while self._idle:
            connection = self._idle.pop()
            if _is_quiet(connection):
                return connection
            connection.close()
        if self._context is None:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._context)


class _Body(httpx.SyncByteStream):
    """The body of an answer. When it was read to its end, its connection is kept."""

    def __init__(
        self,
        answer: HTTPResponse,
        connection: HTTPConnection,
        keep: Callable[[HTTPConnection], None],
        request: httpx.Request,
    ) -> None:
        self._answer, self._connection, self._keep, self._request = answer, connection, keep, request

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx(self._request):
            while chunk := self._answer.read1(READ_BYTES):
                yield chunk
            if self._answer.length:
                raise httpx.RemoteProtocolError(f"the connection ended {self._answer.length} bytes too soon")

    def close(self) -> None:
        answer = self._answer
        was_read = answer.length == 0 or (answer.length is None and answer.isclosed())
        answer.close()
        if was_read and not answer.will_close:
            self._keep(self._connection)
        else:
            self._connection.close()


def _answer_of(connection: HTTPConnection, request: httpx.Request) -> HTTPResponse:
    target = request.url.raw_path.decode("ascii")
    connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers.raw:
        connection.putheader(name, value)
    try:
        connection.endheaders()
        assert isinstance(request.stream, httpx.SyncByteStream)
        for chunk in request.stream:
            connection.send(chunk)
    except (BrokenPipeError, ConnectionResetError):
        if connection.sock is None:
            raise
        # The coordinator may have answered before it has read all.
    return connection.getresponse()


def _is_quiet(connection: HTTPConnection) -> bool:
    """Whether nothing has come since the last answer: what comes then is the end of the connection."""
    if connection.sock is None:
        return False
    with selectors.DefaultSelector() as selector:  # select.select knows no socket with a number above 1023
        selector.register(connection.sock, selectors.EVENT_READ)
        return not selector.select(0)


@contextmanager
def _as_httpx(request: httpx.Request) -> Iterator[None]:
    """The errors of sockets and of http.client as those of httpx."""
    try:
        yield
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error) or "timed out", request=request) from None
    except HTTPException as error:
        raise httpx.RemoteProtocolError(str(error) or type(error).__name__, request=request) from None
    except OSError as error:
        raise httpx.ConnectError(str(error) or type(error).__name__, request=request) from None
