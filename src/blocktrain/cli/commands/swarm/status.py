"""blocktrain status: how far a run is, who works on it, what is late and why. No torch.
Next: swarm/coordinator/watching/status.py, which answers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import counted, duration, sample_lines, say, show_table, wrapped
from blocktrain.cli.options import InviteText
from blocktrain.cli.shared.progress import num_finished
from blocktrain.errors import CoordinatorUnreachable
from blocktrain.logs import visible
from blocktrain.spec import Phase, RunSpec
from blocktrain.wire.invite import read_invite

if TYPE_CHECKING:
    from blocktrain.swarm.worker.client import CoordinatorClient

REFRESH_S = 2.0
PATIENCE_S = 10.0
CLEAR = "\x1b[H\x1b[2J"


def status(
    invite: InviteText,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 seconds until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of tables.")] = False,
) -> None:
    """Show the progress of a run: phases, rounds, workers, loss."""
    address = read_invite(invite)

    from blocktrain.swarm.worker.client import CoordinatorClient

    with CoordinatorClient(address, patience_s=0.0 if watch else PATIENCE_S) as client:
        spec = RunSpec.model_validate(client.run_info().spec)
        if not watch:
            _print(spec, client.status(), as_json, indent=2)
            return
        with suppress(KeyboardInterrupt):
            while True:
                _print_again(spec, client, as_json)
                time.sleep(REFRESH_S)


def _print_again(spec: RunSpec, client: CoordinatorClient, as_json: bool) -> None:
    """A coordinator that restarts is waited for."""
    try:
        facts = client.status()
    except CoordinatorUnreachable as error:
        say(f"{error}; trying again every {REFRESH_S:g} s (Ctrl-C stops)")
        return
    if not as_json and sys.stdout.isatty():
        print(CLEAR, end="")
    _print(spec, facts, as_json, indent=None)


def _print(spec: RunSpec, facts: Mapping[str, Any], as_json: bool, indent: int | None) -> None:
    if as_json:
        print(json.dumps(facts, indent=indent), flush=True)
        return
    paused = ", paused" if facts["paused"] else ""
    left_s = facts.get("time_left_s")
    left = f", {duration(left_s)} left" if left_s else ""
    phases = f"{num_finished(facts)} of {counted(facts['num_phases'], 'phase')} finished"
    print(f"{visible(facts['name'])}: {phases}{paused}{left}\n")
    if problem := facts.get("storage", {}).get("problem"):
        print(wrapped(f"{visible(problem)}; until then nothing more is taken in\n"))
    show_table(
        ["phase", "blocks", "step", "version", "round", "deadline", "why"],
        phase_rows(spec.phases, facts),
        spaced=False,
    )
    print()
    show_table(
        ["worker", "device", "steps/s", "updates", "share", "last seen"],
        worker_rows(facts["workers"], facts["now_s"]) or [["nobody yet", *[""] * 5]],
        spaced=False,
    )
    for line in excluded_lines(facts["workers"]):
        print(wrapped(visible(line)))
    print(f"\n{wrapped(visible(evaluation_line(facts['evaluations'])))}")
    if facts["samples"]:
        print("\n".join(sample_lines(facts["samples"][-1]["samples"])))
    sys.stdout.flush()


def phase_rows(phases: Sequence[Phase], facts: Mapping[str, Any]) -> list[list[str]]:
    opened = {each["phase"]: each for each in facts["phases"]}
    return [_phase_row(phase, opened.get(phase.index), facts["versions"]) for phase in phases]


def _phase_row(phase: Phase, facts: Mapping[str, Any] | None, versions: Mapping[str, int]) -> list[str]:
    blocks = "+".join(map(str, phase.blocks))
    if facts is None:
        return [str(phase.index + 1), blocks, f"0/{phase.steps}", "", "", "", "not open yet: earlier phases come first"]
    version = "+".join(str(versions.get(str(block), "–")) for block in phase.blocks)
    cells = [str(phase.index + 1), blocks, f"{facts['step']}/{facts['steps']}", version]
    current = facts["round"]
    if current is None:
        return [*cells, "", "", "finished"]
    left_s = current["time_left_s"]
    deadline = "" if not current["leases"] else duration(left_s) if left_s >= 0 else f"−{duration(-left_s)}"
    return [*cells, str(current["number"]), deadline, current["reason"]]


def worker_rows(workers: Sequence[Mapping[str, Any]], now_s: float) -> list[list[str]]:
    """Who has trained on the most text comes first. The share is of the text that all have trained on."""
    total = sum(each["tokens"] for each in workers) or 1
    return [_worker_row(each, total, now_s) for each in sorted(workers, key=lambda each: -each["tokens"])]


def _worker_row(facts: Mapping[str, Any], total: int, now_s: float) -> list[str]:
    seen = f"{duration(max(0.0, now_s - facts['last_seen_s']))} ago"
    speed = f"{facts['steps_per_s']:.3g}"
    share = f"{facts['tokens'] / total:.0%}"
    return [facts["name"], facts["device"], speed, str(facts["updates"]), share, seen]


def excluded_lines(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who gets no work, and why."""
    out = [each for each in workers if each["state"] in ("quarantined", "banned")]
    return [f"{each['alias']} ({each['name']}) is {each['state']}: {each['why'] or 'no reason given'}" for each in out]


def evaluation_line(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The newest held-out loss of the composed model: the last reading of the first path, eval's answer."""
    if not evaluations or not evaluations[-1]["scores"]:
        return "held-out loss: not measured yet"
    newest = evaluations[-1]
    scores = newest["scores"]
    score = [each for each in scores if each["path"] == scores[0]["path"]][-1]
    versions = ", ".join(f"{block}: {version}" for block, version in newest["versions"].items())
    return f"held-out loss: {score['nats_per_byte']:.4f} nats/byte, {score['reading']}, of versions {versions}"
