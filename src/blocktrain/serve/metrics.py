"""What the gateway counts, in Prometheus's format; a registry of its own, so that two gateways in one process do not
add up. Never a prompt, a text or a key. Next: gateway.py, which reports here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from blocktrain.serve.openai import Effort, Usage

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
StageLights = Callable[[], dict[str, bool]]  # stage -> does it answer


class Metrics:
    def __init__(self, seats_taken: Callable[[], int], stages: StageLights) -> None:
        self.registry = CollectorRegistry()
        name, registry = "blocktrain_gateway", self.registry
        self._requests = Counter(f"{name}_requests", "Requests answered", ["route", "status"], registry=registry)
        self._seconds = Histogram(
            f"{name}_completion_seconds",
            "A completion from first to last",
            ["mode"],
            buckets=SECONDS,
            registry=registry,
        )
        self._first_byte = Histogram(
            f"{name}_first_byte_seconds", "Until the first byte of text", ["mode"], buckets=SECONDS, registry=registry
        )
        self._bytes = Counter(f"{name}_bytes", "Bytes of text", ["direction"], registry=registry)
        self._traversals = Counter(f"{name}_traversals", "Traversals of the model", ["mode"], registry=registry)
        self._degraded = Counter(f"{name}_degraded", "Completions with a stage missing", registry=registry)
        self._gone = Counter(f"{name}_clients_gone", "Clients that left before the end", registry=registry)
        busy = Gauge(f"{name}_texts_in_flight", "Texts being written now", registry=registry)
        busy.set_function(seats_taken)
        registry.register(_Stages(stages))

    def answered(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def client_gone(self) -> None:
        self._gone.inc()

    def written(self, effort: Effort, usage: Usage) -> None:
        """A completion ended, well or not: what it had cost by then."""
        self._seconds.labels(effort.mode).observe(effort.seconds)
        if effort.first_byte_s is not None:
            self._first_byte.labels(effort.mode).observe(effort.first_byte_s)
        self._bytes.labels("read").inc(usage.prompt_tokens)
        self._bytes.labels("written").inc(usage.completion_tokens)
        self._traversals.labels(effort.mode).inc(effort.traversals)
        self._degraded.inc(effort.degraded)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _Stages(Collector):
    """Asked when somebody looks, so that a stage that left is not shown for ever."""

    def __init__(self, stages: StageLights) -> None:
        self._stages = stages

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("blocktrain_gateway_stage_up", "1: the stage answers", labels=["stage"])
        for stage, up in self._stages().items():
            family.add_metric([stage], float(up))
        yield family
