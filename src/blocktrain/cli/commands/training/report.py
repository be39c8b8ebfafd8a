"""blocktrain report: one HTML page about a run, which works offline, and its figures as PNG: curves, blocks, workers,
bytes, events. Next: cli/shared/sections.py, the contents; figures.py, which draws."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import LedgerUrl, MaxWindows, require_positive
from blocktrain.errors import ConfigError

PAGE_START = b"<!doctype html"
QUICK_WINDOWS = 64  # of held-out text: takes seconds, not minutes


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run directory of train, reference or export, or a coordinator's --dir."),
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page. Default: RUN/report.html.")] = None,
    ledger: LedgerUrl = None,
    max_windows: MaxWindows = QUICK_WINDOWS,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Also write every figure as PNG.")] = True,
) -> None:
    """Write a page about a run: curves, blocks, workers, bytes.

    The page works offline. RUN may be the directory of a running coordinator: its ledger is only read."""
    require_positive("--max-windows", max_windows)
    if out is not None:
        require_page(out)
    out = out or run / "report.html"

    from blocktrain.cli.shared.sections import page_of
    from blocktrain.figures import write_page, write_png

    page = page_of(run, ledger, max_windows)
    write_page(out, page.title, page.sections, page.summary)
    print(out, flush=True)  # the pictures take longer than the page
    for index, figure in enumerate(section.figure for section in page.sections if section.figure and png):
        for path in write_png(figure, out.with_name(f"{out.stem}-{index + 1}.png"), skipped=say):
            print(path, flush=True)


def require_page(out: Path) -> None:
    """A name that is free, or that of an older page: nothing else is overwritten."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file, for example {out / 'report.html'}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out} is in a folder that does not exist: make {out.parent}, or name another file")
    try:
        with suppress(FileNotFoundError), out.open("rb") as file:
            if not file.read(len(PAGE_START)).lower().startswith(PAGE_START):
                raise ConfigError(f"--out {out} is not a report page: name another file")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be read ({error.strerror}): name another file") from None
