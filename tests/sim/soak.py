"""Runs the simulator's seeds: a number of them, or until it is stopped. A seed that fails is printed with the shortest
schedule that fails in the same way. Nothing random but the seed: `--first SEED --seeds 1` runs one again.

    python tests/sim/soak.py --seeds 500
    make soak
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from multiprocessing import get_context
from pathlib import Path

CHUNK, BATCH = 5, 500
SAY_EVERY_S = 10.0
_FOLDER: list[Path] = []


def _begin(folder: Path) -> None:
    """Of each process: Ctrl-C is for the one that prints. Tensors are tiny: threads would only wait for each other."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _FOLDER.append(folder / str(os.getpid()))


def _run(seed: int) -> tuple[int, int, int, int, list[str]]:
    from blocktrain.sim.seeds import report, run_seed

    lines: list[str] = []
    course = run_seed(seed, _FOLDER[0])
    if course.invariant:
        report(course, _FOLDER[0], lines.append)
    return seed, course.events, course.acknowledged, course.merges, lines


def _batches(seeds: Iterator[int]) -> Iterator[list[int]]:
    """A pool reads all that it is given at once."""
    while batch := list(islice(seeds, BATCH)):
        yield batch


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="how many; without it, until Ctrl-C")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at the same time")
    args = parser.parse_args(argv)
    from blocktrain.sim.seeds import scratch

    seeds: Iterator[int] = islice(count(args.first), args.seeds)
    done = events = acknowledged = merges = 0
    failed: list[int] = []
    began_s = said_s = time.monotonic()

    def summary() -> str:
        took_s = time.monotonic() - began_s
        return (
            f"{done} schedules, {events} events, {acknowledged} acknowledged updates, {merges} versions in "
            f"{took_s:.0f} s; {len(failed)} failed{': ' + ', '.join(map(str, failed)) if failed else ''}"
        )

    with scratch() as folder, get_context("spawn").Pool(args.jobs, _begin, (folder,)) as pool:
        courses = chain.from_iterable(pool.imap_unordered(_run, batch, CHUNK) for batch in _batches(seeds))
        try:
            for seed, more_events, more_acknowledged, more_merges, lines in courses:
                done, events, merges = done + 1, events + more_events, merges + more_merges
                acknowledged += more_acknowledged
                if lines:
                    failed.append(seed)
                    print("\n".join(lines), flush=True)
                if time.monotonic() > said_s + SAY_EVERY_S:
                    said_s = time.monotonic()
                    print(summary(), flush=True)
            pool.close()
            pool.join()
        except KeyboardInterrupt:
            pool.terminate()
    print(summary(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
