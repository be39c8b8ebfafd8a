"""A lease with blobs that it names, so that the worker need not ask for each of them: the JSON of a message, a line
feed, and the bytes of the blobs one after the other. And the header that says what the worker holds. Pure: no sockets.
Next: swarm/coordinator/attaching.py, which chooses the blobs; swarm/worker/client.py, which keeps them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, ValidationError

from blocktrain.errors import TensorError
from blocktrain.wire.messages import Blob, Message, TrainLease
from blocktrain.wire.safetensors import Encoded

HOLDS_HEADER = "BlockTrain-Holds"
MEDIA_TYPE = "application/octet-stream"
MAX_ATTACHED = 512  # blobs
MOST_HELD = 256  # words of the header

_VERSION, _PAYLOAD = re.compile(r"([0-9]{1,15})\.([0-9]{1,15})"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Held:
    """What a worker holds: versions of blocks, and the payloads that it sent. It may hold more."""

    versions: frozenset[tuple[int, int]] = frozenset()  # (block, version)
    payloads: frozenset[str] = frozenset()

    def header(self) -> str:
        words = [f"{block}.{version}" for block, version in sorted(self.versions)] + sorted(self.payloads)
        return " ".join(["held", *words[:MOST_HELD]])

    @classmethod
    def parse(cls, header: str) -> Self:
        """Words that mean nothing are left out: the header is a hint."""
        words = header.split()[: 1 + MOST_HELD]
        versions = (match for word in words if (match := _VERSION.fullmatch(word)))
        return cls(
            frozenset((int(match[1]), int(match[2])) for match in versions),
            frozenset(word for word in words if _PAYLOAD.fullmatch(word)),
        )


class LeaseWithBlobs(Message):
    lease: TrainLease
    blobs: Annotated[tuple[Blob, ...], Field(max_length=MAX_ATTACHED)]  # whose bytes follow, in this order


def encode_attached(lease: TrainLease, blobs: Sequence[Blob], contents: Iterable[Encoded]) -> list[Encoded]:
    """As chunks that follow each other: the contents are not copied."""
    message = LeaseWithBlobs(lease=lease, blobs=tuple(blobs))
    return [message.model_dump_json().encode() + b"\n", *contents]


def read_attached(data: bytes) -> tuple[TrainLease, dict[str, memoryview]]:
    """The lease, and the bytes of its blobs by their hashes. TensorError if they are not what the message says."""
    head, _, _ = data.partition(b"\n")
    try:
        message = LeaseWithBlobs.model_validate_json(head)
    except ValidationError as error:
        raise TensorError(f"a lease with blobs cannot be read ({error.errors()[0]['msg']}): ask again") from None
    rest, contents = memoryview(data)[len(head) + 1 :], dict[str, memoryview]()
    for blob in message.blobs:
        content, rest = rest[: blob.num_bytes], rest[blob.num_bytes :]
        if hashlib.sha256(content).hexdigest() != blob.sha256:
            raise TensorError(f"blob {blob.sha256[:12]}… arrived damaged with a lease: ask again")
        contents[blob.sha256] = content
    return message.lease, contents
