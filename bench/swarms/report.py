"""What swarm.py found, as goals that are reached or not, as a section of tables and as a picture. Computes no
measurement; a part that was not measured is left out. Next: swarm.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from blocktrain.figures import PALETTE
from shared.experiment import Document, Verdict, at_least, at_most, goal_lines, markdown
from swarms.memory import MAX_GROWTH
from swarms.share import COMPUTING, MIN_SHARE

MB, GB = 1e6, 1e9
WORKS = {
    "bare": "bare FastAPI route",
    "health": "GET /healthz",
    "leases": "lease",
    "updates": "update",
}
_MERGED = f"<span style='color:{PALETTE[1]}'>as it is</span>"
_IN_MEMORY = f"<span style='color:{PALETTE[0]}'>in memory alone</span>"


def verdicts(document: Document) -> list[Verdict]:
    """Each goal with the figure that it is held against. What has no goal is only stated."""
    what = "share of a worker's time spent computing"
    found = [at_least(f"{what}, {row['name']}", row["share"], MIN_SHARE) for row in document.get("share", [])]
    growth = "growth of the coordinator's memory with the number of replicas"
    for row in document.get("memory", {}).get("growth", []):
        found.append(at_most(f"{growth}, {_arrival(row['at_once'])}", row["factor"], MAX_GROWTH))
    return found


# --- text ------------------------------------------------------------------------------------------------------------


def section(document: Document) -> str:
    """What was run where, one table per question, and the goals."""
    tables: dict[str, Callable[[Any], str]] = {
        "share": _share_table,
        "merging": _merging_table,
        "bytes": _bytes_table,
        "memory": _memory_table,
        "load": _load_table,
    }
    parts = [draw(document[name]) for name, draw in tables.items() if name in document]
    return "\n".join(["## Costs of a swarm\n", _origin(document), *parts, goal_lines(verdicts(document))])


def _origin(document: Document) -> str:
    loads = ", ".join(f"{name} {value:.1f}" for name, value in document["load_average"].items())
    return (
        f"Coordinator, workers and clients are real processes on loopback with one thread each; preset "
        f"{document['spec']['name']}, corpus {document['spec']['corpus']['source']}. Load averages after each part: "
        f"{loads}.\n"
    )


def _share_table(rows: Sequence[Document]) -> str:
    kinds = {"hand in and merge": "submit and merge", "wait": "wait", "lease": "lease"}  # in the file: on the page
    head = ["a worker's time", "workers", "codec up / down", "steps per round", "computing", "in CPU time"]
    return markdown(
        [*head, *kinds.values(), "bytes up per parameter", "bytes down per parameter"],
        [
            [
                row["name"],
                str(row["workers"]),
                f"{row['update']} / {row['download']}",
                str(row["round_steps"]),
                f"{row['share']:.1%}",
                f"{row['cpu_share']:.1%}",
                *(f"{row['spent'].get(kind, 0.0):.1%}" for kind in kinds),
                f"{row['sent_bytes_per_parameter']:.3f}",
                f"{row['received_bytes_per_parameter']:.3f}",
            ]
            for row in rows
        ],
    )


def _merging_table(part: Document) -> str:
    return markdown(
        [
            f"merging {part['updates']} updates of {part['parameters'] / MB:.2f} M parameters",
            "CPU s",
            "MB/s",
            f"of copying ({part['bandwidth_bytes_per_s'] / GB:.1f} GB/s)",
            "in memory alone, MB/s",
            "of copying",
            "most of it",
        ],
        [
            [
                row["codec"],
                f"{row['merge_s']:.2f}",
                f"{row['merge_bytes_per_s'] / MB:.0f}",
                f"{row['merge_of_bandwidth']:.2%}",
                f"{row['mean_bytes_per_s'] / MB:.0f}",
                f"{row['mean_of_bandwidth']:.1%}",
                max(row["spent"].items(), key=lambda item: item[1])[0],
            ]
            for row in part["rows"]
        ],
    )


def _bytes_table(part: Document) -> str:
    rows = [("up", row) for row in part["up"]] + [("down", row) for row in part["down"]]
    return markdown(
        [f"an update of {part['steps']} steps", "codec", "bytes per parameter", "left out"],
        [[way, row["codec"], f"{row['bytes_per_parameter']:.3f}", f"{row['lost']:.1%}"] for way, row in rows],
    )


def _memory_table(part: Document) -> str:
    return markdown(
        [f"coordinator, block of {part['block_bytes'] / MB:.1f} MB", "replicas", "peak above idle, MB", "× block"],
        [
            [
                _arrival(row["at_once"]),
                str(row["replicas"]),
                f"{row['peak_bytes'] / MB:.0f}",
                f"{row['peak_of_block']:.1f}",
            ]
            for row in part["rows"]
        ],
    )


def _arrival(at_once: bool) -> str:
    return "updates all at once" if at_once else "updates one by one"


def _load_table(part: Document) -> str:
    head = [f"{part['clients']} clients", "per second", "p50 ms", "p99 ms", "requests over bare", "server CPU ms"]
    return markdown(
        [*head, "CPU per request over bare"],
        [
            [
                WORKS[row["work"]],
                f"{row['per_s']:.1f}",
                f"{row['p50_ms']:.0f}",
                f"{row['p99_ms']:.0f}",
                f"{row['of_bare']:.1%}",
                f"{row['server_cpu_ms']:.1f}",
                f"{row['cpu_of_bare']:.1f} ×",
            ]
            for row in part["rows"]
        ],
    )


# --- picture ---------------------------------------------------------------------------------------------------------


def figures(document: Document) -> dict[str, go.Figure]:
    """One panel per question."""
    panels: dict[str, tuple[str, Callable[[go.Figure, Any, dict[str, int]], None]]] = {
        "share": ("A worker's time that is not computing", _draw_share),
        "merging": (f"Speed of merging over copying memory: {_MERGED}, {_IN_MEMORY}", _draw_merging),
        "bytes": ("Bytes per parameter and round", _draw_bytes),
        "memory": ("Coordinator's peak memory above idle, × block", _draw_memory),
        "load": ("Requests per second, and server CPU time each", _draw_load),
        "spent": ("Where the time of the coordinator's merge goes", _draw_spent),
    }
    drawable = {**document, "spent": document["merging"]} if "merging" in document else document
    drawn = make_subplots(
        rows=2,
        cols=3,
        subplot_titles=[title for title, _ in panels.values()],
        horizontal_spacing=0.08,
        vertical_spacing=0.2,
    )
    for place, (name, (_, draw)) in enumerate(panels.items()):
        if name in drawable:
            draw(drawn, drawable[name], {"row": place // 3 + 1, "col": place % 3 + 1})
    drawn.update_layout(
        template="plotly_white",
        width=1600,
        height=950,
        font_size=14,
        barmode="stack",
        showlegend=False,
        margin={"t": 60, "b": 60},
    )
    drawn.update_annotations(font_size=15)
    return {"swarm": drawn}


def _draw_share(drawn: go.Figure, rows: Sequence[Document], place: dict[str, int]) -> None:
    """The largest parts of what is left by computing, named in the bars; the line is what the goal allows."""
    names = [f"{_wrapped(row['name'])}<br>{row['update']}, {row['round_steps']} steps" for row in rows]
    kinds = sorted({kind for row in rows for kind in row["spent"]} - {COMPUTING})
    for number, kind in enumerate(kinds):
        values = [row["spent"].get(kind, 0.0) for row in rows]
        text = [f"{kind} {value:.1%}" if value > 0.004 else "" for value in values]
        color = PALETTE[number % len(PALETTE)]
        drawn.add_bar(x=names, y=values, text=text, marker_color=color, textangle=0, **place)
    drawn.update_xaxes(tickangle=0, tickfont_size=12, **place)
    drawn.add_hline(y=1 - MIN_SHARE, line_dash="dash", annotation_text="the goal's limit", **place)
    drawn.update_yaxes(tickformat=".0%", **place)


def _wrapped(name: str) -> str:
    """Two words a line: as much as fits under a bar."""
    words = name.split()
    return "<br>".join(" ".join(words[start : start + 2]) for start in range(0, len(words), 2))


def _draw_merging(drawn: go.Figure, part: Document, place: dict[str, int]) -> None:
    for color, key in ((1, "merge"), (0, "mean")):
        values = [row[f"{key}_of_bandwidth"] for row in part["rows"]]
        drawn.add_bar(
            x=[row["codec"] for row in part["rows"]],
            y=values,
            text=[f"{value:.2%}" for value in values],
            offsetgroup=key,
            marker_color=PALETTE[color],
            textposition="outside",
            textangle=0,
            constraintext="none",
            **place,
        )
    drawn.update_yaxes(type="log", tickvals=[1e-4, 1e-3, 1e-2, 1e-1], tickformat="~%", range=[-4.2, -0.5], **place)


def _draw_spent(drawn: go.Figure, part: Document, place: dict[str, int]) -> None:
    codecs = [row["codec"] for row in part["rows"]]
    for number, kind in enumerate(part["rows"][0]["spent"]):
        values = [row["spent"].get(kind, 0.0) for row in part["rows"]]
        text = [kind if value > 0.06 else "" for value in values]
        color = PALETTE[number % len(PALETTE)]
        drawn.add_bar(x=codecs, y=values, text=text, marker_color=color, textangle=0, **place)
    drawn.update_yaxes(tickformat=".0%", **place)


def _draw_bytes(drawn: go.Figure, part: Document, place: dict[str, int]) -> None:
    for color, way in enumerate(("up", "down")):
        values = [row["bytes_per_parameter"] for row in part[way]]
        drawn.add_bar(
            x=[f"{way}<br>{row['codec']}" for row in part[way]],
            y=values,
            text=[f"{value:.2f}" for value in values],
            marker_color=PALETTE[color],
            textposition="outside",
            **place,
        )
    drawn.update_yaxes(title="bytes", range=[0, 4.5], **place)


def _draw_memory(drawn: go.Figure, part: Document, place: dict[str, int]) -> None:
    for color, at_once in enumerate((False, True)):
        rows = [row for row in part["rows"] if row["at_once"] == at_once]
        if not rows:
            continue
        last = ["" for _ in rows[1:]] + [_arrival(at_once)]
        drawn.add_scatter(
            x=[row["replicas"] for row in rows],
            y=[row["peak_of_block"] for row in rows],
            text=last,
            mode="lines+markers+text",
            textposition="top left",
            line_color=PALETTE[color],
            **place,
        )
    drawn.update_xaxes(title="replicas in the round", type="log", tickvals=[2, 4, 8, 16, 32], **place)
    drawn.update_yaxes(title="× block", rangemode="tozero", **place)


def _draw_load(drawn: go.Figure, part: Document, place: dict[str, int]) -> None:
    rows = part["rows"]
    drawn.add_bar(
        x=[WORKS[row["work"]].replace(" ", "<br>", 1) for row in rows],
        y=[row["per_s"] for row in rows],
        text=[f"{row['per_s']:.0f}<br>{row['server_cpu_ms']:.1f} ms" for row in rows],
        marker_color=PALETTE[4],
        textposition="outside",
        **place,
    )
    top = 1.2 * max(row["per_s"] for row in rows)
    drawn.update_xaxes(tickangle=0, **place)
    drawn.update_yaxes(title=f"requests/s, {part['clients']} clients", range=[0, top], **place)
