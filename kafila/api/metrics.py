"""What Prometheus is told of a member: what was asked through its interface, and the ring as it knows it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kafila.api.engine import Engine, RingFacts
from kafila.ring.frames import Text

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The counters of one member's interface, and its view of ``engine`` when asked."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kafila_api_requests",
            "Requests answered, by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._tokens = Counter(
            "kafila_api_tokens", "Tokens of prompts and answers asked for here.", ["kind"], registry=self._registry
        )
        self._queue_s = self._histogram("queue", "From a question to its place in the cache.")
        self._prefill_s = self._histogram("prefill", "From there to the first token.")
        self._decode_s = self._histogram("decode", "From an answer's first token to its last.")
        self._registry.register(_RingCollector(engine))

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"kafila_api_{name}_seconds", text, buckets=_SECONDS, registry=self._registry)

    def request(self, route: str, status: int) -> None:
        """A request was answered (or given up by its client, 499). ``route`` is one of ours, never a client's words."""
        self._requests.labels(route, str(status)).inc()

    def answered(self, text: Text) -> None:
        """An answer ended; ``text`` is its last part."""
        self._tokens.labels("prompt").inc(text.prompt_tokens)
        self._tokens.labels("reused").inc(text.reused_tokens)
        self._tokens.labels("answer").inc(text.answer_tokens)
        self._queue_s.observe(text.queue_s)
        self._prefill_s.observe(text.prefill_s)
        self._decode_s.observe(text.decode_s)

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _RingCollector:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The ring's gauges; only the first where there is no ring yet."""
        ring = self._engine.ring()
        up = GaugeMetricFamily("kafila_serving", "Whether prompts may be asked.")
        up.add_metric([], float(self._engine.model() is not None))
        yield up
        if ring is not None:
            yield from _ring(ring)
            yield from _members(ring)

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is depends on the ring."""
        yield from ()


def _ring(ring: RingFacts) -> Iterator[Metric]:
    for name, text, value in (
        ("kafila_running", "Answers that hold a slot, everybody's.", ring.running),
        ("kafila_waiting", "Questions in the queue, everybody's.", ring.waiting),
        ("kafila_circuit_seconds", "A token's time once round, lately.", ring.circuit_s),
    ):
        if value is not None:
            gauge = GaugeMetricFamily(name, text)
            gauge.add_metric([], value)
            yield gauge
    tokens = CounterMetricFamily("kafila_ring_tokens", "Tokens generated, everybody's.")
    tokens.add_metric([], ring.tokens)
    yield tokens


def _members(ring: RingFacts) -> Iterator[Metric]:
    stage = GaugeMetricFamily("kafila_stage_seconds", "A stage's time a token.", labels=["place", "member", "which"])
    memory = GaugeMetricFamily("kafila_memory_bytes", "Memory of a share.", labels=["place", "member", "which"])
    for place, member in enumerate(ring.members):
        for which, value in (("predicted", member.predicted_s), ("measured", member.measured_s)):
            if value is not None:
                stage.add_metric([str(place), member.name, which], value)
        memory.add_metric([str(place), member.name, "used"], member.memory_used_bytes)
        memory.add_metric([str(place), member.name, "room"], member.memory_room_bytes)
    yield stage
    yield memory
    rtt = GaugeMetricFamily("kafila_link_rtt_seconds", "A link's round trip.", labels=["from", "to", "kind"])
    for place, edge in enumerate(ring.edges):
        if edge.measured and edge.rtt_s is not None:
            rtt.add_metric([str(place), str((place + 1) % len(ring.members)), edge.kind], edge.rtt_s)
    yield rtt
