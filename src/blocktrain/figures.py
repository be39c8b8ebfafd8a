"""Line and bar charts with titles and units, written as HTML that works offline and, if a browser is installed, as PNG.
Also pages of several charts. For the command line and bench/. Computes nothing. Next: cli/shared/comparison.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import cycle
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from blocktrain.io.files import write_whole

# The colours of Okabe and Ito, which colour-blind readers can distinguish. Black is reserved for references.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
WIDTH_PX, HEIGHT_PX, PNG_SCALE = 960, 540, 2
PNG_TIMEOUT_S = 180
SMALL_DIFFERENCE = 0.25  # of the largest value
STYLE = "static/dashboard/dashboard.css"  # in blocktrain.http: pages look like the dashboard
CHART_PX = 380  # height on a page


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


def bar_figure(
    names: Sequence[str], values: Sequence[float], *, title: str, x_title: str, y_title: str, zoom: bool = False
) -> go.Figure:
    """With `zoom` the axis does not start at zero if the differences are small beside the values, and says so."""
    figure = line_figure([], title=title, x_title=x_title, y_title=y_title)
    figure.add_bar(x=list(names), y=list(values), marker_color=PALETTE[0])
    if zoom and (range := zoomed_range(values)):
        figure.update_traces(text=[f"{value:.4g}" for value in values], textposition="outside")
        figure.update_yaxes(range=range, title_text=f"{y_title} (not from 0)")
    return figure.update_layout(showlegend=False, xaxis_type="category")


def zoomed_range(values: Sequence[float]) -> tuple[float, float] | None:
    """An axis around values that differ little; None: it should start at zero."""
    if not values or min(values) <= 0 or max(values) - min(values) > SMALL_DIFFERENCE * max(values):
        return None
    room = max(max(values) - min(values), 0.02 * max(values)) / 2
    return min(values) - room, max(values) + room


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


@dataclass(frozen=True)
class PageSummary:
    """The top of a page: (name, value, unit) of a few figures, and what the model wrote, as (prompt, text)."""

    figures: Sequence[tuple[str, str, str]] = ()
    sample: tuple[str, str] | None = None


def write_page(path: Path, title: str, sections: Sequence[Section], summary: PageSummary | None = None) -> None:
    """One file that needs no network: it contains plotly's code once. All text is escaped. It looks like the dashboard,
    by day and night and on a phone."""
    body = "\n".join([_summary_html(summary or PageSummary()), *map(_section_html, sections)])
    code = f"<script>{get_plotlyjs()}</script>" if any(section.figure for section in sections) else ""
    style = resources.files("blocktrain").joinpath("http", STYLE).read_text(encoding="utf-8")
    page = _PAGE.format(title=escape(title), style=style, code=code, body=body, theme=_THEME if code else "")
    write_whole(path, page.encode())


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
figure {{ margin-bottom: .8rem }}
.table {{ overflow-x: auto }}
#newest {{ margin-bottom: 1.8rem }}
</style>{code}</head><body>
<header><h1>{title}</h1><p class="hint">BlockTrain</p></header>
<main>
{body}
</main>{theme}
</body></html>
"""

# Plotly does not read style sheets: the colours of the page are given to it, also when day becomes night.
_THEME = """
<script>
function theme() {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const all = colour("--series").split(",").map((each) => each.trim());
  for (const chart of document.querySelectorAll(".plotly-graph-div")) {
    const look = {"font.color": colour("--soft"), "font.family": colour("--sans")};
    look["hoverlabel.bgcolor"] = colour("--card");
    for (const axis of ["xaxis", "yaxis"]) {
      look[axis + ".gridcolor"] = look[axis + ".linecolor"] = look[axis + ".zerolinecolor"] = colour("--line");
    }
    Plotly.relayout(chart, look);
    chart.originals ??= chart.data.map((trace) => trace.line?.color);
    chart.data.forEach((trace, index) => {
      const black = chart.originals[index] === "#000000", stroke = black ? colour("--ink") : all[index % all.length];
      const colours = {"line.color": stroke, "marker.color": stroke};
      Plotly.restyle(chart, trace.type === "bar" ? {"marker.color": all[0]} : colours, [index]);
    });
  }
}
addEventListener("load", theme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme);
</script>"""


def _summary_html(summary: PageSummary) -> str:
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="unit">{escape(unit)}</dd></div>'
        for name, value, unit in summary.figures
    )
    parts = [f'<dl class="figures hero">{cells}</dl>'] if cells else []
    if summary.sample is not None:
        prompt, text = map(escape, summary.sample)
        parts.append(f'<p id="newest" class="sample"><span class="prompt">{prompt}</span>{text}</p>')
    return "\n".join(parts)


def _section_html(section: Section) -> str:
    parts = ["<section>", f"<h2>{escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f'<p class="hint">{escape(section.text)}</p>')
    if section.figure is not None:
        chart = _chart(section.figure).to_html(full_html=False, include_plotlyjs=False, config=_CHART_CONFIG)
        parts.append(f"<figure>{chart}</figure>")
    if section.rows:
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in section.columns)
        rows = "".join(_table_row(section.columns, row) for row in section.rows)
        table = f'<table class="wide"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        parts.append(f'<div class="table">{table}</div>')
    return "\n".join([*parts, "</section>"])


_CHART_CONFIG = {"responsive": True, "displayModeBar": False}


def _chart(figure: go.Figure) -> go.Figure:
    """As wide as the page, with its legend below it; the section's heading is its title."""
    legend = {"orientation": "h", "yanchor": "top", "y": -0.22, "x": 0}
    clear = "rgba(0,0,0,0)"
    return go.Figure(figure).update_layout(
        title=None,
        width=None,
        height=CHART_PX,
        autosize=True,
        font_size=12,
        legend=legend,
        margin={"l": 60, "r": 16, "t": 16, "b": 48},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
    )


def _table_row(columns: Sequence[str], row: Sequence[str]) -> str:
    first, *rest = row
    cells = (
        f'<td data-label="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(columns[1:], rest, strict=True)
    )
    return f'<tr><th scope="row">{escape(first)}</th>{"".join(cells)}</tr>'


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
