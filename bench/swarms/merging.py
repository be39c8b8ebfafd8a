"""How fast are updates merged? The coordinator's own merge of a round, from the updates' bytes on disk to the published
version, for every codec, against copying memory in the same run; and how many bytes a trained update takes.

A rate counts the float32 values that an update stands for, whatever it takes on the wire: updates × parameters × 4.
Seconds are CPU time, of merging and of copying alike: what other processes take of a core falls on neither. What a
disk takes to sync is not in them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blocktrain.data.corpus import Corpus
from blocktrain.io.arrays import as_arrays
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator import blocks, merging
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.initial_blocks import initial_blocks_here
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.policy.averaging import base as averaging
from blocktrain.swarm.policy.averaging.norms import norm_of
from blocktrain.swarm.policy.averaging.table import merge
from blocktrain.train.trainer import BlockTrainer
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.messages import Blob, TrainLease
from blocktrain.wire.safetensors import Tensors, encode, flat
from blocktrain.wire.updates import apply_update, encode_difference, encode_update, read_update
from swarms.processes import Member, Stopwatch, num_parameters, phase_tensors, random_update, watched

UPDATE_CODECS = ("fp32", "fp16", "int8", "vector", "sparse")
DOWNLOAD_CODECS = ("fp32", "int8", "int6")
FLOAT_BYTES = 4
COPIES = 5


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes read and written a second by copying a large array, the best of some."""
    source = torch.ones(num_bytes // FLOAT_BYTES)
    target = torch.empty_like(source)
    return max(2 * num_bytes / timed(lambda: target.copy_(source)) for _ in range(COPIES))


def timed(act: Callable[[], Any]) -> float:
    started_s = time.process_time()
    act()
    return time.process_time() - started_s


# --- merging ---------------------------------------------------------------------------------------------------------


def merging_part(
    spec: RunSpec, corpus: Corpus, num_updates: int, copied_bytes: int, rounds: int, folder: Path
) -> dict[str, Any]:
    bandwidth = copy_bandwidth(copied_bytes)
    rows = []
    for codec in UPDATE_CODECS:
        of_codec = spec.with_(**{"swarm.update": codec})
        rows.append(merging_row(of_codec, corpus, num_updates, rounds, folder / f"merging-{codec}"))
    for row in rows:
        for kind in ("merge", "mean"):
            row[f"{kind}_of_bandwidth"] = row[f"{kind}_bytes_per_s"] / bandwidth
    return {
        "copied_bytes": copied_bytes,
        "bandwidth_bytes_per_s": bandwidth,
        "updates": num_updates,
        "parameters": num_parameters(phase_tensors(spec)),
        "rows": rows,
    }


def merging_row(spec: RunSpec, corpus: Corpus, num_updates: int, rounds: int, folder: Path) -> dict[str, Any]:
    before, codec = phase_tensors(spec), spec.swarm.update
    payloads = [random_update(before, spec, seed) for seed in range(num_updates)]
    merged_bytes = FLOAT_BYTES * num_updates * num_parameters(before)
    mean_s = min(timed(lambda: mean_of(payloads, before, spec)) for _ in range(rounds))
    merge_s, spent = merge_seconds(spec, corpus, before, num_updates, rounds, folder)
    return {
        "codec": codec,
        "merge_s": merge_s,
        "merge_bytes_per_s": merged_bytes / merge_s,
        "mean_s": mean_s,
        "mean_bytes_per_s": merged_bytes / mean_s,
        "spent": spent,
    }


def mean_of(payloads: Sequence[bytes], before: Tensors, spec: RunSpec) -> Tensors:
    """The least that a merge could be: every update is opened once and every tensor merged, all in memory."""
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}

    def opened(payload: bytes) -> averaging.Deltas:
        update = read_update(payload, shapes)
        return lambda name: update.pieces(name, before[name] if update.needs_base else None)

    parts = [averaging.WeightedUpdate(partial(opened, payload), 1.0, 1.0) for payload in payloads]
    return dict(merge(parts, {name: tensor.size for name, tensor in before.items()}, spec.swarm))


def merge_seconds(
    spec: RunSpec, corpus: Corpus, before: Tensors, num_updates: int, rounds: int, folder: Path
) -> tuple[float, dict[str, float]]:
    """Of the fastest round, the seconds in the coordinator's merge; of all rounds, the shares of its parts."""
    watch, seconds = Stopwatch(time.process_time), list[float]()
    with coordinator_here(spec, corpus, folder) as host:
        host.loop._merge = only_while(host.loop._merge, watch, merge_calls())  # type: ignore[method-assign]
        for round in range(rounds):
            so_far_s = watch.total_s
            send_round(host, spec, before, num_updates, seed=round * num_updates)
            seconds.append(watch.total_s - so_far_s)
    return min(seconds), {label: spent / watch.total_s for label, spent in watch.seconds.items()}


@contextmanager
def coordinator_here(spec: RunSpec, corpus: Corpus, folder: Path) -> Iterator[Coordinator]:
    """In this process, on a ledger and blobs in the folder."""
    folder.mkdir(parents=True)
    ledger, blobs = Ledger(folder / "ledger.db"), Blobs(folder / "blobs")
    try:
        found_run(spec, corpus, ledger, blobs, now_s=time.time())
        yield Coordinator(spec, ledger, blobs, initial_block=initial_blocks_here(spec))
    finally:
        ledger.close()


def merge_calls() -> list[tuple[Any, str, str]]:
    return [
        (Blobs, "get", "read and hash blobs"),
        (Blobs, "put", "write blobs"),
        (merging, "read_update", "open updates"),
        (averaging, "_mean", "decode and average"),
        (merging, "follow_recipe", "decode and average"),
        (merging, "outer_step", "outer step"),
        (merging, "encode_difference", "encode the version"),
        (merging, "encode_chunks", "encode the version"),
        (blocks, "decode", "decode the base"),
    ]


def only_while(act: Callable[..., Any], watch: Stopwatch, calls: Sequence[tuple[Any, str, str]]) -> Callable[..., Any]:
    """The same act; the watch times the calls during it, and what else it does as "ledger and rest"."""

    def watched_act(*arguments: Any) -> Any:
        with watched(watch, *calls):
            return watch.timed(act, "ledger and rest")(*arguments)

    return watched_act


def send_round(host: Coordinator, spec: RunSpec, before: Tensors, num_updates: int, seed: int) -> None:
    """A round of so many members; the last update closes and merges it."""
    members = [Member(spec, host.info().run) for _ in range(num_updates)]
    host.loop.settle()
    leases = [host.lease(member.request()) for member in members]
    for number, (member, lease) in enumerate(zip(members, leases, strict=True)):
        assert isinstance(lease, TrainLease), lease
        data = random_update(before, spec, seed + number)
        blob = Blob(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
        host.intake.receive(lease.lease, blob.sha256, 0, len(data), data)
        host.update(member.notice(lease, blob))
    host.loop.settle()


# --- bytes -----------------------------------------------------------------------------------------------------------


def bytes_part(spec: RunSpec, corpus: Corpus, steps: int) -> dict[str, Any]:
    """What one worker's trained update takes, and the version that is merged of it, in every codec."""
    before, after = trained_update(spec, corpus, steps)
    parameters = num_parameters(before)
    return {
        "steps": steps,
        "parameters": parameters,
        "up": [upload_row(before, after, codec, parameters) for codec in UPDATE_CODECS],
        "down": [download_row(before, after, codec, parameters) for codec in DOWNLOAD_CODECS],
    }


def trained_update(spec: RunSpec, corpus: Corpus, steps: int) -> tuple[Tensors, Tensors]:
    trainer = BlockTrainer(spec, spec.phases[0], corpus.train, {}, compile=False)
    before = as_arrays(flat(trainer.weights()))
    for _ in range(steps):
        trainer.step()
    return before, as_arrays(flat(trainer.weights()))


def upload_row(before: Tensors, after: Tensors, codec: str, parameters: int) -> dict[str, Any]:
    data = encode_update(before, after, make_codec(codec))
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
    return _bytes_row(
        codec, len(data), parameters, lost(before, after, apply_update(before, read_update(data, shapes)))
    )


def download_row(before: Tensors, after: Tensors, codec: str, parameters: int) -> dict[str, Any]:
    """fp32 is the whole version, as a worker fetches it that has none before."""
    if codec == "fp32":
        return _bytes_row(codec, len(encode(after)), parameters, 0.0)
    data, decoded = encode_difference(before, after, make_codec(codec))
    return _bytes_row(codec, len(data), parameters, lost(before, after, decoded))


def _bytes_row(codec: str, num_bytes: int, parameters: int, lost: float) -> dict[str, Any]:
    return {"codec": codec, "num_bytes": num_bytes, "bytes_per_parameter": num_bytes / parameters, "lost": lost}


def lost(before: Tensors, after: Tensors, decoded: Tensors) -> float:
    """The norm of what the codec left out, as a share of the update's; error feedback sends it with later ones."""
    wanted = norm_of(before[name] - after[name] for name in before)
    return norm_of(decoded[name] - after[name] for name in before) / wanted
