"""The ways to decode that bench/serve.py compares, and the measurement of one output. Next: report.py."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from blocktrain.serve.decode.decoder import decode
from blocktrain.serve.decode.request import DecodeStats, Mode, Request
from blocktrain.serve.traversal import Forward
from serving.relay import Links
from shared.experiment import cpu_s

Served = Literal["reference", "model", "denoise"]
TRIPS = 4  # one way each: gateway, three stages, gateway


@dataclass(frozen=True)
class Way:
    """One line of the picture."""

    name: str
    label: str
    served: Served
    mode: Mode
    settings: Mapping[str, Any] = field(default_factory=dict)
    one_window: bool = False  # as many bytes as one traversal can write behind the prompt

    def request(self, prompt: bytes, max_tokens: int, seed: int) -> Request:
        return Request(prompt, max_tokens, self.mode, seed=seed, **self.settings)


BASELINE = "baseline"


def ways(candidates: int, few: int) -> tuple[Way, ...]:
    swept: tuple[Served, Mode] = ("model", Mode.SWEEP)
    return (
        Way(BASELINE, "end to end, autoregressive (baseline)", "reference", Mode.AUTOREGRESSIVE),
        Way("autoregressive", "blocks, autoregressive", "model", Mode.AUTOREGRESSIVE),
        Way("speculative", "blocks, speculative", "model", Mode.SPECULATIVE),
        Way("sweep", f"blocks, sweep ({candidates} candidates)", *swept, {"candidates": candidates}),
        Way("sweep-few", f"blocks, sweep ({few} candidates)", *swept, {"candidates": few}),
        Way("window", f"blocks, sweep ({few} candidates), one window", *swept, {"candidates": few}, one_window=True),
        Way("denoise", "denoising sweep (small span model)", "denoise", Mode.SWEEP),
    )


@dataclass(frozen=True)
class Output:
    """What one output took over the links. How good it is: serve_quality.py."""

    way: str
    rtt_ms: float
    prompt: int
    prompt_bytes: int
    output_bytes: int
    traversals: int
    seconds: float
    first_byte_seconds: float
    wire_bytes: int
    stage_cpu_seconds: float  # of all stages: what is left of the seconds when the machine does nothing else
    drafted: int
    accepted: int
    draft_seconds: float
    effective_candidates: tuple[float, ...]  # of each weighing


def bytes_within(budget_s: float, rtt_ms: float, wanted: int, mode: Mode) -> int:
    """How long an output may be for a decoder that goes round for every byte, so that nobody waits for minutes."""
    if mode is not Mode.AUTOREGRESSIVE or not rtt_ms:
        return wanted
    return min(wanted, max(8, int(budget_s / (TRIPS * rtt_ms / 2000))))


async def write(forward: Forward, request: Request) -> tuple[bytes, DecodeStats, float, tuple[float, ...]]:
    """The text, what it took, when its first byte came, and the effective candidates of each weighing."""
    text, began_s, first_s, effective = bytearray(), time.perf_counter(), 0.0, []
    async with aclosing(decode(forward, request)) as steps:
        async for step in steps:
            first_s = first_s or time.perf_counter() - began_s
            text += bytes(byte.value for byte in step.written)
            if (count := step.stats.effective_candidates) is not None:
                effective.append(count)
            stats = step.stats
    return bytes(text), replace(stats, seconds=time.perf_counter() - began_s), first_s, tuple(effective)


@dataclass(frozen=True)
class Chain:
    """The stages of one model, and the links to them."""

    processes: Sequence[subprocess.Popen[str]]
    addresses: Sequence[str]  # without the links
    links: Links

    def cpu_s(self) -> float:
        return sum(cpu_s(process.pid) for process in self.processes)


async def measure(forward: Forward, chain: Chain, way: Way, request: Request, **where: Any) -> Output:
    before, cpu_before_s = chain.links.num_bytes(), chain.cpu_s()
    _, stats, first_s, effective = await write(forward, request)
    return Output(
        way=way.name,
        prompt_bytes=len(request.prompt),
        output_bytes=stats.written,
        traversals=stats.traversals,
        seconds=stats.seconds,
        first_byte_seconds=first_s,
        wire_bytes=chain.links.num_bytes() - before,
        stage_cpu_seconds=chain.cpu_s() - cpu_before_s,
        drafted=stats.drafted,
        accepted=stats.accepted,
        draft_seconds=stats.draft_s,
        effective_candidates=effective,
        **where,
    )


async def greedy_is_the_same(forward: Forward, prompts: Sequence[bytes], max_tokens: int) -> int:
    """Speculative decoding at temperature 0 writes the bytes of autoregressive decoding, or the experiment ends here.
    How many bytes were compared."""
    compared = 0
    for prompt in prompts:
        modes = (Mode.AUTOREGRESSIVE, Mode.SPECULATIVE)
        one, other = [(await write(forward, Request(prompt, max_tokens, mode, temperature=0)))[0] for mode in modes]
        if one != other:
            raise RuntimeError(f"behind {prompt!r} speculative decoding wrote {other!r}, autoregressive {one!r}")
        compared += len(one)
    return compared


@dataclass(frozen=True)
class Point:
    """All outputs of one way at one round-trip time: medians, and the extremes of the rate."""

    way: str
    rtt_ms: float
    outputs: int
    output_bytes: int
    bytes_per_second: float
    slowest: float
    fastest: float
    traversals_per_output: float
    traversals_per_byte: float
    first_byte_seconds: float
    wire_bytes_per_byte: float
    acceptance: float | None  # of drafted bytes, where they are accepted one by one
    effective_candidates: float | None  # median over weighings
    draft_seconds: float
    stage_cpu_seconds: float


def point(outputs: Sequence[Mapping[str, Any]], mode: Mode) -> Point:
    first, mid = outputs[0], statistics.median
    rates = [each["output_bytes"] / each["seconds"] for each in outputs]
    drafted = sum(each["drafted"] for each in outputs)
    effective = [count for each in outputs for count in each["effective_candidates"]]
    return Point(
        way=first["way"],
        rtt_ms=first["rtt_ms"],
        outputs=len(outputs),
        output_bytes=first["output_bytes"],
        bytes_per_second=mid(rates),
        slowest=min(rates),
        fastest=max(rates),
        traversals_per_output=mid(each["traversals"] for each in outputs),
        traversals_per_byte=mid(each["traversals"] / each["output_bytes"] for each in outputs),
        first_byte_seconds=mid(each["first_byte_seconds"] for each in outputs),
        wire_bytes_per_byte=mid(each["wire_bytes"] / each["output_bytes"] for each in outputs),
        acceptance=sum(each["accepted"] for each in outputs) / drafted
        if mode is Mode.SPECULATIVE and drafted
        else None,
        effective_candidates=mid(effective) if effective else None,
        draft_seconds=mid(each["draft_seconds"] for each in outputs),
        stage_cpu_seconds=mid(each["stage_cpu_seconds"] for each in outputs),
    )


def as_record(output: Output) -> dict[str, Any]:
    return asdict(output)
