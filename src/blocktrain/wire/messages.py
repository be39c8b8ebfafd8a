"""Every HTTP message and the protocol's version: small frozen models, nothing else. Tensors never travel in here, only
their names, sizes and hashes; the bytes go as blobs. Next: swarm/coordinator/routes.py answers them,
swarm/worker/client.py asks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 2
WORKER_HEADER = "BlockTrain-Worker"  # of a fetch: whose it is, for the picture of who takes how much

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PublicKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # Ed25519
Signature = Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
Natural = Annotated[int, Field(ge=0, lt=2**53, strict=True)]  # neither true nor 1.0 nor "1"
InQuery = Annotated[int, Field(ge=0, lt=2**53)]  # a number as text
Name = Annotated[str, Field(min_length=1, max_length=100)]
TensorName = Annotated[str, Field(min_length=1, max_length=200)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Blob(Message):
    """Bytes to be fetched by their hash."""

    sha256: Sha256
    num_bytes: Natural


class BlockVersion(Message):
    """One version of a block, and the way to it from the version before, where that is smaller."""

    block: Natural
    version: Natural
    tensors: Blob
    from_previous: Blob | None = None


class RunInfo(Message):
    """What a worker needs to know once."""

    protocol: int = PROTOCOL_VERSION
    spec: dict[str, Any]
    spec_digest: Sha256
    corpus_sha256: Sha256
    corpus: dict[str, Blob]  # split -> its bytes


UNSIGNED = "00" * 64


class Signed(Message):
    """What a worker vouches for: its key signs every other field."""

    worker: PublicKey
    signature: Signature = UNSIGNED

    def signed_bytes(self) -> bytes:
        return self.model_dump_json(exclude={"signature"}).encode()


class LeaseRequest(Signed):
    """A worker asks for work with what it is. Every request has a larger `nonce` than those before: microseconds of
    the worker's clock do."""

    protocol: Natural
    nonce: Natural
    name: Name
    device: Name
    memory_bytes: Natural
    steps_per_s: Annotated[float, Field(ge=0, le=1e9)]
    phase: Natural | None = None  # the one whose blocks and optimiser state it holds


class TrainLease(Message):
    kind: Literal["train"] = "train"
    lease: Name
    phase: Natural
    shard: Natural
    step_start: Natural
    steps: Annotated[int, Field(ge=1, strict=True)]
    deadline_s: Seconds  # from now
    trained: tuple[BlockVersion, ...]
    below: tuple[BlockVersion, ...]
    ahead: tuple[BlockVersion, ...]


class EvaluateLease(Message):
    kind: Literal["evaluate"] = "evaluate"
    lease: Name
    deadline_s: Seconds
    blocks: tuple[BlockVersion, ...]
    max_windows: Annotated[int, Field(ge=1, strict=True)]


class Wait(Message):
    """Nothing to do now: ask again, and why."""

    kind: Literal["wait"] = "wait"
    seconds: Seconds
    reason: str


class Finished(Message):
    kind: Literal["finished"] = "finished"
    reason: str


LeaseReply = Annotated[TrainLease | EvaluateLease | Wait | Finished, Field(discriminator="kind")]


class Received(Message):
    """How far an upload is: these bytes need not be sent again."""

    received: Natural


class UpdateNotice(Signed):
    """An update whose payload has been uploaded."""

    lease: Name
    tensors: dict[TensorName, tuple[Natural, ...]]  # name -> shape, of all that the payload holds
    payload: Blob
    steps: Annotated[int, Field(ge=1, lt=2**53, strict=True)]
    tokens: Annotated[int, Field(ge=1, lt=2**53, strict=True)]
    loss: float


class UpdateReceipt(Message):
    """The update is safe: it survives a kill of the coordinator."""

    update: Sha256
    lag: Natural  # versions it was built behind
    weight: float
    duplicate: bool


class EvaluationNotice(Signed):
    lease: Name
    scores: tuple[dict[str, str | int | float], ...]  # numbers are finite: people's status pages show them
    combine: dict[str, tuple[float, ...]]


class ModelManifest(Message):
    """The newest consistent model: one version of every block, and how far each open phase was with them. `combine` is
    empty unless it was fitted to exactly these versions."""

    spec: dict[str, Any]
    spec_digest: Sha256
    corpus_sha256: Sha256
    blocks: tuple[BlockVersion, ...]
    finished: tuple[int, ...]
    steps: dict[int, int]  # phase -> steps done
    combine: dict[str, tuple[float, ...]]


class Page(Message):
    """What follows an entry of a list that only grows."""

    after: InQuery = 0  # the number of the last entry that is known


class EventPage(Page):
    """The newest events after one number and, to page back, before another."""

    before: InQuery = 2**53 - 1


class EventEntry(Message):
    """Something that happened, for people; `data` names who and what for programs."""

    number: Natural
    at_s: Seconds
    kind: Name
    text: str
    data: dict[str, Any]


class LossPoint(Message):
    """A closed round: the mean training loss of its updates, each weighed by its tokens."""

    round: Natural
    step: Natural  # of the phase's schedule where it began
    at_s: Seconds
    nats_per_byte: float
    updates: Natural
    tokens: Natural


class LossCurve(Message):
    phase: Natural
    blocks: tuple[Natural, ...]
    points: tuple[LossPoint, ...]


class HeldOutPoint(Message):
    """The score of the composed model as `blocktrain eval` would answer."""

    at_s: Seconds
    versions: dict[int, int]  # block -> version
    path: str
    reading: str
    nats_per_byte: float
    blocks: dict[int, float] = {}  # block -> what it scores by itself, on the same path


class Curves(Message):
    """Loss over time; long curves are thinned to at most `max_points`, the newest always among them."""

    max_points: Natural
    training: tuple[LossCurve, ...]
    held_out: tuple[HeldOutPoint, ...]


class AccessTokenRole(Message):
    """What the access token of the request may do."""

    role: Literal["admin", "worker", "viewer"]


class InviteText(Message):
    """The string that lets a machine join."""

    invite: str


class Problem(Message):
    """What every refused request gets: a code for programs, a sentence with the remedy for people."""

    code: Name
    message: str
    retry: bool
