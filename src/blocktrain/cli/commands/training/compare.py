"""blocktrain compare: trains and measures blocks and reference, and plots both; or compares runs that exist.
Next: cli/shared/comparison.py for the first, compare_runs.py for the second."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import (
    Budget,
    BudgetOption,
    Changes,
    CorpusSource,
    Jobs,
    MaxWindows,
    Preset,
    Seed,
    read_spec,
    require_positive,
    warn_about_text,
)
from blocktrain.errors import ConfigError

RUNS_OUT = Path("comparison")


def compare(
    given: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN.toml|RUN", help="Settings to train, or two or more run directories."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output directory. For runs the default is comparison/.")
    ] = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    work: BudgetOption = Budget.EQUAL,
    jobs: Jobs = 1,
    max_windows: MaxWindows = None,
) -> None:
    """Compare blocks with end-to-end training, or compare existing runs.

    With settings: trains both, prints a table, and writes curves (HTML and PNG) and a JSON document to DIR. With run
    directories or those of coordinators: measures them, on the text of --corpus if it is given, prints a table, and
    writes a page with their curves and the settings that differ."""
    require_positive("--max-windows", max_windows)
    paths = given or []
    if len(paths) > 1 or any(path.is_dir() for path in paths):
        if seed is not None or changes:
            raise ConfigError("--seed and --set change nothing in runs that exist: leave them out, or train new ones")
        _compare_runs(paths, out or RUNS_OUT, preset, corpus, max_windows)
        return
    if out is None:
        raise ConfigError("compare writes what it trains: give --out DIR")
    spec = read_spec(paths[0] if paths else None, preset, corpus, seed, changes)

    from blocktrain.cli.shared.comparison import Side, show, write
    from blocktrain.cli.shared.training import describe, open_text, train_into, twin_of

    warn_about_text(spec)
    spec, text = open_text(spec)
    twin = twin_of(spec, work)
    describe(spec)
    blocks = train_into(out / "blocks", spec, text, jobs=jobs)
    describe(twin)
    reference = train_into(out / "reference", twin, text)
    ours, theirs = (Side.of(run, text, max_windows) for run in (blocks, reference))
    show(ours, theirs)
    for path in write(out, ours, theirs, work):
        say(f"wrote {path}")


def _compare_runs(
    paths: list[Path], out: Path, preset: str | None, corpus: str | None, max_windows: int | None
) -> None:
    files = [str(path) for path in paths if not path.is_dir()]
    if files or len(paths) < 2 or preset is not None:
        both = "directories and --preset were both given" if preset is not None else f"{paths[0]} is only one run"
        wrong = f"{', '.join(files)} is not a directory" if files else both
        raise ConfigError(f"{wrong}: give the directories of two or more runs, or one RUN.toml, or --preset")

    from blocktrain.cli.commands.training.compare_runs import compare_runs

    for path in compare_runs(paths, out, max_windows, corpus):
        say(f"wrote {path}")
