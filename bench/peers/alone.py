"""Run a command where nothing else uses the network: in a network namespace of its own with only loopback, where this
user may make one; else as it is.    python alone.py COMMAND ..."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1


def leave_the_network() -> bool:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return True


if __name__ == "__main__":
    os.environ["PEERS_ALONE"] = str(int(leave_the_network()))
    os.execvp(sys.argv[1], sys.argv[1:])
