"""Metrics: a run's status in the text format of Prometheus, computed from the ledger at every scrape. A restarted
coordinator loses only what it counts itself, its HTTP answers. Next: status.py, where the facts come from."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from blocktrain.swarm.coordinator.watching.curves import answer_of
from blocktrain.swarm.coordinator.watching.status import PRESENT_S

METRICS_TYPE = CONTENT_TYPE_LATEST


class Answers:
    """How many requests were answered with which status, since this process started. Threads may share it."""

    def __init__(self) -> None:
        self._counts, self._turn = Counter[int](), threading.Lock()

    def count(self, status: int) -> None:
        with self._turn:
            self._counts[status] += 1

    def totals(self) -> dict[int, int]:
        with self._turn:
            return dict(self._counts)


def exposition(status: Mapping[str, Any], answers: Answers) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Facts(status, answers.totals()))
    return generate_latest(registry)


class _Facts(Collector):
    def __init__(self, status: Mapping[str, Any], answered: Mapping[int, int]) -> None:
        self._status, self._answered = status, answered

    def collect(self) -> Iterator[Metric]:
        status, workers = self._status, self._status["workers"]
        yield _gauge("paused", "Whether an admin has paused the run", float(status["paused"]))
        yield from self._phases()
        yield _labelled("block_version", "The newest version of a block", "block", status["versions"])
        present = sum(status["now_s"] - worker["last_seen_s"] < PRESENT_S for worker in workers)
        yield _gauge("workers", "Workers heard of in the last five minutes", present)
        for name, text in (("updates", "Updates accepted"), ("tokens", "Tokens of accepted updates")):
            yield CounterMetricFamily(f"blocktrain_{name}", text, sum(worker[name] for worker in workers))
        answer = answer_of(status["evaluations"][-1]["scores"]) if status["evaluations"] else None
        if answer:
            yield _gauge("held_out_nats_per_byte", "Of the composed model, newest score", answer["nats_per_byte"])
        responses = CounterMetricFamily("blocktrain_http_responses", "Of this process", labels=["status"])
        for code, total in sorted(self._answered.items()):
            responses.add_metric([str(code)], total)
        yield responses

    def _phases(self) -> Iterator[Metric]:
        phases = self._status["phases"]
        open_rounds = {phase["phase"]: phase["round"] for phase in phases if phase["round"]}
        at_work = {p: sum(x["reported_s"] is None for x in round["leases"]) for p, round in open_rounds.items()}
        for name, text, values in (
            ("phase_step", "Steps done", {phase["phase"]: phase["step"] for phase in phases}),
            ("phase_steps", "Steps in all", {phase["phase"]: phase["steps"] for phase in phases}),
            ("phase_finished", "1 when all is done", {phase["phase"]: int(phase["finished"]) for phase in phases}),
            ("round_number", "The open round", {p: round["number"] for p, round in open_rounds.items()}),
            ("round_deadline_seconds", "Until its deadline", {p: r["time_left_s"] for p, r in open_rounds.items()}),
            ("leases_at_work", "Leases of the open round that have not reported", at_work),
        ):
            yield _labelled(name, text, "phase", values)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"blocktrain_{name}", text, value)


def _labelled(name: str, text: str, label: str, values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"blocktrain_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family
