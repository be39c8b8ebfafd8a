"""The gateway's metrics in Prometheus's format. Each gateway has its own registry, so two gateways in one process are
counted separately. No prompts, texts or keys. Next: app.py, which reports here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from blocktrain.serve.chain.pipeline import PipelineStats
from blocktrain.serve.gateway.openai import Effort, Usage

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ChainStats = Callable[[], PipelineStats | None]
OF_THE_CHAIN = {
    "traversals": "Traversals of the chain",
    "retries": "Further attempts of a traversal",
    "cache_misses": "Traversals sent again with the complete text",
    "between_bytes": "Bytes from stage to stage",
    "sent_bytes": "Bytes to the stages",
    "received_bytes": "Bytes from the stages",
}
OF_A_STAGE: dict[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str]] = {
    "alive": (GaugeMetricFamily, "1: it answers"),
    "traversals": (CounterMetricFamily, "Traversals that the stage advanced"),
    "failures": (CounterMetricFamily, "Traversals it failed"),
    "round_trip_s": (GaugeMetricFamily, "Seconds of a heartbeat"),
    "work_s": (GaugeMetricFamily, "Seconds that a traversal took there of late"),
    "waiting": (GaugeMetricFamily, "Traversals that wait there"),
}


class Metrics:
    def __init__(self, texts_in_flight: Callable[[], int], chain: ChainStats) -> None:
        self.registry = CollectorRegistry()
        name, registry = "blocktrain_gateway", self.registry
        self._requests = Counter(f"{name}_requests", "Requests answered", ["route", "status"], registry=registry)
        self._seconds = Histogram(
            f"{name}_completion_seconds",
            "Duration of a completion",
            ["mode"],
            buckets=SECONDS,
            registry=registry,
        )
        self._first_byte = Histogram(
            f"{name}_first_byte_seconds", "Time to the first byte of text", ["mode"], buckets=SECONDS, registry=registry
        )
        self._bytes = Counter(f"{name}_bytes", "Bytes of text", ["direction"], registry=registry)
        about = "Tokens of text: bytes, unless the model has a tokenizer"
        self._tokens = Counter(f"{name}_tokens", about, ["direction"], registry=registry)
        self._traversals = Counter(f"{name}_traversals", "Traversals of the model", ["mode"], registry=registry)
        self._degraded = Counter(f"{name}_degraded", "Completions with a missing stage", registry=registry)
        self._gone = Counter(f"{name}_clients_gone", "Clients that disconnected before the end", registry=registry)
        busy = Gauge(f"{name}_texts_in_flight", "Texts being written now", registry=registry)
        busy.set_function(texts_in_flight)
        registry.register(_Chain(chain))

    def answered(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def client_gone(self) -> None:
        self._gone.inc()

    def written(self, effort: Effort, usage: Usage, prompt_bytes: int) -> None:
        """Records what a completion cost, whether it succeeded or failed."""
        self._seconds.labels(effort.mode).observe(effort.seconds)
        if effort.first_byte_s is not None:
            self._first_byte.labels(effort.mode).observe(effort.first_byte_s)
        self._bytes.labels("read").inc(prompt_bytes)
        self._bytes.labels("written").inc(effort.bytes_written)
        self._tokens.labels("read").inc(usage.prompt_tokens)
        self._tokens.labels("written").inc(usage.completion_tokens)
        self._traversals.labels(effort.mode).inc(effort.traversals)
        self._degraded.inc(effort.degraded)

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _Chain(Collector):
    """The stages, read at each scrape."""

    def __init__(self, stats: ChainStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        for name, help_text in OF_THE_CHAIN.items():
            yield CounterMetricFamily(f"blocktrain_chain_{name}", help_text, value=getattr(stats, name))
        for name, (kind, help_text) in OF_A_STAGE.items():
            family = kind(f"blocktrain_stage_{name}", help_text, labels=["stage"])
            for address, stage in stats.stages.items():
                family.add_metric([address], float(getattr(stage, name)))
            yield family
