"""The key of a chain: one file, copied to all of its hosts; whoever holds it is in the chain. A CURVE key pair that
every stage listens with and every caller shows. And which addresses need it. Next: sockets.py, which uses both."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import zmq

from blocktrain.errors import ConfigError

ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)")
ANY_PORT = ("*", "0")
HIGHEST_PORT = 65535
KEY_TEXT = """\
# The key of a chain of blocktrain stages. Whoever holds it can ask them and pass for one: keep it private.
public = "{public}"
secret = "{secret}"
"""


@dataclass(frozen=True)
class ChainKey:
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "ChainKey(…)"  # no secret in a log


def new_key_text() -> str:
    public, secret = zmq.curve_keypair()
    return KEY_TEXT.format(public=public.decode(), secret=secret.decode())


def read_key(path: Path) -> ChainKey:
    try:
        table = tomllib.loads(path.read_text(encoding="ascii"))
        key = ChainKey(str(table["public"]).encode(), str(table["secret"]).encode())
        fits = zmq.curve_public(key.secret) == key.public
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): make one with blocktrain keys {path} and copy it to all hosts"
        ) from None
    except (ValueError, KeyError, zmq.ZMQError):
        fits = False
    if not fits:
        raise ConfigError(f"{path} is not a key that blocktrain keys wrote: copy it again from another host")
    return key


def parse_address(text: str, *, listen: bool = False) -> tuple[str, str]:
    """Host and port; refused with what is wrong."""
    found = ADDRESS.fullmatch(text)
    if found is None or (found[2] != "*" and int(found[2]) > HIGHEST_PORT):
        raise ConfigError(f'"{text}" is not an address of a stage: write for example tcp://192.168.1.7:7001')
    if found[2] in ANY_PORT and not listen:
        raise ConfigError(f'"{text}" names no port: write for example tcp://192.168.1.7:7001')
    return found[1].strip("[]"), found[2]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_key(address: str, key: ChainKey | None, insecure: bool, *, listen: bool = False) -> None:
    """Anybody on the network could ask, answer or read along where there is no key."""
    host, _ = parse_address(address, listen=listen)
    if key is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{address} is not on this machine and would be open to all: make a key with blocktrain keys chain.key, "
            f"copy it to all hosts and give --keys chain.key everywhere (or --insecure on a network you trust)"
        )
