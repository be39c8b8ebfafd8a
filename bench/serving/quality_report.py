"""The rows of serve_quality.py, and what the page tells of them. Pure functions of its result file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import PALETTE
from blocktrain.serve.decode.request import Mode
from shared.experiment import Document, Verdict, at_most, goal_lines, markdown

OTHER_SEEDS = 1_000_000  # added to the seeds of the noise floor
GOAL_NATS = 0.05
AUTOREGRESSIVE, AGAIN, HELD_OUT, SHUFFLED = "autoregressive", "again", "held-out", "shuffled"


@dataclass(frozen=True)
class Way:
    """One row of the table."""

    name: str
    label: str
    mode: Mode = Mode.AUTOREGRESSIVE
    settings: Mapping[str, Any] = field(default_factory=dict)
    served: str = "model"
    first_seed: int = 0
    drafter: bool = True  # if the model has one


WAYS = (
    Way(AUTOREGRESSIVE, "blocks, autoregressive"),
    Way(AGAIN, "the same with other seeds (noise floor)", first_seed=OTHER_SEEDS),
    Way("speculative", "blocks, speculative (8 rows)", Mode.SPECULATIVE, {"candidates": 8}),
    Way("sweep", "blocks, sweep (8 candidates)", Mode.SWEEP, {"candidates": 8}),
    Way("draft", "the first stage's draft alone", Mode.SWEEP, {"candidates": 1}),
    Way("reference", "end to end, autoregressive", served="reference"),
    Way("plain-draft", "the draft alone without drafter", Mode.SWEEP, {"candidates": 1}, drafter=False),
    Way("plain-sweep", "sweep without drafter", Mode.SWEEP, {"candidates": 8}, drafter=False),
)
CONTROLS = {HELD_OUT: "held-out text itself", SHUFFLED: "autoregressive texts, words shuffled"}
LABELS = {way.name: way.label for way in WAYS} | CONTROLS


def shown(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.3f} ± {estimate['error']:.3f}"


def cells_of(document: Document) -> tuple[list[str], list[list[str]]]:
    head = ["texts", "nats/byte, block model", "above autoregressive", "nats/byte, end-to-end model"]
    head += ["told from autoregressive", "traversals", "exact bytes", "bound on the divergence, nats per output"]
    length = document["settings"]["output_bytes"]
    rows = [
        [
            LABELS[name],
            shown(row["nats"]),
            "–" if name == AUTOREGRESSIVE else shown(row["nats_above"]),
            shown(row["nats_reference"]),
            "–" if name == AUTOREGRESSIVE else shown(row["told_apart"]),
            f"{row['traversals']['value']:.1f}" if "traversals" in row else "–",
            f"{row['exact']:.0f} of {length}" if "exact" in row else "–",
            _bound(row, length),
        ]
        for name, row in _in_order(document)
    ]
    return head, rows


def _bound(row: Mapping[str, Any], length: int) -> str:
    if row.get("exact") == length:
        return "0"
    if "exact" not in row or not row["divergence_nats"]["value"]:
        return "–"
    return "{value:.2f} ± {error:.2f}".format(**row["divergence_nats"])


def _in_order(document: Document) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, document["rows"][name]) for name in LABELS if name in document["rows"]]


def verdicts(document: Document) -> list[Verdict]:
    found = []
    for name in ("speculative", "sweep"):
        if row := document["rows"].get(name):
            above = row["nats_above"]
            what = f"{LABELS[name]}, nats/byte above autoregressive sampling under the block model, with two errors"
            found.append(at_most(what, abs(above["value"]) + 2 * above["error"], GOAL_NATS, ".3f"))
    return found


def section(document: Document) -> str:
    return "\n".join(
        [
            "## Quality of served text\n",
            story(document) + "\n",
            markdown(*cells_of(document)),
            goal_lines(verdicts(document)),
        ]
    )


def story(document: Document) -> str:
    settings = document["settings"]
    model = settings["models"]["model"]
    return (
        f"{settings['outputs']} outputs of {settings['output_bytes']} bytes per row, behind {settings['prompt_bytes']} "
        f"held-out bytes, temperature {settings['temperature']:g}; every row has the same prompts and seeds, in one "
        f"process. The model has {model['layers']} layers of width {model['width']} in {model['blocks']} blocks, "
        f"divided among {settings['stages']} stages. ± is one standard error. Told from autoregressive: how often a "
        "classifier ranks a text of the row above an autoregressive text, on prompts that it was not trained with "
        "(byte n-grams and surprises under the model, its first stage and the reference); 0.5 is chance, and the row "
        "with other seeds is what chance gives here. Traversals are counted with the draft lengths that a distance of "
        "100 ms leads to. Exact bytes are drawn from the whole model's own distribution; a sweep's weights bound the "
        "Kullback-Leibler divergence of the rest."
    )


def figures(document: Document) -> dict[str, go.Figure]:
    """Both measures beside each other: a good way is near the autoregressive one in both."""
    drawn = go.Figure()
    colors = dict(zip(LABELS, ("black", *PALETTE, "gray", "brown", *PALETTE), strict=False))
    for name, row in _in_order(document):
        drawn.add_scatter(
            x=[row["nats"]["value"]],
            y=[row["told_apart"]["value"]],
            error_x={"array": [2 * row["nats"]["error"]]},
            error_y={"array": [2 * row["told_apart"]["error"]]},
            mode="markers",
            name=LABELS[name],
            marker={"size": 10, "color": colors[name], "symbol": "diamond" if name in CONTROLS else "circle"},
        )
    drawn.update_layout(
        title="Texts by their likelihood and by how well they are told from autoregressive text (two standard errors)",
        xaxis_title="nats per byte under the block model",
        yaxis_title="told from autoregressive text (0.5: chance)",
        template="plotly_white",
        legend={"orientation": "h", "y": -0.2},
        width=1100,
        height=620,
        font_size=14,
    )
    return {"serve_quality": drawn}
