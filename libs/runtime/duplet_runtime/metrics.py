"""Counters and gauges of one service, on a registry of its own, told to Prometheus over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from duplet_core.errors import require

MAX_COUNTERS = 256
"""Names come from code, never from a peer; more than this is a name made of data."""


class Metrics:
    """The numbers of one service. Names get the prefix `duplet_<service>_`."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"duplet_{service}_"
        self._counters: dict[str, Counter] = {}
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
