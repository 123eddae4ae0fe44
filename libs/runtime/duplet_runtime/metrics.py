"""Counters, gauges and histograms of one service, on a registry of its own, over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from duplet_core.errors import require

MAX_COUNTERS = 256
"""Names come from code, never from a peer; more than this is a name made of data."""

MAX_HISTOGRAMS = 16

BUCKETS_S = (
    *(50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 400e-6, 500e-6, 750e-6),
    *(1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0),
)
"""Upper bounds of histograms: times that should stay around a millisecond."""


class Metrics:
    """The numbers of one service. Names get the prefix `duplet_<service>_`."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"duplet_{service}_"
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        # Owned here while serving; ended by close().
        self._http: tuple[WSGIServer, Thread] | None = None

    def count(self, name: str, by: int = 1) -> None:
        """Raise the counter `name`, which begins at 0."""
        counter = self._counters.get(name)
        if counter is None:
            require(len(self._counters) < MAX_COUNTERS, f"too many counters: {name}")
            counter = Counter(self._prefix + name, name, registry=self.registry)
            self._counters[name] = counter
        counter.inc(by)

    def gauge(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """A value read when it is asked for. `read` runs in the HTTP thread: one attribute or
        length, nothing that walks a structure."""
        Gauge(self._prefix + name, meaning, registry=self.registry).set_function(read)

    def observe(self, name: str, seconds: float) -> None:
        """Add one time to the histogram `name`, which should end in `_seconds`."""
        histogram = self._histograms.get(name)
        if histogram is None:
            require(len(self._histograms) < MAX_HISTOGRAMS, f"too many histograms: {name}")
            full_name = self._prefix + name
            histogram = Histogram(full_name, name, registry=self.registry, buckets=BUCKETS_S)
            self._histograms[name] = histogram
        histogram.observe(seconds)

    def serve(self, port: int, host: str = "127.0.0.1") -> None:
        """Serve on `port`; 0: not at all.

        Raises:
            OSError: the port is taken.
        """
        if port:
            self._http = start_http_server(port, host, self.registry)

    def close(self) -> None:
        """End the HTTP server and its thread."""
        if self._http is not None:
            server, thread = self._http
            server.shutdown()
            server.server_close()
            thread.join()
            self._http = None
