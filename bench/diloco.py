"""Blocks or whole replicas? BlockTrain, with its default objective and with `denoise`, against replicas of the full
model (`blocks = 1`) at equal work: what the model is worth, what one worker must hold in memory and what it must send
and fetch. The full replicas are averaged once as ours are, with our codecs, and once as DiLoCo does (Douillard et al.
2023): fp32 and Nesterov's outer step.

    python bench/diloco.py --corpus PATH [--rows blocktrain] [--seeds 0]

Each row is written to the result file when it is done and is not run again: stop it at any time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.data.corpus import Corpus
from blocktrain.figures import bar_figure
from blocktrain.spec import RunSpec
from blocktrain.train.flops import run_flops
from blocktrain.train.reference import single_block_of
from shared.experiment import Document, Verdict, goal_lines, markdown, portable
from shared.rows import Record, Row, Table, base_of, chosen, mean_of, parser, records_of, run_rows, seeds_of, show
from swarms.run import APART, Plan, run_swarm, together
from training.memory import Case, in_own_process

OURS, DENOISE = "BlockTrain", "BlockTrain, denoise"
FULL, DILOCO = "full replicas, our codecs", "DiLoCo (fp32, Nesterov)"
DILOCO_CHANGES = {"swarm.update": "fp32", "swarm.download": "fp32", "swarm.outer": "nesterov"}
BUDGET = {"train.steps": 400, "train.windows": 6, "swarm.round_steps": 10}  # windows of one worker
QUICK_BUDGET = {"train.steps": 4, "train.windows": 2, "swarm.round_steps": 2}
WORKERS, MEMORY_STEPS = 2, 2


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    base, corpus = base_of(options, together(WORKERS) | (QUICK_BUDGET if options.quick else BUDGET))
    rows = [
        _row(name, spec, corpus, 20 if options.quick else 400)
        for seed in options.seeds
        for name, spec in runs(base.with_(seed=seed)).items()
    ]
    document = run_rows(options.out / "diloco.json", chosen(rows, options.rows))
    show(_table(document), figures(document), options.out)


def runs(ours: RunSpec) -> dict[str, RunSpec]:
    """Ours, and the others with as many steps as take the same work."""
    full = as_much_work(single_block_of(ours, num_layers=ours.model.total_layers, steps=1), ours)
    denoise = as_much_work(ours.with_(**APART, **{"train.steps": 1}), ours)
    return {OURS: ours, DENOISE: denoise, FULL: full, DILOCO: full.with_(**DILOCO_CHANGES)}


def as_much_work(one_step: RunSpec, ours: RunSpec) -> RunSpec:
    return one_step.with_(**{"train.steps": max(1, round(run_flops(ours) / run_flops(one_step)))})


def _row(name: str, spec: RunSpec, corpus: Corpus, max_windows: int) -> Row:
    plan = Plan(spec, WORKERS, max_windows=max_windows)
    settings = {"spec": portable(spec), "workers": WORKERS, "max_windows": max_windows}
    return Row(name, spec.seed, settings, lambda: run(plan, corpus))


def run(plan: Plan, corpus: Corpus) -> dict[str, Any]:
    """The tensors are those of the phase that takes most; a process also has its libraries, about 300 MB."""
    cases = [Case(f"phase {phase.index}", plan.spec, phase.index) for phase in plan.spec.phases]
    peak_bytes = max(in_own_process(case, MEMORY_STEPS).tensor_peak for case in cases)
    return {**run_swarm(plan, corpus), "tensor_peak_bytes": peak_bytes, "flops": run_flops(plan.spec)}


def _lines(document: Document) -> list[tuple[str, Sequence[Record]]]:
    return [(name, records) for name in (OURS, DENOISE, FULL, DILOCO) if (records := records_of(document, name))]


def _table(document: Document) -> Table:
    head = ["swarm", "valid", "test", "tensors, MB", "process, MB", "up, MB per worker", "down, MB per worker", "work"]
    return head, [
        [
            name,
            f"{mean_of(records, 'valid'):.4f}",
            f"{mean_of(records, 'test'):.4f}",
            f"{mean_of(records, 'tensor_peak_bytes') / 1e6:.0f}",
            f"{mean_of(records, 'worker_rss_peak_bytes') / 1e6:.0f}",
            f"{mean_of(records, 'up_bytes') / records[0]['workers'] / 1e6:.1f}",
            f"{mean_of(records, 'down_bytes') / records[0]['workers'] / 1e6:.1f}",
            f"{mean_of(records, 'flops') / 1e12:.2f} TFLOP",
        ]
        for name, records in _lines(document)
    ]


def section(document: Document) -> str:
    lines = dict(_lines(document))
    intro = "## Blocks against full replicas\n\n"
    if OURS in lines:
        record = lines[OURS][0]
        spec = record["settings"]["spec"]
        intro += (
            f"{record['workers']} workers; {spec['model']['layers']} layers of width {spec['model']['width']} in "
            f"{spec['model']['blocks']} blocks, {spec['train']['steps']} steps of {spec['train']['windows']} windows "
            f"per worker in the first phase. They are compared with replicas of the whole model at equal work (counted "
            f"from the shapes); rounds of {spec['swarm']['round_steps']} steps, {seeds_of(document)}. Nats/byte on "
            f"held-out text. Memory is the peak of a worker's tensors and of its whole process; in our process one "
            f"worker also fits and scores the composition at the end. Bytes are counted on a worker's cable after "
            "joining.\n\n"
        )
    return f"{intro}{markdown(*_table(document))}\n{goal_lines(verdicts(document))}"


def verdicts(document: Document) -> list[Verdict]:
    lines = dict(_lines(document))
    others = [name for name in (FULL, DILOCO) if {OURS, name} <= lines.keys()]
    return [verdict for name in others for verdict in _verdicts(lines[OURS], name, lines[name])]


def _verdicts(ours: Sequence[Record], name: str, theirs: Sequence[Record]) -> list[Verdict]:
    def against(key: str) -> str:
        return f"{mean_of(ours, key):.4f} against {mean_of(theirs, key):.4f}"

    memory = mean_of(ours, "tensor_peak_bytes") / mean_of(theirs, "tensor_peak_bytes")
    moved = [mean_of(ours, key) / mean_of(theirs, key) for key in ("up_bytes", "down_bytes")]
    better = mean_of(ours, "valid") <= mean_of(theirs, "valid")
    up_down = f"{moved[0]:.2f} of them up, {moved[1]:.2f} down"
    return [
        Verdict(f"no worse than {name} at equal work", against("valid"), "", better),
        Verdict(f"less memory per worker than {name}", f"{memory:.2f} of it", "", memory < 1),
        Verdict(f"fewer bytes per worker than {name}", up_down, "", max(moved) < 1),
    ]


def figures(document: Document) -> dict[str, go.Figure]:
    lines = _lines(document)
    figure = bar_figure(
        [f"{name}:<br>{mean_of(records, 'valid'):.3f} nats/byte" for name, records in lines],
        [mean_of(records, "tensor_peak_bytes") / 1e6 for _, records in lines],
        title="Memory of a worker, blocks against full replicas at equal work",
        x_title="",
        y_title="MB of tensors at the peak",
    )
    return {"diloco": figure}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
