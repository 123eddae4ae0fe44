"""Starts an engine process as the I/O process's child and watches it to its end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duplet_core.engine import FromEngine, Ready, Shutdown
from duplet_core.errors import Reason, Unavailable
from duplet_pages.engine_config import EngineConfig
from duplet_runtime.async_link import AsyncLink
from duplet_runtime.fate import describe_exit
from duplet_runtime.logs import get_logger
from duplet_runtime.settings import BAD_SETTINGS_EXIT, SettingsError

STOP_LIMIT_S = 5.0
"""How long an engine may take to leave after Shutdown before it is killed."""

_log = get_logger("duplet.engine_process")


@dataclass(frozen=True, slots=True)
class EngineReady:
    """What a ready engine offers. `pool_fd` belongs to the taker; -1 where there is none."""

    ready: Ready
    pool_fd: int


class EngineProcess:
    """One engine process and the link to it. Owns child, pidfd and link until `stop`.

    Start it before gRPC starts its threads. The engine inherits stdout, stderr and its end of
    the link, nothing else: no descriptor of a GPU, a lifeline or a server. It is in a process
    group of its own, so that Ctrl-C in a terminal drains the service instead of ending it.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        sock: socket.socket,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._child = child
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineReady] = self._loop.create_future()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._stopping = False
        self.pidfd = os.pidfd_open(child.pid)
        """Of the child, which is unreaped now; for the lifeline. Closed by `stop`."""
        self.link = AsyncLink(sock, self._take, lambda: None)
        self._loop.add_reader(self.pidfd, self._reap)

    @staticmethod
    def start(
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[int], None],
        command: Sequence[str] = (sys.executable, "-m", "duplet_engine"),
    ) -> EngineProcess:
        """Start the process; returns at once.

        `on_message` gets everything after Ready. `on_exit(returncode)` is called once when the
        engine exits by itself after Ready: the service must exit too. Not called for the exit
        that `stop` asks for; `ready` raises for one before Ready.

        Raises:
            OSError: the process cannot be started.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            fd = theirs.fileno()
            child = subprocess.Popen(
                [*command, "--config", config.to_json(), "--link-fd", str(fd)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        return EngineProcess(child, ours, on_message, on_exit)

    async def ready(self) -> EngineReady:
        """Wait until the model is loaded and the pool is mapped.

        Raises:
            SettingsError: the engine cannot start with its settings, and has said why.
            Unavailable: the engine exited first, otherwise.
        """
        return await asyncio.shield(self._ready)

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> int:
        """End the engine, by Shutdown or after `limit_s` by a kill.

        Returns:
            Its exit code, negative for a signal.
        """
        self._stopping = True
        self.link.send(Shutdown())
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._exited)
        except TimeoutError:
            _log.warning("engine does not leave; killing it", pid=self._child.pid)
            self._child.kill()
            await asyncio.shield(self._exited)
        self.link.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return self._exited.result()

    def _take(self, message: FromEngine, fds: tuple[int, ...]) -> None:
        if isinstance(message, Ready) and not self._ready.done():
            self._ready.set_result(EngineReady(message, fds[0] if fds else -1))
            fds = fds[1:]
        else:
            self._on_message(message)
        for fd in fds:
            os.close(fd)

    def _reap(self) -> None:
        self._loop.remove_reader(self.pidfd)
        code = self._child.wait()
        # Of bad settings the operator is told in plain words.
        expected = self._stopping or code == BAD_SETTINGS_EXIT
        tell = _log.info if expected else _log.error
        tell("engine exited", pid=self._child.pid, how=describe_exit(code))
        self._exited.set_result(code)
        if not self._ready.done():
            self._ready.set_exception(_why_not_ready(code))
            # Read by whoever awaits ready(); nobody may.
            self._ready.exception()
        elif not self._stopping:
            self._on_exit(code)


def _why_not_ready(code: int) -> Exception:
    if code == BAD_SETTINGS_EXIT:
        return SettingsError("the engine cannot start with these settings")
    return Unavailable(
        Reason.ENGINE_FAILED, f"the engine ended before it was ready: {describe_exit(code)}"
    )
