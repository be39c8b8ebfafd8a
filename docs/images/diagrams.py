"""Draws the diagrams of this folder as SVG, the same bytes every time: the model and its schedule (blocks.svg), a round
(round.svg), serving (serving.svg). They bring their own ground, so they are legible by day and by night. Not the
pictures of the dashboard: make.py takes those.

    python docs/images/diagrams.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from blocktrain.spec import Phase, RunSpec, preset

HERE = Path(__file__).parent
STYLE = """
svg { color-scheme: light dark }
.ground { fill: #ffffff; stroke: #d5dae1 }
text { font: 15px system-ui, "DejaVu Sans", sans-serif; fill: #1d2430 }
.title { font-size: 17px; font-weight: 600 }
.small { font-size: 13px; fill: #535e6e }
.middle { text-anchor: middle }
.end { text-anchor: end }
.mono { font-family: ui-monospace, "DejaVu Sans Mono", monospace }
.trained { fill: #2a6fdb; stroke: #1f56ad }
.along { fill: #bcd5fb; stroke: #2a6fdb }
.frozen { fill: #dfe3e9; stroke: #8b95a3 }
.waiting { fill: none; stroke: #8b95a3; stroke-dasharray: 5 4 }
.late { fill: #f6c9a0; stroke: #b85c00 }
.merged { fill: #bfe3c6; stroke: #26793a }
.line { fill: none; stroke: #535e6e; stroke-width: 1.6 }
.trip { fill: none; stroke: #2a6fdb; stroke-width: 1.8 }
.latetrip { fill: none; stroke: #b85c00; stroke-width: 1.8 }
.lane { stroke: #d5dae1 }
.deadline { stroke: #b85c00; stroke-width: 1.8; stroke-dasharray: 6 4 }
.on { fill: #ffffff }
.warn { fill: #94490a }
.head { fill: #535e6e }
.triphead { fill: #2a6fdb }
.lateheadfill { fill: #b85c00 }
@media (prefers-color-scheme: dark) {
  .ground { fill: #161b22; stroke: #3a434f }
  text { fill: #e6eaf0 }
  .small { fill: #a5b0be }
  .trained { fill: #2563eb; stroke: #8db6fb }
  .along { fill: #1f3b68; stroke: #6aa1f8 }
  .frozen { fill: #2d343e; stroke: #7b8694 }
  .waiting { stroke: #7b8694 }
  .late { fill: #6b3a0b; stroke: #f0a45b }
  .merged { fill: #1d4427; stroke: #63c07a }
  .line { stroke: #a5b0be }
  .trip { stroke: #6aa1f8 }
  .latetrip { stroke: #f0a45b }
  .lane { stroke: #3a434f }
  .deadline { stroke: #f0a45b }
  .on { fill: #ffffff }
  .warn { fill: #f3b679 }
  .head { fill: #a5b0be }
  .triphead { fill: #6aa1f8 }
  .lateheadfill { fill: #f0a45b }
}
"""
HEADS = {"line": "head", "trip": "triphead", "latetrip": "lateheadfill"}
Point = tuple[float, float]


def main() -> None:
    for name, drawing in (("blocks", blocks()), ("round", a_round()), ("serving", serving())):
        (HERE / f"{name}.svg").write_text(drawing, encoding="utf-8")


# Strokes


def svg(width: int, height: int, says: str, parts: Iterable[str]) -> str:
    markers = "".join(
        f'<marker id="{line}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="{head}" d="M0 0L8 4L0 8z"/></marker>'
        for line, head in HEADS.items()
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{says}">',
            f"<title>{says}</title>",
            f"<style>{STYLE}</style>",
            f"<defs>{markers}</defs>",
            f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, words: str = "", inside: str = "") -> str:
    shape = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
    ink = inside or ("on" if kind == "trained" else "")
    return shape + (text(x + width / 2, y + height / 2 + 5, words, f"middle {ink}") if words else "")


def arrow(points: Sequence[Point], kind: str = "line") -> str:
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="{kind}" d="M{path}" marker-end="url(#{kind})"/>'


def stroke(start: Point, end: Point, kind: str) -> str:
    return f'<line class="{kind}" x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}"/>'


# The model and its schedule

COLUMN, LEFT, WIDTH = 168, 190, 126  # of a block: from one to the next, where the first begins, how wide


def blocks() -> str:
    spec = preset("small")
    rows = [part for phase in spec.phases for part in phase_row(spec, phase, 232 + 52 * phase.index)]
    legend = [
        ("trained", "trained, its own phase"),
        ("along", "trained along (scaffold)"),
        ("frozen", "frozen, only run forward"),
        ("waiting", "not trained yet"),
    ]
    keys = [
        part
        for n, (kind, words) in enumerate(legend)
        for part in (box(24 + 216 * n, 402, 20, 16, kind), text(50 + 216 * n, 415, words, "small"))
    ]
    says = "A model of four blocks; three phases, in each of which two neighbouring blocks are trained"
    return svg(880, 440, says, [*composed(spec.model.blocks), text(24, 206, "The schedule", "title"), *rows, *keys])


def composed(num_blocks: int) -> list[str]:
    """The blocks in a row: bytes go into each of them, the state from one to the next, every one has a read-out."""
    parts = [text(24, 34, "The model", "title")]
    for block in range(num_blocks):
        x, center = LEFT + COLUMN * block, LEFT + COLUMN * block + WIDTH / 2
        parts += [box(x, 64, WIDTH, 44, "frozen", f"block {block}"), arrow([(center, 132), (center, 111)])]
        parts += [arrow([(center, 62), (center, 44)]), text(center, 38, "logits", "small middle")]
        parts.append(text(center, 147, "bytes", "small middle"))
        if block:
            parts.append(arrow([(x - COLUMN + WIDTH + 2, 90), (x - 3, 90)]))
            parts.append(text(x - (COLUMN - WIDTH) / 2, 81, "state", "small middle"))
    return parts


def phase_row(spec: RunSpec, phase: Phase, y: float) -> list[str]:
    label = f"phase {phase.index + 1}"
    parts = [text(24, y + 16, label), text(24, y + 34, f"{phase.steps} steps", "small")]
    for block in range(spec.model.blocks):
        kind, words = ("frozen", "frozen") if block in phase.below else ("waiting", "")
        if block in phase.blocks:
            kind, words = ("trained", "trained") if block == phase.block else ("along", "along")
        parts.append(box(LEFT + COLUMN * block, y, WIDTH, 38, kind, words))
    return parts


# A round

LANES = {"coordinator": 74.0, "worker A": 154.0, "worker B": 214.0, "worker C": 274.0}
START, DEADLINE, MERGED = 150.0, 520.0, 566.0


def a_round() -> str:
    lanes = [text(24, y + 5, name) + stroke((130, y), (856, y), "lane") for name, y in LANES.items()]
    says = "A round: three workers get leases, two submit before the deadline, the third is merged a round later"
    first = [
        *lease(START, "worker A", 330, "trains 50 steps"),
        *lease(START + 14, "worker B", 300, "trains 40 steps"),
        *lease(START + 28, "worker C", 410, "trains 30 steps, slower than it promised", late=True),
    ]
    second = [
        *lease(MERGED + 76, "worker A", 186, "the next lease", reports=False),
        *lease(MERGED + 90, "worker B", 172, "the next lease", reports=False),
    ]
    coordinator = LANES["coordinator"]
    limit = stroke((DEADLINE, 44), (DEADLINE, 306), "deadline")
    middle = [
        text(DEADLINE, 36, "deadline", "warn middle"),
        box(DEADLINE + 4, coordinator - 17, 76, 34, "merged", "merge"),
        text(START - 4, coordinator - 24, "version n", "small"),
        text(DEADLINE + 94, coordinator - 24, "version n + 1", "small"),
        text(
            24, 334, "Down: leases. Up: updates. The round closes when every update is in, or at the deadline.", "small"
        ),
        text(24, 356, "A late update goes into the next round and weighs less: one version behind, 1/√2.", "small"),
    ]
    return svg(880, 376, says, [text(24, 34, "A round", "title"), *lanes, limit, *first, *second, *middle])


def lease(x: float, worker: str, length: float, words: str, late: bool = False, reports: bool = True) -> list[str]:
    """Down with a lease, work, and up with an update; without a report it goes on beyond the picture."""
    top, y = LANES["coordinator"], LANES[worker]
    kind = "late" if late else "along"
    parts = [arrow([(x, top), (x + 16, y - 15)]), box(x + 18, y - 14, length, 28, kind, words)]
    if reports:
        end = x + 20 + length
        parts.append(arrow([(end, y - 10), (end + 18, top + 3)], "latetrip" if late else "trip"))
    return parts


# Serving

TOPS = {"gateway": 0.0, "stage 1": 36.0, "stage 2": 72.0, "stage 3": 108.0}


def serving() -> str:
    says = "Above, every byte passes through all stages and back; below, the whole output passes once"
    one_by_one = [part for n, byte in enumerate("house") for part in traversal(130 + 122 * n, 74, 8, byte)]
    parts = [
        text(24, 34, "One traversal per byte", "title"),
        *stage_lanes(74),
        *one_by_one,
        text(762, 66, "… and so on", "small"),
        text(24, 254, "One traversal per output (sweep)", "title"),
        *stage_lanes(294),
        *traversal(130, 294, 46, "house of representatives has …"),
        text(
            24,
            458,
            "A slanted line is a trip over the network. Speculative decoding lies between: one traversal",
            "small",
        ),
        text(24, 478, "carries some drafted bytes, and those that all blocks agree with are kept.", "small"),
    ]
    return svg(880, 498, says, parts)


def stage_lanes(y: float) -> list[str]:
    return [text(24, y + dy + 5, name) + stroke((104, y + dy), (856, y + dy), "lane") for name, dy in TOPS.items()]


def traversal(x: float, y: float, computing: float, written: str) -> list[str]:
    """From the gateway through every stage, where it takes so long, and back."""
    trip, parts = 17.0, list[str]()
    here, down = x, 0.0
    for top in list(TOPS.values())[1:]:
        parts.append(arrow([(here, y + down), (here + trip, y + top - 7)], "trip"))
        here, down = here + trip + computing, top
        parts.append(box(here - computing, y + top - 7, computing, 14, "along"))
    parts.append(arrow([(here, y + down - 7), (here + 22, y + 4)], "trip"))
    parts.append(text(here + 18, y - 8, written, "mono"))
    return parts


if __name__ == "__main__":
    main()
