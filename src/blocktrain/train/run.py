"""A whole run on one machine: its phases in order, or side by side in --jobs processes, saved as it goes.
Stopping at any step and starting again ends with exactly the weights of an uninterrupted run; after a kill while
saving, a simultaneous run goes on from its neighbours' newer snapshots. Next: trainer.py, checkpoint.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes
from blocktrain.model.stack import BlockModel
from blocktrain.spec import Phase, RunSpec, Stacked
from blocktrain.train.evaluate import fit_combination
from blocktrain.train.trainer import BlockTrainer, StepReport, Weights

SAVE_EVERY_S = 20.0
CHILD_STEPS = 10  # a child process reports after so many steps
SNAPSHOT = "snapshot:"


class PublishedBlocks(Mapping[int, Mapping[str, Tensor]]):
    """The published blocks of a run, read when they are asked for: a worker holds no more of them than it uses."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._shapes: dict[int, dict[str, tuple[int, ...]]] = {}

    def __getitem__(self, block: int) -> Mapping[str, Tensor]:
        if block not in self:
            raise KeyError(block)
        if block not in self._shapes:
            self._shapes[block] = block_shapes(self._run.spec, block)
        return self._run.load_block(block, self._shapes[block])

    def __contains__(self, block: object) -> bool:
        return block in self._run.manifest().blocks

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._run.manifest().blocks))

    def __len__(self) -> int:
        return len(self._run.manifest().blocks)


class Trainers:
    """The live trainers of some phases, in one process."""

    def __init__(self, spec: RunSpec, corpus: Corpus) -> None:
        self._spec, self._corpus = spec, corpus
        self._by_phase: dict[int, BlockTrainer] = {}

    def start(self, phase: Phase, published: Weights, state: dict[str, Tensor] | None, step_done: int) -> None:
        trainer = BlockTrainer(self._spec, phase, self._corpus.train, published)
        if state is not None:
            trainer.restore(state, step_done)
        self._by_phase[phase.index] = trainer

    def advance(self, phase: int, steps: int) -> list[StepReport]:
        return [self._by_phase[phase].step() for _ in range(steps)]

    def refresh(self, phase: int, published: Weights) -> None:
        self._by_phase[phase].refresh(published)

    def weights(self, phase: int) -> Weights:
        return self._by_phase[phase].weights()

    def state(self, phase: int) -> dict[str, Tensor]:
        return self._by_phase[phase].state()


class Crew(Protocol):
    """Where trainers live: here, or in child processes. `ask` calls a method of Trainers for a phase."""

    slice_steps: int

    def ask(self, phase: Phase, method: str, *arguments: Any) -> Future[Any]: ...

    def close(self) -> None: ...


class InlineCrew:
    slice_steps = 1

    def __init__(self, spec: RunSpec, corpus: Corpus) -> None:
        self._trainers = Trainers(spec, corpus)

    def ask(self, phase: Phase, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(getattr(self._trainers, method)(*arguments))
        return answer

    def close(self) -> None: ...


class ProcessCrew:
    """Each phase always meets the same process, so that its trainer stays alive there."""

    slice_steps = CHILD_STEPS

    def __init__(self, spec: RunSpec, jobs: int) -> None:
        context = multiprocessing.get_context("spawn")
        threads = max(1, torch.get_num_threads() // jobs)
        self._executors = [
            ProcessPoolExecutor(1, context, initializer=_start_child, initargs=(spec.model_dump(mode="json"), threads))
            for _ in range(jobs)
        ]

    def ask(self, phase: Phase, method: str, *arguments: Any) -> Future[Any]:
        with _interrupts_held():  # the first call starts the process
            return self._executors[phase.index % len(self._executors)].submit(_ask_child, method, *arguments)

    def close(self) -> None:
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A Ctrl-C reaches the whole terminal; a process started here is deaf to it from its first instruction on."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_child: Trainers


def _start_child(spec_data: dict[str, Any], threads: int) -> None:
    global _child
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    spec = RunSpec.model_validate(spec_data)
    _child = Trainers(spec, load_corpus(spec.corpus, spec.model.context))


def _end_with_parent() -> None:
    """A parent that was killed cannot tell its children to go."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _ask_child(method: str, *arguments: Any) -> Any:
    return getattr(_child, method)(*arguments)


def train_run(
    run: RunDirectory,
    corpus: Corpus,
    *,
    only_block: int | None = None,
    jobs: int = 1,
    report: Callable[[StepReport], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Train what is not finished yet. Returns whether all that was asked for is; False after a stop."""
    crew: Crew = ProcessCrew(run.spec, jobs) if jobs > 1 else InlineCrew(run.spec, corpus)
    try:
        for phases in _work(run, wanted_phases(run.spec, only_block), jobs):
            if not _Group(run, crew, phases, report, stop, clock).train():
                return False
    finally:
        crew.close()
    manifest = run.manifest()
    if len(manifest.finished) == len(run.spec.phases) and not manifest.combine:
        for path, weights in fit_combination(load_model(run), corpus.valid).items():
            run.save_combine(path, weights)
    return True


def wanted_phases(spec: RunSpec, only_block: int | None) -> tuple[Phase, ...]:
    if only_block is None:
        return spec.phases
    chosen = tuple(phase for phase in spec.phases if phase.block == only_block)
    if not chosen:
        blocks = ", ".join(str(phase.block) for phase in spec.phases)
        raise ConfigError(f"--block {only_block} has no phase of its own in this run: choose one of {blocks}")
    if isinstance(spec.objective, Stacked) and spec.objective.schedule == "simultaneous":
        raise ConfigError('--block trains one block alone, schedule = "simultaneous" all together: leave --block out')
    return chosen


def load_model(run: RunDirectory) -> BlockModel:
    """The composed model of a run's published blocks; blocks not yet trained are as the seed makes them."""
    return BlockModel.from_tensors(run.spec, PublishedBlocks(run), run.manifest().combine)


def _coupled(spec: RunSpec) -> bool:
    """Whether phases of one group exchange snapshots as they go."""
    return isinstance(spec.objective, Stacked) and spec.objective.schedule == "simultaneous"


def _work(run: RunDirectory, wanted: Sequence[Phase], jobs: int) -> Iterator[Sequence[Phase]]:
    """The unfinished phases in the order of the groups: coupled ones together, others as many at once as jobs."""
    for group in run.spec.groups:
        todo = [phase for phase in group if phase in wanted and phase.index not in run.manifest().finished]
        at_once = len(todo) if _coupled(run.spec) else jobs
        yield from (todo[start : start + at_once] for start in range(0, len(todo), max(1, at_once)))


class _Group:
    """The phases of a group, advanced in turn. Independent ones run to their ends; simultaneous stacked ones meet every
    refresh_steps to exchange snapshots."""

    def __init__(
        self,
        run: RunDirectory,
        crew: Crew,
        phases: Sequence[Phase],
        report: Callable[[StepReport], None],
        stop: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._run, self._crew, self._phases = run, crew, phases
        self._report, self._stop, self._clock = report, stop, clock
        self._steps = dict.fromkeys(phases, 0)
        objective = run.spec.objective
        self._refresh_steps = objective.refresh_steps if isinstance(objective, Stacked) and _coupled(run.spec) else None

    def train(self) -> bool:
        self._start()
        saved_s = self._clock()
        while unfinished := [phase for phase in self._phases if self._steps[phase] < phase.steps]:
            if self._stop():
                self._save()
                return False
            self._advance(unfinished)
            if self._clock() - saved_s > SAVE_EVERY_S:
                self._save()
                saved_s = self._clock()
        self._finish()
        return True

    def _start(self) -> None:
        progress = {phase: self._run.load_progress(phase.index) for phase in self._phases}
        published = PublishedBlocks(self._run)
        self._require_below(published)
        self._snapshots: dict[int, Any] = dict(published) if self._refresh_steps else {}
        for found in filter(None, progress.values()):
            self._snapshots |= _snapshots(found[0])
        for phase, saved in progress.items():
            state, metadata = saved or (None, {"step": "0"})
            with _unusable(self._run.progress_file(phase.index)):
                self._steps[phase] = int(metadata["step"])
                start_from = self._snapshots if self._refresh_steps else published
                self._crew.ask(phase, "start", phase, start_from, state, self._steps[phase]).result()
        if self._refresh_steps and not self._snapshots:
            self._exchange()

    def _require_below(self, snapshots: Weights) -> None:
        here = {index for phase in self._phases for index in phase.blocks}
        for phase in self._phases:
            if absent := [str(index) for index in phase.below if index not in snapshots and index not in here]:
                raise ConfigError(
                    f"block {phase.block} stands on blocks that {self._run.path} has not trained yet "
                    f"({', '.join(absent)}): train them first, or leave --block out"
                )

    def _advance(self, unfinished: Sequence[Phase]) -> None:
        """One slice of every phase; coupled phases wait for each other at their meeting points."""
        slices = {phase: min(self._crew.slice_steps, self._meeting(phase) - self._steps[phase]) for phase in unfinished}
        if self._refresh_steps:
            first = min(self._meeting(phase) for phase in unfinished)
            slices = {phase: steps for phase, steps in slices.items() if self._meeting(phase) == first}
        answers = {phase: self._crew.ask(phase, "advance", phase.index, steps) for phase, steps in slices.items()}
        for phase, answer in answers.items():
            for step in answer.result():
                self._steps[phase] = step.step
                self._report(step)
                self._run.log({"phase": step.phase, "step": step.step, "loss": step.loss, "seconds": step.seconds})
        if self._refresh_steps and all(self._steps[phase] >= first for phase in answers):
            self._exchange()

    def _meeting(self, phase: Phase) -> int:
        """The step at which a phase next stops for snapshots, or its end."""
        if not self._refresh_steps:
            return phase.steps
        return min(phase.steps, (self._steps[phase] // self._refresh_steps + 1) * self._refresh_steps)

    def _exchange(self) -> None:
        for phase in self._phases:
            self._snapshots |= self._crew.ask(phase, "weights", phase.index).result()
        for phase in self._phases:
            self._crew.ask(phase, "refresh", phase.index, self._snapshots).result()

    def _save(self) -> None:
        for phase in self._phases:
            state = self._crew.ask(phase, "state", phase.index).result()
            if self._refresh_steps:
                own = self._snapshots.get(phase.block, {})
                state |= {f"{SNAPSHOT}{phase.block}.{name}": tensor for name, tensor in own.items()}
            self._run.save_progress(phase.index, state, {"step": str(self._steps[phase])})

    def _finish(self) -> None:
        for phase in self._phases:
            weights = self._crew.ask(phase, "weights", phase.index).result()
            self._run.finish_phase(phase.index, weights, phase.steps)
            self._run.clear_progress(phase.index)


@contextmanager
def _unusable(progress: Path) -> Iterator[None]:
    """A file that is whole but does not hold what this phase needs: torch and dict say so in their own ways."""
    try:
        yield
    except (KeyError, ValueError, RuntimeError) as error:
        detail = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{progress} does not hold the state of this phase ({detail}): delete it to train the phase from its start"
        ) from None


def _snapshots(state: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Take the snapshots that a simultaneous phase saved with its state out of it."""
    found: dict[int, dict[str, Tensor]] = {}
    for label in [name for name in state if name.startswith(SNAPSHOT)]:
        block, name = label.removeprefix(SNAPSHOT).split(".", 1)
        found.setdefault(int(block), {})[name] = state.pop(label)
    return found
