"""What bench/serve.py found: one line a way and distance, whether the goals are reached, and the picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import PALETTE
from blocktrain.serve.decode.request import Mode
from serving.modes import BASELINE, TRIPS, point, ways
from shared.experiment import (
    Document,
    Verdict,
    at_least,
    at_most,
    goal_lines,
    markdown,
    table,
    write_json,
    write_pictures,
)

GOAL_RTT_MS = 100
GOAL_SPEEDUPS = {"sweep": 50.0, "sweep-few": 50.0, "window": 50.0, "denoise": 50.0, "speculative": 30.0}
GOAL_ADDED_SHARE = 0.05
ORDER = [way.name for way in ways(1, 1)]  # a result file that was read again has lost it
Lines = list[dict[str, Any]]


def summarise(document: Document) -> dict[str, Any]:
    return {"points": lines_of(document)}


def lines_of(document: Document) -> Lines:
    """The medians of every way at every distance, beside the baseline's at the same distance."""
    modes = document["settings"]["modes"]
    groups: dict[tuple[str, float], Lines] = {}
    for output in document["outputs"]:
        groups.setdefault((output["way"], output["rtt_ms"]), []).append(output)
    lines = [
        asdict(point(groups[key], Mode(modes[key[0]])))
        for key in sorted(groups, key=lambda key: (key[1], ORDER.index(key[0])))
    ]
    baseline = {line["rtt_ms"]: line for line in lines if line["way"] == BASELINE}
    for line in lines:
        base = baseline.get(line["rtt_ms"])
        line["speedup"] = line["bytes_per_second"] / base["bytes_per_second"] if base else None
        line["speedup_unhindered"] = unhindered_rate(line) / unhindered_rate(base) if base else None
    return lines


def unhindered_rate(line: dict[str, Any]) -> float:
    """Bytes per second if the stages had their processors to themselves and did nothing at the same time: the trips of
    the traversals, and the stages' CPU time. Unlike the clock it does not depend on what else ran on the machine."""
    trips_s = line["traversals_per_output"] * TRIPS * line["rtt_ms"] / 2000
    return float(line["output_bytes"] / (trips_s + line["stage_cpu_seconds"]))


def verdicts(document: Document) -> list[Verdict]:
    labels, gateway = document["settings"]["labels"], document.get("gateway")
    lines = {line["way"]: line for line in lines_of(document) if line["rtt_ms"] == GOAL_RTT_MS}
    found = [
        at_least(
            f"{labels[way]} at {GOAL_RTT_MS} ms, times the baseline's bytes/s",
            lines[way]["speedup"],
            wanted,
            ".1f",
            "faster than autoregressive",
            about=f" ({lines[way]['traversals_per_output']:g} traversals per output; by trips and CPU time "
            f"{lines[way]['speedup_unhindered']:.1f})",
        )
        for way, wanted in GOAL_SPEEDUPS.items()
        if way in lines and lines[way]["speedup"] is not None
    ]
    if gateway:
        what = "time added by HTTP, gateway and stages, as a share of a sweep in one process"
        found.append(at_most(what, gateway["added_share"], GOAL_ADDED_SHARE))
    return found


def report(document: Document, path: Path) -> None:
    write_json(path, {**document, "summary": summarise(document)})
    print(table(*cells_of(document)), story(document), goal_lines(verdicts(document)), sep="\n\n")
    write_pictures({path.stem: figures(document)["serve"]}, path.parent)


def section(document: Document) -> str:
    first, _, rest = story(document).partition("\n\n")
    parts = [first + "\n", markdown(*cells_of(document)), rest + "\n", goal_lines(verdicts(document))]
    return "\n".join(["## Serving over distances\n", *parts])


def cells_of(document: Document) -> tuple[list[str], list[list[str]]]:
    labels = document["settings"]["labels"]
    head = [
        "way",
        "RTT ms",
        "bytes",
        "bytes/s",
        "range",
        "× baseline",
        "× by trips and CPU",
        "traversals",
        "per byte",
        "first byte s",
    ]
    head += ["stages' CPU s", "wire bytes per byte"]
    rows = [
        [
            labels[line["way"]],
            f"{line['rtt_ms']:g}",
            str(line["output_bytes"]),
            f"{line['bytes_per_second']:.1f}",
            f"{line['slowest']:.1f}–{line['fastest']:.1f}",
            "–" if line["speedup"] is None else f"{line['speedup']:.1f}",
            "–" if line["speedup"] is None else f"{line['speedup_unhindered']:.1f}",
            f"{line['traversals_per_output']:g}",
            f"{line['traversals_per_byte']:.4f}",
            f"{line['first_byte_seconds']:.3f}",
            f"{line['stage_cpu_seconds']:.2f}",
            f"{line['wire_bytes_per_byte']:,.0f}",
        ]
        for line in lines_of(document)
    ]
    return head, rows


def story(document: Document) -> str:
    """What the table does not say by itself."""
    settings = document["settings"]
    loads = [load[0] for load in document["load"].values()] or [0.0]
    parts = [
        f"{settings['stages']} stages of {settings['stage_threads']} thread, links of {settings['rate_mbit']:g} "
        f"Mbit/s, wire {settings['wire']}, prompts of {settings['prompt_bytes']} held-out bytes, temperature "
        f"{settings['temperature']:g}. Rates are medians over outputs of the length in the table. An output that does "
        f"not fit into one window behind its prompt takes two sweeps. Rates are wall-clock, with whatever else ran on "
        f"the machine; one column has the stages' own CPU time per output, and × by trips and CPU is the ratio of "
        f"what remains without the others: the one-way trips of all traversals and the stages' CPU time. Load of the "
        f"machine ({document['machine']['cores']} cores): {min(loads):.1f} to {max(loads):.1f}.",
        *_about_denoising(document),
        f"At temperature 0, speculative decoding through the served chain wrote the same bytes as autoregressive "
        f"decoding: {document.get('greedy_bytes_compared', 0)} bytes compared.",
        *drafting(document),
    ]
    if gateway := document.get("gateway"):
        parts.append(
            f"HTTP, gateway and three stages without relays add {gateway['added_share']:+.1%} of the time of one "
            f"process (median of {len(gateway['gateway_seconds'])} alternating pairs; fastest runs: "
            f"{gateway['added_share_of_fastest']:+.1%}; "
            f"CPU time: {gateway['added_cpu_share']:+.1%}; load {gateway['load'][0]:.1f})."
        )
    return "\n\n".join(parts)


def _about_denoising(document: Document) -> list[str]:
    if not any(output["way"] == "denoise" for output in document["outputs"]):
        return []
    spans = document["settings"]["blocks"]["denoise"]
    return [
        f"The denoising model is a toy (width {spans['width']}, {spans['steps']} steps, spans of "
        f"{spans['context'] // 2} bytes): its row shows the cost of such a sweep; it cannot write."
    ]


def drafting(document: Document) -> list[str]:
    """How good the first stage's drafts are, over all distances."""
    speculated = [output for output in document["outputs"] if output["way"] == "speculative"]
    swept = [
        count for output in document["outputs"] if output["way"] == "sweep" for count in output["effective_candidates"]
    ]
    parts = []
    if drafted := sum(output["drafted"] for output in speculated):
        parts.append(
            f"{sum(output['accepted'] for output in speculated) / drafted:.1%} of the drafted bytes were accepted."
        )
    if swept:
        count = document["settings"]["candidates"]
        parts.append(f"Effective candidates per choice: {sum(swept) / len(swept):.2f} of {count} on average.")
    return parts


LABEL_PLACES = {"autoregressive": "bottom", "sweep": "bottom", "denoise": "top"}  # lines that end beside another


def figures(document: Document) -> dict[str, go.Figure]:
    """Throughput against distance, one line a way, with the range of the outputs."""
    drawn, labels, lines = go.Figure(), document["settings"]["labels"], lines_of(document)
    colors = dict(zip(ORDER, ("black", *PALETTE), strict=True))
    for way in ORDER:
        own = [line for line in lines if line["way"] == way]
        if not own:
            continue
        rates = [line["bytes_per_second"] for line in own]
        drawn.add_scatter(
            x=[line["rtt_ms"] for line in own],
            y=rates,
            error_y={
                "array": [line["fastest"] - line["bytes_per_second"] for line in own],
                "arrayminus": [line["bytes_per_second"] - line["slowest"] for line in own],
                "thickness": 1,
            },
            text=[""] * (len(rates) - 1) + [f"  {rates[-1]:.1f}"],
            textposition=f"{LABEL_PLACES.get(way, 'middle')} right",
            mode="lines+markers+text",
            name=labels[way],
            line={"color": colors[way], "width": 2, "dash": "dot" if way == BASELINE else "solid"},
            marker_size=8,
        )
    drawn.update_layout(
        title=f"Bytes per second over {document['settings']['stages']} hosts, by the round-trip time between them",
        xaxis={
            "title": "round-trip time of each link, ms",
            "tickvals": sorted({line["rtt_ms"] for line in lines}),
            "range": [-8, 1.1 * max(line["rtt_ms"] for line in lines) + 5],
        },
        yaxis={"title": "output bytes per second (logarithmic)", "type": "log", "dtick": 1},
        legend={"orientation": "h", "y": -0.2},
        template="plotly_white",
        width=1100,
        height=680,
        font_size=14,
    )
    return {"serve": drawn}
