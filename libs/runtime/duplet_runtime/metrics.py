"""Counters, gauges and histograms of one service, on a registry of its own, over HTTP.

Counters and histograms are ours, shown to the Prometheus client when it is asked: theirs take
a lock and walk their buckets, which is dear where every row of every stream is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Thread
from typing import Generic, TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from duplet_core.errors import require
from duplet_runtime.settings import SettingsError

S = TypeVar("S")

MAX_SERIES = 256
"""Names and labels come from code, never from a peer; more than this is a name made of data."""

BUCKETS_S = (
    *(50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 400e-6, 500e-6, 750e-6),
    *(1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0),
)
"""Upper bounds of histograms: times that should stay around a millisecond."""

Labels = Mapping[str, str]
NO_LABELS: Labels = {}


class Counter:
    """Written by one thread; read by another, to which a value late by one is as good."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, by: float = 1) -> None:
        self.value += by


class Histogram:
    """As Counter: one writer."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it) as Prometheus wants them."""
        sums = accumulate(list(self.counts))
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, sums), strict=True))


@dataclass(frozen=True, slots=True)
class _Family(Generic[S]):
    """Series of one name."""

    meaning: str
    labels: tuple[str, ...]
    series: dict[tuple[str, ...], S]
    """By the labels' values."""


class _Shown(Collector):
    """Our series as Prometheus' client wants them. Its thread walks copies."""

    def __init__(self) -> None:
        self.counters: dict[str, _Family[Counter]] = {}
        self.histograms: dict[str, _Family[Histogram]] = {}

    def collect(self) -> Iterator[CounterMetricFamily | HistogramMetricFamily]:
        for name, counters in list(self.counters.items()):
            counted = CounterMetricFamily(name, counters.meaning, labels=counters.labels)
            for values, counter in list(counters.series.items()):
                counted.add_metric(values, counter.value)
            yield counted
        for name, histograms in list(self.histograms.items()):
            observed = HistogramMetricFamily(name, histograms.meaning, labels=histograms.labels)
            for values, histogram in list(histograms.series.items()):
                observed.add_metric(values, histogram.buckets(), histogram.total)
            yield observed


def _series(
    families: dict[str, _Family[S]],
    name: str,
    meaning: str,
    labels: Labels,
    make: Callable[[], S],
) -> S:
    """The series of this name and these labels, made when it is new."""
    family = families.get(name)
    if family is None:
        require(len(families) < MAX_SERIES, f"too many names: {name}")
        family = families[name] = _Family(meaning, tuple(labels), {})
    require(family.labels == tuple(labels), f"{name} has the labels {family.labels}")
    values = tuple(labels.values())
    if values not in family.series:
        require(len(family.series) < MAX_SERIES, f"too many series of {name}")
        family.series[values] = make()
    return family.series[values]


class Metrics:
    """The numbers of one service. Names get the prefix `duplet_<service>_`."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"duplet_{service}_"
        self._shown = _Shown()
        self.registry.register(self._shown)
        # Owned here while serving; ended by close().
        self._http: tuple[WSGIServer, Thread] | None = None

    def counter(self, name: str, meaning: str, labels: Labels = NO_LABELS) -> Counter:
        """The counter of this name and these labels, which begins at 0; on the wire `_total`."""
        return _series(self._shown.counters, self._prefix + name, meaning, labels, Counter)

    def count(self, name: str, by: int = 1) -> None:
        """Raise the counter `name`, declared before or not."""
        self.counter(name, name).add(by)

    def gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A value read when it is asked for. `read` runs in the HTTP thread: one attribute or
        length, nothing that walks a structure."""
        Gauge(self._prefix + name, meaning, registry=self.registry).set_function(read)

    def histogram(
        self,
        name: str,
        meaning: str,
        bounds: Sequence[float] = BUCKETS_S,
        labels: Labels = NO_LABELS,
    ) -> Histogram:
        """The histogram of this name and these labels. Names end in their unit."""
        families = self._shown.histograms
        return _series(families, self._prefix + name, meaning, labels, lambda: Histogram(bounds))

    def serve(self, port: int, host: str = "127.0.0.1") -> None:
        """Serve on `port`; 0: not at all.

        Raises:
            SettingsError: the port is taken.
        """
        if not port:
            return
        try:
            self._http = start_http_server(port, host, self.registry)
        except OSError as error:
            raise SettingsError(f"metrics_port: {host}:{port}: {error.strerror}") from error

    def close(self) -> None:
        """End the HTTP server and its thread."""
        if self._http is not None:
            server, thread = self._http
            server.shutdown()
            server.server_close()
            thread.join()
            self._http = None
