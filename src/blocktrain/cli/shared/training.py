"""What train, reference and compare share: print what will be trained, train it into a directory, stop on Ctrl-C.
Next: train/run.py, which trains."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import typer

from blocktrain.cli.console import quantity, say, show_table
from blocktrain.cli.options import EXIT_INTERRUPTED, Budget, require_positive
from blocktrain.cli.shared.metrics import report_to, tensorboard_log
from blocktrain.cli.shared.progress import training_progress
from blocktrain.cli.shared.signals import StopOnInterrupt
from blocktrain.data.corpus import Corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import build_block, logical_parameters
from blocktrain.model.stack import count_parameters
from blocktrain.spec import EndToEnd, Phase, RunSpec, Stacked
from blocktrain.train.flops import run_flops
from blocktrain.train.reference import equal_work_steps, reference_of
from blocktrain.train.run import train_run, wanted_phases
from blocktrain.train.trainer import pick_device


def train_into(
    out: Path,
    spec: RunSpec,
    corpus: Corpus,
    *,
    only_block: int | None = None,
    jobs: int = 1,
    tensorboard: Path | None = None,
) -> RunDirectory:
    """Trains what `out` does not hold yet. A Ctrl-C saves everything and ends the command."""
    wanted = wanted_phases(spec, only_block)
    jobs = _useful_jobs(spec, jobs)
    run = RunDirectory.create(out, spec, corpus.sha256)
    todo = [phase for phase in wanted if phase.index not in run.manifest().finished]
    if not todo:
        say(f"{out} is finished: nothing is left to train")
    labels = {phase.index: phase_label(spec, phase) for phase in todo}
    with tensorboard_log(tensorboard) as log, training_progress(labels) as report, StopOnInterrupt() as stop:
        done = train_run(run, corpus, only_block=only_block, jobs=jobs, report=report_to(report, log), stop=stop)
    if not done:
        say(f"stopped: everything is saved in {out}, run the same command again to continue")
        raise typer.Exit(EXIT_INTERRUPTED)
    return run


def twin_of(spec: RunSpec, budget: Budget, steps: int | None = None) -> RunSpec:
    """The end-to-end reference of these blocks, as --work and --steps say."""
    require_positive("--steps", steps)
    return reference_of(spec, steps=steps or (equal_work_steps(spec) if budget is Budget.EQUAL else None))


def describe(spec: RunSpec) -> None:
    """Prints what will be trained, before it takes its time."""
    model, parameters = spec.model, parameters_of_blocks(spec)
    say(
        f"{spec.name}: {model.blocks} blocks, {model.total_layers} layers of width {model.width}, "
        f"context {model.context}, {_objective(spec)}, on {pick_device().type}"
    )
    each = ", ".join(f"block {block}: {count:,}" for block, count in enumerate(parameters))
    say(f"  parameters  {sum(parameters):,} ({each})")
    if model.physical_layers is not None:
        say(f"  logical     {logical_parameters(spec):,} parameters, if every layer had its own")
    say(f"  phases      {'; '.join(f'{_blocks(phase.blocks)} for {phase.steps} steps' for phase in spec.phases)}")
    say(f"  total       {quantity(training_bytes(spec), 'B')} of text, {quantity(run_flops(spec), 'FLOP')}")


def show_parameters_side_by_side(spec: RunSpec, twin: RunSpec) -> None:
    ours, theirs = parameters_of_blocks(spec), parameters_of_blocks(twin)
    rows = [[f"block {k}", f"{a:,}", f"{b:,}"] for k, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    rows.append(["total", f"{sum(ours):,}", f"{sum(theirs):,}"])
    show_table(["parameters", "in blocks", "end to end"], rows, stream=sys.stderr)


def parameters_of_blocks(spec: RunSpec) -> list[int]:
    return [count_parameters(build_block(spec, block)) for block in range(spec.model.blocks)]


def training_bytes(spec: RunSpec) -> int:
    return sum(phase.steps for phase in spec.phases) * spec.step_bytes


def phase_label(spec: RunSpec, phase: Phase) -> str:
    if isinstance(spec.objective, EndToEnd):
        return f"end to end, {_blocks(phase.blocks)}"
    return f"phase {phase.index + 1} of {len(spec.phases)}, {_blocks(phase.blocks)}"


def _blocks(blocks: Iterable[int]) -> str:
    names = "+".join(map(str, blocks))
    return f"blocks {names}" if "+" in names else f"block {names}"


def _objective(spec: RunSpec) -> str:
    kind = spec.objective.kind.replace("_", " ")
    return f"{spec.objective.schedule} {kind}" if isinstance(spec.objective, Stacked) else kind


def _useful_jobs(spec: RunSpec, jobs: int) -> int:
    require_positive("--jobs", jobs)
    most = max(map(len, spec.groups))
    if jobs > 1 and most == 1:
        say(f"--jobs {jobs} has no effect: the phases of this run depend on each other")
    return min(jobs, most)
