"""Output for people: results on stdout, everything else on stderr; tables and quantities. A terminal gets rich
tables, a file or a pipe plain aligned text. Next: cli/shared/progress.py."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Collection, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

Row = Sequence[str]
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and formatting characters, surrogates, line separators
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def visible(text: str) -> str:
    """Foreign text as one line that cannot control the terminal: control characters are shown as their escapes."""
    return "".join(ascii(each)[1:-1] if unicodedata.category(each) in UNSEEN else each for each in text)


def say(text: str) -> None:
    """Prints what is not the result: on stderr."""
    print(text, file=sys.stderr, flush=True)


def show_table(
    columns: Row, rows: Sequence[Row], *, marked: Collection[int] = (), stream: TextIO | None = None
) -> None:
    """Text columns to the left, numbers to the right; marked rows stand out. The cells may hold foreign text."""
    stream = stream or sys.stdout
    rows = [[visible(cell) for cell in row] for row in rows]
    if stream.isatty():
        Console(file=stream, markup=False, highlight=False).print(_rich_table(columns, rows, marked))
    else:
        print("\n".join(plain_table(columns, rows)), file=stream, flush=True)


def plain_table(columns: Row, rows: Sequence[Row]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    numeric = _numeric(columns, rows)
    return ["  ".join(map(_pad, row, widths, numeric)).rstrip() for row in (columns, *rows)]


def quantity(amount: float, unit: str) -> str:
    """1234567, "B" -> "1.235 MB" """
    for size, prefix in PREFIXES:
        if amount >= size:
            return f"{amount / size:.4g} {prefix}{unit}"
    return f"{amount:.4g} {unit}"


def duration(seconds: float) -> str:
    """75 -> "1m15s" """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _pad(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _numeric(columns: Row, rows: Sequence[Row]) -> list[bool]:
    cells = [[row[column] for row in rows] for column in range(len(columns))]
    return [any(cells) and all(not cell or cell[0] in "+-−–0123456789" for cell in cells) for cells in cells]


def _rich_table(columns: Row, rows: Sequence[Row], marked: Collection[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name, numeric in zip(columns, _numeric(columns, rows), strict=True):
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index in marked else None)
    return table
