"""What Prometheus can ask: counts, sizes and times of requests, images and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from retinue.batching import BatchRecord, LifeRecord, Pending, RequestRecord
from retinue.batching.records import Outcome
from retinue.encoder.cache import Cached
from retinue.errors import RetinueError
from retinue.server.middleware import Ending

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_COSTS = tuple(4**n for n in range(1, 10))
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


class Metrics:
    """The figures of one server; an observer of its encoder. Any thread may report to it.

    ``max_batch_cost``: of the backend; without it there is no fill ratio.
    """

    def __init__(self, max_batch_cost: int | None = None) -> None:
        self._max_batch_cost = max_batch_cost
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "retinue_requests", "Requests with images, by how these ended", ["outcome"], registry=registry
        )
        self._images = Counter(
            "retinue_images", "Images of those requests, by how they ended", ["outcome"], registry=registry
        )
        self._left = Counter(
            "retinue_cancellations",
            "Requests whose client left, by whether a batch had claimed an image of them",
            ["claimed"],
            registry=registry,
        )
        self._batches = Counter(
            "retinue_batches", "Calls of forward_batch, by outcome", ["outcome"], registry=registry
        )
        self._retries = Counter(
            "retinue_retries",
            "Calls of forward_batch that ran what had been in flight before",
            registry=registry,
        )
        self._life = Counter(
            "retinue_backend_events",
            "What befell the backend: lost, rebuilt, failed, stuck, back",
            ["event"],
            registry=registry,
        )
        self._batch_items = Histogram(
            "retinue_batch_items", "Images in a batch", buckets=_SIZES, registry=registry
        )
        self._batch_cost = Histogram(
            "retinue_batch_cost", "Cost of a batch", buckets=_COSTS, registry=registry
        )
        self._fill = Histogram(
            "retinue_batch_fill_ratio",
            "Cost of a batch over max_batch_cost",
            buckets=_SHARES,
            registry=registry,
        )
        self._wait = Histogram(
            "retinue_wait_seconds",
            "From the end of a request's preprocessing until a batch claims the first of its images",
            buckets=_SECONDS,
            registry=registry,
        )
        self._preprocess = Histogram(
            "retinue_preprocess_seconds", "One image's preprocess", buckets=_SECONDS, registry=registry
        )
        self._forward = Histogram(
            "retinue_forward_seconds", "One call of forward_batch", buckets=_SECONDS, registry=registry
        )
        for outcome in get_args(Outcome):  # so that all are there from the beginning
            self._batches.labels(outcome)

    def watch(self, pending: Callable[[], Pending]) -> None:
        """Show what waits, as ``pending`` says whenever somebody asks."""
        for name, text, value in (
            ("retinue_pending_items", "Images that wait for a batch", lambda: pending().items),
            ("retinue_pending_cost", "Cost of the images that wait", lambda: pending().cost),
            (
                "retinue_cost_ceiling",
                "Most that a batch may cost since memory ran out; 0: there is no such ceiling",
                lambda: pending().cost_ceiling or 0,
            ),
            ("retinue_running_cost", "Cost of the batch that runs", lambda: pending().running_cost),
            (
                "retinue_oldest_wait_seconds",
                "How long the oldest of them has waited",
                lambda: pending().oldest_wait_s or 0.0,
            ),
        ):
            self.gauge(name, text, value)

    def watch_cache(self, cached: Callable[[], Cached]) -> None:
        """Show what the artifact cache holds and has done, as ``cached`` says whenever somebody asks."""
        self.registry.register(_CacheFigures(cached))

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show ``value()`` whenever somebody asks."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def ended(self, images: int, ending: Ending) -> None:
        """A request with images has ended at the encoder."""
        outcome = _snake(type(ending).__name__) if isinstance(ending, RetinueError) else ending
        self._requests.labels(outcome).inc()
        self._images.labels(outcome).inc(images)

    def on_batch(self, record: BatchRecord) -> None:
        """Of ``retinue.Observer``."""
        self._batches.labels(record.outcome).inc()
        if record.is_retry:
            self._retries.inc()
        self._batch_items.observe(record.items)
        self._batch_cost.observe(record.cost)
        self._forward.observe(record.duration_s)
        if self._max_batch_cost is not None:
            self._fill.observe(record.cost / self._max_batch_cost)

    def on_request(self, record: RequestRecord) -> None:
        """Of ``retinue.Observer``."""
        if record.wait_s is not None:
            self._wait.observe(record.wait_s)
        if record.outcome == "left":
            self._left.labels("no" if record.wait_s is None else "yes").inc()

    def on_life(self, record: LifeRecord) -> None:
        """Of ``retinue.batching.LifeObserver``."""
        self._life.labels(record.event).inc()

    def on_preprocess(self, duration_s: float) -> None:
        """Of ``retinue.encoder.PreprocessObserver``."""
        self._preprocess.observe(duration_s)

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self.registry)


class _CacheFigures(Collector):
    def __init__(self, cached: Callable[[], Cached]) -> None:
        self._cached = cached

    def collect(self) -> Iterator[Metric]:
        """Of ``prometheus_client``."""
        cached = self._cached()
        lookups = CounterMetricFamily(
            "retinue_cache_lookups",
            "Images looked up in the artifact cache: it was there, it was on its way, or neither",
            labels=["outcome"],
        )
        for outcome, images in (("hit", cached.hits), ("joined", cached.joined), ("miss", cached.misses)):
            lookups.add_metric([outcome], images)
        yield lookups
        yield CounterMetricFamily(
            "retinue_cache_evictions", "Artifacts that made room for others", value=cached.evictions
        )
        yield GaugeMetricFamily("retinue_cache_bytes", "Artifacts in the cache", value=cached.bytes)
        yield GaugeMetricFamily("retinue_cache_entries", "How many these are", value=cached.entries)


def _snake(name: str) -> str:
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")
