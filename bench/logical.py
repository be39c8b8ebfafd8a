"""Can a model far larger than this machine's memory be served from it? A logical shape of 75.80 billion parameters in
half precision, over three stage processes: one full-sequence traversal against autoregressive decoding.

    python bench/logical.py [--positions 64] [--baseline-s 240] [--physical-layers 2] [--quick]

Logical parameters are those of the shape, and all of their work is done. Physical parameters are those on the disk: a
block's few real layers are walked over again and again. The weights are random, so nothing here says how good a text
is. What was not run to its end is extrapolated, and its field's name says so."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes, logical_parameters, physical_parameters
from blocktrain.serve.chain.pipeline import Pipeline, PipelineSettings, PipelineStats
from blocktrain.serve.decode.decoder import decode
from blocktrain.serve.decode.request import Mode, Request
from blocktrain.serve.traversal import Forward, StageTiming, Traversal
from blocktrain.spec import Denoise, EndToEnd, ModelSpec, Objective, RunSpec, TrainSpec
from blocktrain.train.flops import FORWARD, layers_flops
from serving.logical_report import HEAD, cells, figures, section, shape, story, verdicts
from serving.stages import address_of, stage_process
from shared.experiment import RESULTS, cpu_s, goal_lines, machine, proc_status, table, write_json, write_pictures

__all__ = ["figures", "main", "section", "verdicts"]  # what page.py asks for
WIDTH, HEADS, BLOCKS, LAYERS = 4224, 33, 3, 354  # 75.80 billion parameters, in three blocks of 118 layers
NEVER_S = 1e6
MATMUL_S = 4.0
LEAST_TRAVERSALS = 3
GB = 1e9
PROMPT = b"It is the duty of the President to give to the Congress information of the state of the Union. "


# --- the model -------------------------------------------------------------------------------------------------------


def logical_spec(objective: Objective, positions: int, physical_layers: int, quick: bool) -> RunSpec:
    """Quick: a single block, so that a single stage has to start."""
    width, heads, blocks, layers = (64, 2, 1, 4) if quick else (WIDTH, HEADS, BLOCKS, LAYERS)
    model = ModelSpec(
        width=width, heads=heads, context=positions, blocks=blocks, layers=layers, physical_layers=physical_layers
    )
    return RunSpec(name="logical", model=model, objective=objective, train=TrainSpec(windows=1))


def random_block(spec: RunSpec, index: int) -> dict[str, Tensor]:
    """Half-precision weights under which the stream neither fades nor grows: what all layers together add to it is
    about as large as what comes in."""
    torch.manual_seed(index)
    return {name: _random(name, shape, spec) for name, shape in block_shapes(spec, index).items()}


def _random(name: str, shape: tuple[int, ...], spec: RunSpec) -> Tensor:
    if name in ("gain", "sharpness"):
        return torch.ones(shape)
    adds_to_stream = name.endswith(("attention_out", "down"))
    variance_one = 1.0 if name == "embedding" else math.sqrt(3 / shape[1])
    spread = variance_one / spec.model.total_layers if adds_to_stream else variance_one
    return torch.empty(shape, dtype=torch.float16).uniform_(-spread, spread)


def write_model(path: Path, spec: RunSpec) -> RunDirectory:
    run = RunDirectory.create(path, spec, corpus_sha256="none")
    for index in range(spec.model.blocks):
        run.save_block(index, random_block(spec, index), steps=1)
    return run


def traversal_flops(spec: RunSpec, positions: int) -> int:
    """All layers over so many positions once."""
    short = spec.with_(**{"model.context": positions})
    return sum(layers_flops(short, block, FORWARD) for block in range(spec.model.blocks))


# --- the stages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageProcess:
    process: subprocess.Popen[str]
    address: str
    block: int

    def peak_rss(self) -> int:
        return proc_status("VmHWM", self.process.pid)

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)


@contextmanager
def stage_processes(model: Path, threads: int) -> Iterator[list[StageProcess]]:
    """One process a block, its layers left on the disk."""
    with ExitStack() as stack:
        options = ["--listen", "tcp://127.0.0.1:*", "--offload"]
        started = [
            stack.enter_context(stage_process(model, range(block, block + 1), threads, *options))
            for block in range(RunDirectory.open(model).spec.model.blocks)
        ]
        yield [StageProcess(process, address_of(process), block) for block, process in enumerate(started)]


# --- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matmul:
    """What this machine's matmul does with the shape of a layer's largest matrix, in float32."""

    gflops: float  # by the clock: what other processes leave
    gflops_a_cpu_s: float

    @classmethod
    def measure(cls, width: int, positions: int, seconds: float) -> Matmul:
        x, weight = torch.randn(positions, width), torch.randn(4 * width, width)
        F.linear(x, weight)
        began_s, cpu_began_s, count = time.monotonic(), time.process_time(), 0
        while time.monotonic() - began_s < seconds:
            F.linear(x, weight)
            count += 1
        work = count * 2 * positions * weight.numel() / GB
        return cls(work / (time.monotonic() - began_s), work / (time.process_time() - cpu_began_s))


@dataclass(frozen=True)
class Wire:
    """Bytes of messages, heartbeats included."""

    to_stages: int
    between_stages: int
    back: int

    @property
    def total(self) -> int:
        return self.to_stages + self.between_stages + self.back

    @classmethod
    def between(cls, before: PipelineStats, after: PipelineStats) -> Wire:
        return cls(
            after.sent_bytes - before.sent_bytes,
            after.between_bytes - before.between_bytes,
            after.received_bytes - before.received_bytes,
        )


def patient() -> PipelineSettings:
    """Nothing here is quick: no stage is given up."""
    return PipelineSettings(
        wire="fp16",
        time_limit_s=NEVER_S,
        attempt_s=NEVER_S,
        attempts=1,
        start_s=300.0,
        heartbeat_s=30.0,
        dead_after_s=NEVER_S,
    )


class Timed:
    """A forward that notes what each traversal took."""

    def __init__(self, forward: Forward) -> None:
        self._forward, self.info = forward, forward.info
        self.seconds: list[float] = []
        self.timings: list[tuple[StageTiming, ...]] = []

    async def __call__(self, traversal: Traversal) -> Traversal:
        began_s = time.monotonic()
        reply = await self._forward(traversal)
        self.seconds.append(time.monotonic() - began_s)
        self.timings.append(reply.trace)
        _say(f"  traversal {len(self.seconds)}: {self.seconds[-1]:.1f} s")
        return reply

    async def forget(self, session: str) -> None:
        await self._forward.forget(session)


async def write(stages: Sequence[StageProcess], request: Request, budget_s: float) -> dict[str, Any]:
    """As much of the output as fits the budget, but at least three traversals where it takes so many."""
    written = 0
    async with Pipeline([stage.address for stage in stages], patient()) as pipeline:
        timed, before, cpu_before_s = Timed(pipeline), pipeline.stats(), _cpu_s(stages)
        async with aclosing(decode(timed, request)) as steps:
            async for step in steps:
                written += len(step.written)
                if len(timed.seconds) >= LEAST_TRAVERSALS and sum(timed.seconds) >= budget_s:
                    break
        cpu_s, wire = _cpu_s(stages) - cpu_before_s, Wire.between(before, pipeline.stats())
    return {
        "prompt_bytes": len(request.prompt),
        "output_bytes": request.max_tokens,
        "measured_bytes": written,
        "traversal_seconds": timed.seconds,
        "stage_seconds": [[stage.computed_s for stage in stages] for stages in timed.timings],
        "measured_seconds": sum(timed.seconds),
        "measured_cpu_seconds": cpu_s,
        "measured_wire_bytes": {**asdict(wire), "total": wire.total},
        "stages": [{"block": stage.block, "peak_rss_bytes": stage.peak_rss()} for stage in stages],
    }


def extrapolated(measured: Mapping[str, Any]) -> dict[str, float]:
    """The whole output of a decoder that writes a byte a traversal, had it been let to the end."""
    first_s, *later_s = measured["traversal_seconds"]
    return {
        "first_byte_seconds": first_s,
        "median_later_byte_seconds": statistics.median(later_s),
        "extrapolated_seconds": first_s + (measured["output_bytes"] - 1) * statistics.median(later_s),
    }


def prompt_of(length: int) -> bytes:
    return (PROMPT * (1 + length // len(PROMPT)))[:length]


def _cpu_s(stages: Sequence[StageProcess]) -> float:
    return sum(stage.cpu_s() for stage in stages)


# --- the run ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    positions = options.positions or (16 if options.quick else 64)
    matmul_s = 0.1 if options.quick else MATMUL_S
    document: dict[str, Any] = {"machine": machine(), "stage_threads": options.threads}
    for mode, objective in ((Mode.SWEEP, Denoise(span_share=0.5)), (Mode.AUTOREGRESSIVE, EndToEnd())):
        spec = logical_spec(objective, positions, options.physical_layers, options.quick)
        document[mode] = run_model(mode, spec, options, matmul_s)
        write_json(options.out / f"{options.name}.json", document)
    document["summary"] = summarise(document)
    write_json(options.out / f"{options.name}.json", document)
    print(shape(document), table(HEAD, cells(document)), story(document), goal_lines(verdicts(document)), sep="\n\n")
    write_pictures({options.name: figures(document)["logical"]}, options.out)


def run_model(mode: Mode, spec: RunSpec, options: argparse.Namespace, matmul_s: float) -> dict[str, Any]:
    """One way to decode on a model of its own, made for it and gone after it."""
    output_bytes, load_before = spec.model.context // 2, os.getloadavg()
    request = Request(prompt_of(spec.model.context - output_bytes), output_bytes, mode)
    with tempfile.TemporaryDirectory(dir=options.work, prefix="logical-") as folder:
        _say(f"{mode}: writing {2 * physical_parameters(spec) / GB:.2f} GB of weights")
        write_model(Path(folder), spec)
        stored_bytes = [path.stat().st_size for path in sorted(Path(folder).glob("block-*"))]
        with stage_processes(Path(folder), options.threads) as stages:
            before = Matmul.measure(spec.model.width, spec.model.context, matmul_s)
            _say(f"{mode}: running, a matmul does {before.gflops:.0f} GFLOP/s beside whatever else runs here")
            measured = asyncio.run(write(stages, request, options.baseline_s))
            after = Matmul.measure(spec.model.width, spec.model.context, matmul_s)
    return {
        **measured,
        **(extrapolated(measured) if mode is Mode.AUTOREGRESSIVE else {}),
        "spec": spec.model_dump(mode="json"),
        "logical_parameters": logical_parameters(spec),
        "physical_parameters": physical_parameters(spec),
        "logical_fp16_bytes": 2 * logical_parameters(spec),
        "stored_bytes": stored_bytes,
        "sequence_positions": spec.model.context - 1,  # nobody reads what follows the last byte
        "sequence_flops": traversal_flops(spec, spec.model.context - 1),
        "load": {"before": load_before, "after": os.getloadavg()},
        "matmul": {"before": asdict(before), "after": asdict(after)},
    }


def summarise(document: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that the page quotes."""
    swept, written = document["sweep"], document["autoregressive"]
    matmul, flops = swept["matmul"], swept["sequence_flops"] / GB
    clock, cpu = (statistics.mean(matmul[when][key] for when in matmul) for key in ("gflops", "gflops_a_cpu_s"))
    seconds, cpu_s = swept["measured_seconds"], swept["measured_cpu_seconds"]
    return {
        "logical_parameters": swept["logical_parameters"],
        "physical_parameters": swept["physical_parameters"],
        "sweep_seconds": seconds,
        "sweep_gflops": flops / seconds,
        "matmul_gflops": clock,
        "of_matmul": flops / seconds / clock,
        "of_matmul_a_cpu_second": flops / cpu_s / cpu,
        "autoregressive_extrapolated_seconds": written["extrapolated_seconds"],
        "extrapolated_speedup": written["extrapolated_seconds"] / seconds,
        "sweep_peak_rss_bytes": [stage["peak_rss_bytes"] for stage in swept["stages"]],
        "autoregressive_peak_rss_bytes": [stage["peak_rss_bytes"] for stage in written["stages"]],
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, help="of the sequence, half of them output (default 64)")
    parser.add_argument("--baseline-s", type=float, default=240.0, help="for autoregressive decoding, then extrapolate")
    parser.add_argument("--physical-layers", type=int, default=2, help="real layers a block")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each stage; one works at a time")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--name", default="logical", help="of the result file")
    parser.add_argument(
        "--work", type=Path, help="where the weights are written meanwhile (default: a temporary folder)"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny shape in one block, seconds")
    return parser


if __name__ == "__main__":
    main()
