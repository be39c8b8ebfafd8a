"""Line and bar charts with titles and units, written as HTML that works offline and, if a browser is installed, as PNG.
Also pages of several charts. For the command line and bench/. Computes nothing. Next: cli/shared/comparison.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from blocktrain.io.files import write_whole

# The colours of Okabe and Ito, which colour-blind readers can distinguish. Black is reserved for references.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
WIDTH_PX, HEIGHT_PX, PNG_SCALE = 960, 540, 2
PNG_TIMEOUT_S = 180


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str | None = None  # None: the next colour of the palette


def line_figure(lines: Sequence[Line], *, title: str, x_title: str, y_title: str) -> go.Figure:
    figure = go.Figure()
    palette = cycle(PALETTE)
    for line in lines:
        stroke = {"color": line.color or next(palette), "width": 2}
        figure.add_scatter(x=list(line.x), y=list(line.y), name=line.name, mode="lines", line=stroke)
    figure.update_layout(
        title=title,
        xaxis_title=x_title,
        yaxis_title=y_title,
        template="plotly_white",
        width=WIDTH_PX,
        height=HEIGHT_PX,
        font_size=15,
        showlegend=True,
    )
    return figure


def bar_figure(names: Sequence[str], values: Sequence[float], *, title: str, x_title: str, y_title: str) -> go.Figure:
    figure = line_figure([], title=title, x_title=x_title, y_title=y_title)
    figure.add_bar(x=list(names), y=list(values), marker_color=PALETTE[0])
    return figure.update_layout(showlegend=False, xaxis_type="category")


def write_figure(figure: go.Figure, base: Path, skipped: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Write base.html and, if it can be drawn, base.png. Calls `skipped` with the reason if not. Returns the paths."""
    page, image = (base.with_name(base.name + suffix) for suffix in (".html", ".png"))
    write_whole(page, figure.to_html(include_plotlyjs=True).encode())
    return [page, *write_png(figure, image, lambda reason: skipped(f"{reason}; {page} shows the same"))]


def write_png(figure: go.Figure, image: Path, skipped: Callable[[str], None] = lambda _: None) -> list[Path]:
    """Returns the path if the image was drawn."""
    try:
        write_whole(image, _png(figure))
    except _NotDrawn as reason:
        skipped(f"{image} was skipped, {reason}")
        return []
    return [image]


@dataclass(frozen=True)
class Section:
    """A section of a page: a heading, a sentence, and optionally a figure and a table."""

    heading: str
    text: str = ""
    figure: go.Figure | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """One file that needs no network: it contains plotly's code once. All text is escaped."""
    body = "\n".join(map(_section_html, sections))
    code = f"<script>{get_plotlyjs()}</script>" if any(section.figure for section in sections) else ""
    write_whole(path, _PAGE.format(title=escape(title), code=code, body=body).encode())


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
        padding: 0 1rem }}
table {{ border-collapse: collapse; display: block; overflow-x: auto }}
th, td {{ text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top }}
</style>{code}</head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def _section_html(section: Section) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.figure is not None:
        parts.append(section.figure.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True}))
    if section.rows:
        lines = [_table_line("th", section.columns), *(_table_line("td", row) for row in section.rows)]
        parts.append(f"<table>{''.join(lines)}</table>")
    return "\n".join(parts)


def _table_line(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


class _NotDrawn(Exception):
    """The reason why an image was not drawn."""


# In a separate process: if the browser hangs, the process that waits for it hangs too.
_DRAW = """
import json, sys, kaleido
figure, options = json.load(sys.stdin)
sys.stdout.buffer.write(kaleido.calc_fig_sync(figure, opts=options))
"""


def _png(figure: go.Figure) -> bytes:
    options = {"format": "png", "width": figure.layout.width, "height": figure.layout.height, "scale": PNG_SCALE}
    order = f"[{figure.to_json()}, {json.dumps(options)}]".encode()
    try:
        done = subprocess.run([sys.executable, "-c", _DRAW], input=order, capture_output=True, timeout=PNG_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _NotDrawn(f"the browser took longer than {PNG_TIMEOUT_S} s") from None
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.decode(errors="replace").strip()
    if "No module named 'kaleido'" in said:
        raise _NotDrawn("the package kaleido is not installed: pip install 'blocktrain[png]'")
    if "ChromeNotFoundError" in said:
        raise _NotDrawn("no Chrome or Chromium was found: install one (on Debian and Ubuntu: the package chromium)")
    raise _NotDrawn(f"the browser failed ({said.rpartition(chr(10))[2][:120]})")
