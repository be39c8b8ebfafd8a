"""What does it take to carry a swarm's weights? One host, every worker in every round, real serialised checkpoints: the
same run with fp32 both ways, with the default codecs and with the smallest updates, which are also what the workers
fetch of each other; the bytes are counted on the workers' cables.

    python bench/transport.py --corpus PATH [--rows fp32,int8] [--seeds 0]

Each row is written to the result file when it is done and is not run again: stop it at any time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.data.corpus import Corpus
from blocktrain.figures import PALETTE, bar_figure
from blocktrain.spec import RunSpec
from shared.experiment import Document, Verdict, goal_lines, markdown, portable
from shared.rows import Record, Row, Table, base_of, chosen, mean_of, parser, records_of, run_rows, seeds_of, show
from swarms.run import APART, Plan, run_swarm, together

PAPER_CE, PAPER_GB, FEWER_GOAL = 1.576, 10.23, 100
CODECS: dict[str, dict[str, Any]] = {
    "fp32": {"swarm.update": "fp32", "swarm.download": "fp32"},
    "int8": {"swarm.update": "int8"},  # the default, down int6
    "int8, denoise": {"swarm.update": "int8", **APART},  # every block as many steps as the first phase
    "vector": {"swarm.update": "vector", "swarm.update_ratio": 150.0},  # HTTP and TCP take the rest to 100
}
RELAYED = {"vector": "the other's"}  # what comes down is what others sent up
BUDGET = {"train.steps": 300, "train.windows": 8, "swarm.round_steps": 5}  # windows of one worker
QUICK_BUDGET = {"train.steps": 6, "train.windows": 2, "swarm.round_steps": 2}
WORKERS = 2


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    base, corpus = base_of(options, together(WORKERS) | (QUICK_BUDGET if options.quick else BUDGET), "wikitext")
    rows = [
        _row(name, base.with_(seed=seed, **changes), corpus, 20 if options.quick else 400)
        for seed in options.seeds
        for name, changes in CODECS.items()
    ]
    document = run_rows(options.out / "transport.json", chosen(rows, options.rows))
    show(_table(document), figures(document), options.out)


def _row(name: str, spec: RunSpec, corpus: Corpus, max_windows: int) -> Row:
    plan = Plan(spec, WORKERS, max_windows=max_windows)
    settings = {"spec": portable(spec), "workers": WORKERS, "max_windows": max_windows}
    return Row(name, spec.seed, settings, lambda: run_swarm(plan, corpus))


def _lines(document: Document) -> list[dict[str, Any]]:
    """A line a codec: bytes a parameter and round, and how many times fewer than those of fp32 in the same document."""
    lines, fp32 = [], records_of(document, "fp32")
    for name in CODECS:
        if not (records := records_of(document, name)):
            continue
        up, down = _per_parameter(records, "up_bytes"), _per_parameter(records, "down_bytes")
        lines.append(
            {
                "name": name,
                "download": RELAYED.get(name) or records[0]["settings"]["spec"]["swarm"]["download"],
                "valid": mean_of(records, "valid"),
                "test": mean_of(records, "test"),
                "up": up,
                "down": down,
                "payload_up": _per_parameter(records, "payload_up_bytes"),
                "payload_down": _per_parameter(records, "payload_down_bytes"),
                "up_fewer": _per_parameter(fp32, "up_bytes") / up if fp32 else None,
                "down_fewer": _per_parameter(fp32, "down_bytes") / down if fp32 else None,
                "gigabytes": (mean_of(records, "up_bytes") + mean_of(records, "down_bytes")) / 1e9,
            }
        )
    return lines


def _per_parameter(records: Sequence[Record], key: str) -> float:
    return mean_of(records, key) / mean_of(records, "moved_parameters")


def _table(document: Document) -> Table:
    head = [
        "up / down",
        "valid",
        "test",
        "bytes up (payload)",
        "bytes down (payload)",
        "up, × fewer",
        "down, × fewer",
        "GB in all",
    ]
    return head, [
        [
            f"{line['name']} / {line['download']}",
            f"{line['valid']:.4f}",
            f"{line['test']:.4f}",
            f"{line['up']:.3f} ({line['payload_up']:.3f})",
            f"{line['down']:.3f} ({line['payload_down']:.3f})",
            "–" if line["up_fewer"] is None else f"{line['up_fewer']:.1f}",
            "–" if line["down_fewer"] is None else f"{line['down_fewer']:.1f}",
            f"{line['gigabytes']:.3f}",
        ]
        for line in _lines(document)
    ]


def section(document: Document) -> str:
    lines = _lines(document)
    intro = "## Transport\n\n"
    if lines:
        record = records_of(document, lines[0]["name"])[0]
        spec, counted = record["settings"]["spec"], record["counted"]
        intro += (
            f"{record['workers']} workers in every round, {spec['train']['steps']} steps in the first phase, "
            f"{spec['train']['windows']} windows of {spec['model']['context']} bytes per worker and step, rounds of "
            f"{spec['swarm']['round_steps']}; {seeds_of(document)}. Bytes are counted on the {counted}"
            f"{', with all headers' if counted == 'cables' else ''}, after joining, per trained parameter and round. "
            f"Downloads at the start of a phase are included. The payload is in brackets: the rest, HTTP and TCP, does "
            f"not grow with the model.\n\n"
        )
    return f"{intro}{markdown(*_table(document))}\n{goal_lines(verdicts(document))}"


def verdicts(document: Document) -> list[Verdict]:
    return [verdict for line in _lines(document) if line["name"] != "fp32" for verdict in _verdicts(line)]


def _verdicts(line: Mapping[str, Any]) -> Iterator[Verdict]:
    yield Verdict(
        f"{line['name']}: at most {PAPER_CE} nats/byte with fewer than {PAPER_GB} GB",
        f"{line['valid']:.4f} with {line['gigabytes']:.3f} GB",
        "",
        line["valid"] <= PAPER_CE and line["gigabytes"] < PAPER_GB,
        paper=f"{PAPER_CE} with {PAPER_GB} GB, larger",
    )
    if line["up_fewer"] is not None:
        yield Verdict(
            f"{line['name']}: at least {FEWER_GOAL} times fewer bytes than fp32 both ways",
            f"{line['up_fewer']:.1f} times up, {line['down_fewer']:.1f} times down",
            "",
            min(line["up_fewer"], line["down_fewer"]) >= FEWER_GOAL,
        )


def figures(document: Document) -> dict[str, go.Figure]:
    lines = _lines(document)
    figure = bar_figure(
        [line["name"] for line in lines],
        [line["up"] for line in lines],
        title="What carries a swarm's weights",
        x_title="codec of the updates",
        y_title="bytes per parameter and round, on the cables",
    )
    figure.data[0].name = "up"
    figure.add_bar(
        x=[line["name"] for line in lines],
        y=[line["down"] for line in lines],
        name="down",
        marker_color=PALETTE[1],
    )
    figure.update_layout(showlegend=True, yaxis_type="log")
    return {"transport": figure}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
