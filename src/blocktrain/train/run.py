"""A whole run on one machine: its phases in order, or side by side in --jobs processes. Progress is saved on the way.
A run that is stopped and started again ends with exactly the weights of an uninterrupted run. One exception: after a
kill while saving, a simultaneous run goes on from its neighbours' newer snapshots.
Next: trainer.py, one phase; io/checkpoint.py, where the blocks are saved; processes.py, for --jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from blocktrain.data.corpus import Corpus
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes
from blocktrain.model.stack import BlockModel
from blocktrain.settings import TOKENIZER_FILE
from blocktrain.spec import Phase, RunSpec, Stacked
from blocktrain.start_model import require_start
from blocktrain.train.evaluate import fit_combination
from blocktrain.train.memory_estimate import memory_plan
from blocktrain.train.streamed import fitting_trainer
from blocktrain.train.trainer import BlockTrainer, StepReport, Weights

SAVE_EVERY_S = 20.0
SNAPSHOT = "snapshot:"


class Trainers(Protocol):
    """The trainers of the phases that are trained at the same time. They live in this process (LocalTrainers) or in
    child processes (processes.py: ProcessTrainers)."""

    slice_steps: int  # the most steps of one call of `advance`

    def start(self, phase: Phase, published: Weights, state: dict[str, Tensor] | None, step_done: int) -> None:
        """Make the trainer of a phase; with a state, continue where that was saved."""

    def advance(self, steps: Mapping[Phase, int]) -> Mapping[Phase, Sequence[StepReport]]:
        """Train each phase for so many steps."""

    def refresh(self, phase: Phase, published: Weights) -> None: ...

    def weights(self, phase: Phase) -> Weights: ...

    def state(self, phase: Phase) -> dict[str, Tensor]: ...

    def close(self) -> None: ...


class LocalTrainers:
    """In this process, one step of each phase after the other. A phase that does not fit `memory_bytes` is streamed
    from `scratch`, if it can be; without them none is."""

    slice_steps = 1

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        device: torch.device | None = None,
        memory_bytes: int | None = None,
        scratch: Path | None = None,
    ) -> None:
        self._spec, self._corpus, self._device = spec, corpus, device
        self._memory_bytes, self._scratch = memory_bytes, scratch
        self._trainers: dict[Phase, BlockTrainer] = {}

    def start(self, phase: Phase, published: Weights, state: dict[str, Tensor] | None, step_done: int) -> None:
        memory_bytes = self._memory_bytes if self._scratch else None
        trainer = fitting_trainer(
            self._spec,
            phase,
            self._corpus.train,
            published,
            memory_bytes=memory_bytes,
            scratch=self._scratch or Path(),
            device=self._device,
            checkpoint_activations=memory_plan(self._spec, phase, memory_bytes).checkpoint_activations,
        )
        if state is not None:
            trainer.restore(state, step_done)
        self._trainers[phase] = trainer

    def advance(self, steps: Mapping[Phase, int]) -> dict[Phase, list[StepReport]]:
        return {phase: [self._step(self._trainers[phase]) for _ in range(count)] for phase, count in steps.items()}

    @staticmethod
    def _step(trainer: BlockTrainer) -> StepReport:
        report = trainer.step()
        trainer.open_ahead()  # not earlier: what the first step needs comes first
        return report

    def refresh(self, phase: Phase, published: Weights) -> None:
        self._trainers[phase].refresh(published)

    def weights(self, phase: Phase) -> Weights:
        return self._trainers[phase].weights()

    def state(self, phase: Phase) -> dict[str, Tensor]:
        return self._trainers[phase].state()

    def close(self) -> None:
        self._trainers.clear()


class PublishedBlocks(Mapping[int, Mapping[str, Tensor]]):
    """The published blocks of a run, read from disk on each access, so that a trainer holds only those that it uses."""

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


def train_run(
    run: RunDirectory,
    corpus: Corpus,
    *,
    only_block: int | None = None,
    jobs: int = 1,
    device: torch.device | None = None,
    memory_bytes: int | None = None,
    report: Callable[[StepReport], None] = lambda _: None,
    saved: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Train the phases that are not finished yet, on the GPU if there is one. `saved` is called when the directory has
    newer weights. With `memory_bytes`, phases that need more are streamed, if they can be (streamed.py). Returns False
    after a stop, else True."""
    require_start(run.spec, run.manifest().blocks or None)
    trainers = _trainers(run, corpus, jobs, device, memory_bytes)
    try:
        for phases in _unfinished_groups(run, wanted_phases(run.spec, only_block), jobs):
            if not _Group(run, trainers, phases, report, saved, stop, clock).train():
                return False
    finally:
        trainers.close()
    manifest = run.manifest()
    if len(manifest.finished) == len(run.spec.phases) and not manifest.combine:
        for path, weights in fit_combination(load_model(run), corpus.valid).items():
            run.save_combine(path, weights)
    return True


def _trainers(
    run: RunDirectory, corpus: Corpus, jobs: int, device: torch.device | None, memory_bytes: int | None
) -> Trainers:
    if jobs == 1:
        return LocalTrainers(run.spec, corpus, device, memory_bytes, run.path / "scratch")
    from blocktrain.train.processes import ProcessTrainers  # which imports this module

    return ProcessTrainers(_with_own_tokenizer(run), jobs, device)


def _with_own_tokenizer(run: RunDirectory) -> RunSpec:
    """The settings to read the text with: a tokenizer that came with another model was not learned from this text."""
    if run.spec.train.start_sha256 is None or run.tokenizer_file() is None:
        return run.spec
    return run.spec.with_(**{"corpus.tokenizer": str(run.path / TOKENIZER_FILE)})


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


def load_model(run: RunDirectory | str | Path) -> BlockModel:
    """The composed model of a run's published blocks. Blocks that are not trained yet have their initial weights."""
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    return BlockModel.from_tensors(run.spec, PublishedBlocks(run), run.manifest().combine)


def _coupled(spec: RunSpec) -> bool:
    """Whether the phases of one group exchange snapshots while they train."""
    return isinstance(spec.objective, Stacked) and spec.objective.schedule == "simultaneous"


def _unfinished_groups(run: RunDirectory, wanted: Sequence[Phase], jobs: int) -> Iterator[Sequence[Phase]]:
    """The unfinished phases in the order of the groups. Coupled phases come together, others `jobs` at a time."""
    for group in run.spec.groups:
        todo = [phase for phase in group if phase in wanted and phase.index not in run.manifest().finished]
        at_once = len(todo) if _coupled(run.spec) else jobs
        yield from (todo[start : start + at_once] for start in range(0, len(todo), max(1, at_once)))


class _Group:
    """Phases that are trained at the same time. Independent phases run to their ends. Simultaneous stacked phases stop
    every refresh_steps to exchange snapshots."""

    def __init__(
        self,
        run: RunDirectory,
        trainers: Trainers,
        phases: Sequence[Phase],
        report: Callable[[StepReport], None],
        saved: Callable[[], None],
        stop: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._run, self._trainers, self._phases = run, trainers, phases
        self._report, self._saved, self._stop, self._clock = report, saved, stop, clock
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
                self._saved()
                saved_s = self._clock()
        self._finish()
        self._saved()
        return True

    def _start(self) -> None:
        progress = {phase: self._run.load_progress(phase.index) for phase in self._phases}
        published = PublishedBlocks(self._run)
        self._require_below(published)
        self._snapshots: dict[int, Mapping[str, Tensor]] = dict(published) if self._refresh_steps else {}
        for found in filter(None, progress.values()):
            self._snapshots |= _snapshots(found[0])
        for phase, saved in progress.items():
            state, metadata = saved or (None, {"step": "0"})
            with _unusable(self._run.progress_file(phase.index)):
                self._steps[phase] = int(metadata["step"])
                start_from = self._snapshots if self._refresh_steps else published
                self._trainers.start(phase, start_from, state, self._steps[phase])
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
        """One slice of every phase. Coupled phases wait for each other at their meeting points."""
        slices = {
            phase: min(self._trainers.slice_steps, self._meeting(phase) - self._steps[phase]) for phase in unfinished
        }
        if self._refresh_steps:
            first = min(self._meeting(phase) for phase in unfinished)
            slices = {phase: steps for phase, steps in slices.items() if self._meeting(phase) == first}
        for phase, reports in self._trainers.advance(slices).items():
            for step in reports:
                self._steps[phase] = step.step
                self._report(step)
                self._run.log({"phase": step.phase, "step": step.step, "loss": step.loss, "seconds": step.seconds})
        if self._refresh_steps and all(self._steps[phase] >= first for phase in slices):
            self._exchange()

    def _meeting(self, phase: Phase) -> int:
        """The step at which a phase next stops to exchange snapshots, or its last step."""
        if not self._refresh_steps:
            return phase.steps
        return min(phase.steps, (self._steps[phase] // self._refresh_steps + 1) * self._refresh_steps)

    def _exchange(self) -> None:
        for phase in self._phases:
            self._snapshots |= self._trainers.weights(phase)
        for phase in self._phases:
            self._trainers.refresh(phase, self._snapshots)

    def _save(self) -> None:
        for phase in self._phases:
            state = self._trainers.state(phase)
            if self._refresh_steps:
                own = self._snapshots.get(phase.block, {})
                state |= {f"{SNAPSHOT}{phase.block}.{name}": tensor for name, tensor in own.items()}
            self._run.save_progress(phase.index, state, {"step": str(self._steps[phase])})

    def _finish(self) -> None:
        for phase in self._phases:
            self._run.finish_phase(phase.index, self._trainers.weights(phase), phase.steps)
            self._run.clear_progress(phase.index)


@contextmanager
def _unusable(progress: Path) -> Iterator[None]:
    """The errors that torch and dict raise when an undamaged file does not hold the state of this phase."""
    try:
        yield
    except (KeyError, ValueError, RuntimeError) as error:
        detail = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"{progress} does not hold the state of this phase ({detail}): delete it to train the phase from its start"
        ) from None


def _snapshots(state: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Removes from a state the snapshots that a simultaneous phase saved with it, and returns them by block."""
    found: dict[int, dict[str, Tensor]] = {}
    for label in [name for name in state if name.startswith(SNAPSHOT)]:
        block, name = label.removeprefix(SNAPSHOT).split(".", 1)
        found.setdefault(int(block), {})[name] = state.pop(label)
    return found
