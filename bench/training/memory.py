"""The memory of one worker, measured: what it holds between steps and the peak of whole steps, each kind of worker in a
process of its own. Next: memory.py, which reports it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import build_block
from blocktrain.spec import Denoise, EndToEnd, Phase, RunSpec, Stacked
from blocktrain.train.reference import reference_of
from blocktrain.train.run import PublishedBlocks
from blocktrain.train.streamed import StreamedTrainer
from blocktrain.train.trainer import BlockTrainer
from shared.experiment import proc_status

SLACK = 0.10  # what a worker may take above its share of the reference's memory
Snapshots = dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """One kind of worker."""

    name: str
    spec: RunSpec
    phase_index: int
    compiled: bool = False
    streamed: bool = False  # one block in memory at a time
    kept_blocks: int = 0  # streamed: blocks that keep their activations

    @property
    def phase(self) -> Phase:
        return self.spec.phases[self.phase_index]

    @property
    def is_reference(self) -> bool:
        return isinstance(self.spec.objective, EndToEnd)


@dataclass(frozen=True)
class Memory:
    """Bytes. The first five are held between backward and update, exact; the peaks are those of whole steps."""

    weights: int
    gradients: int
    optimiser: int
    frozen: int  # weights of other blocks that the trainer runs
    buffers: int
    tensor_peak: int  # all tensors alive at once
    rss_peak: int  # resident memory above that of the process with its libraries warm and the corpus loaded

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimiser

    @property
    def held(self) -> int:
        return self.state + self.frozen + self.buffers


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
        Case("middle, scaffold", spec.with_(objective=Stacked(scaffold=1)), middle),
        Case("middle, look-ahead", spec.with_(objective=ahead), middle),
        Case("denoise", spec.with_(objective=Denoise()), middle),
    ]


def all_cases(spec: RunSpec) -> list[Case]:
    """Four blocks and eight; then four again, compiled, as a run of this size trains on a CPU."""
    four, eight = (memory_cases(spec, num_blocks) for num_blocks in (4, 8))
    return [*four, *eight, *(replace(case, name=f"{case.name}, compiled", compiled=True) for case in four)]


def quick_cases(spec: RunSpec) -> list[Case]:
    chosen = ("end to end", "middle, scaffold")
    return [case for case in memory_cases(spec, spec.model.blocks) if case.name in chosen]


def measure_memory(case: Case, steps: int) -> Memory:
    corpus = load_corpus(case.spec.corpus, case.spec.model.context)
    _warm_up(case, corpus)
    baseline = reset_peak_rss()
    with TemporaryDirectory() as folder:
        published = published_by(case, Path(folder) / "run", corpus)
        if case.streamed:
            scratch = Path(folder) / "scratch"
            options: dict[str, Any] = {"scratch": scratch, "kept_blocks": case.kept_blocks, "compile": False}
            streamed = StreamedTrainer(case.spec, case.phase, corpus.train, published, **options)
            return _measure_streamed_steps(streamed, steps, baseline)
        trainer = BlockTrainer(case.spec, case.phase, corpus.train, published, compile=case.compiled)
        return _measure_steps(trainer, steps, baseline)


def _measure_steps(trainer: BlockTrainer, steps: int, baseline: int) -> Memory:
    held: list[dict[str, int]] = []
    call_before(trainer._optimizer, "step", lambda: held.append(held_bytes(trainer)))
    for _ in range(steps):
        trainer.step()
    rss_peak = peak_rss() - baseline
    between_steps = sum(held[-1].values()) - held[-1]["gradients"]
    return Memory(**held[-1], tensor_peak=between_steps + step_peak(trainer), rss_peak=rss_peak)


def _measure_streamed_steps(trainer: StreamedTrainer, steps: int, baseline: int) -> Memory:
    """Between steps it holds the weights of one block alone; gradients and optimiser state come and go in the step."""
    for _ in range(steps):
        trainer.step()
    rss_peak = peak_rss() - baseline
    modules = [*trainer._modules.values(), *trainer._frozen.values()]
    weights = num_bytes(parameter for module in modules for parameter in module.parameters())
    buffers = num_bytes(buffer for module in modules for buffer in module.buffers())
    peak = weights + buffers + step_peak(trainer)
    return Memory(weights, 0, 0, 0, buffers, tensor_peak=peak, rss_peak=rss_peak)


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


def published_by(case: Case, path: Path, corpus: Corpus) -> PublishedBlocks:
    """The same as a run has them: in files, read when they are run."""
    run = RunDirectory.create(path, case.spec, corpus.sha256)
    for index, tensors in snapshots_of(case).items():
        run.save_block(index, tensors, steps=0)
    return PublishedBlocks(run)


def held_bytes(trainer: BlockTrainer) -> dict[str, int]:
    parameters = [parameter for block in trainer.trained for parameter in block.parameters()]
    frozen = list(trainer._frozen.values())
    return {
        "weights": num_bytes(parameters),
        "gradients": num_bytes(parameter.grad for parameter in parameters),
        "optimiser": num_bytes(trainer._optimizer.state().values()),
        "frozen": num_bytes(parameter for block in frozen for parameter in block.parameters()),
        "buffers": num_bytes(buffer for block in (*trainer.trained, *frozen) for buffer in block.buffers()),
    }


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def step_peak(trainer: BlockTrainer) -> int:
    """The most bytes of tensors that a step has alive at once, above those it finds, by the allocator's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.step()
    with TemporaryDirectory() as folder:
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
    return proc_status("VmRSS")


def peak_rss() -> int:
    if Path("/proc/self/status").exists():
        return proc_status("VmHWM")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def call_before(owner: object, method: str, act: Callable[[], None]) -> None:
    """Have `act` called at the start of a method of this one object."""
    original = getattr(owner, method)

    def call(*arguments: Any) -> Any:
        act()
        return original(*arguments)

    setattr(owner, method, call)


def memory_part(cases: Sequence[Case], steps: int, measure: Callable[[Case, int], Memory]) -> list[dict[str, Any]]:
    """One row a case, with its ratios to the reference of the same number of blocks. Two are measured at a time: what
    one takes does not depend on the other."""
    with ThreadPoolExecutor(2 if measure is in_own_process else 1) as pool:
        measured = dict(zip(cases, pool.map(lambda case: measure(case, steps), cases), strict=True))
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
        # With --quick all cases share a process, and one that was larger before has no new peak.
        "rss_peak_ratio": memory.rss_peak / max(reference.rss_peak, 1),
        "goal": None if case.is_reference else 1 / blocks + SLACK,
    }


def in_own_process(case: Case, steps: int) -> Memory:
    print(f"memory: {case.spec.model.blocks} blocks, {case.name}", file=sys.stderr, flush=True)
    settings = {
        "name": case.name,
        "spec": case.spec.model_dump(mode="json"),
        "phase_index": case.phase_index,
        "compiled": case.compiled,
        "streamed": case.streamed,
        "kept_blocks": case.kept_blocks,
        "steps": steps,
        "threads": torch.get_num_threads(),
    }
    command = [sys.executable, str(Path(__file__).parents[1] / "memory.py"), "--measure", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring {case.name} failed: {done.stderr.strip()[-2000:]}")
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def measure_here(settings: Mapping[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    spec = RunSpec.model_validate(settings["spec"])
    kind = {name: settings[name] for name in ("compiled", "streamed", "kept_blocks")}
    case = Case(settings["name"], spec, settings["phase_index"], **kind)
    print(json.dumps(asdict(measure_memory(case, settings["steps"]))))
