"""What train, reference and compare share: print what will be trained, train it into a directory, stop on Ctrl-C.
Next: train/run.py, which trains."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import typer

from blocktrain.cli.console import counted, quantity, sample_lines, say, show_table
from blocktrain.cli.options import EXIT_INTERRUPTED, Budget, require_positive
from blocktrain.cli.shared.metrics import report_to, tensorboard_log
from blocktrain.cli.shared.progress import RunPlan, preparing_progress, training_progress
from blocktrain.cli.shared.signals import StopOnInterrupt
from blocktrain.data.corpus import Corpus, load_corpus, with_tokenizer
from blocktrain.errors import ConfigError
from blocktrain.io.checkpoint import SAMPLES_FILE, RunDirectory
from blocktrain.model.block import (
    block_shapes,
    logical_parameters,
    physical_parameters,
    table_parameters,
)
from blocktrain.spec import EndToEnd, ModelSpec, Phase, RunSpec, Stacked
from blocktrain.start_model import StartModel
from blocktrain.tables import LARGEST_SHARE, chosen_rank
from blocktrain.train.flops import phase_flops, run_flops
from blocktrain.train.memory_estimate import FLOAT_BYTES, MemoryPlan, memory_plan, training_memory_bytes
from blocktrain.train.reference import equal_work_steps, reference_of
from blocktrain.train.run import train_run, wanted_phases
from blocktrain.train.start import begin_from
from blocktrain.train.trainer import pick_device
from blocktrain.train.unfinished import look_at

LOOK_SHARE = 0.05


def train_into(
    out: Path,
    spec: RunSpec,
    corpus: Corpus,
    *,
    start: StartModel | None = None,
    only_block: int | None = None,
    jobs: int = 1,
    tensorboard: Path | None = None,
    device: torch.device | None = None,
    memory_bytes: int | None = None,
) -> RunDirectory:
    """Trains what `out` does not hold yet. A Ctrl-C saves everything and ends the command."""
    wanted = wanted_phases(spec, only_block)
    jobs = _useful_jobs(spec, jobs)
    if memory_bytes is not None:
        check_memory(spec, wanted, memory_bytes)
    if start is not None:
        start.require_elsewhere(out)
    run = RunDirectory.create(out, spec, corpus.sha256)
    run.save_tokenizer(corpus.tokenizer.file)
    if start is not None:
        begin_from(run, start)
    todo = [phase for phase in wanted if phase.index not in run.manifest().finished]
    if not todo:
        say(f"{out} is finished: nothing is left to train")
    labels = {phase.index: phase_label(spec, phase) for phase in todo}
    plan = RunPlan({phase.index: (phase.steps, phase_flops(spec, phase)) for phase in todo}, jobs)
    look = Look(run, corpus, device) if has_room_to_look(spec, wanted, memory_bytes) else lambda: None
    with tensorboard_log(tensorboard) as log, training_progress(labels, plan) as report, StopOnInterrupt() as stop:
        show = report_to(report, log)
        done = train_run(
            run,
            corpus,
            only_block=only_block,
            jobs=jobs,
            device=device,
            memory_bytes=memory_bytes,
            report=show,
            saved=look,
            stop=stop,
        )
    if not done:
        say(f"stopped: everything is saved in {out}, run the same command again to continue")
        raise typer.Exit(EXIT_INTERRUPTED)
    return run


def check_memory(spec: RunSpec, phases: Iterable[Phase], memory_bytes: int, warning: str | None = None) -> None:
    """Says how phases are made to fit the memory. One that needs more even so is refused, or gets the warning."""
    for phase in phases:
        whole, plan = training_memory_bytes(spec, phase), memory_plan(spec, phase, memory_bytes)
        if whole <= memory_bytes:
            continue
        there = (
            f"{phase_label(spec, phase)} needs about {quantity(whole, 'B')} of memory, {quantity(memory_bytes, 'B')}"
        )
        if plan.memory_bytes > memory_bytes:
            least = f"{there} is available; the minimum is {quantity(plan.memory_bytes, 'B')}"
            if warning is None:
                raise ConfigError(f"{least}: use a smaller model or more blocks, or give more memory with --memory")
            say(f"{least}: {warning}")
            continue
        say(f"{there} is available: it trains with {ways_of(spec, plan)}")


def ways_of(spec: RunSpec, plan: MemoryPlan) -> str:
    """How a plan saves memory, what it needs then, and the settings that choose the same."""
    ways = [f"{counted(plan.micro_windows, 'window')} at once"] if plan.micro_windows < spec.train.windows else []
    ways += ["layers computed again"] if plan.checkpoint_activations else []
    ways += ["one block in memory at a time"] if plan.streamed else []
    ways += [f"the activations of {counted(plan.kept_blocks, 'more block')} kept"] if plan.kept_blocks else []
    facts = [quantity(plan.memory_bytes, "B"), *plan.settings(spec)]
    return f"{' and '.join(ways)} ({'; '.join(facts)})"


def has_room_to_look(spec: RunSpec, phases: Iterable[Phase], memory_bytes: int | None) -> bool:
    """Whether the whole model fits beside what training takes: once as read, once as a model."""
    if memory_bytes is None:
        return True
    plans = [memory_plan(spec, phase, memory_bytes) for phase in phases]
    training = max((plan.memory_bytes for plan in plans), default=0)
    if any(plan.streamed for plan in plans):
        return False
    return training + 2 * FLOAT_BYTES * sum(parameters_of_blocks(spec)) <= memory_bytes


class Look:
    """Shows a run while it is trained: its held-out loss on a few windows, and the same prompts continued. Takes at
    most LOOK_SHARE of the time."""

    def __init__(
        self,
        run: RunDirectory,
        corpus: Corpus,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._corpus, self._device, self._clock = run, corpus, device or pick_device(), clock
        self._not_before_s = -math.inf

    def __call__(self) -> None:
        began_s = self._clock()
        finished = len(self._run.manifest().finished) == len(self._run.spec.phases)
        if began_s < self._not_before_s and not finished:
            return
        found = look_at(self._run, self._corpus, self._device)
        loss, samples = found.nats_per_byte, [x.model_dump() for x in found.samples]
        record = {"at_s": time.time(), "where": found.where, "nats_per_byte": loss, "samples": samples}
        self._run.log(record, SAMPLES_FILE)
        say(f"{found.where}: held-out loss {loss:.3f} nats/byte", *sample_lines(samples))
        self._not_before_s = self._clock() + (self._clock() - began_s) / LOOK_SHARE


def open_text(spec: RunSpec) -> tuple[RunSpec, Corpus]:
    """The text of a run, prepared first if it must be; and the spec with the facts of its tokenizer."""
    with preparing_progress() as report:
        corpus = load_corpus(spec.corpus, spec.model.context, report)
    return with_tokenizer(spec, corpus), corpus


def twin_of(spec: RunSpec, budget: Budget, steps: int | None = None) -> RunSpec:
    """The end-to-end reference of these blocks, as --work and --steps say."""
    require_positive("--steps", steps)
    return reference_of(spec, steps=steps or (equal_work_steps(spec) if budget is Budget.EQUAL else None))


def describe(spec: RunSpec, device: torch.device | None = None) -> None:
    """Prints what will be trained, before it takes its time."""
    model, parameters = spec.model, parameters_of_blocks(spec)
    kind = (device or pick_device()).type
    say(f"{spec.name}: {shape_of(model)}, context {model.context}, {_objective(spec)}, on {kind}", indent=2)
    each = ", ".join(f"block {block}: {count:,}" for block, count in enumerate(parameters))
    fact("parameters", f"{sum(parameters):,} ({each})")
    if model.physical_layers is not None:
        fact("logical", f"{logical_parameters(spec):,} parameters, if every layer had its own")
    if spec.train.start_sha256 is not None:
        frozen = f", {_blocks(spec.train.freeze)} frozen" if spec.train.freeze else ""
        fact("starts from", f"a model with sha256 {spec.train.start_sha256[:12]}…{frozen}")
    phases = (f"{_blocks(phase.blocks)} for {counted(phase.steps, 'step')}" for phase in spec.phases)
    fact("phases", "; ".join(phases))
    if spec.corpus.tokenizer_sha256 is not None:
        fact("tokenizer", f"{spec.corpus.tokenizer}, {model.vocabulary:,} tokens")
        fact("tables", about_tables(spec))
    fact("total", f"{training_text(spec)} of text, {quantity(run_flops(spec), 'FLOP')}")


def fact(name: str, text: str) -> None:
    say(f"  {name:<12}{text}", indent=14)


def about_tables(spec: RunSpec) -> str:
    """How wide embeddings and read-outs are, and what to do if they are more of the model than a third."""
    share = table_parameters(spec) / physical_parameters(spec)
    said = f"{spec.model.table_rank or spec.model.width} wide, {share:.0%} of the parameters"
    if share <= LARGEST_SHARE:
        return said
    named = spec.model.table_rank != chosen_rank(spec)
    remedy = "leave model.table_rank out" if named else "use a smaller vocabulary or a larger model"
    return f"{said}; {remedy} to make them a third (docs: text)"


def shape_of(model: ModelSpec) -> str:
    return f"{counted(model.blocks, 'block')}, {counted(model.total_layers, 'layer')} of width {model.width}"


def show_parameters_side_by_side(spec: RunSpec, twin: RunSpec) -> None:
    ours, theirs = parameters_of_blocks(spec), parameters_of_blocks(twin)
    rows = [[f"block {k}", f"{a:,}", f"{b:,}"] for k, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    rows.append(["total", f"{sum(ours):,}", f"{sum(theirs):,}"])
    show_table(["parameters", "in blocks", "end to end"], rows, stream=sys.stderr)


def parameters_of_blocks(spec: RunSpec) -> list[int]:
    """Counted from the shapes: a model that is too large for this machine is counted as well."""
    shapes = (block_shapes(spec, block).values() for block in range(spec.model.blocks))
    return [sum(math.prod(shape) for shape in each) for each in shapes]


def training_tokens(spec: RunSpec) -> int:
    """All tokens that training reads. A token is a byte, unless the run has a tokenizer."""
    return sum(phase.steps for phase in spec.phases) * spec.step_tokens


def training_text(spec: RunSpec) -> str:
    return quantity(training_tokens(spec), "B" if spec.corpus.tokenizer_sha256 is None else "tokens")


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
