"""A TCP proxy before an HTTP server that counts requests by method, and bytes both ways. Next: scale_out.py."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

REQUEST = re.compile(rb"(GET|PUT|POST|HEAD|DELETE) /[^\r\n]* HTTP/1\.1\r\n")


@dataclass(frozen=True)
class Reading:
    requests: Counter[str]
    bytes_in: int
    bytes_out: int


class CountingProxy:
    def __init__(self, port: int) -> None:
        self._target, self._lock = port, threading.Lock()
        self._requests, self._bytes = Counter[str](), [0, 0]
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def read(self) -> Reading:
        with self._lock:
            return Reading(Counter(self._requests), *self._bytes)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for way, (source, target) in enumerate(((client, server), (server, client))):
                    threading.Thread(target=self._pass_on, args=(source, target, way), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, way: int) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                with self._lock:
                    self._bytes[way] += len(data)
                    if way == 0:
                        self._requests.update(method.decode() for method in REQUEST.findall(data))
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()
