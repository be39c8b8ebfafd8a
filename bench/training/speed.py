"""The speed of one worker, measured: its steps against the reference's and against the same layers in a bare loop, and
where a step's time goes. Next: speed.py, which reports it."""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from blocktrain.data.corpus import Corpus
from blocktrain.data.windows import Tokens, windows
from blocktrain.model.block import StackedBlock, build_block
from blocktrain.spec import Phase, RunSpec, Stacked
from blocktrain.train.flops import phase_flops
from blocktrain.train.optim import Muon
from blocktrain.train.reference import reference_of
from blocktrain.train.trainer import BlockTrainer
from training.memory import Case, snapshots_of

SPANS = ("data", "optimiser")  # what happens inside them counts as theirs, whatever it is
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


class BareLoop:
    """The layers of a phase in the plainest loop: batches drawn beforehand, all weights in place, no schedule, no
    report. What BlockTrainer adds to this is what our loop costs."""

    def __init__(self, spec: RunSpec, phase: Phase, train_bytes: Tokens, compiled: bool) -> None:
        self._below = [_stacked_block(spec, index).requires_grad_(False) for index in phase.below]
        self._trained = [_stacked_block(spec, index) for index in phase.blocks]
        self._own_weight = spec.objective.own_weight if isinstance(spec.objective, Stacked) else 0.0
        self._parameters = [p for block in self._trained for p in block.parameters()]
        optim = spec.optim
        self._clip_norm = optim.clip_norm
        self._muon = Muon([p for b in self._trained for p in b.matrices()], optim.muon_lr, optim.muon_momentum)
        tables = [p for b in self._trained for p in b.tables()]
        self._adam = torch.optim.AdamW(tables, optim.adam_lr, optim.adam_betas, weight_decay=0.0, fused=True)
        self._batches = [_batch(spec, phase, train_bytes, step) for step in range(4)]
        self._loss = torch.compile(bare_loss, dynamic=False) if compiled else bare_loss
        self._step = 0

    def step(self) -> None:
        inputs, targets = self._batches[self._step % len(self._batches)]
        self._step += 1
        loss = self._loss(self._below, self._trained, inputs, targets, self._own_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._muon.step()
        self._adam.step()
        for parameter in self._parameters:
            parameter.grad = None


def bare_loss(
    below: list[StackedBlock], trained: list[StackedBlock], inputs: Tensor, targets: Tensor, own_weight: float
) -> Tensor:
    state = None
    with torch.no_grad():
        for block in below:
            state = block.advance(inputs, state)
    loss = torch.zeros(())
    for block in trained:
        state = block.advance(inputs, state)
        weight = 1.0 if block is trained[-1] else own_weight
        if weight:
            loss = loss + weight * F.cross_entropy(block.read_out(state).flatten(0, 1), targets.flatten())
    return loss


def _stacked_block(spec: RunSpec, index: int) -> StackedBlock:
    block = build_block(spec, index)
    assert isinstance(block, StackedBlock)
    return block


def _batch(spec: RunSpec, phase: Phase, train_bytes: Tokens, step: int) -> tuple[Tensor, Tensor]:
    length = spec.model.context + 1
    drawn = windows(
        train_bytes, count=spec.train.windows, length=length, seed=spec.seed, block=phase.block, shard=0, step=step
    )
    window = torch.from_numpy(drawn).long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


@dataclass(frozen=True)
class Times:
    """Seconds of each contestant in each turn."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        """The median over turns of one contestant's time over the other's."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True))


def take_turns(
    contestants: Mapping[str, Callable[[], object]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Every second turn goes backwards, so that none always follows the same one."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns):
        for name in list(contestants)[:: 1 if turn % 2 == 0 else -1]:
            started_s = clock()
            contestants[name]()
            seconds[name].append(clock() - started_s)
    return Times(seconds)


def speed_part(spec: RunSpec, corpus: Corpus, compiled: bool, turns: int, matmul_size: int) -> dict[str, Any]:
    """Every phase of the run, the reference, bare loops of the first and the last phase, and one large matmul."""
    reference = reference_of(spec)
    cases = {f"phase {phase.index}": Case("", spec, phase.index) for phase in spec.phases}
    cases["end to end"] = Case("", reference, 0)
    trainers = {
        name: BlockTrainer(case.spec, case.phase, corpus.train, snapshots_of(case), compile=compiled)
        for name, case in cases.items()
    }
    ends = list(dict.fromkeys((spec.phases[0], spec.phases[-1])))
    bare = {f"phase {phase.index}, bare": BareLoop(spec, phase, corpus.train, compiled) for phase in ends}
    square = torch.randn(matmul_size, matmul_size)
    contestants: dict[str, Callable[[], object]] = {name: loop.step for name, loop in (trainers | bare).items()}
    contestants["matmul"] = lambda: square @ square
    for name, contestant in contestants.items():
        print(f"speed: warming up {name}", file=sys.stderr, flush=True)
        contestant()
        contestant()
    print(f"speed: {turns} turns", file=sys.stderr, flush=True)
    times = take_turns(contestants, turns)
    middle = spec.phases[len(spec.phases) // 2]
    return {
        "compiled": compiled,
        "turns": turns,
        "seconds": times.seconds,
        "matmul": {"size": matmul_size, "gflops": 2e-9 * matmul_size**3 / times.median("matmul")},
        "steps": [step_row(name, case, times, matmul_size) for name, case in cases.items()],
        "loop": [{"name": f"phase {p.index}", "ratio": loop_ratio(times, f"phase {p.index}")} for p in ends],
        "shares": {"of": f"phase {middle.index}", **step_shares(trainers[f"phase {middle.index}"], turns)},
    }


def loop_ratio(times: Times, name: str) -> float:
    """Our throughput over the bare loop's."""
    return times.ratio(f"{name}, bare", to=name)


def step_row(name: str, case: Case, times: Times, matmul_size: int) -> dict[str, Any]:
    """A phase's step: its time, its work, and how near it comes to the speed of a large matmul in the same turn."""
    flops = phase_flops(case.spec, case.phase)
    return {
        "name": name,
        "trained_blocks": list(case.phase.blocks),
        "blocks_below": list(case.phase.below),
        "seconds": times.median(name),
        "of_reference": times.ratio(name, to="end to end"),
        "flops": flops,
        "gflops": flops / times.median(name) / 1e9,
        "of_matmul": flops / (2 * matmul_size**3) * times.ratio("matmul", to=name),
    }


def step_shares(trainer: BlockTrainer, steps: int) -> dict[str, float]:
    """Where the time of a step goes, as shares of the whole."""
    annotate(trainer, "_batch", "data")
    annotate(trainer._optimizer, "step", "optimiser")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            with record_function("step"):
                trainer.step()
    kinds: Counter[str] = Counter()
    for event in profiler.events() or ():
        if (kind := kind_of(event)) is not None:
            kinds[kind] += event.self_cpu_time_total
    total = sum(kinds.values())
    return {kind: kinds[kind] / total for kind in ("matmul", "attention", "optimiser", "data", "other")}


def kind_of(event: Any) -> str | None:
    """What an event of the profiler is part of; None outside of a step."""
    names = [event.name]
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    if names[-1] != "step":
        return None
    for span in SPANS:
        if span in names:
            return span
    if names[0] in MATMULS:
        return "matmul"
    return "attention" if "attention" in names[0] else "other"


def annotate(owner: object, method: str, label: str) -> None:
    """Have the profiler see a method of this one object as a span of that name."""
    original = getattr(owner, method)

    def call(*arguments: Any) -> Any:
        with record_function(label):
            return original(*arguments)

    setattr(owner, method, call)
