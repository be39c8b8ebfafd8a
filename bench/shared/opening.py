"""The opening of the page of results: the ten lines that matter most, each from a result file. page.py puts them above
the goals. A line whose file is missing says so. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.experiment import Document

Line = Callable[[Document], str]


def pick(rows: Sequence[Mapping[str, Any]], **fields: Any) -> Mapping[str, Any]:
    """The first row with these fields."""
    for row in rows:
        if all(row.get(name) == value for name, value in fields.items()):
            return row
    raise KeyError(str(fields))


def short_training(quality: Document) -> str:
    blocks, reference = (pick(quality["summary"], row=row) for row in ("scaffold", "reference"))
    return (
        f"**Short training**: {blocks['test']:.4f} nats/byte in four blocks, {reference['test']:.4f} end to end at "
        f"equal work (test, {len(blocks['seeds'])} seeds). Lower is better."
    )


def fewer_layers(quality: Document) -> str:
    small = pick(quality["summary"], row="one-block-long")
    return (
        f"**But** a model with a quarter of the layers, trained longer with the same work, has {small['test']:.4f}: "
        f"at this budget depth does not pay yet."
    )


def longer_training(depth: Document) -> str:
    ours, theirs = (depth["results"][f"{row}-3200/0"]["scores"]["valid"] for row in ("whole-bare", "end-to-end"))
    gap = ours[-1]["nats_per_byte"] - theirs[-1]["nats_per_byte"]
    return (
        f"**Longer training**: {ours[-1]['nats_per_byte']:.4f} nats/byte with one block in memory, "
        f"{theirs[-1]['nats_per_byte']:.4f} end to end, a gap of {gap:+.4f} (valid, 1 seed)."
    )


def memory(memory: Document) -> str:
    pair, alone = (
        pick(memory["memory"], name=x, blocks=4, compiled=False) for x in ("middle, scaffold", "middle block")
    )
    return (
        f"**Memory of one worker**, as a share of end to end's, 4 blocks: {pair['tensor_peak_ratio']:.2f} by the "
        f"default schedule, {alone['tensor_peak_ratio']:.2f} for a block alone."
    )


def upload(updates: Document) -> str:
    small, plain = (pick(updates["summary"], row=row) for row in ("vector", "fp32"))
    return (
        f"**Upload of one worker** in {small['rounds']} rounds: {small['upload_bytes_a_run'] / 1e6:.1f} MB with "
        f"`vector`, {plain['upload_bytes_a_run'] / 1e6:,.0f} MB in float32, for "
        f"{small['valid'] - plain['valid']:+.4f} nats/byte."
    )


def averaging(peers: Document) -> str:
    ours, flower, hivemind = (
        pick(peers["averaging"], side=side, size_mb="100", workers=8, codec="fp32")
        for side in ("blocktrain", "flower_grpc", "hivemind")
    )
    return (
        f"**Averaging 100 MB of 8 workers**: {ours['seconds']:.1f} s and {ours['central_peak_bytes'] / 1e9:.2f} GB in "
        f"the coordinator; Flower {flower['seconds']:.1f} s and {flower['central_peak_bytes'] / 1e9:.1f} GB; hivemind "
        f"{hivemind['seconds']:.1f} s without a coordinator."
    )


def exact_serving(serve: Document) -> str:
    point = pick(serve["summary"]["points"], way="speculative", rtt_ms=100, output_bytes=256)
    return (
        f"**Exact text over 3 hosts that are 100 ms apart**: {point['speedup']:.1f} times as fast as one byte per "
        f"traversal (speculative)."
    )


def swept_serving(serve: Document) -> str:
    point = pick(serve["summary"]["points"], way="sweep", rtt_ms=100, output_bytes=256)
    return f"**Approximate text**: {point['speedup']:.1f} times as fast (sweep)."


LINES: tuple[tuple[str, Line | None, str], ...] = (
    ("quality", short_training, ""),
    ("quality", fewer_layers, ""),
    ("depth", longer_training, ""),
    ("memory", memory, ""),
    ("six_workers", None, "**Six workers** instead of one, at equal work, nats/byte: {ours}."),
    ("three_hosts", None, "**Three hosts** train together, nats/byte: {ours} sent."),
    ("updates", upload, ""),
    ("peers", averaging, ""),
    ("serve", exact_serving, ""),
    ("serve", swept_serving, ""),
)


def opening(documents: Mapping[str, Document], first_verdict: Callable[[str], str | None]) -> str:
    """A list of lines, each with a link to its experiment. `first_verdict` is our figure for an experiment's first
    goal."""
    lines = []
    for name, line, template in LINES:
        try:
            ours = first_verdict(name) if line is None else None
            if line is None and ours is None:
                raise KeyError(name)
            text = template.format(ours=ours) if line is None else line(documents[name])
        except (KeyError, IndexError, TypeError):
            text = "Not measured yet."
        lines.append(f"- {text} ([{name}](#{name}))")
    return "\n".join(lines) + "\n"
