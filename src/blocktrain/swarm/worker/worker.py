"""Worker: get a lease, fetch blocks, train until the deadline, submit the update; then again. Synchronous code around
the same BlockTrainer that trains locally. A worker keeps its optimiser state and what its codec left out; it can fetch
everything else again.
Next: block_cache.py, the blocks it holds; client.py, its requests to the coordinator; train/trainer.py, the steps."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.data.corpus import Corpus
from blocktrain.errors import RequestRefused
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.model.block import block_shapes, build_block
from blocktrain.model.stack import BlockModel
from blocktrain.spec import RunSpec
from blocktrain.swarm.signatures import sign
from blocktrain.swarm.worker.block_cache import BlockCache, prune_cache
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.train.evaluate import answer, evaluate, fit_combination
from blocktrain.train.trainer import BlockTrainer, pick_device
from blocktrain.wire.codecs.table import codec_type, update_codec
from blocktrain.wire.error_feedback import ErrorFeedback
from blocktrain.wire.messages import (
    MAX_LOSS,
    PROTOCOL_VERSION,
    EvaluateLease,
    EvaluationNotice,
    Finished,
    LeaseRequest,
    RunInfo,
    TrainLease,
    UpdateNotice,
    UpdateReceipt,
    Wait,
)
from blocktrain.wire.safetensors import Array, by_block, flat

Tensors = dict[str, Array]
FINAL_CODES = (
    "token",
    "role",
    "protocol",
    "signature",
    "replayed",
)  # refusals of the worker itself: no other lease helps
REFUSED_PAUSE_S = 1.0
UNNEEDED_S = 60.0  # how long a cached blob that no lease needs is kept: another worker of the same home may read it
UPLOAD_SHARE = 0.1  # of the time until the deadline, kept for the upload


@dataclass(frozen=True)
class WorkReport:
    """What a worker reports while it works."""

    kind: str  # "lease", "step", "submitted", "refused", "wait", "evaluated", "finished"
    text: str
    loss: float | None = None


class Worker:
    """One volunteer's machine. `home` holds the key and a cache of blobs: the corpus and what the current lease
    needs."""

    def __init__(
        self,
        client: CoordinatorClient,
        home: Path,
        *,
        key: Ed25519PrivateKey,
        name: str | None = None,
        memory_bytes: int,
        device: torch.device | None = None,
        report: Callable[[WorkReport], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._cache, self._key = client, home / "blobs", key
        self._name, self._memory_bytes = name or platform.node() or "worker", memory_bytes
        self._device = device or pick_device()
        self._report, self._stop = report, stop
        self._clock, self._sleep, self._wall_clock = clock, sleep, wall_clock
        self._public_key = key.public_key().public_bytes_raw().hex()
        self._steps_per_s, self._nonce = 0.0, 0
        self._trainer: BlockTrainer | None = None

    def run(self) -> None:
        """Works until the run is finished or `stop` returns true."""
        info = self._client.run_info()
        self._spec = RunSpec.model_validate(info.spec)
        self._block_cache = BlockCache(
            self._client,
            self._cache,
            shapes=lru_cache(None)(partial(block_shapes, self._spec)),
            make_initial=lambda block: as_arrays(build_block(self._spec, block).state_dict()),
            keep_earlier=codec_type(self._spec.swarm.update).uses_course,
        )
        self._feedback = ErrorFeedback()
        self._corpus = self._fetch_corpus(info)
        self._corpus_blobs = {blob.sha256 for blob in info.corpus.values()}
        while not self._stop():
            if not self._work_once():
                return

    def _work_once(self) -> bool:
        """Works on one lease. False if the run is finished and there will be no more."""
        reply = self._client.lease(self._request)
        match reply:
            case Finished():
                self._report(WorkReport("finished", reply.reason))
                return False
            case Wait():
                self._report(WorkReport("wait", reply.reason))
                self._sleep(reply.seconds)
            case TrainLease() | EvaluateLease():
                needed = self._corpus_blobs | self._block_cache.needed_blobs(reply)
                prune_cache(self._cache, needed, before_s=self._wall_clock() - UNNEEDED_S)
                try:
                    self._train(reply) if isinstance(reply, TrainLease) else self._evaluate(reply)
                except RequestRefused as refused:
                    self._continue_after(refused)
        return True

    def _continue_after(self, refused: RequestRefused) -> None:
        """Another lease may succeed, unless the coordinator refuses the worker itself. The optimiser state and the
        unsent part stay as they were."""
        if refused.code in FINAL_CODES:
            raise refused
        self._report(WorkReport("refused", str(refused)))
        self._sleep(REFUSED_PAUSE_S)

    def _request(self) -> LeaseRequest:
        self._nonce = max(self._nonce + 1, time.time_ns() // 1000)
        unsigned = LeaseRequest(
            protocol=PROTOCOL_VERSION,
            nonce=self._nonce,
            worker=self._public_key,
            name=self._name,
            device=str(self._device),
            memory_bytes=self._memory_bytes,
            steps_per_s=self._steps_per_s,
            phase=self._trainer.phase.index if self._trainer else None,
        )
        return sign(unsigned, self._key)

    def _train(self, lease: TrainLease) -> None:
        self._report(WorkReport("lease", f"phase {lease.phase}, shard {lease.shard}, {lease.steps} steps"))
        started_s = self._clock()
        around = self._block_cache.mapped((*lease.below, *lease.ahead))
        trained = self._block_cache.trained(lease.trained)
        trainer = self._prepare_trainer(lease, by_block(self._feedback.start(flat(trained))), around)
        losses = self._run_steps(trainer, lease, started_s)
        published, after = flat(trained), as_arrays(flat(trainer.current()))
        earlier = self._block_cache.earlier(lease.trained)
        phase, steps_done = self._spec.phases[lease.phase], lease.step_start + self._spec.swarm.round_steps
        codec = update_codec(self._spec.swarm, phase.steps, steps_done)
        payload = self._feedback.compress(published, after, codec, earlier)
        self._block_cache.keep_payload(payload)
        receipt = self._submit(lease, payload, len(losses), losses[-1])
        self._feedback.accepted(payload, published, after, earlier)  # not if it was refused: all stays unsent then
        self._report(
            WorkReport("submitted", f"{len(losses)} steps, {len(payload)} bytes, lag {receipt.lag}", losses[-1])
        )

    def _prepare_trainer(
        self, lease: TrainLease, start: dict[int, Tensors], around: dict[int, Tensors]
    ) -> BlockTrainer:
        """The trainer of the lease's phase: the current one with its optimiser state, or a new one."""
        phase, trained, others = self._spec.phases[lease.phase], _as_weights(start), _as_weights(around)
        if self._trainer is None or self._trainer.phase != phase:
            self._trainer = BlockTrainer(self._spec, phase, self._corpus.train, trained | others, device=self._device)
        else:
            self._trainer.adopt(trained)
            self._trainer.refresh(others)
        self._trainer.shard, self._trainer.step_done = lease.shard, lease.step_start
        return self._trainer

    def _run_steps(self, trainer: BlockTrainer, lease: TrainLease, started_s: float) -> list[float]:
        """The losses of the leased steps, or of fewer if the deadline comes or the user stops. At least one step."""
        end_s, begun_s = started_s + (1 - UPLOAD_SHARE) * lease.time_left_s, self._clock()
        losses: list[float] = []
        while len(losses) < lease.steps:
            losses.append(trainer.step().loss)
            self._report(WorkReport("step", f"step {trainer.step_done}", losses[-1]))
            if self._stop() or self._clock() > end_s:
                break
        self._steps_per_s = len(losses) / max(self._clock() - begun_s, 1e-9)
        return losses

    def _submit(self, lease: TrainLease, payload: bytes, steps: int, loss: float) -> UpdateReceipt:
        unsigned = UpdateNotice(
            lease=lease.lease,
            worker=self._public_key,
            tensors=self._block_cache.named_shapes([version.block for version in lease.trained]),
            payload=self._client.upload(payload, lease.lease),
            steps=steps,
            tokens=steps * self._spec.step_bytes,
            loss=min(loss, MAX_LOSS),  # a diverged block is judged by its norm
        )
        return self._client.submit(sign(unsigned, self._key))

    def _evaluate(self, lease: EvaluateLease) -> None:
        model = BlockModel.from_tensors(self._spec, _as_weights(self._block_cache.mapped(lease.blocks))).to(
            self._device
        )
        missing = set(range(self._spec.model.blocks)) - {each.block for each in lease.blocks}
        combine = {} if missing else fit_combination(model, self._corpus.valid)
        model.combine = dict(combine)
        scores = evaluate(model, self._corpus.valid, max_windows=lease.max_windows, missing=missing)
        unsigned = EvaluationNotice(
            lease=lease.lease,
            worker=self._public_key,
            scores=tuple(score.as_dict() for score in scores),
            combine=combine,
        )
        self._client.submit_evaluation(sign(unsigned, self._key))
        loss = answer(scores).nats_per_byte
        self._report(WorkReport("evaluated", f"{loss:.4f} nats/byte", loss))

    def _fetch_corpus(self, info: RunInfo) -> Corpus:
        """The text of the run. The client checks the hash of every split."""
        parts = {
            split: np.frombuffer(self._client.download(blob, self._cache), dtype=np.uint8)
            for split, blob in info.corpus.items()
        }
        return Corpus(parts["train"], parts["valid"], parts["test"], info.corpus_sha256)


def _as_weights(blocks: dict[int, Tensors]) -> dict[int, dict[str, torch.Tensor]]:
    return {block: as_tensors(arrays) for block, arrays in blocks.items()}
