"""blocktrain report: a run told on one page that needs no network, with its figures as PNG beside it: curves, blocks,
workers, bytes, events. Next: sections.py, what it says; ../figures.py, which draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import LedgerUrl, MaxWindows, require_positive

QUICK_WINDOWS = 64  # of held-out text: seconds, not minutes


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A directory of train, reference or export, or a coordinator's --dir.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; RUN/report.html by default.")] = None,
    ledger: LedgerUrl = None,
    max_windows: MaxWindows = QUICK_WINDOWS,
    png: Annotated[bool, typer.Option("--png/--no-png", help="Draw every figure beside the page too.")] = True,
) -> None:
    """Tell a run on one page: curves, blocks, workers, bytes.

    The page works offline. Takes a coordinator's directory too, while it runs: the ledger is only read."""
    require_positive("--max-windows", max_windows)
    out = out or run / "report.html"

    from blocktrain.cli.shared.sections import told
    from blocktrain.figures import write_page, write_png

    title, sections = told(run, ledger, max_windows)
    write_page(out, title, sections)
    written = [out]
    for index, figure in enumerate(section.figure for section in sections if section.figure and png):
        written += write_png(figure, out.with_name(f"{out.stem}-{index + 1}.png"), skipped=say)
    for path in written:
        print(path)
