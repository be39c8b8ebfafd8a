"""The HTTP messages of workers and the protocol's version: small frozen models, nothing else. Messages never hold
tensors, only their names, sizes and hashes; the bytes are sent as blobs.
Next: people_messages.py, those for people; swarm/coordinator/routes.py, which answers; swarm/worker/client.py, which
sends them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 5
INDEX_BLOB, TOKENIZER_BLOB = "index", "tokenizer"  # of a prepared corpus, among RunInfo.corpus
WORKER_HEADER = "BlockTrain-Worker"  # the worker that downloads, so that the status shows each worker's traffic
UPLOAD_HEADER = "Blocktrain-Upload-Location"  # where a worker may put an upload itself

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PublicKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # Ed25519
Signature = Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
Natural = Annotated[int, Field(ge=0, lt=2**53, strict=True)]  # neither true nor 1.0 nor "1"
InQuery = Annotated[int, Field(ge=0, lt=2**53)]  # the same, written as text
NO_NUL = "^[^\x00]*$"  # PostgreSQL stores no text that has one
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=NO_NUL)]
TensorName = Annotated[str, Field(min_length=1, max_length=200, pattern=NO_NUL)]
Seconds = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # a span, or since 1970
MAX_LOSS = 1e4  # nats per byte; a model that knows nothing has 5.5
MAX_SCORE = 1e9
Loss = Annotated[float, Field(ge=0, le=MAX_LOSS)]
ScoreValue = Annotated[float, Field(ge=-MAX_SCORE, le=MAX_SCORE)]
Steps = Annotated[int, Field(ge=1, lt=2**53, strict=True)]
Shape = Annotated[tuple[Natural, ...], Field(max_length=8)]
MAX_SCORES = 2**12  # of an evaluation: some readings and every block, per path
CombineWeights = dict[str, Annotated[tuple[ScoreValue, ...], Field(fail_fast=True)]]  # of the composition, per path


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Blob(Message):
    """Bytes that can be downloaded by their hash."""

    sha256: Sha256
    num_bytes: Natural


class BlockVersion(Message):
    """One version of a block. `from_previous` leads to it from the version before, if that takes fewer bytes."""

    block: Natural
    version: Natural
    tensors: Blob
    from_previous: Blob | None = None


class RunInfo(Message):
    """What a worker needs to know about the run. Only a coordinator that is added changes it."""

    protocol: InQuery = PROTOCOL_VERSION
    run: Sha256  # its id: part of everything that is signed
    coordinators: tuple[PublicKey, ...]  # the keys that sign receipts
    spec: dict[str, Any]
    spec_digest: Sha256
    corpus_sha256: Sha256
    corpus: dict[str, Blob]  # of raw bytes: split -> its bytes; of a prepared corpus: docs/protocol.md


UNSIGNED = "00" * 64


class Signed(Message):
    """A message that a key signs. The signature covers the run's id and every other field, so that a message for one
    run is none for another. The JSON has sorted keys: whoever knows the fields can check the signature later."""

    signature: Signature = UNSIGNED

    @property
    def signer(self) -> str:
        raise NotImplementedError

    def signed_bytes(self, run: str) -> bytes:
        fields = self.model_dump(mode="json", exclude={"signature"})
        return f"{run}\n{json.dumps(fields, sort_keys=True, separators=(',', ':'))}".encode()


class SignedByWorker(Signed):
    worker: PublicKey

    @property
    def signer(self) -> str:
        return self.worker


class LeaseRequest(SignedByWorker):
    """A worker describes itself and asks for work. Each request has a larger `nonce` than the one before. A worker that
    does not know its last one asks with 1: the refusal tells it."""

    protocol: Natural
    nonce: Natural
    name: Name
    device: Name
    memory_bytes: Natural
    steps_per_s: Annotated[float, Field(ge=0, le=1e9)]
    phase: Natural | None = None  # the phase whose blocks and optimiser state the worker holds


MAX_LEASE_SHARDS = 64  # that a lease names; a worker that needs more fetches them when it needs them
LeaseText = Annotated[tuple[Blob, ...], Field(max_length=MAX_LEASE_SHARDS)]


class TrainLease(Message):
    kind: Literal["train"] = "train"
    lease: Name
    phase: Natural
    shard: Natural
    step_start: Natural
    steps: Steps
    time_left_s: Seconds  # until the deadline
    afresh: bool = False  # starts with new optimiser state and nothing unsent, so that others can compute it again
    trained: tuple[BlockVersion, ...]
    below: tuple[BlockVersion, ...]
    ahead: tuple[BlockVersion, ...]
    text: LeaseText = ()  # the shards of a prepared corpus that its steps read, in this order; none for raw text
    next_text: LeaseText = ()  # those of the steps after it, to be fetched meanwhile


class EvaluateLease(Message):
    kind: Literal["evaluate"] = "evaluate"
    lease: Name
    time_left_s: Seconds
    blocks: tuple[BlockVersion, ...]
    max_windows: Steps


MAX_VETTED = 64  # updates that one worker scores


class VetUpdate(Message):
    """An update that waits to be merged, its share of the common step, and the versions that it was built on. `earlier`
    are those before them, for codecs that code from a block's course."""

    payload: Blob
    share: Annotated[float, Field(ge=0, le=2**53)]
    base: tuple[BlockVersion, ...]
    earlier: tuple[BlockVersion, ...] = ()


class VetLease(Message):
    """Asks a worker to score updates on held-out text. `draw` chooses the windows."""

    kind: Literal["vet"] = "vet"
    lease: Name
    time_left_s: Seconds
    phase: Natural
    draw: Natural
    batches: Steps
    trained: tuple[BlockVersion, ...]
    below: tuple[BlockVersion, ...]
    ahead: tuple[BlockVersion, ...]
    updates: Annotated[tuple[VetUpdate, ...], Field(max_length=MAX_VETTED)]


class Wait(Message):
    """There is no work now: ask again after `seconds`."""

    kind: Literal["wait"] = "wait"
    seconds: Seconds
    reason: str


class Finished(Message):
    kind: Literal["finished"] = "finished"
    reason: str


LeaseReply = Annotated[TrainLease | EvaluateLease | VetLease | Wait | Finished, Field(discriminator="kind")]


class Received(Message):
    """How many bytes of an upload have arrived. They need not be sent again."""

    received: Natural


class UpdateNotice(SignedByWorker):
    """An update whose payload has been uploaded."""

    lease: Name
    tensors: Annotated[dict[TensorName, Shape], Field(max_length=2**13)]  # name -> shape of every tensor in the payload
    payload: Blob
    steps: Steps
    tokens: Steps
    loss: Loss


class UpdateReceipt(Signed):
    """The update is stored: it survives a crash of the coordinator. Signed by the coordinator: a worker can prove what
    was acknowledged."""

    coordinator: PublicKey
    update: Sha256
    lease: Name
    worker: PublicKey
    lag: Natural  # how many versions behind the newest one it was built
    weight: Annotated[float, Field(ge=0, le=2**53)]
    duplicate: bool

    @property
    def signer(self) -> str:
        return self.coordinator


class Sample(Message):
    """A prompt of held-out text and how the evaluated model continues it, for people to read."""

    prompt: Annotated[str, Field(max_length=100, pattern=NO_NUL)]
    text: Annotated[str, Field(max_length=200, pattern=NO_NUL)]


class EvaluationNotice(SignedByWorker):
    lease: Name
    scores: Annotated[  # the status shows them
        tuple[dict[str, str | Natural | ScoreValue], ...], Field(max_length=MAX_SCORES, fail_fast=True)
    ]
    combine: CombineWeights
    samples: Annotated[tuple[Sample, ...], Field(max_length=4)] = ()  # and these


VetLosses = Annotated[tuple[Loss, ...], Field(max_length=MAX_VETTED)]


class VetNotice(SignedByWorker):
    """The held-out losses of a vetting, in nats per token: of the version, of the common step, and for each update of
    the version moved by it alone and of the common step with it replaced by zero."""

    lease: Name
    base: Loss
    together: Loss
    alone: VetLosses
    without: VetLosses


class ModelManifest(Message):
    """The newest consistent model: one version of every block, and the steps of each phase at these versions. `combine`
    is empty unless it was fitted to exactly these versions."""

    spec: dict[str, Any]
    spec_digest: Sha256
    corpus_sha256: Sha256
    blocks: tuple[BlockVersion, ...]
    finished: tuple[InQuery, ...]
    steps: dict[InQuery, InQuery]  # phase -> steps done
    combine: CombineWeights


class Problem(Message):
    """The answer to every refused request: a code for programs, and a sentence with the remedy for people."""

    code: Name
    message: str
    retry: bool
    number: Natural | None = None  # with the code "replayed": of the worker's last answered request
