"""The history of a run: losses from its metrics, and who did what from a coordinator's ledger, which is only read.
Next: sections.py and comparison.py, which present it."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from blocktrain.cli.shared.ledger import all_pages
from blocktrain.cli.shared.training import phase_label
from blocktrain.errors import CheckpointError, StorageError
from blocktrain.figures import Line
from blocktrain.io.files import write_whole
from blocktrain.io.private import LEDGER_FILE
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.watching.curves import MAX_EVALUATIONS, samples_of, thinned
from blocktrain.swarm.coordinator.watching.status import status_for
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.migrations.upgrading import upgrade_ledger
from blocktrain.swarm.policy.evaluations import those_that_count
from blocktrain.swarm.worker.client import CoordinatorClient

Record: TypeAlias = dict[str, Any]
STORY_FILE = "swarm.json"  # in an exported directory
SAVED = ("number", "worker", "phase", "steps", "tokens", "num_bytes", "loss", "received_s")  # of an update
LISTS = ("contributions", "workers", "evaluations", "events")
MOST_SAMPLES = 1000  # evaluations; a page shows some of them
MOST_POINTS = 200  # of one curve


@dataclass(frozen=True)
class SwarmStory:
    """Records of a run that a swarm trained: who took part and what happened."""

    spec: RunSpec
    contributions: list[Record]
    workers: list[Record]
    evaluations: list[Record]
    events: list[Record]
    samples: list[Record] = field(default_factory=list)  # as the status shows them


def story_of_ledger(folder: Path, url: str | None = None) -> SwarmStory:
    """From a coordinator's directory, also while it runs, or from its database."""
    with _copied(folder / LEDGER_FILE) if url is None else closing(Ledger(url)) as ledger:
        run = ledger.run()
        if run is None:
            raise CheckpointError(f"the ledger of {folder} holds no run: give the --dir of blocktrain coordinator")
        evaluations = ledger.evaluations(limit=MAX_EVALUATIONS)
        return SwarmStory(
            RunSpec.model_validate_json(run.spec),
            list(all_pages(lambda after: [asdict(each) for each in ledger.contributions(after)])),
            [asdict(each) for each in ledger.workers()],
            [asdict(each) for each, _ in thinned([*those_that_count(evaluations)])],
            [asdict(each) for each in ledger.events()],
            samples_of(ledger.sampled(MOST_SAMPLES), evaluations),
        )


def save_story(client: CoordinatorClient, folder: Path) -> None:
    """Saves who trained an exported model, by alias. It stays with the model when the swarm is gone."""
    status = status_for("viewer", client.status())  # even if an admin exports: the model may be passed on
    contributions = [
        {"update": {name: each["update"][name] for name in SAVED}} for each in all_pages(client.contributions)
    ]
    evaluations = [*_earlier(client.curves()["held_out"], status["evaluations"]), *status["evaluations"]]
    story = {"contributions": contributions, "workers": status["workers"], "evaluations": evaluations}
    story["samples"] = status["samples"]
    write_whole(folder / STORY_FILE, json.dumps({**story, "events": []}).encode())


def _earlier(points: Sequence[Record], newest: Sequence[Record]) -> list[Record]:
    """The points of the curve that are older than the newest evaluations, which are all that a status has, as such."""
    older = [point for point in points if newest and point["at_s"] < newest[0]["at_s"]]
    return [{"at_s": point["at_s"], "scores": [*_scores(point)]} for point in older]


def _scores(point: Record) -> Iterator[Record]:
    for block, loss in point["blocks"].items():
        yield {"path": point["path"], "reading": f"block {block}", "nats_per_byte": loss}
    yield {key: point[key] for key in ("path", "reading", "nats_per_byte")}


def story_of_export(folder: Path, spec: RunSpec) -> SwarmStory | None:
    """What blocktrain export saved. None if the model was trained on one machine."""
    path = folder / STORY_FILE
    try:
        kept = json.loads(path.read_bytes())
        contributions, workers, evaluations, events = (list(kept[name]) for name in LISTS)
        samples = list(kept.get("samples", ()))  # not in older exports
        return SwarmStory(spec, contributions, workers, evaluations, events, samples)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): delete it, or export again") from None


@contextmanager
def _copied(path: Path) -> Iterator[Ledger]:
    """A copy of a ledger as it is now. Opening the ledger itself needs permission to write."""
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as folder:
        copy = Path(folder) / LEDGER_FILE
        try:
            with (
                closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as there,
                closing(sqlite3.connect(copy)) as here,
            ):
                there.backup(here)
        except sqlite3.Error as error:
            raise StorageError(f"{path} cannot be read ({error}): make it readable, or restore it") from None
        upgrade_ledger(copy, backups=None)
        with closing(Ledger(copy)) as ledger:
            yield ledger


def history(records: Sequence[dict[str, Any]]) -> tuple[dict[int, list[float]], float]:
    """Losses by phase, and seconds of training. Of a step recorded twice, the last record counts."""
    latest = {(record["phase"], record["step"]): record for record in records if {"phase", "step"} <= record.keys()}
    losses: dict[int, list[float]] = {}
    for (phase, _), record in sorted(latest.items()):
        losses.setdefault(phase, []).append(float(record["loss"]))
    return losses, sum(float(record["seconds"]) for record in latest.values())


def training_curves(spec: RunSpec, losses_of_phase: dict[int, list[float]], color: str | None = None) -> list[Line]:
    """One line per phase. A group begins where the group before it ended; the phases of a group train side by side."""
    starts = accumulate((max(phase.steps for phase in group) for group in spec.groups), initial=0)
    lines = []
    for start, group in zip(starts, spec.groups, strict=False):
        for phase in group:
            steps, losses = means(losses_of_phase.get(phase.index, []))
            seen = [(start + step) * spec.step_tokens for step in steps]
            lines.append(Line(phase_label(spec, phase), seen, losses, color))
    return lines


def means(losses: Sequence[float], most: int = MOST_POINTS) -> tuple[list[float], list[float]]:
    """At most `most` points: the mean loss of neighbouring steps, at the middle of them."""
    size = -(-len(losses) // most) or 1
    chunks = [losses[start : start + size] for start in range(0, len(losses), size)]
    middles = [size * index + (len(chunk) + 1) / 2 for index, chunk in enumerate(chunks)]
    return middles, [sum(chunk) / len(chunk) for chunk in chunks]
