"""A bucket in which blobs are stored (s3://, gs://, az://, …): the methods of a folder, by obstore. An object appears
whole when its writer is closed. Next: folder.py, which says what the methods do and raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from tempfile import SpooledTemporaryFile, TemporaryFile
from typing import BinaryIO, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import from_url

from blocktrain.errors import ConfigError
from blocktrain.io.files import mapped_file
from blocktrain.swarm.coordinator.storage.errors import sentence
from blocktrain.swarm.coordinator.storage.folder import Data

SEND_BYTES = 8 * 2**20  # of a large blob per request; two requests run at once
SPOOLED_BYTES = 2**16  # of a part that stay in memory while the rest arrives


class Bucket:
    """Credentials come from the environment as that service's own tools take them."""

    uses_threads = True

    def __init__(self, url: str) -> None:
        self.where = url
        try:
            self.store = from_url(url)
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"{url} cannot hold blobs ({sentence(error)}): give a folder or a URL like s3://bucket/run, and the "
                f"service's settings in its environment variables"
            ) from None

    def state(self, key: str) -> None:
        """There is none: a bucket checks its objects itself."""

    def size(self, key: str) -> int:
        return int(self.store.head(key)["size"])

    def read(self, key: str) -> memoryview:
        """Copied to a temporary file."""
        with TemporaryFile() as file:
            for chunk in self.store.get(key).stream(min_chunk_size=SEND_BYTES):
                file.write(chunk)
            file.flush()
            return mapped_file(file)

    def chunks(self, key: str, start: int, end: int) -> Iterator[bytes]:
        for begin in range(start, end, SEND_BYTES):
            yield bytes(self.store.get_range(key, start=begin, end=min(begin + SEND_BYTES, end)))

    def write(self, key: str, chunks: Iterable[Data]) -> None:
        writer = obstore.open_writer(self.store, key, buffer_size=SEND_BYTES, max_concurrency=2)
        for chunk in chunks:
            writer.write(chunk)
        writer.close()

    def write_as(self, key: Callable[[], str], chunks: Iterable[Data]) -> None:
        self.write(key(), chunks)

    def sync(self, key: str) -> None:
        """An object is safe when it is there."""

    def list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        for metas in self.store.list(prefix):
            for meta in metas:
                yield meta["path"], meta["size"], meta["last_modified"].timestamp()

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def remove_folder(self, name: str) -> None:
        """There are none."""

    @contextmanager
    def receiving(self) -> Iterator[BinaryIO]:
        with SpooledTemporaryFile(SPOOLED_BYTES) as spooled:
            yield cast("BinaryIO", spooled)

    def keep_received(self, key: str, received: BinaryIO) -> None:
        received.seek(0)
        self.write(key, iter(lambda: received.read(SEND_BYTES), b""))

    def arrived(self, file: BinaryIO) -> tuple[str, int] | None:
        return None

    def inode(self, key: str) -> int | None:
        return None

    def rename(self, key: str, inode: int, new_key: str, is_synced: bool = False) -> bool:
        return False

    def disk_bytes(self) -> tuple[int, int] | None:
        return None
