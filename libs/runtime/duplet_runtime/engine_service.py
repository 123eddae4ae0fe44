"""What prefill's and decode's I/O processes share: an engine, a lifeline, two peer streams.

To the start of an `EngineHost` they add: lifeline to kvproxy → stream to kvproxy, each opened
again for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc.aio

from duplet_core.effects import InstanceDied, LifelineUp
from duplet_core.ids import InstanceId, Role
from duplet_runtime.engine_host import EngineHost
from duplet_runtime.engine_process import EngineProcess, EngineReady
from duplet_runtime.executor import Executor
from duplet_runtime.lifeline import LifelineClient
from duplet_runtime.peers import Acceptor
from duplet_runtime.service import Service


class EngineService(EngineHost):
    """One service of a unit with an engine: its pool is kvproxy's to read or write."""

    def __init__(self, service: Service[Any], kvproxy: Callable[[grpc.aio.Channel], Any]) -> None:
        """`kvproxy` picks our method of kvproxy's stub."""
        super().__init__(service)
        self._kvproxy = kvproxy

    def accept(self, executor: Executor, role: Role) -> Acceptor[Any]:
        return executor.accept(Role.LB)

    def join(self, engine: EngineProcess, ready: EngineReady, executor: Executor) -> None:
        settings = self.service.settings
        io_pidfd = os.pidfd_open(os.getpid())
        lifeline = LifelineClient(
            settings.lifeline_path,
            settings.role,
            self.service.instance,
            {"io": io_pidfd, "engine": engine.pidfd},
            ready.ready.pool,
            ready.pool_fd,
            self._watch_kvproxy,
            lambda instance: executor.feed(InstanceDied(Role.KVPROXY, instance)),
        )
        self.service.spawn(lifeline.run(), "lifeline")

    def _watch_kvproxy(self, instance: InstanceId) -> None:
        assert self.executor is not None
        self.executor.feed(LifelineUp(Role.KVPROXY, instance))
        if not self.executor.dials(Role.KVPROXY):
            # Only now: before the first lifeline a stream could only be refused.
            self.executor.dial(Role.KVPROXY, self._kvproxy)
