"""Memory against the size of the text: a process of its own prepares a generated corpus, another one trains on it and
counts what a worker fetches. Next: text.py, which calls it."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import blocktrain.train.trainer as training
from blocktrain.data.corpus import load_corpus
from blocktrain.data.prepare import Plan, prepare
from blocktrain.data.windows import STEPS_PER_SHARDS
from blocktrain.spec import RunSpec, preset
from blocktrain.swarm.local import local_swarm
from blocktrain.swarm.worker.worker import WorkReport
from blocktrain.train.run import LocalTrainers
from training.memory import peak_rss, reset_peak_rss

MEGABYTE = 10**6
STEPS = 150  # they read six shards
FETCH_STEPS = 3 * STEPS_PER_SHARDS  # after the first step, while a worker is watched
FETCH_LIMIT_S = 1200.0


def measure_memory(megabytes: int, work: Path, *, quick: bool = False) -> dict[str, float]:
    """A process of its own prepares a corpus of that size, another one trains on it. The text is made for that and
    deleted after it."""
    folder = work / "corpora" / f"generated-{megabytes}"
    folder.mkdir(parents=True, exist_ok=True)
    source, corpus = folder / "text.jsonl", folder / "corpus"
    try:
        with source.open("w") as file:
            for line in generated_lines(megabytes * MEGABYTE):
                file.write(line)
        prepared = _alone(f"prepare_there({str(source)!r}, {str(corpus)!r})")
        source.unlink()
        return prepared | _alone(f"train_on({str(corpus)!r}, quick={quick})")
    finally:
        shutil.rmtree(folder)


def _alone(call: str) -> dict[str, float]:
    """What a function of this module prints in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", f"from training import text_memory; text_memory.{call}"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(found.stdout))


def generated_lines(num_bytes: int) -> Iterator[str]:
    """JSON lines of documents that are not alike."""
    written, number = 0, 0
    while written < num_bytes:
        words = random.Random(number).randbytes(1800).hex(" ", 3)
        line = json.dumps({"text": f"{number} {words}"}) + "\n"
        written, number = written + len(line), number + 1
        yield line


def prepare_there(source: str, out: str) -> None:
    """Prints what preparing takes; the memory is that above the imports'."""
    before, began_s = reset_peak_rss(), time.process_time()
    prepare(Plan((source,), "bytes"), Path(out))
    seconds, peak = time.process_time() - began_s, peak_rss() - before
    print(json.dumps({"prepare_cpu_s": seconds, "prepare_peak_bytes": peak}))


def train_on(corpus: str, *, quick: bool) -> None:
    """Prints the peak of the memory above the imports', and the share of the time that training waits for its text.
    The first step comes before that: it waits for its files, and reads the libraries' code."""
    before = reset_peak_rss()
    steps, fetch_steps = (2, 2) if quick else (STEPS, FETCH_STEPS)
    spec = preset("tiny" if quick else "small").with_(**{"corpus.source": corpus, "train.steps": 4 * FETCH_STEPS})
    trainers, phase = LocalTrainers(spec, load_corpus(spec.corpus, spec.model.context)), spec.phases[0]
    trainers.start(phase, {}, None, 0)
    trainers.advance({phase: 1})
    waited_s = _seconds_in(training, "windows")
    training_s, _ = _timed(lambda: [trainers.advance({phase: 1}) for _ in range(steps)])
    facts = {"peak_bytes": peak_rss() - before, "drawing_share": sum(waited_s) / training_s, "steps": steps}
    print(json.dumps(facts | fetched_by_a_worker(spec, fetch_steps)))


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    answer = call()
    return time.perf_counter() - began_s, answer


def _seconds_in(module: ModuleType, name: str) -> list[float]:
    """Of each later call of a function that a module uses."""
    call, seconds = getattr(module, name), list[float]()

    def timed(*arguments: Any, **settings: Any) -> Any:
        passed_s, answer = _timed(lambda: call(*arguments, **settings))
        seconds.append(passed_s)
        return answer

    setattr(module, name, timed)
    return seconds


def fetched_by_a_worker(spec: RunSpec, steps: int) -> dict[str, float]:
    """What a worker that joins a swarm has on its disk when it has done one step, and so many steps later."""
    found, done, left = list[tuple[int, float]](), threading.Event(), steps
    with tempfile.TemporaryDirectory() as folder:

        def look(name: str, report: WorkReport) -> None:
            nonlocal left
            if report.kind != "step" or done.is_set():
                return
            if left in (steps, 0):
                held = sum(path.stat().st_size for path in Path(folder).glob("home/blobs/*"))
                found.append((held, time.perf_counter()))
            if left == 0:
                done.set()
            left -= 1

        with local_swarm(spec, workers=1, folder=folder, report=look):
            done.wait(FETCH_LIMIT_S)
    (first, first_s), (later, later_s) = found
    return {"first_step_bytes": first, "later_bytes": later - first, "later_s": later_s - first_s}
