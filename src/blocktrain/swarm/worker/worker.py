"""Worker: get a lease, fetch blocks, train until the deadline, submit the update; then again. Synchronous code around
the same BlockTrainer that trains locally. A worker keeps its optimiser state and what its codec left out; it can fetch
everything else again.
Next: block_cache.py, the blocks it holds; client.py, its requests to the coordinator; train/trainer.py, the steps."""

from __future__ import annotations

import json
import math
import platform
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.errors import RequestRefused, StorageError
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.io.shelf import Shelf, ShelvedArrays
from blocktrain.model.block import block_shapes, build_block
from blocktrain.model.stack import BlockModel
from blocktrain.spec import RunSpec
from blocktrain.swarm.policy.leases import UPLOAD_SHARE
from blocktrain.swarm.signatures import is_signed, sign
from blocktrain.swarm.worker.block_cache import BlockCache, prune_cache
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.corpus_cache import DEFAULT_CACHE_BYTES, CorpusCache
from blocktrain.swarm.worker.vetting import Scoring
from blocktrain.train.evaluate import answer, evaluate, fit_combination
from blocktrain.train.memory_estimate import memory_plan
from blocktrain.train.samples import sample_prompts, write_samples
from blocktrain.train.streamed import fitting_trainer
from blocktrain.train.trainer import BlockTrainer, Weights, pick_device
from blocktrain.wire.codecs.table import codec_type, update_codec
from blocktrain.wire.error_feedback import ErrorFeedback
from blocktrain.wire.messages import (
    MAX_LOSS,
    MAX_SCORE,
    PROTOCOL_VERSION,
    Blob,
    EvaluateLease,
    EvaluationNotice,
    Finished,
    LeaseReply,
    LeaseRequest,
    TrainLease,
    UpdateNotice,
    UpdateReceipt,
    VetLease,
    VetNotice,
    Wait,
)
from blocktrain.wire.safetensors import Tensors, flat

# Refusals of the worker itself: no other lease helps.
FINAL_CODES = ("token", "role", "protocol", "signature", "replayed", "excluded", "keys")
REFUSED_PAUSE_S = 1.0
RECEIPTS_FILE = "receipts.jsonl"  # what coordinators have signed for
NUMBER_TRIES = 5  # to find a number that is larger than the last: another process may use the same key
UNNEEDED_S = 60.0  # how long a cached blob that no lease needs is kept: another worker of the same home may read it

OfWorker = Literal["lease", "step", "submitted", "refused", "wait", "sample", "evaluated", "vetted", "finished"]
WorkKind = OfWorker | Literal["standing", "away"]  # the command line adds these two


@dataclass(frozen=True)
class WorkReport:
    """What a worker reports while it works."""

    kind: WorkKind
    text: str
    loss: float | None = None


class Worker:
    """One volunteer's machine. `home` holds the key, the receipts and a cache of blobs: the corpus and what the
    current lease needs. `joined` gets the run's settings before the first lease is asked for."""

    def __init__(
        self,
        client: CoordinatorClient,
        home: Path,
        *,
        key: Ed25519PrivateKey,
        name: str | None = None,
        memory_bytes: int,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        device: torch.device | None = None,
        report: Callable[[WorkReport], None] = lambda _: None,
        joined: Callable[[RunSpec], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._home, self._key = client, home, key
        self._cache, self._scratch = home / "blobs", home / "scratch"
        self._name, self._memory_bytes = name or platform.node() or "worker", memory_bytes
        self._device, self._cache_bytes = device or pick_device(), cache_bytes
        self._report, self._joined, self._stop = report, joined, stop
        self._clock, self._sleep, self._wall_clock = clock, sleep, wall_clock
        self._public_key = key.public_key().public_bytes_raw().hex()
        self._steps_per_s, self._nonce = 0.0, 0
        self._trainer: BlockTrainer | None = None

    def run(self) -> None:
        """Works until the run is finished or `stop` returns true."""
        self._info = info = self._client.run_info()
        self._spec = RunSpec.model_validate(info.spec)
        self._joined(self._spec)
        self._block_cache = BlockCache(
            self._client,
            self._cache,
            shapes=lru_cache(None)(partial(block_shapes, self._spec)),
            make_initial=self._initial_block,
            keep_earlier=codec_type(self._spec.swarm.update).uses_course,
        )
        streams = any(memory_plan(self._spec, phase, self._memory_bytes).streamed for phase in self._spec.phases)
        self._feedback = ErrorFeedback(ShelvedArrays(Shelf(self._scratch)) if streams else None)
        self._corpus_cache = CorpusCache(self._client, info, self._cache, self._cache_bytes)
        self._corpus = self._corpus_cache.corpus
        while not self._stop():
            if not self._work_once():
                return

    def _initial_block(self, block: int) -> Tensors:
        return as_arrays(build_block(self._spec, block).state_dict())

    def _work_once(self) -> bool:
        """Works on one lease. False if the run is finished and there will be no more."""
        reply = self._ask_for_work()
        match reply:
            case Finished():
                self._report(WorkReport("finished", reply.reason))
                return False
            case Wait():
                self._report(WorkReport("wait", reply.reason))
                self._sleep(reply.seconds)
            case TrainLease() | EvaluateLease() | VetLease():
                needed = self._corpus_cache.needed_blobs() | self._block_cache.needed_blobs(reply)
                prune_cache(self._cache, needed, before_s=self._wall_clock() - UNNEEDED_S)
                try:
                    self._do(reply)
                except RequestRefused as refused:
                    self._continue_after(refused)
        return True

    def _do(self, lease: TrainLease | EvaluateLease | VetLease) -> None:
        match lease:
            case TrainLease():
                self._train(lease)
            case EvaluateLease():
                self._evaluate(lease)
            case VetLease():
                self._vet(lease)

    def _continue_after(self, refused: RequestRefused) -> None:
        """Another lease may succeed, unless the coordinator refuses the worker itself. The optimiser state and the
        unsent part stay as they were."""
        if refused.code in FINAL_CODES:
            raise refused
        self._report(WorkReport("refused", str(refused)))
        self._sleep(REFUSED_PAUSE_S)

    def _ask_for_work(self) -> LeaseReply:
        """The coordinator knows the last number of this key, and this process may not: a refusal tells it."""
        for _ in range(NUMBER_TRIES):
            try:
                return self._client.lease(self._request, self._block_cache.held())
            except RequestRefused as refused:
                if refused.code != "replayed" or refused.number is None or refused.number < self._nonce:
                    raise
                self._nonce = refused.number
        return self._client.lease(self._request, self._block_cache.held())

    def _request(self) -> LeaseRequest:
        self._nonce += 1
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
        return sign(unsigned, self._key, self._info.run)

    def _train(self, lease: TrainLease) -> None:
        self._report(WorkReport("lease", f"phase {lease.phase + 1}, shard {lease.shard}, {_steps(lease.steps)}"))
        started_s = self._clock()
        phase, steps_done = self._spec.phases[lease.phase], lease.step_start + self._spec.swarm.round_steps
        around = self._block_cache.mapped((*lease.below, *lease.ahead))
        streamed = memory_plan(self._spec, phase, self._memory_bytes).streamed
        trained = (self._block_cache.mapped if streamed else self._block_cache.trained)(lease.trained)
        published = flat(trained)
        self._feedback.forget_others({} if lease.afresh else published)
        trainer = self._prepare_trainer(lease, _StartingPoints(self._feedback, trained), around)
        trainer.shard, trainer.step_done = lease.shard, lease.step_start
        losses = self._run_steps(trainer, lease, started_s)
        after = as_arrays(flat(trainer.current()))
        earlier = self._block_cache.earlier(lease.trained)
        codec = update_codec(self._spec.swarm, phase.steps, steps_done)
        payload = self._feedback.compress(published, after, codec, earlier)
        self._block_cache.keep_payload(payload)
        receipt = self._submit(lease, payload, len(losses), losses[-1])
        self._feedback.accepted(payload, published, after, earlier)  # not if it was refused: all stays unsent then
        use = f"lag {receipt.lag}" if receipt.weight else "compared with another worker's result"
        self._report(WorkReport("submitted", f"{_steps(len(losses))}, {len(payload)} bytes, {use}", losses[-1]))

    def _prepare_trainer(
        self, lease: TrainLease | VetLease, start: Weights, around: dict[int, Tensors]
    ) -> BlockTrainer:
        """The trainer of the lease's phase: the current one with its optimiser state, or a new one."""
        phase, others = self._spec.phases[lease.phase], _as_weights(around)
        if isinstance(lease, TrainLease) and lease.afresh:
            self._trainer = None  # the lease is a function of public facts: others can compute it again
        if self._trainer is None or self._trainer.phase != phase:
            self._trainer = fitting_trainer(
                self._spec,
                phase,
                self._corpus.train,
                ChainMap(start, others),  # type: ignore[arg-type]  # it is only read
                memory_bytes=self._memory_bytes,
                scratch=self._scratch,
                device=self._device,
                checkpoint_activations=memory_plan(self._spec, phase, self._memory_bytes).checkpoint_activations,
            )
        else:
            self._trainer.adopt(start)
            self._trainer.refresh(others)
        return self._trainer

    def _run_steps(self, trainer: BlockTrainer, lease: TrainLease, started_s: float) -> list[float]:
        """The losses of the leased steps, or of fewer if the deadline comes or the user stops. At least one step."""
        end_s, begun_s = started_s + (1 - UPLOAD_SHARE) * lease.time_left_s, self._clock()
        losses: list[float] = []
        while len(losses) < lease.steps:
            losses.append(trainer.step().loss)
            left_s = (lease.steps - len(losses)) * (self._clock() - begun_s) / len(losses)
            in_phase = f"phase {lease.phase + 1}: {trainer.step_done}/{trainer.phase.steps}"
            text = f"step {len(losses)}/{lease.steps} of the lease, {left_s:.0f} s left ({in_phase})"
            self._report(WorkReport("step", text, losses[-1]))
            if len(losses) == 1:  # not earlier: what the first step needs comes first
                self._corpus_cache.fetch_ahead(lease)
            if self._stop() or self._clock() > end_s:
                break
        self._steps_per_s = len(losses) / max(self._clock() - begun_s, 1e-9)
        return losses

    def _submit(self, lease: TrainLease, payload: bytes, steps: int, loss: float) -> UpdateReceipt:
        def notice(blob: Blob) -> UpdateNotice:
            unsigned = UpdateNotice(
                lease=lease.lease,
                worker=self._public_key,
                tensors=self._block_cache.named_shapes([version.block for version in lease.trained]),
                payload=blob,
                steps=steps,
                tokens=steps * self._spec.step_tokens,
                loss=min(loss, MAX_LOSS),  # a diverged block is judged by its norm
            )
            return sign(unsigned, self._key, self._info.run)

        sent, receipt = self._client.send(payload, lease.lease, notice)
        self._keep_receipt(receipt, sent)
        return receipt

    def _keep_receipt(self, receipt: UpdateReceipt, sent: UpdateNotice) -> None:
        """Checks that the coordinator has signed for this update, and keeps what it signed."""
        if receipt.coordinator not in self._info.coordinators:
            self._info = self._client.run_info()  # a coordinator may have been added to the run
        is_known = receipt.coordinator in self._info.coordinators
        is_mine = (receipt.update, receipt.lease, receipt.worker) == (sent.payload.sha256, sent.lease, sent.worker)
        if not (is_known and is_mine and is_signed(receipt, self._info.run)):
            raise RequestRefused(
                "the receipt of this update is not signed by a coordinator of the run: report it to the operator",
                code="receipt",
            )
        line = json.dumps({"run": self._info.run, **receipt.model_dump(mode="json")}) + "\n"
        try:
            self._home.mkdir(parents=True, exist_ok=True)
            with (self._home / RECEIPTS_FILE).open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise StorageError(
                f"{self._home / RECEIPTS_FILE} cannot be written ({error.strerror}): free space there, or make it yours"
            ) from None

    def _evaluate(self, lease: EvaluateLease) -> None:
        model = BlockModel.from_tensors(self._spec, _as_weights(self._block_cache.mapped(lease.blocks))).to(
            self._device
        )
        missing = set(range(self._spec.model.blocks)) - {each.block for each in lease.blocks}
        combine = {} if missing else fit_combination(model, self._corpus.valid)
        model.combine = dict(combine)
        scores = evaluate(model, self._corpus.valid, max_windows=lease.max_windows, missing=missing)
        prompts = sample_prompts(self._corpus.valid, self._spec.model.context)
        samples = write_samples(model, prompts, missing, tokenizer=self._corpus.tokenizer)
        unsigned = EvaluationNotice(
            lease=lease.lease,
            worker=self._public_key,
            scores=tuple(_in_range(score.as_dict()) for score in scores),
            combine=combine,
            samples=samples,
        )
        self._client.submit_evaluation(sign(unsigned, self._key, self._info.run))
        loss = answer(scores).nats_per_byte
        for each in samples:
            self._report(WorkReport("sample", f'"{each.prompt}" → "{each.text}"'))
        self._report(WorkReport("evaluated", f"{loss:.4f} nats/byte", loss))

    def _vet(self, lease: VetLease) -> None:
        """The trainer's weights are those of the next lease anyway; its optimiser state stays."""
        self._report(WorkReport("lease", f"phase {lease.phase + 1}, score {len(lease.updates)} updates"))
        around = self._block_cache.mapped((*lease.below, *lease.ahead))
        base = self._block_cache.mapped(lease.trained)
        trainer = self._prepare_trainer(lease, _as_weights(base), around)
        scoring = Scoring(self._client, self._cache, self._block_cache.shapes, trainer)
        scores = scoring.scores(lease, flat(base), self._corpus.valid)
        unsigned = VetNotice(lease=lease.lease, worker=self._public_key, **vars(scores))
        self._client.submit_vetting(sign(unsigned, self._key, self._info.run))
        change = scores.together - scores.base
        self._report(WorkReport("vetted", f"{len(lease.updates)} updates, together {change:+.4f} nats"))


class _StartingPoints(Mapping[int, Mapping[str, torch.Tensor]]):
    """What the blocks of a lease are trained from, made when it is asked for: one block at a time fits any worker."""

    def __init__(self, feedback: ErrorFeedback, published: Mapping[int, Tensors]) -> None:
        self._feedback, self._published = feedback, published

    def __getitem__(self, block: int) -> dict[str, torch.Tensor]:
        started = self._feedback.start(flat({block: self._published[block]}))
        return as_tensors({name.partition(".")[2]: array for name, array in started.items()})

    def __contains__(self, block: object) -> bool:
        return block in self._published

    def __iter__(self) -> Iterator[int]:
        return iter(self._published)

    def __len__(self) -> int:
        return len(self._published)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _in_range(score: dict[str, Any]) -> dict[str, Any]:
    """What the coordinator takes: the score of a diverged model is cut, and what is not a number is left out."""
    limits = dict.fromkeys(score, MAX_SCORE) | {"nats_per_byte": MAX_LOSS}
    kept = {name: value for name, value in score.items() if not (isinstance(value, float) and math.isnan(value))}
    return {name: min(value, limits[name]) if isinstance(value, float) else value for name, value in kept.items()}


def _as_weights(blocks: dict[int, Tensors]) -> dict[int, dict[str, torch.Tensor]]:
    return {block: as_tensors(arrays) for block, arrays in blocks.items()}
