"""A TCP proxy with bad weather: it cuts connections, delays, changes and repeats what it passes on. Seeded: the draws
are the same, their order is that of the connections."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

CHUNK_BYTES = 1 << 16
LONGEST_DELAY_S = 0.2
REPEATED_S = 2.0  # that the answer to a repeated request is waited for


@dataclass(frozen=True)
class TcpWeather:
    """Chances, for each chunk that arrives."""

    cut: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    repeat: float = 0.0


FAIR = TcpWeather()
STORM = TcpWeather(cut=0.03, delay=0.2, corrupt=0.01, repeat=0.05)


class Proxy:
    """Listens on a free port and passes everything on to another port of this machine."""

    def __init__(self, target_port: int, seed: int) -> None:
        self._target = "127.0.0.1", target_port
        self._draw, self._lock = random.Random(f"proxy {seed}"), threading.Lock()
        self.weather, self.counts = FAIR, dict.fromkeys(("cut", "delay", "corrupt", "repeat"), 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()
        self._pump(client, server, True)

    def _pump(self, source: socket.socket, sink: socket.socket, is_request: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                fate = self._fate()
                if "cut" in fate:
                    break
                if "delay" in fate:
                    time.sleep(LONGEST_DELAY_S * random.random())
                sink.sendall(self._changed(data) if "corrupt" in fate else data)
                if "repeat" in fate and is_request:
                    self._send_again(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _fate(self) -> set[str]:
        with self._lock:
            fate = {what for what, chance in vars(self.weather).items() if self._draw.random() < chance}
            for what in fate:
                self.counts[what] += 1
            return fate

    def _changed(self, data: bytes) -> bytes:
        with self._lock:
            at, bit = self._draw.randrange(len(data)), 1 << self._draw.randrange(8)
        return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]

    def _send_again(self, data: bytes) -> None:
        """The same bytes on another connection, as a network that repeats a request does. Nobody reads the answer."""
        with suppress(OSError), socket.create_connection(self._target, timeout=REPEATED_S) as again:
            again.sendall(data)
            again.recv(CHUNK_BYTES)
