"""What logical.py found: one line a way, what was extrapolated, and the picture. Next: logical.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from blocktrain.figures import PALETTE
from shared.experiment import Document, Verdict, goal_lines, markdown

GB, GIB = 1e9, 2**30
HEAD = ["way", "output", "traversals", "seconds an output", "wire bytes measured", "peak memory of the stages"]
PAPER_PARAMETERS = 75.80e9


def verdicts(document: Document) -> list[Verdict]:
    summary, written = document["summary"], document["autoregressive"]
    billions, speedup = summary["logical_parameters"] / GB, summary["extrapolated_speedup"]
    extrapolated = (
        f"{written['measured_bytes']} of {written['output_bytes']} bytes of it measured, the rest extrapolated"
    )
    return [
        Verdict(
            "billion logical parameters over three stages",
            f"{billions:.2f} ({summary['physical_parameters'] / GB:.2f} real ones)",
            "≥ 75.80",
            round(billions, 2) >= PAPER_PARAMETERS / GB,
            "75.80",
        ),
        Verdict(
            "speed relative to autoregressive decoding, without network delay",
            f"{speedup:.1f} ({extrapolated})",
            "> 1",
            speedup > 1,
            "faster",
        ),
    ]


def section(document: Document) -> str:
    parts = [shape(document) + "\n", markdown(HEAD, cells(document)), story(document) + "\n"]
    return "\n".join(["## A model larger than the memory\n", *parts, goal_lines(verdicts(document))])


def cells(document: Document) -> list[list[str]]:
    swept, written = document["sweep"], document["autoregressive"]
    return [
        [
            "sweep (measured)",
            f"{swept['output_bytes']} bytes",
            "1",
            f"{swept['measured_seconds']:.1f}",
            f"{swept['measured_wire_bytes']['total']:,}",
            _gib(swept["stages"]),
        ],
        [
            f"autoregressive ({written['measured_bytes']} bytes measured, the rest extrapolated)",
            f"{written['output_bytes']} bytes",
            str(written["output_bytes"]),
            f"{written['extrapolated_seconds']:.1f}",
            f"{written['measured_wire_bytes']['total']:,}",
            _gib(written["stages"]),
        ],
    ]


def shape(document: Document) -> str:
    swept = document["sweep"]
    model = swept["spec"]["model"]
    return (
        f"Logical: {swept['logical_parameters']:,} parameters, {model['layers']} layers of width {model['width']} in "
        f"{model['blocks']} blocks, {swept['logical_fp16_bytes'] / GB:.1f} GB in half precision. Physical: "
        f"{swept['physical_parameters']:,} parameters, {model['physical_layers']} real layers per block, "
        f"{sum(swept['stored_bytes']) / GB:.2f} GB that stay on disk. Random weights. Every stage is a process that "
        f"reads its layers from disk while it computes; {swept['prompt_bytes']} bytes of prompt."
    )


def story(document: Document) -> str:
    swept, written, summary = document["sweep"], document["autoregressive"], document["summary"]
    loads = " and ".join(f"{part['load']['after'][0]:.1f}" for part in (swept, written))
    return (
        f"The sweep's {swept['sequence_positions']} positions: {summary['sweep_gflops']:.1f} GFLOP/s, "
        f"{summary['of_matmul']:.0%} of a plain matmul of the same shape at the same load. Autoregressive decoding: "
        f"first byte {written['first_byte_seconds']:.1f} s, each later byte {written['median_later_byte_seconds']:.1f} "
        f"s. Load of the machine at the end of each: {loads}; if these differ much, the ratio of the times means "
        "little."
    )


def _gib(stages: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{stage['peak_rss_bytes'] / GIB:.2f}" for stage in stages) + " GiB"


def figures(document: Document) -> dict[str, go.Figure]:
    """Time to the left, memory to the right."""
    swept, written = document["sweep"], document["autoregressive"]
    drawn = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=[f"Seconds for {swept['output_bytes']} bytes", "Memory, GiB (logarithmic)"],
        horizontal_spacing=0.12,
    )
    names, left = ["one sweep", "autoregressive"], written["extrapolated_seconds"] - written["measured_seconds"]
    measured = [swept["measured_seconds"], written["measured_seconds"]]
    blue = {"marker_color": PALETTE[0], "texttemplate": "%{y:.0f} s"}
    drawn.add_bar(x=names, y=measured, name="measured", **blue, row=1, col=1)
    if left > 0:
        hatched = {"marker_color": PALETTE[5], "marker_pattern_shape": "/", "texttemplate": "%{y:.0f} s"}
        drawn.add_bar(x=names[1:], y=[left], name="extrapolated", **hatched, row=1, col=1)
    for color, (name, part) in zip(PALETTE[1:], (("sweep", swept), ("autoregressive", written)), strict=False):
        drawn.add_bar(
            x=[f"stage {stage['block']}" for stage in part["stages"]],
            y=[stage["peak_rss_bytes"] / GIB for stage in part["stages"]],
            name=f"peak resident, {name}",
            marker_color=color,
            offsetgroup=name,
            texttemplate="%{y:.2f}",
            row=1,
            col=2,
        )
    everything = {
        "x": ["all weights,<br>logical"],
        "y": [swept["logical_fp16_bytes"] / GIB],
        "texttemplate": "%{y:.1f}",
    }
    drawn.add_bar(**everything, name="half precision, all logical layers", marker_color="black", row=1, col=2)
    drawn.update_yaxes(type="log", dtick=1, row=1, col=2)
    drawn.update_layout(
        title=f"{swept['logical_parameters'] / GB:.2f} billion logical parameters "
        f"({swept['physical_parameters'] / GB:.2f} billion real ones) over three stages on one machine",
        template="plotly_white",
        width=1200,
        height=560,
        font_size=14,
        barmode="relative",
    )
    return {"logical": drawn}
