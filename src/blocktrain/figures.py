"""Figures: lines with titles and units, written as HTML that works offline and, where a browser is found, as PNG.
Used by the command line and by bench/; draws what it is given and computes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import plotly.graph_objects as go

from blocktrain.checkpoint import write_whole

# Okabe and Ito's colours, which colour-blind readers can tell apart; black is left for references.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
WIDTH_PX, HEIGHT_PX, PNG_SCALE = 960, 540, 2
PNG_TIMEOUT_S = 180


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str | None = None  # the next one of the palette


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


def write_figure(figure: go.Figure, base: Path, skipped: Callable[[str], None] = lambda _: None) -> list[Path]:
    """base.html, and base.png unless it cannot be drawn here, which `skipped` is told; returns the paths written."""
    page, image = (base.with_name(base.name + suffix) for suffix in (".html", ".png"))
    write_whole(page, figure.to_html(include_plotlyjs=True).encode())
    try:
        write_whole(image, _png(figure))
    except _NotDrawn as reason:
        skipped(f"{image} was skipped, {reason}; {page} shows the same")
        return [page]
    return [page, image]


class _NotDrawn(Exception):
    """Why there is no picture."""


# A process of its own, since a browser that hangs takes the interpreter that waits for it along.
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
    if "ChromeNotFoundError" in said:
        raise _NotDrawn("no Chrome or Chromium was found: install one (Debian and Ubuntu: the package chromium)")
    raise _NotDrawn(f"the browser failed ({said.rpartition(chr(10))[2][:120]})")
