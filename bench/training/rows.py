"""Rows of a table of training: one way of training each, trained, composed and scored on held-out text, and kept in the
result file as soon as it is done. Next: quality.py and blocks.py, which have such rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.io.files import written_whole
from blocktrain.model.stack import BlockModel, count_parameters
from blocktrain.spec import RunSpec
from blocktrain.train.evaluate import evaluate, fit_combination
from blocktrain.train.flops import run_flops
from blocktrain.train.run import load_model, train_run
from blocktrain.train.trainer import BlockTrainer
from shared.experiment import Document, machine, num_threads, portable, read_json, write_json

AVERAGE_EVERY_STEPS = 20
SAVE_EVERY_S = 60.0  # of several workers that are trained side by side
MISSING_WINDOWS = 400
Record = dict[str, Any]
Weights = dict[int, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Row:
    """One way of training. `replicas` > 1 are averaged every AVERAGE_EVERY_STEPS, each on its own shard."""

    name: str
    label: str
    comparison: str
    make: Callable[[RunSpec, int], RunSpec]  # from the base spec and the reference's steps
    replicas: int = 1
    without_hosts: bool = False  # also scored with one block missing
    reference: str = "reference"  # the row that its gap is to


@dataclass(frozen=True)
class Way:
    """How rows are run: where runs are kept to be resumed, how much is scored, how many rows at once."""

    work: Path
    max_windows: int | None = None
    jobs: int = 1
    threads: int = 1  # of each row


def todo(
    rows: Sequence[Row], base: RunSpec, steps: int, seeds: Sequence[int], done: Mapping[str, Record]
) -> list[tuple[Row, RunSpec]]:
    """Seeds first, so that every row has one result before any has two. A result of other settings is made again;
    settings of the swarm do not count, because rows are trained without a coordinator."""
    missing = []
    for seed in seeds:
        for row in rows:
            spec = row.make(base.with_(seed=seed), steps).with_(name=row.name)
            stored = done.get(f"{row.name}/{seed}")
            if stored is None or _of_training(stored["spec"]) != _of_training(portable(spec)):
                missing.append((row, spec))
    return missing


def _of_training(spec_data: Document) -> Document:
    return RunSpec.model_validate(spec_data).model_dump(exclude={"swarm"})


def run_rows(wanted: Sequence[tuple[Row, RunSpec]], path: Path, way: Way, **about: Any) -> None:
    """Each result goes to the file at once, beside what the document says about all of them."""
    print(f"{len(wanted)} rows to run, results go to {path}", flush=True)
    tasks = [
        partial(run_row, row.name, spec.model_dump(mode="json"), way, row.replicas, row.without_hosts)
        for row, spec in wanted
    ]
    for record in _results(tasks, way.jobs):
        document = read_json(path) | {"machine": machine(), **about}
        document.setdefault("results", {})[f"{record['row']}/{record['seed']}"] = record
        write_json(path, document)
        print(
            f"{record['row']} seed {record['seed']}: {own_answer(record, 'valid'):.4f} nats/byte on valid", flush=True
        )


def _results(tasks: Sequence[Callable[[], Record]], jobs: int) -> Iterator[Record]:
    if jobs == 1:
        yield from (task() for task in tasks)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(task) for task in tasks]):
            yield future.result()


def run_row(name: str, spec_data: Document, way: Way, replicas: int = 1, without_hosts: bool = False) -> Record:
    """Train, compose and score one row with one seed."""
    spec = RunSpec.model_validate(spec_data)
    corpus = load_corpus(spec.corpus, spec.model.context)
    with num_threads(way.threads):
        started_s, cpu_started_s = time.monotonic(), time.process_time()
        model = _trained(name, spec, corpus, way.work, replicas)
        seconds, cpu_seconds = time.monotonic() - started_s, time.process_time() - cpu_started_s
        scores = {
            split: [score.as_dict() for score in evaluate(model, corpus.split(split), max_windows=way.max_windows)]
            for split in ("valid", "test")
        }
        missing = _missing(model, corpus) if without_hosts else {}
    return {
        "row": name,
        "seed": spec.seed,
        "spec": portable(spec),
        "replicas": replicas,
        "parameters": count_parameters(model),
        "train_bytes": replicas * spec.step_tokens * sum(phase.steps for phase in spec.phases),
        "flops": replicas * run_flops(spec),
        "blocks_at_a_worker": max(len(phase.blocks) for phase in spec.phases),
        "combine": model.combine,
        "scores": scores,
        "max_windows": way.max_windows,
        "missing": missing,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def _trained(name: str, spec: RunSpec, corpus: Corpus, work: Path, replicas: int) -> BlockModel:
    place = work / f"{name}-{spec.seed}-{spec.digest()[:8]}"
    if replicas > 1:
        return train_replicas(spec, corpus, replicas, place.with_suffix(".pt"))
    run = RunDirectory.create(place, spec, corpus.sha256)
    train_run(run, corpus)
    return load_model(run)


def train_replicas(spec: RunSpec, corpus: Corpus, replicas: int, kept: Path) -> BlockModel:
    """Every phase by several workers, each on its own shard, their weights averaged every AVERAGE_EVERY_STEPS. All that
    is needed to go on is kept in a file now and then, which is removed at the end."""
    saved: dict[str, Any] = torch.load(kept) if kept.exists() else {"phase": 0, "published": {}}
    published: dict[int, Any] = saved["published"]
    for phase in spec.phases[saved["phase"] :]:
        workers = [BlockTrainer(spec, phase, corpus.train, published, shard=shard) for shard in range(replicas)]
        for worker, state in zip(workers, saved.pop("states", []), strict=False):
            worker.restore(state, saved["step"])
        mean, saved_s = _mean([worker.weights() for worker in workers]), time.monotonic()
        while not workers[0].finished:
            for worker in workers:
                for _ in range(min(AVERAGE_EVERY_STEPS, phase.steps - worker.step_done)):
                    worker.step()
            mean = _mean([worker.weights() for worker in workers])
            for worker in workers:
                worker.adopt(mean)
            if time.monotonic() > saved_s + SAVE_EVERY_S:
                states = [worker.state() for worker in workers]
                now = {"phase": phase.index, "step": workers[0].step_done, "states": states, "published": published}
                _keep(now, kept)
                saved_s = time.monotonic()
        published |= mean
    kept.unlink(missing_ok=True)
    model = BlockModel.from_tensors(spec, published)
    model.combine = dict(fit_combination(model, corpus.valid))
    return model


def _keep(progress: Document, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        torch.save(progress, file)


def _mean(replicas: list[Weights]) -> Weights:
    first = replicas[0]
    return {
        block: {name: torch.stack([replica[block][name] for replica in replicas]).mean(0) for name in first[block]}
        for block in first
    }


def _missing(model: BlockModel, corpus: Corpus) -> dict[str, float]:
    """Cross entropy on the first windows of valid when one block's host is dead."""
    return {
        str(block): evaluate(model, corpus.valid, missing={block}, max_windows=MISSING_WINDOWS)[-1].nats_per_byte
        for block in range(len(model.blocks))
    }


def own_answer(record: Document, split: str) -> float:
    """The model's own answer: the last reading of its first path."""
    scores = record["scores"][split]
    return float([score for score in scores if score["path"] == scores[0]["path"]][-1]["nats_per_byte"])


def summarise(rows: Sequence[Row], results: Mapping[str, Record]) -> list[Record]:
    """One line a row: means over seeds, the spread, and the gap to its reference seed by seed."""
    by_row = {row: [record for record in results.values() if record["row"] == row.name] for row in rows}
    return [_line(row, records, results) for row, records in by_row.items() if records]


def _line(row: Row, records: Sequence[Record], results: Mapping[str, Record]) -> Record:
    kept = ("parameters", "train_bytes", "flops", "blocks_at_a_worker", "replicas")
    line = {"row": row.name, "label": row.label, "comparison": row.comparison, **{key: records[0][key] for key in kept}}
    line["seeds"] = sorted(record["seed"] for record in records)
    for split in ("valid", "test"):
        values = [own_answer(record, split) for record in records]
        gaps = differences(results, row.name, row.reference, split)
        line[split] = statistics.mean(values)
        line[f"{split}_spread"] = statistics.stdev(values) if len(values) > 1 else None
        line[f"{split}_gap"] = statistics.mean(gaps) if gaps else None
    return line


def differences(results: Mapping[str, Record], row: str, other: str, split: str) -> list[float]:
    """Of two rows, seed by seed, where both were run."""
    pairs = [(record, results.get(f"{other}/{record['seed']}")) for record in results.values() if record["row"] == row]
    return [own_answer(record, split) - own_answer(twin, split) for record, twin in pairs if twin is not None]


def signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}"
