"""What rounds.py shows of its result file: the table, the goals, the section of the page and its picture."""

from __future__ import annotations

import plotly.graph_objects as go

from blocktrain.figures import Line, line_figure
from peers import SIZES
from shared.experiment import Document, Verdict, at_most, goal_lines, markdown

COUNTS = ("requests", "statements", "transactions", "commits", "syncs")
BYTES = ("hashed", "written", "read", "decoded")


def table(document: Document) -> str:
    head = ["one round", *COUNTS, *(f"{key}, MB" for key in BYTES), "CPU, ms", "limit, ms", "times"]
    return markdown(
        head,
        [
            [
                name,
                *(str(row[key]) for key in COUNTS),
                *(f"{row[key] / 1e6:.2f}" for key in BYTES),
                f"{1e3 * row['cpu_s']:.0f}",
                f"{1e3 * row['limit_cpu_s']:.0f}",
                f"{row['cpu_s'] / row['limit_cpu_s']:.1f}",
            ]
            for name, row in document["rows"].items()
        ],
    )


def verdicts(document: Document) -> list[Verdict]:
    small = [row for name, row in document["rows"].items() if name.startswith("1 MB")]
    return [
        at_most(
            "1 MB: requests of a worker in a round", max(row["requests"] / row["workers"] for row in small), 3, ".1f"
        ),
        at_most(
            "1 MB: synced commits, of one per update and one per merge",
            max(row["commits"] / (row["workers"] + 1) for row in small),
            1,
            ".2f",
        ),
    ]


def section(document: Document) -> str:
    return "\n".join(
        [
            "## Where a round goes\n",
            "One round, every worker's part after the other, through the real client, server, coordinator and ledger "
            "(SQLite) in one process, without training. Commits are transactions that write and are synced; "
            "syncs are those of files. CPU time is that of workers and coordinator together. The limit is a bare "
            "asyncio server that hashes each update, writes it to a synced file and sends the new version back: no "
            "HTTP, no signatures, no ledger, no decoding, no merging and no coding.\n",
            table(document),
            goal_lines(verdicts(document)),
        ]
    )


def figures(document: Document) -> dict[str, go.Figure]:
    """Two workers: what a round takes for each codec, and the limit for float32."""
    sizes = [size for size in SIZES if f"{size} MB, 2 workers, fp32" in document["rows"]]

    def line(name: str, codec: str, key: str, color: str | None = None) -> Line:
        found = {size: document["rows"].get(f"{size} MB, 2 workers, {codec}") for size in sizes}
        points = [(float(size), 1e3 * row[key]) for size, row in found.items() if row]
        return Line(name, [x for x, _ in points], [y for _, y in points], color)

    lines = [line(codec, codec, "cpu_s") for codec in ("fp32", "int8", "vector")]
    lines.append(line("the limit, fp32", "fp32", "limit_cpu_s", "black"))
    title = "Processor time of one round with two workers"
    figure = line_figure(lines, title=title, x_title="MB of the block in float32", y_title="milliseconds")
    figure.update_traces(mode="lines+markers")
    figure.update_xaxes(type="log", tickvals=[float(size) for size in sizes])
    figure.update_yaxes(type="log", dtick=1)
    return {"rounds": figure}
