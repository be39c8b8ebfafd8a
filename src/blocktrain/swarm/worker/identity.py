"""Who a worker is: an Ed25519 key in its home directory. Its contributions count for this key, so it can be moved to
another machine or kept as a backup. Next: worker.py, which signs with it.

    HOME/key, HOME/key-2, …    one per worker of this directory that works at the same time"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from blocktrain.errors import ConfigError, StorageError
from blocktrain.io.private import read_private, write_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@contextmanager
def own_key(home: Path) -> Iterator[tuple[Ed25519PrivateKey, int]]:
    """The first key of this directory that no other worker uses now, and its number. Makes one if needed: to the
    coordinator, two workers with the same key would be one."""
    from filelock import FileLock, Timeout

    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{home} cannot be created ({error.strerror}): choose another --home") from None
    for number in count(1):
        path = key_file(home, number)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        except OSError as error:
            raise StorageError(f"{home} cannot be written ({error.strerror}): choose another --home") from None
        try:
            yield _key(path), number
        finally:
            lock.release()
        return


def _key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    data = read_private(path)
    if data is None:
        made = Ed25519PrivateKey.generate()
        write_private(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return made
    return _parsed(data, path, "restore it, or delete it to join as a new worker")


def _parsed(data: bytes, path: Path, remedy: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with suppress(ValueError, TypeError):
        key = load_pem_private_key(data, password=None)
        if isinstance(key, Ed25519PrivateKey):
            return key
    raise ConfigError(f"{path} is not an Ed25519 key in PEM format: {remedy}")


def key_file(home: Path, number: int = 1) -> Path:
    return home / ("key" if number == 1 else f"key-{number}")


def export_key(home: Path, number: int, target: Path) -> str:
    """Copies a worker's key to a file that only its owner may read. Returns the worker's public key."""
    path = key_file(home, number)
    if (data := read_private(path)) is None:
        raise ConfigError(f"{path} is not there: no worker has used this --home, name another")
    key = _parsed(data, path, "restore it")
    if target.exists():
        raise ConfigError(f"{target} exists already: name another file, or delete it")
    write_private(target, data)
    return key.public_key().public_bytes_raw().hex()


def import_key(source: Path, home: Path, number: int) -> str:
    """The worker of this home is the one of the file from now on. A key that is there is never replaced."""
    if (data := read_private(source)) is None:
        raise ConfigError(f"{source} is not there: name a file that blocktrain keys export has written")
    key, path = _parsed(data, source, "name a file that blocktrain keys export has written"), key_file(home, number)
    there = read_private(path)
    if there is not None and there != data:
        raise ConfigError(
            f"{path} is the key of another worker: export it and delete it first, or choose another --home or --number"
        )
    write_private(path, data)
    return key.public_key().public_bytes_raw().hex()
