"""The facts of a run, as the ledger takes and returns them: frozen, and free of the database. Open rounds and their
leases are those of ../policy/rounds.py. Next: ledger.py."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blocktrain.swarm.policy.audits import AuditReport
from blocktrain.swarm.policy.evaluations import weights_that_count
from blocktrain.swarm.policy.rounds import Round
from blocktrain.swarm.policy.vetting import VetReport

Role = Literal["admin", "worker", "viewer"]
LeaseState = Literal["open", "reported", "expired"]
ROLES: tuple[Role, ...] = ("admin", "worker", "viewer")


@dataclass(frozen=True, kw_only=True)
class Run:
    spec: str  # TOML or JSON, as the run was started
    spec_digest: str
    corpus_sha256: str
    corpus: Mapping[str, str] = field(default_factory=dict)  # split: blob
    protocol: int
    paused: bool = False
    created_s: float

    @property
    def id(self) -> str:
        """What signatures name. Two runs of one spec differ by when they were founded."""
        founded = f"{self.spec_digest} {self.corpus_sha256} {float(self.created_s)!r}"
        return hashlib.sha256(founded.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class AccessToken:
    name: str
    role: Role
    created_s: float
    revoked_s: float | None


@dataclass(frozen=True, kw_only=True)
class WorkerRecord:
    """What a worker last said of itself, and what it contributed."""

    id: str  # Ed25519 public key, hexadecimal
    name: str
    device: str
    memory_bytes: int
    steps_per_s: float
    first_seen_s: float
    last_seen_s: float
    updates: int = 0  # accepted
    tokens: int = 0
    update_bytes: int = 0  # of the accepted payloads
    measured_steps_per_s: float | None = None  # from its updates: what its leases are sized by
    owed: int = 0  # updates that it must deliver until rounds wait for it again


@dataclass(frozen=True, kw_only=True)
class NewVersion:
    block: int
    version: int
    sha256: str
    momentum_sha256: str | None = None  # of the outer optimiser
    difference_sha256: str | None = None  # from the version before


@dataclass(frozen=True, kw_only=True)
class Version(NewVersion):
    """`phase`, `round` and `parent` are None for an initial block, which is version 0."""

    phase: int | None
    round: int | None
    parent: int | None
    created_s: float


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    phase: int
    step: int  # position in its learning-rate schedule
    finished: bool


@dataclass(frozen=True)
class RoundRecord:
    round: Round
    extensions: int
    closed_s: float | None
    reason: str


@dataclass(frozen=True)
class Standing:
    """What work there is: whether the run is paused, the phases so far, and the open round of each phase."""

    paused: bool
    phases: tuple[PhaseRecord, ...]
    rounds: Mapping[int, Round]


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    id: str
    phase: int
    round: int
    shard: int
    worker: str
    step_start: int
    steps: int
    granted_s: float
    due_s: float
    deadline_at_s: float
    state: LeaseState


@dataclass(frozen=True, kw_only=True)
class NewUpdate:
    id: str  # sha256 of the payload
    lease: str
    worker: str  # its public key
    phase: int
    base: Mapping[int, int]  # block: version
    tokens: int
    steps: int
    codec: str
    num_bytes: int
    norm: float
    lag: int  # versions it was built behind
    weight: float
    loss: float
    received_s: float
    refused: str | None = None  # why; a refused update is never merged
    signature: str


@dataclass(frozen=True, kw_only=True)
class Update(NewUpdate):
    number: int  # counts up in the order of arrival
    merged_phase: int | None
    merged_round: int | None


@dataclass(frozen=True)
class MergeWeight:
    """What an update weighed in the merge of its round. Merging with these again gives the same bits."""

    update: str
    weight: float  # 0: left out
    scale: float  # what its Δ was multiplied with
    reason: str = ""  # why it was left out


@dataclass(frozen=True)
class Contribution:
    """One accepted update, and who made it."""

    update: Update
    worker_name: str
    round: int  # that it was leased in
    shard: int


@dataclass(frozen=True, kw_only=True)
class RoundLoss:
    phase: int
    round: int
    step: int
    at_s: float
    loss: float
    updates: int
    tokens: float


@dataclass(frozen=True, kw_only=True)
class Audit:
    """An update that other workers compute again, and what they reported so far."""

    number: int
    update: Update
    lease: LeaseRecord  # the audited one
    asked: tuple[AuditLease, ...]
    outcome: str | None

    @property
    def reports(self) -> tuple[AuditReport, ...]:
        reported = (x for x in self.asked if x.distances is not None)
        return tuple(AuditReport(x.worker, x.distances or {}) for x in reported)


@dataclass(frozen=True, kw_only=True)
class AuditSummary:
    """A closed audit, as people see it."""

    worker: str  # whose update was computed again
    phase: int
    round: int
    outcome: str
    closed_s: float


@dataclass(frozen=True, kw_only=True)
class AuditLease:
    id: str
    audit: int
    worker: str
    granted_s: float
    deadline_at_s: float
    payload: str | None  # the blob that it sent
    num_bytes: int | None
    loss: float | None
    distances: Mapping[str, float] | None  # worker: how far its result is from that one's
    signature: str | None


@dataclass(frozen=True, kw_only=True)
class VetSeat:
    """A worker that was asked to score updates, and what it reported."""

    id: str
    vetting: int
    worker: str
    granted_s: float
    losses: Mapping[str, Any] | None  # the fields of its report
    signature: str | None
    contradicted: bool

    @property
    def report(self) -> VetReport | None:
        if self.losses is None:
            return None
        told = self.losses
        return VetReport(self.worker, told["base"], told["together"], tuple(told["alone"]), tuple(told["without"]))


@dataclass(frozen=True, kw_only=True)
class VettingRecord:
    """Updates of one round that workers score before it is merged."""

    number: int
    phase: int
    round: int
    updates: tuple[str, ...]
    chosen: tuple[str, ...]
    draw: int
    opened_s: float
    deadline_at_s: float
    verdict: Mapping[str, Any] | None  # outcome, reason, and update: why it is left out
    closed_s: float | None
    seats: tuple[VetSeat, ...]

    @property
    def reports(self) -> tuple[VetReport, ...]:
        return tuple(report for seat in self.seats if (report := seat.report) is not None)

    @property
    def harmful(self) -> Mapping[str, str]:
        return self.verdict["harmful"] if self.verdict else {}


@dataclass(frozen=True, kw_only=True)
class RollbackRecord:
    """A version that an admin made: what version `source` was or, with a worker, what the rounds since then give
    without it."""

    phase: int
    round: int  # the first one after it
    block: int
    version: int
    source: int
    worker: str | None
    reason: str
    at_s: float


@dataclass(frozen=True, kw_only=True)
class EvaluationLease:
    id: int
    worker: str
    versions: Mapping[int, int]  # block: version
    granted_s: float
    deadline_at_s: float
    reported: bool


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    lease: int
    worker: str
    versions: Mapping[int, int]
    split: str
    scores: Any
    combine: Mapping[str, tuple[float, ...]]  # weights of a composition, fitted to exactly these versions
    at_s: float


@dataclass(frozen=True)
class ModelVersions:
    """The newest version of every block, how far the phases are, and the newest evaluations. These may be of older
    versions: the weights that were fitted to those do not belong to these."""

    blocks: Mapping[int, Version]
    phases: tuple[PhaseRecord, ...]
    evaluations: tuple[Evaluation, ...]

    @property
    def evaluation(self) -> Evaluation | None:
        return self.evaluations[-1] if self.evaluations else None

    @property
    def versions(self) -> dict[int, int]:
        return {block: version.version for block, version in self.blocks.items()}

    @property
    def combine(self) -> Mapping[str, Sequence[float]]:
        return weights_that_count([x for x in self.evaluations if dict(x.versions) == self.versions])


@dataclass(frozen=True, kw_only=True)
class Event:
    number: int
    at_s: float
    kind: str
    text: str
    data: Any
