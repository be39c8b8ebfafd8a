"""What peers.py found, as a page section, a picture and one screen of text. Computes no measurement; an error that a
side gave stands where its figures would. Next: peers.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from blocktrain.figures import PALETTE
from shared.experiment import Verdict, goal_lines, markdown, table

Document = Mapping[str, Any]
Row = Mapping[str, Any]
MB = 1e6
OURS = "blocktrain"
NAMES = {OURS: "BlockTrain", "flower": "Flower", "flower_grpc": "Flower by gRPC", "hivemind": "hivemind"}
HEAD = ["MB, workers", "side, codec", "s per round", "MB on loopback", "central MB", "worker MB", "error"]
# What has a goal: its words, the key of a row, and how a value is written.
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "seconds": ("seconds per round", lambda value: f"{value:.2f}"),
    "loopback_bytes": ("bytes on loopback per round", lambda value: f"{value / MB:.1f} MB"),
    "central_peak_bytes": ("peak memory of the central processes", lambda value: f"{value / MB:.0f} MB"),
    "worker_peak_bytes": ("peak memory of a worker's processes", lambda value: f"{value / MB:.0f} MB"),
}
DASHES = {"fp32": "solid", "vector": "dot"}
KINDS: dict[str, Callable[[Row], bool]] = {
    "fp32": lambda row: row["codec"] == "fp32",
    "our int8, their smallest": lambda row: row["codec"] not in ("fp32", "vector"),
    "our vector, their smallest": lambda row: row["codec"] not in ("fp32", "int8"),
}


def section(document: Document) -> str:
    """For docs/results.md."""
    rows = document.get("averaging", [])
    parts = [
        "## Comparison with Flower and hivemind",
        f"{_told(rows)} Every worker sends the published tensors plus its own step and gets the mean of all workers. "
        "The steps are the same on every side, and so is the rule, the plain mean: our default, `screened`, leaves out "
        "steps that point elsewhere than the others, as the independent noise of eight workers does. The last column "
        "shows the distance of the mean from the exact one, as a share of the mean step. Seconds and bytes are medians "
        "over the rounds after the first. Memory is the peak of a process with its children, with shared pages counted "
        "once; hivemind has no central process. Flower runs in two ways: as documented, with a SuperLink and "
        "SuperNodes that start one process per message (their connections to their apps are on loopback too), and with "
        "its older, deprecated gRPC streams, which are faster. Flower has no lossy codec of its own: its fp16 is "
        "numpy's cast before and after. Our int8 downloads the mean as a difference in int6, our vector as the others' "
        "updates. vector sends a hundredth of the step and keeps the rest for later rounds, so its error in one round "
        "is not an error of the sum.",
        "A profiler shows why ours is behind in some rows. In small rounds it is the cost of safety: signed messages, "
        "a ledger in a database, and files that are synced before an update is acknowledged; the others keep "
        "everything in memory. In float32 every byte goes up to a coordinator and down again, which workers behind "
        "routers need; hivemind's workers send to each other. At 100 MB this and the writes to disk dominate. vector "
        "costs CPU time, and here all workers, each of which decodes the others' updates, share two cores. Before it "
        "serves, our coordinator starts a separate process that creates the initial block with torch. It has ended "
        "when workers join, and is not included in the memory here.",
        markdown(HEAD, [_cells(row) for row in rows]),
        _missing(rows),
        *_settings(rows),
        goal_lines(verdicts(document)),
        *_training(document),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def summary(document: Document) -> str:
    """One screen, for who ran it."""
    rows = [_cells(row) for row in document.get("averaging", [])]
    averaged = table(HEAD, rows) if rows else "no averaging was measured"
    return "\n".join([averaged, goal_lines(verdicts(document)), *_training(document)])


def _told(rows: Sequence[Row]) -> str:
    if not rows:
        return "Nothing was measured."
    workers = ", ".join(str(n) for n in sorted({row["workers"] for row in rows}))
    sizes = ", ".join(sorted({row["size_mb"] for row in rows}, key=float))
    return f"{workers} workers on one machine average the tensors of a block of about {sizes} MB in float32."


def _missing(rows: Sequence[Row]) -> str:
    """Where we were measured and another side was not."""

    def places(side: str) -> dict[str, None]:
        return {f"{row['size_mb']} MB with {row['workers']}": None for row in rows if row["side"] == side}

    missing = {name: [x for x in places(OURS) if x not in places(side)] for side, name in NAMES.items()}
    return " ".join(f"{name} was not measured at {', '.join(there)}." for name, there in missing.items() if there)


def _cells(row: Row) -> list[str]:
    place = [f"{row['size_mb']}, {row['workers']}", f"{NAMES[row['side']]}, {row['codec']}"]
    if row["error"]:
        return [*place, f"failed: {row['error'].replace('|', '/')}", "-", "-", "-", "-"]
    values = [_written(row, key) for key in COLUMNS]
    return [*place, *values, f"{row['error_of_step']:.2g}"]


def _written(row: Row, key: str) -> str:
    value = row[key]
    if value is None:
        return "none"
    return f"{value:.2f}" if key == "seconds" else f"{value / MB:.{1 if key == 'loopback_bytes' else 0}f}"


def _settings(rows: Sequence[Row]) -> Iterator[str]:
    lines = []
    for side, name in NAMES.items():
        row = next((row for row in rows if row["side"] == side and not row["error"]), None)
        if row:
            settings = ", ".join(f"{key} {value}" for key, value in sorted(_flat(row["settings"])))
            lines.append(f"- {name}: {settings}")
    if lines:
        yield "Settings:\n\n" + "\n".join(lines)


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value


# --- goals -----------------------------------------------------------------------------------------------------------


def verdicts(document: Document) -> list[Verdict]:
    """Ahead of both on every column, in fp32 and with each side's small codecs."""
    rows = [row for row in document.get("averaging", []) if not row["error"]]
    found = []
    for kind, of_kind in KINDS.items():
        chosen = [row for row in rows if of_kind(row)]
        for key, (words, _) in COLUMNS.items():
            if duels := _duels(chosen, key):
                found.append(_verdict(f"{words}, {kind}", duels))
    return [*found, *_training_verdicts(document)]


def _duels(rows: Sequence[Row], key: str) -> list[tuple[str, float]]:
    """For every place where both were measured: ours over the best peer's."""
    found = []
    for place in sorted({(float(row["size_mb"]), row["workers"]) for row in rows}):
        here = [row for row in rows if (float(row["size_mb"]), row["workers"]) == place and row[key] is not None]
        ours = [row[key] for row in here if row["side"] == OURS]
        theirs = [row[key] for row in here if row["side"] != OURS]
        if ours and theirs:
            found.append((f"{place[0]:g} MB with {place[1]} workers", min(ours) / min(theirs)))
    return found


def _verdict(words: str, duels: Sequence[tuple[str, float]]) -> Verdict:
    behind = [duel for duel in duels if duel[1] >= 1]
    worst = max(duels, key=lambda duel: duel[1])
    won = f"ahead in {len(duels) - len(behind)} of {len(duels)}"
    told = f"{won}; ours is {worst[1]:.2f} times the best peer's at {worst[0]}"
    return Verdict(f"ahead of both peers in {words}", told, "", not behind)


# --- training --------------------------------------------------------------------------------------------------------


def _training(document: Document) -> Iterator[str]:
    rows = document.get("training", [])
    if not rows:
        return
    target = target_loss(rows)
    settings = document["specs"]["small"]
    yield (
        f"All sides use the same trainer between the rounds: the `small` preset as one block, {rows[0]['workers']} "
        f"workers, each with its own shard and {settings['swarm']['round_steps']} steps per round. The time is taken "
        f"until the held-out loss is at most {target:.2f} nats/byte, which every side reached. It includes training "
        f"but not scoring."
    )
    head = ["side, codec", f"s to {target:.2f}", "rounds", "s per round", "MB on loopback in total", "last loss"]
    yield markdown(head, [_trained(row, target) for row in rows])


def _training_verdicts(document: Document) -> Iterator[Verdict]:
    rows = [row for row in document.get("training", []) if not row["error"]]
    target = target_loss(rows)
    for kind, of_kind in KINDS.items():
        times_s = [(row["side"], _reached(row, target)[1]) for row in rows if of_kind(row)]
        ours = [seconds for side, seconds in times_s if side == OURS]
        theirs = [seconds for side, seconds in times_s if side != OURS]
        if ours and theirs:
            words = f"seconds to {target:.2f} nats/byte, {kind}"
            yield _verdict(words, [(f"{rows[0]['workers']} workers", min(ours) / min(theirs))])


def target_loss(rows: Sequence[Row]) -> float:
    """The lowest loss, to a twentieth, that all sides came to."""
    worst = max((min(row["losses"]) for row in rows if not row["error"]), default=math.inf)
    return math.ceil(20 * worst) / 20 if math.isfinite(worst) else worst


def _trained(row: Row, target: float) -> list[str]:
    name = f"{NAMES[row['side']]}, {row['codec']}"
    if row["error"]:
        return [name, f"failed: {row['error'].replace('|', '/')}", "-", "-", "-", "-"]
    rounds, reached_s = _reached(row, target)
    traffic = sum(row["round_bytes"][:rounds])
    return [
        name,
        f"{reached_s:.1f}",
        str(rounds),
        f"{row['seconds']:.2f}",
        f"{traffic / MB:.1f}",
        f"{row['losses'][-1]:.3f}",
    ]


def _reached(row: Row, target: float) -> tuple[int, float]:
    """The rounds and the seconds until the loss was there."""
    rounds = 1 + next(n for n, loss in enumerate(row["losses"]) if loss <= target)
    return rounds, sum(row["round_seconds"][:rounds])


# --- the picture -----------------------------------------------------------------------------------------------------


def figures(document: Document) -> dict[str, go.Figure]:
    rows = [row for row in document.get("averaging", []) if not row["error"]]
    keys = list(COLUMNS)
    picture = make_subplots(2, 2, subplot_titles=[COLUMNS[key][0] for key in keys], vertical_spacing=0.18)
    lines = sorted({(row["side"], row["codec"]) for row in rows})
    colors = {side: PALETTE[n] for n, side in enumerate(NAMES)}
    for n, key in enumerate(keys):
        for side, codec in lines:
            points = [row for row in rows if (row["side"], row["codec"]) == (side, codec) and row[key] is not None]
            if not points:
                continue
            picture.add_scatter(
                x=[f"{row['size_mb']} MB, {row['workers']}" for row in points],
                y=[row[key] if key == "seconds" else row[key] / MB for row in points],
                name=f"{NAMES[side]}, {codec}",
                legendgroup=f"{side} {codec}",
                showlegend=n == 0,
                mode="lines+markers",
                line={"color": colors[side], "dash": DASHES.get(codec, "dash")},
                row=n // 2 + 1,
                col=n % 2 + 1,
            )
    picture.update_yaxes(type="log")
    picture.update_yaxes(title_text="s", row=1, col=1)
    for place in ((1, 2), (2, 1), (2, 2)):
        picture.update_yaxes(title_text="MB", row=place[0], col=place[1])
    title = "Averaging beside Flower and hivemind: block size and number of workers"
    picture.update_layout(title=title, template="plotly_white", width=1200, height=800)
    return {"peers": picture}
