"""What updates.py found: one line a codec, its goals, and the picture. Next: updates.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import PALETTE
from blocktrain.spec import RunSpec
from shared.experiment import Document, Verdict, at_least, goal_lines, markdown

UPLOAD_GOAL, DOWNLOAD_GOAL, LOSS_GOAL = 100, 4, 0.01
HEAD = ["codec", "seeds", "valid", "lost", "up, KB per round", "up, × fewer", "up, MB per run", "down, × fewer"]


@dataclass(frozen=True)
class Row:
    name: str
    label: str
    swarm: Mapping[str, Any]  # settings that differ from the run's


ROWS = (
    Row("fp32", "fp32 both ways", {"update": "fp32", "download": "fp32"}),
    Row("vector", "vector, 100 times", {"update": "vector"}),
    Row("sparse", "sparse, 100 times", {"update": "sparse"}),
    Row("int8", "int8 (default)", {"update": "int8"}),
    Row("vector-50", "vector, 50 times", {"update": "vector", "update_ratio": 50.0}),
    Row("vector-25", "vector, 25 times", {"update": "vector", "update_ratio": 25.0}),
)


def summarise(document: Document) -> list[dict[str, Any]]:
    """One line a row: means over seeds, and the loss against fp32 seed by seed."""
    results, lines = document["results"], []
    for row in ROWS:
        records = [record for record in results.values() if record["row"] == row.name]
        if not records:
            continue
        traffic, spec = records[0]["traffic"], RunSpec.model_validate(records[0]["spec"])
        lost = [
            record["valid"] - results[f"fp32/{record['seed']}"]["valid"]
            for record in records
            if f"fp32/{record['seed']}" in results
        ]
        lines.append(
            {
                "row": row.name,
                "label": row.label,
                "seeds": sorted(record["seed"] for record in records),
                "valid": statistics.mean(record["valid"] for record in records),
                "lost": statistics.mean(lost) if lost else None,
                "lost_least": min(lost, default=None),
                "lost_most": max(lost, default=None),
                "upload_ratio": traffic["uploaded_fp32"] / traffic["uploaded"],
                "download_ratio": traffic["downloaded_fp32"] / traffic["downloaded"],
                "upload_bytes_a_round": traffic["uploaded"] / traffic["rounds"] / records[0]["replicas"],
                "upload_bytes_a_run": traffic["uploaded"] / records[0]["replicas"],
                "download_bytes_a_run": traffic["downloaded"] / records[0]["replicas"],
                "rounds": traffic["rounds"],
                "steps": [phase.steps for phase in spec.phases],
                "round_steps": spec.swarm.round_steps,
                "windows": spec.train.windows,
                "replicas": records[0]["replicas"],
            }
        )
    return lines


def verdicts(document: Document) -> list[Verdict]:
    """The smallest updates that cost next to nothing; and what is fetched, whatever the updates."""
    lines = [line for line in summarise(document) if line["lost"] is not None]
    harmless = [line for line in lines if line["lost"] <= LOSS_GOAL]
    fetched = [line for line in lines if line["row"] != "fp32"]
    found = []
    if harmless:
        best = max(harmless, key=lambda line: float(line["upload_ratio"]))
        what = f"times fewer bytes up than fp32 with at most {LOSS_GOAL:g} nats/byte lost"
        about = f" ({best['label']}, {best['lost']:+.4f} nats/byte)"
        found.append(at_least(what, best["upload_ratio"], UPLOAD_GOAL, ".1f", about=about))
    if fetched:
        least = min(line["download_ratio"] for line in fetched)
        found.append(at_least("times fewer bytes down than fp32", least, DOWNLOAD_GOAL, ".1f"))
    return found


def section(document: Document) -> str:
    line, first = summarise(document)[0], next(iter(document["results"].values()))
    spec = first["spec"]
    return "\n".join(
        [
            f"## Small updates, {spec['name']} preset, {line['steps'][0]} steps\n",
            f"{line['replicas']} replicas of the {spec['name']} preset on {spec['corpus']['source']}, "
            f"{line['rounds']} rounds of {line['round_steps']} steps of {line['windows']} windows, in one process. All "
            f"codecs run the same rounds. *Lost* is the difference to fp32 with the same seed, in nats/byte on the "
            f"first {first['max_windows']} windows of valid.\n",
            markdown(HEAD, cells(document)),
            goal_lines(verdicts(document)),
        ]
    )


def cells(document: Document) -> list[list[str]]:
    return [
        [
            line["label"],
            str(len(line["seeds"])),
            f"{line['valid']:.4f}",
            _lost(line),
            f"{line['upload_bytes_a_round'] / 1e3:.1f}",
            f"{line['upload_ratio']:.1f}",
            f"{line['upload_bytes_a_run'] / 1e6:.2f}",
            f"{line['download_ratio']:.1f}",
        ]
        for line in summarise(document)
    ]


def _lost(line: Mapping[str, Any]) -> str:
    if line["lost"] is None:
        return "–"
    spread = f" ({line['lost_least']:+.4f} to {line['lost_most']:+.4f})" if len(line["seeds"]) > 1 else ""
    return f"{line['lost']:+.4f}{spread}"


def figures(document: Document) -> dict[str, go.Figure]:
    """What is lost over how small the uploads are; the goal is the lower right."""
    known = [line for line in summarise(document) if line["lost"] is not None]
    figure = go.Figure()
    figure.add_scatter(
        x=[line["upload_ratio"] for line in known],
        y=[line["lost"] for line in known],
        text=[f"  {line['label']}: {line['lost']:+.3f}" for line in known],
        mode="markers+text",
        textposition="top center",
        marker={"size": 12, "color": PALETTE[0]},
        showlegend=False,
    )
    figure.add_hline(y=LOSS_GOAL, line_dash="dot", annotation_text=f"goal: at most {LOSS_GOAL}")
    figure.add_vline(x=UPLOAD_GOAL, line_dash="dot", annotation_text=f"goal: at least {UPLOAD_GOAL}")
    figure.update_layout(
        title="What small updates cost, against fp32 in the same rounds",
        xaxis={"title": "times fewer bytes uploaded", "type": "log", "range": [-0.3, 2.5]},
        yaxis={"title": "nats/byte lost on held-out text"},
        template="plotly_white",
        width=1100,
        height=600,
        font_size=14,
    )
    return {"updates": figure}
