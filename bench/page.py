"""The page of results: docs/results.md and its pictures, made of the files in bench/results and of nothing else.

    python bench/page.py [--no-pictures]

`make results` runs it. An experiment that has not been run is on the page too, as one that is missing; what its file
holds is told by the functions of its own module (shared/experiment.py says which). Measures nothing."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import write_png
from blocktrain.io.files import write_whole
from shared.experiment import RESULTS, Document, Verdict, markdown, read_json
from shared.opening import opening

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = "images/results"  # below docs/


@dataclass(frozen=True)
class Experiment:
    """`name` is that of its result file and its place on the page."""

    name: str
    module: str
    options: str = ""

    @property
    def command(self) -> str:
        return f"python bench/{self.module}.py{self.options}"


def _own(name: str) -> Experiment:
    return Experiment(name, name)


SHORT = " --steps 100 --max-windows 400"
TEXT = " --width 128 --windows 16 --steps 200 --threads 1"
EXPERIMENTS = (
    _own("quality"),
    Experiment("quality-short", "quality", f" --name quality-short{SHORT}"),
    Experiment("quality-sotu", "quality", f" --corpus sotu --name quality-sotu{SHORT}"),
    _own("depth"),
    Experiment("depth-novels", "depth", " --name depth-novels --width 128 --budgets 800"),
    _own("blocks"),
    Experiment("text", "text", f" --corpus novels{TEXT}"),
    Experiment("text-wikitext", "text", f" --corpus wikitext-2 --name text-wikitext --no-samples --sizes ''{TEXT}"),
    _own("going_on"),
    _own("memory"),
    _own("speed"),
    _own("six_workers"),
    _own("transport"),
    _own("three_hosts"),
    _own("late"),
    _own("byzantine"),
    _own("goodput"),
    _own("load"),
    _own("diloco"),
    Experiment("updates", "updates", " --windows 8 --round-steps 1"),
    Experiment("updates-short", "updates", " --name updates-short --steps 300 --windows 8 --round-steps 1"),
    Experiment(
        "updates-small", "updates", " --preset small --name updates-small --steps 160 --windows 16 --round-steps 1"
    ),
    _own("swarm"),
    _own("rounds"),
    Experiment("scale_out", "scale_out", " --clients 2000 --seconds 1"),
    _own("presigned"),
    _own("serve"),
    _own("serve_quality"),
    _own("serve_via"),
    _own("generate"),
    _own("logical"),
    _own("peers"),
)


@dataclass(frozen=True)
class Found:
    """What there is of an experiment; no document or no module: it was not measured."""

    experiment: Experiment
    module: ModuleType | None
    document: Document

    @property
    def measured(self) -> bool:
        return self.module is not None and bool(self.document)

    def section(self) -> str:
        return str(self._module.section(self.document))

    def figures(self) -> dict[str, go.Figure]:
        """By the names of their files, which are those of the experiment even where its module has several."""
        own, name = self.experiment.module, self.experiment.name
        return {key.replace(own, name, 1): drawn for key, drawn in self._module.figures(self.document).items()}

    def verdicts(self) -> list[Verdict]:
        return list(self._module.verdicts(self.document))

    @property
    def _module(self) -> ModuleType:
        assert self.module is not None
        return self.module


def look(results: Path, experiments: Sequence[Experiment] = EXPERIMENTS) -> list[Found]:
    return [Found(each, module_of(each.module), read_json(results / f"{each.name}.json")) for each in experiments]


def module_of(name: str) -> ModuleType | None:
    """None where there is no experiment of that name; what goes wrong inside of one is told."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name != name:
            raise
        return None
    return module if hasattr(module, "section") else None  # a folder of that name is a module too


def page(found: Sequence[Found]) -> str:
    measured = [each for each in found if each.measured]
    return "\n".join(
        [
            "# Results\n",
            "This page is generated. Do not edit it: `make results` (`python bench/page.py`) builds it from the files "
            "in bench/results that are named below, and a test compares the two. Each file is written by one "
            "experiment and contains its settings, its seeds and the machine.\n",
            "## In ten lines\n",
            "Two CPU cores and WikiText-2 as bytes, where the line says nothing else.\n",
            opening({each.experiment.name: each.document for each in measured}, first_verdict_of(measured)),
            "## Goals\n",
            "The paper is Spheroid BlockTrain (arXiv 2606.24722). “–” means that it has no such figure. Lower is "
            "better for nats/byte, bytes, seconds and memory.\n",
            markdown(
                ["experiment", "goal", "the paper", "ours", ""], [row for each in found for row in summary_rows(each)]
            ),
            "## Where it was measured\n",
            markdown(["file", "made by", "machine"], [origin_row(each) for each in measured]),
            *(part_of(each) for each in found),
        ]
    )


def first_verdict_of(measured: Sequence[Found]) -> Callable[[str], str | None]:
    verdicts = {each.experiment.name: each.verdicts() for each in measured}
    return lambda name: verdicts[name][0].ours if verdicts.get(name) else None


def summary_rows(each: Found) -> list[list[str]]:
    link = f"[{each.experiment.name}](#{each.experiment.name})"
    if not each.measured:
        return [[link, _not_measured(each), "–", "–", "–"]]
    verdicts = each.verdicts()
    if not verdicts:
        return [[link, "no goal", "–", "see the section", "–"]]
    return [
        [link if number == 0 else "", _cell(v.wanted), _cell(v.paper), _cell(v.ours), v.answer]
        for number, v in enumerate(verdicts)
    ]


def _not_measured(each: Found) -> str:
    if each.module is None:
        return f"not measured yet: there is no bench/{each.experiment.module}.py"
    return f"not measured yet: run `{each.experiment.command}`"


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


def origin_row(each: Found) -> list[str]:
    file = f"bench/results/{each.experiment.name}.json"
    return [f"[{file}](../{file})", f"`{each.experiment.command}`", machine_of(each.document)]


def machine_of(document: Document) -> str:
    known: Mapping[str, Any] = document.get("machine", {})
    if not known:
        return "not recorded"
    cores, threads = f"{known.get('cores')} cores", f"torch's threads: {known.get('threads')}"
    return f"{known.get('processor')}, {cores}, {known.get('platform')}, torch {known.get('torch')}, {threads}"


def part_of(each: Found) -> str:
    """A section with its pictures, below a name that links can rely on."""
    anchor = f'<a id="{each.experiment.name}"></a>\n'
    if not each.measured:
        return f"{anchor}\n## {each.experiment.name}\n\n{_not_measured(each)}\n"
    pictures = "".join(f"\n![{name}]({IMAGES}/{name}.png)\n" for name in each.figures())
    return f"{anchor}\n{each.section().strip()}\n{pictures}"


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    found = look(options.results)
    write_whole(options.docs / "results.md", page(found).encode())
    print(f"wrote {options.docs / 'results.md'}")
    if not options.pictures:
        return
    folder = options.docs / IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    for each in found:
        for name, drawn in each.figures().items() if each.measured else ():
            for path in write_png(drawn, folder / f"{name}.png", print):
                print(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the result files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the page")
    parser.add_argument(
        "--pictures", action=argparse.BooleanOptionalAction, default=True, help="draw them, which takes a Chromium"
    )
    return parser


if __name__ == "__main__":
    main()
