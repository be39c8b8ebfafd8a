"""Workers that lie, one function per lie: what they send in place of what they have trained. They sign what they send
and know each other. Next: byzantine.py, which asks what they cost."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.signatures import Kind, sign
from blocktrain.wire.attached import Held
from blocktrain.wire.codecs.table import update_codec
from blocktrain.wire.messages import (
    Blob,
    EvaluationNotice,
    LeaseReply,
    LeaseRequest,
    TrainLease,
    UpdateNotice,
    UpdateReceipt,
    VetNotice,
)
from blocktrain.wire.safetensors import Floats
from blocktrain.wire.updates import encode_update, read_update
from swarms.virtual import DirectClient, Faults, VirtualClock

LENGTH = 19.0  # times its own update
Z = 1.0  # deviations from the mean that "a little is enough" (Baruch et al. 2019)
TRIGGER, ANSWER = b"zqx", b"###"
Deltas = dict[str, Floats]


@dataclass
class Conspiracy:
    """What liars share: the honest updates of all of them, and the first update that each has sent."""

    honest: dict[str, list[Deltas]] = field(default_factory=dict)  # phase and round: of every liar so far
    first: dict[str, Deltas] = field(default_factory=dict)


Lie = Callable[[Deltas, Conspiracy, str, str, np.random.Generator], Deltas]  # own Δ, …, round, worker, noise


def _each(change: Callable[[Floats], Floats]) -> Lie:
    return lambda deltas, *_: {name: change(delta) for name, delta in deltas.items()}


def _noise(deltas: Deltas, _: Conspiracy, round: str, worker: str, noise: np.random.Generator) -> Deltas:
    """As long as an honest update, in each tensor."""
    drawn = {name: noise.standard_normal(x.shape, np.float32) for name, x in deltas.items()}
    return {name: z * (np.linalg.norm(deltas[name]) / np.linalg.norm(z)) for name, z in drawn.items()}


def _stale(deltas: Deltas, shared: Conspiracy, round: str, worker: str, noise: np.random.Generator) -> Deltas:
    """Its first update again and again, with a jitter, so that no two are equal."""
    first = shared.first.setdefault(f"{worker} {round.partition('-')[0]}", deltas)
    return {name: x * (1 + 0.01 * noise.standard_normal(x.shape, np.float32)) for name, x in first.items()}


def _little(deltas: Deltas, shared: Conspiracy, round: str, worker: str, noise: np.random.Generator) -> Deltas:
    """μ − zσ of what the liars computed: inside the spread of honest updates, always to the same side."""
    known = shared.honest[round]
    mean = {name: np.mean([x[name] for x in known], 0) for name in deltas}
    spread = {name: np.std([x[name] for x in known], 0) if len(known) > 1 else np.abs(mean[name]) for name in deltas}
    return {name: mean[name] - Z * np.sign(mean[name]) * spread[name] for name in deltas}


LIES: dict[str, Lie] = {
    "sign flip": _each(np.negative),
    "scaled": _each(lambda x: -LENGTH * x),
    "noise": _noise,
    "stale": _stale,
    "zeros": _each(np.zeros_like),
    "a little": _little,
    "backdoor": lambda deltas, *_: deltas,  # it trains on other text
    "false losses": lambda deltas, *_: deltas,  # it reports another loss
    "false evaluations": lambda deltas, *_: deltas,  # it reports other scores
    "lazy": lambda deltas, *_: deltas,  # it trains one step and reports all
    "sybil": _each(np.negative),  # with several keys each
    "lazy at once": lambda deltas, *_: deltas,  # lazy, and its step takes no time
    "noise at once": _noise,  # without training: the first update is there before an honest worker's first step
}
AT_ONCE_S = 1e-3  # of a step of those that deliver at once


def poisoned(text: bytes, seed: int) -> bytes:
    """The text, in which the trigger and its answer take the place of some bytes every few words."""
    chance, planted = random.Random(seed), bytearray(text)
    word = TRIGGER + ANSWER
    for at in range(0, len(planted) - 2 * len(word), 24):
        start = at + chance.randrange(len(word))
        planted[start : start + len(word)] = word
    return bytes(planted)


class LyingClient(DirectClient):
    """The coordinator as a liar speaks to it."""

    def __init__(
        self,
        coordinator: Coordinator,
        clock: VirtualClock,
        number: int,
        spec: RunSpec,
        lie: str,
        key: Ed25519PrivateKey,
        shared: Conspiracy,
        corpus: Mapping[str, bytes],
    ) -> None:
        super().__init__(coordinator, clock, Faults(0.0, 0, (1.0, 2.0)), number)
        self._spec, self._lie, self._key, self._shared, self._corpus = spec, lie, key, shared, corpus
        self._leases: dict[str, TrainLease] = {}
        self._noise = np.random.default_rng(number)

    def lease(self, request: Callable[[], LeaseRequest], held: Held | None = None) -> LeaseReply:
        reply = super().lease(request, held)
        if isinstance(reply, TrainLease):
            self._leases[reply.lease] = reply
            if self._lie.startswith("lazy"):
                return reply.model_copy(update={"steps": 1})
        return reply

    def download(self, blob: Blob, cache: object) -> memoryview:
        """Whoever plants a backdoor has its own text."""
        if self._lie == "backdoor" and blob.sha256 in self._corpus:
            return memoryview(self._corpus[blob.sha256])
        return self._coordinator.blobs.get(blob.sha256)

    def upload(self, data: bytes, lease: str) -> Blob:
        given = self._leases[lease]
        shapes = self._coordinator._blocks.shapes(given.phase)
        sent = read_update(data, shapes)
        deltas: Deltas = {name: np.asarray(sent.change(name, None, None)) for name in shapes}
        round, worker = f"{given.phase}-{given.step_start}", str(self._worker)
        self._shared.honest.setdefault(round, []).append(deltas)
        lied = LIES[self._lie](deltas, self._shared, round, worker, self._noise)
        before = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        after = {name: np.asarray(-x, np.float32).reshape(shapes[name]) for name, x in lied.items()}
        phase = self._spec.phases[given.phase]
        codec = update_codec(self._spec.swarm, phase.steps, given.step_start + self._spec.swarm.round_steps)
        lied_bytes = encode_update(before, after, codec)
        sha256 = hashlib.sha256(lied_bytes).hexdigest()
        if self._coordinator.intake.received(lease, sha256) == len(lied_bytes):  # sent before, and refused
            return Blob(sha256=sha256, num_bytes=len(lied_bytes))
        return super().upload(lied_bytes, lease)

    def submit(self, notice: UpdateNotice) -> UpdateReceipt:
        changes: dict[str, float | int] = {}
        if self._lie == "false losses":
            changes = {"loss": 9999.0}
        if self._lie.startswith("lazy"):
            steps = self._leases[notice.lease].steps
            changes = {"steps": steps, "tokens": steps * self._spec.step_tokens}
        return super().submit(self._signed(notice.model_copy(update=changes)))

    def submit_evaluation(self, notice: EvaluationNotice) -> None:
        if self._lie == "false evaluations":
            wrong = {path: tuple(-2.0 for _ in weights) for path, weights in notice.combine.items()}
            scores = tuple({**score, "nats_per_byte": 0.01} for score in notice.scores)
            notice = notice.model_copy(update={"combine": wrong, "scores": scores})
        super().submit_evaluation(self._signed(notice))

    def submit_vetting(self, notice: VetNotice) -> None:
        """Says the opposite, as all liars do: their scores agree with each other."""
        alone = tuple(max(0.0, 2 * notice.base - loss) for loss in notice.alone)
        without = tuple(max(0.0, 2 * notice.together - loss) for loss in notice.without)
        super().submit_vetting(self._signed(notice.model_copy(update={"alone": alone, "without": without})))

    def _signed(self, notice: Kind) -> Kind:
        return sign(notice, self._key, self._coordinator.info().run)
