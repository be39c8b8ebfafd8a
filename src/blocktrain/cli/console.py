"""Output for people: results on stdout, everything else on stderr; tables and quantities. A terminal gets rich
tables, a file or a pipe plain aligned text. Next: cli/shared/progress.py."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from blocktrain.logs import visible

Row = Sequence[str]
WIDTH = 79  # of a line on the narrowest terminal that we think of
SHORT = 12  # characters of a cell that is never wrapped
EDGE = 2  # characters that a table on a terminal takes beside its cells
NAME_BORDER = re.compile(r" (?=\w)|(?<=/)")
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def say(*lines: str, indent: int = 0) -> None:
    """Prints what is not the result: on stderr. A line may hold foreign text, such as a coordinator's error: it stays
    one line, which wraps on a terminal. A line that begins with spaces is to be copied: it wraps only if `indent` says
    how its further lines begin."""
    copied = [line.startswith("  ") and not indent for line in lines]
    shown = [visible(x) if c else wrapped(visible(x), indent, sys.stderr) for x, c in zip(lines, copied, strict=True)]
    print("\n".join(shown), file=sys.stderr, flush=True)


def show_line(text: str) -> None:
    """Prints one line of a result, which may hold foreign text."""
    print(visible(text), flush=True)


def show_table(
    columns: Row,
    rows: Sequence[Row],
    *,
    marked: Collection[int] = (),
    spaced: bool = True,
    stream: TextIO | None = None,
) -> None:
    """Text columns to the left, numbers to the right; marked rows stand out. The cells may hold foreign text. `spaced`
    tables have an empty line above and below on a terminal."""
    stream = stream or sys.stdout
    rows = [[visible(cell) for cell in row] for row in rows]
    if stream.isatty():
        screen = Console(file=stream, markup=False, highlight=False)
        tight = max(map(len, plain_table(columns, rows))) + EDGE > screen.width
        screen.print(_rich_table(columns, rows, marked, tight, spaced))
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


def counted(count: int, noun: str) -> str:
    """1, "step" -> "1 step"; 2, "step" -> "2 steps" """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def named_blocks(blocks: Sequence[int], total: int, singular: str, plural: str) -> str:
    """[2, 3], 4, "does", "do" -> "blocks 2 and 3 of 4 do" """
    *first, last = map(str, blocks)
    names = f"blocks {', '.join(first)} and {last}" if first else f"block {last}"
    return f"{names} of {total} {plural if first else singular}"


def sample_lines(samples: Iterable[Mapping[str, str]]) -> list[str]:
    """What a model wrote, one line each: the prompt, then its continuation. The text is foreign."""
    lines = (f"  {visible(each['prompt'])}|{visible(each['text'])}" for each in samples)
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in lines]


def wrapped(text: str, indent: int = 0, stream: TextIO | None = None) -> str:
    """Sentences for a terminal that cuts no word at its edge; further lines begin with `indent` spaces. A file or pipe
    gets them as they are."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return text
    width = Console(file=stream).width
    return "\n".join("\n".join(_wrap(line, width, indent)) for line in text.split("\n"))


def _wrap(line: str, width: int, indent: int) -> list[str]:
    if len(line) < width:
        return [line]
    settings: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "drop_whitespace": True}
    return textwrap.wrap(line, width - 1, subsequent_indent=" " * indent, **settings)


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


def _rich_table(columns: Row, rows: Sequence[Row], marked: Collection[int], tight: bool, spaced: bool) -> Table:
    """Numbers and short words stay on one line, so that a narrow terminal wraps only sentences and paths. If that is
    too wide, the names of columns take several lines, at their spaces and behind their slashes."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0 if tight else 1, 0, 0), pad_edge=False, show_edge=spaced)
    cells = zip(columns, *rows, strict=True)
    columns = [NAME_BORDER.sub("\n", name) for name in columns] if tight else columns
    for name, numeric, column in zip(columns, _numeric(columns, rows), cells, strict=True):
        short = numeric or max(map(len, column)) <= SHORT
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=short)
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index in marked else None)
    return table
