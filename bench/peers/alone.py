"""Run a command where nothing else uses the network, and leave nothing of it behind: in a network namespace of its own
with only loopback, where this user may make one; else as it is. What the command started and did not end is ended with
it, also when this process is told to stop.    python alone.py COMMAND ..."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
PR_SET_CHILD_SUBREAPER = 36  # whose parents end become this process's children


def leave_the_network() -> bool:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return True


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield from descendants(child)
                yield child


def end_all() -> None:
    """Again and again: one that is ended may leave children, which come here."""
    while left := list(descendants(os.getpid())):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def run(command: list[str]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        return subprocess.call(command)
    finally:
        end_all()


if __name__ == "__main__":
    os.environ["PEERS_ALONE"] = str(int(leave_the_network()))
    sys.exit(run(sys.argv[1:]))
