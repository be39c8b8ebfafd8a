"""The work that every side does, and how it is measured: the same tensors, the same check, the same clock. Runs in the
peers' environments: needs numpy, and of Linux /proc. Next: ours.py, flower_side.py, hivemind_side.py, one a side.

A worker's tensors of a round are the published ones plus a step of its own. A step is a worker's noise times a number
of the round: noise is a short random stretch laid out again and again, so that everybody can tell the exact mean."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Shapes = Mapping[str, Sequence[int]]
STRETCH = 1 << 16
STEP_SIZE = 1e-3
START_FILE = "start.npz"


@dataclass(frozen=True)
class Cell:
    """One measurement: so many workers average tensors of these shapes for so many rounds after a warm-up."""

    workers: int
    rounds: int
    codec: str
    shapes: dict[str, list[int]]
    folder: str  # for whatever a side keeps while it runs
    spec: dict[str, Any]  # of the run whose block has these shapes
    trains: bool = False  # between the rounds, by the spec; else a worker's step is given

    @classmethod
    def read(cls, text: str) -> Cell:
        return cls(**json.loads(text))

    @property
    def num_bytes(self) -> int:
        return 4 * sum(math.prod(shape) for shape in self.shapes.values())

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def factor(round_number: int) -> float:
    """Steps of one worker differ from round to round: equal bytes would be taken for a repetition."""
    return STEP_SIZE * (1 + 0.25 * math.sin(1 + round_number))


def noise(worker: int) -> Floats:
    return np.random.default_rng(worker).standard_normal(STRETCH, dtype=np.float32)


def laid_out(stretch: Floats, shape: Sequence[int]) -> Floats:
    return np.resize(stretch, math.prod(shape)).reshape(shape)


def step(worker: int, round_number: int, shapes: Shapes) -> dict[str, Floats]:
    return _steps(noise(worker), round_number, shapes)


def mean_step(workers: int, round_number: int, shapes: Shapes) -> dict[str, Floats]:
    """What the average of all workers' steps must be."""
    return _steps(np.mean([noise(worker) for worker in range(workers)], axis=0), round_number, shapes)


def _steps(stretch: Floats, round_number: int, shapes: Shapes) -> dict[str, Floats]:
    scaled = (stretch * np.float32(factor(round_number))).astype(np.float32)
    return {name: laid_out(scaled, shape) for name, shape in shapes.items()}


def start(cell: Cell) -> dict[str, Floats]:
    """The tensors before the first round: those of an initial block of ours, on every side."""
    with np.load(Path(cell.folder) / START_FILE) as arrays:
        return {name: arrays[name] for name in cell.shapes}


def trained_for(cell: Cell, number: int) -> Any:
    """What trains between the rounds, where the cell says so: a `Trained`, which not every environment can import."""
    if not cell.trains:
        return None
    from trained import Trained

    return Trained(cell, number)


def error_of_step(before: Mapping[str, Any], after: Mapping[str, Any], workers: int, round_number: int) -> float:
    """How far the published tensors moved from where the exact mean would have led: ‖after - exact‖ / ‖mean step‖."""
    wanted = mean_step(workers, round_number, {name: array.shape for name, array in before.items()})
    wrong = sum(float(np.square(after[name] - before[name] - wanted[name], dtype=np.float64).sum()) for name in wanted)
    return math.sqrt(wrong / sum(float(np.square(array, dtype=np.float64).sum()) for array in wanted.values()))


def loopback_bytes() -> int:
    """Bytes that have passed the loopback interface of this network namespace."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[0] == "lo:")


@dataclass
class Rounds:
    """What each round took, the warm-up first."""

    seconds: list[float] = field(default_factory=list)
    loopback_bytes: list[int] = field(default_factory=list)

    @contextmanager
    def timed(self) -> Iterator[None]:
        bytes_before, started_s = loopback_bytes(), time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - started_s)
        self.loopback_bytes.append(loopback_bytes() - bytes_before)


# --- workers that a driver leads from round to round -----------------------------------------------------------------


class Led:
    """A worker's end: says when it has its tensors of a round, begins when told, says when it has the mean. It looks
    how right that is when all have theirs: nobody's round is longer because another one is looking already."""

    def ready(self, round_number: int) -> None:
        self._say_and_wait({"ready": round_number})

    def done(self, round_number: int) -> None:
        self._say_and_wait({"done": round_number})

    def _say_and_wait(self, message: Mapping[str, Any]) -> None:
        self.say(message)
        if not sys.stdin.readline():
            raise SystemExit("the driver has gone")

    def say(self, message: Mapping[str, Any]) -> None:
        print(json.dumps(message), flush=True)


class Leader:
    """The driver's end: worker processes that begin a round together; it is over when all have its mean."""

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None) -> None:
        self._stack = ExitStack()
        self.processes = [
            self._stack.enter_context(
                started(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(environment or {})}
                )
            )
            for command in commands
        ]

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def hear(self, key: str) -> list[Any]:
        """What every worker says under this key, in their order."""
        return [self._hear(process, key) for process in self.processes]

    def _hear(self, process: subprocess.Popen[str], key: str) -> Any:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{") and key in (said := json.loads(line)):
                return said[key]
        raise RuntimeError(f'a worker ended, with {process.wait()}, and never said "{key}"')

    def run(self, rounds: int) -> tuple[Rounds, list[float]]:
        """The warm-up and the rounds; and how wrong each mean is, by the worker that found most: the error of the step,
        or the held-out loss, which worker 0 tells."""
        measured, errors = Rounds(), list[float]()
        for _ in range(rounds + 1):
            self.hear("ready")
            with measured.timed():
                self._go_on()
                self.hear("done")
            self._go_on()
            errors.append(max(self.hear("error")))
        return measured, errors

    def _go_on(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go on\n")
            process.stdin.flush()


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block."""
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def await_open(port: int, process: subprocess.Popen[str]) -> None:
    """Until the process listens there."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the process that was to listen ended with {process.returncode}")


# --- memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """The peak of what groups of processes hold, each with its children: the sum of their proportional sets, looked at
    again and again with at most a tenth of a core. Pages that several share are counted once."""

    def __init__(self, groups: Callable[[], Mapping[str, Sequence[int]]]) -> None:
        self._groups, self._stopped = groups, threading.Event()
        self.peaks: dict[str, int] = {}
        self.high_water: dict[str, int] = {}  # VmHWM of the largest process
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def of(self, kind: str) -> dict[str, int | None]:
        """The largest of the groups whose names begin so."""
        peaks = [value for name, value in self.peaks.items() if name.startswith(kind)]
        marks = [value for name, value in self.high_water.items() if name.startswith(kind)]
        return {f"{kind}_peak_bytes": max(peaks, default=None), f"{kind}_hwm_bytes": max(marks, default=None)}

    def _watch(self) -> None:
        took_s = 0.0
        while not self._stopped.wait(max(0.1, 10 * took_s)):
            began_s, children = time.perf_counter(), _children()
            for name, roots in self._groups().items():
                tree = [pid for root in roots for pid in _tree(root, children)]
                self.peaks[name] = max(self.peaks.get(name, 0), sum(map(_proportional_bytes, tree)))
                self.high_water[name] = max(self.high_water.get(name, 0), *map(_high_water_bytes, tree), 0)
            took_s = time.perf_counter() - began_s


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return found


def _tree(root: int, children: Mapping[int, Sequence[int]]) -> Iterator[int]:
    yield root
    for child in children.get(root, ()):
        yield from _tree(child, children)


def _proportional_bytes(pid: int) -> int:
    return _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")


def _high_water_bytes(pid: int) -> int:
    return _field(Path(f"/proc/{pid}/status"), "VmHWM:")


def _field(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def write_result(
    cell: Cell, measured: Rounds, errors: Sequence[float], memory: Memory, settings: Mapping[str, Any]
) -> None:
    result = {
        **asdict(measured),
        **memory.of("central"),
        **memory.of("worker"),
        **({"losses": list(errors)} if cell.trains else {"error_of_step": max(errors)}),
        "settings": {**settings, "alone": os.environ.get("PEERS_ALONE") == "1"},
    }
    (Path(cell.folder) / "result.json").write_text(json.dumps(result))
