"""What the experiments share: the machine they ran on, the file they keep, the table they print, the goals they are
held against. An experiment is a module with main(argv) and pure functions of the document that main has written:
`section` (Markdown for docs/results.md), `figures` and `verdicts`. Next: page.py, which makes one page of them."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.data.corpus import Corpus, load_corpus, with_tokenizer
from blocktrain.data.shards import is_prepared
from blocktrain.figures import write_figure
from blocktrain.io.files import write_whole
from blocktrain.spec import RunSpec

RESULTS = Path(__file__).parents[1] / "results"
Document = Mapping[str, Any]  # a result file


def with_text(spec: RunSpec, source: str | None = None) -> tuple[RunSpec, Corpus]:
    """The spec on this source, or on its own one, with what follows from the tokenizer of the text; and the text."""
    if source is not None:
        spec = spec.with_(**{"corpus.source": source} | ({"corpus.tokenizer": None} if is_prepared(source) else {}))
    corpus = load_corpus(spec.corpus, spec.model.context)
    return with_tokenizer(spec, corpus), corpus


@dataclass(frozen=True)
class Verdict:
    """A goal of an experiment, the figure it is held against, and what the paper has for it."""

    what: str
    ours: str
    goal: str  # a limit, or nothing where `what` says all of it
    reached: bool
    paper: str = "–"

    @property
    def wanted(self) -> str:
        return f"{self.what} {self.goal}".rstrip()

    @property
    def answer(self) -> str:
        return "reached" if self.reached else "not reached"


def at_most(what: str, value: float, limit: float, form: str = ".3f", paper: str = "–", about: str = "") -> Verdict:
    return Verdict(what, f"{value:{form}}{about}", f"≤ {limit:g}", value <= limit, paper)


def at_least(what: str, value: float, limit: float, form: str = ".3f", paper: str = "–", about: str = "") -> Verdict:
    return Verdict(what, f"{value:{form}}{about}", f"≥ {limit:g}", value >= limit, paper)


def goal_lines(verdicts: Sequence[Verdict]) -> str:
    """One line a goal, as a section ends."""
    return "".join(f"- goal: {v.wanted}: {v.answer} ({_figures(v)})\n" for v in verdicts)


def _figures(verdict: Verdict) -> str:
    return verdict.ours if verdict.paper == "–" else f"{verdict.ours}; the paper: {verdict.paper}"


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Of torch, for as long as something is measured."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def proc_status(key: str, pid: int | str = "self") -> int:
    """Bytes of a process by Linux's account, such as VmRSS, the resident ones now, or VmHWM, their peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def cpu_s(pid: int) -> float:
    """Processor time that a process has used so far, to the nanosecond: by its clock, as clock_getcpuclockid names it,
    since /proc counts in ticks of a hundredth of a second."""
    return time.clock_gettime(~pid << 3 | 2)


def portable(spec: RunSpec) -> dict[str, Any]:
    """The settings as the result file keeps them: the corpus by its name, not by its place on this machine."""
    settings = spec.model_dump(mode="json")
    settings["corpus"]["source"] = Path(spec.corpus.source).name
    return settings


def read_json(path: Path) -> dict[str, Any]:
    """A result file written earlier, or nothing."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())


def write_pictures(pictures: Mapping[str, go.Figure], folder: Path) -> None:
    """Beside the result file, for the person who ran the experiment; the page has its own."""
    for name, figure in pictures.items():
        for path in write_figure(figure, folder / name, skipped=print):
            print(f"wrote {path}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest])

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a page."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
