"""Lifelines: how kvproxy and the owners of pools learn of each other's death from the kernel.

prefill and decode connect to kvproxy's socket and hand over a pidfd of each of their processes
and their pool's descriptor; kvproxy answers with its own pidfd. An instance is dead when every
one of its pidfds is readable, which no signal but a fatal one brings about, and at no other
time: the end of the connection is only a reason to connect again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from duplet_core.errors import require
from duplet_core.ids import InstanceId, Role
from duplet_runtime.lifeline_wire import (
    POOL,
    Descriptors,
    LifelineError,
    Registration,
    VersionError,
    receive_registration,
    send_registration,
)
from duplet_runtime.lock import HeldLock
from duplet_runtime.logs import get_logger

MAX_CONNECTIONS = 32
MAX_INSTANCES = 16
"""Living instances watched at once; one unit has two."""

OWNERS = (Role.PREFILL, Role.DECODE)
"""Of pools: they introduce themselves to kvproxy."""

REGISTER_LIMIT_S = 2.0
"""A connection that has not introduced itself by then is closed."""

SHORTAGE_PAUSE_S = 1.0
"""How long no connection is taken after one found no descriptor or no memory."""

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

BACKOFF_FIRST_S = 0.1
BACKOFF_MOST_S = 1.0

_log = get_logger("duplet.lifeline")


@dataclass(frozen=True, slots=True)
class LifelinePeer:
    """An instance that introduced itself. `pool_fd` belongs to who gets this; -1: no pool."""

    role: Role
    instance: InstanceId
    pool: str
    pool_fd: int


class DeathWatch:
    """Watches the pidfds of one instance until each is readable. Owns them."""

    def __init__(self, pidfds: Mapping[str, int], on_died: Callable[[], None]) -> None:
        """`on_died` is called once, from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._alive = dict(pidfds)
        self._on_died = on_died
        for name, fd in self._alive.items():
            self._loop.add_reader(fd, self._exited, name)

    def close(self) -> None:
        """Stop watching."""
        for name in tuple(self._alive):
            self._release(name)

    def _exited(self, name: str) -> None:
        self._release(name)
        if not self._alive:
            self._on_died()

    def _release(self, name: str) -> None:
        fd = self._alive.pop(name)
        self._loop.remove_reader(fd)
        os.close(fd)


class LifelineServer:
    """kvproxy's end. Owns the listening socket, connections, received descriptors, watches.

    Lives in the event loop's callbacks; what `on_up` or `on_died` raise reaches the loop's
    exception handler.
    """

    def __init__(
        self,
        path: Path,
        lock: HeldLock,
        instance: InstanceId,
        on_up: Callable[[LifelinePeer], bool],
        on_died: Callable[[Role, InstanceId], None],
        on_other_version: Callable[[Role, int], None],
    ) -> None:
        """Listen. `lock`, kvproxy's own, is why a socket file found at `path` is a dead
        predecessor's and may be replaced. `on_up` takes an instance or refuses it; a refused one
        is not watched, and comes again; nor is one that speaks another version of the transfer
        protocol, of which `on_other_version` hears.

        Raises:
            OSError: the socket cannot be made.
        """
        require(lock.fd >= 0, "the lifeline's server must hold kvproxy's lock")
        self._instance = instance
        self._on_up = on_up
        self._on_died = on_died
        self._on_other_version = on_other_version
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(os.getpid())
        self._connections: dict[int, _Connection] = {}
        self._watches: dict[tuple[Role, InstanceId], DeathWatch] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._listener = _listen(path)
        self._path = path
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Close everything. Peers see no death: that is our exit."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for connection in tuple(self._connections.values()):
            self._drop(connection)
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        os.close(self._pidfd)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            # The connection stays in the backlog; looking at once again would only spin.
            _log.warning("lifeline refused", detail=str(error))
            self._loop.remove_reader(self._listener.fileno())
            self._pause = self._loop.call_later(
                SHORTAGE_PAUSE_S, self._loop.add_reader, self._listener.fileno(), self._accept
            )
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            _log.warning("lifeline refused", detail="too many connections")
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock)
        self._connections[sock.fileno()] = connection
        self._loop.add_reader(sock.fileno(), self._read, connection)
        connection.late = self._loop.call_later(
            REGISTER_LIMIT_S, self._drop, connection, "no introduction in time"
        )

    def _read(self, connection: _Connection) -> None:
        try:
            arrived = receive_registration(connection.sock)
        except BlockingIOError:
            return
        except VersionError as error:
            self._drop(connection, str(error))
            if error.role in OWNERS:
                self._on_other_version(error.role, error.version)
            return
        except (OSError, LifelineError) as error:
            self._drop(connection, str(error))
            return
        if arrived is None:
            self._drop(connection)
            return
        connection.late.cancel()
        message, fds = arrived
        try:
            self._register(connection, message, fds)
        finally:
            fds.close()

    def _register(self, connection: _Connection, message: Registration, fds: Descriptors) -> None:
        if connection.registered is not None:
            self._drop(connection, "introduced itself twice")
            return
        if message.role not in OWNERS:
            self._drop(connection, f"{message.role} has no lifeline")
            return
        key = (message.role, message.instance)
        if key not in self._watches and len(self._watches) >= MAX_INSTANCES:
            self._drop(connection, "too many living instances")
            return
        if key not in self._watches and not self._take_up(key, message, fds):
            self._drop(connection, f"{message.role} was refused")
            return
        try:
            send_registration(connection.sock, Role.KVPROXY, self._instance, {"io": self._pidfd})
        except OSError as error:
            self._drop(connection, str(error))
            return
        for other in tuple(self._connections.values()):
            if other.registered == key:
                self._drop(other, "replaced by a newer connection")
        connection.registered = key

    def _take_up(
        self, key: tuple[Role, InstanceId], message: Registration, fds: Descriptors
    ) -> bool:
        """Watch a new instance and tell of it; False when it was refused. It hears from us only
        afterwards, so that it dials nobody who does not know it."""
        pool_fd = fds.take(POOL) if POOL in fds else -1
        pidfds = {name: fds.take(name) for name in tuple(fds)}
        self._watches[key] = DeathWatch(pidfds, partial(self._died, key))
        _log.info("lifeline up", peer=message.role, peer_instance=message.instance)
        if self._on_up(LifelinePeer(message.role, message.instance, message.pool, pool_fd)):
            return True
        self._watches.pop(key).close()
        return False

    def _died(self, key: tuple[Role, InstanceId]) -> None:
        del self._watches[key]
        role, instance = key
        _log.info("instance died", peer=role, peer_instance=instance)
        self._on_died(role, instance)

    def _drop(self, connection: _Connection, why: str = "") -> None:
        """Close one connection; its instance stays watched."""
        if why:
            _log.warning("lifeline connection closed", detail=why)
        connection.late.cancel()
        fd = connection.sock.fileno()
        self._loop.remove_reader(fd)
        del self._connections[fd]
        connection.sock.close()


class _Connection:
    """One client's socket, owned by the server's table."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.registered: tuple[Role, InstanceId] | None = None
        self.late: asyncio.TimerHandle


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listening = False
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(MAX_CONNECTIONS)
        listening = True
    finally:
        if not listening:
            listener.close()
    return listener


class LifelineClient:
    """The end of prefill or decode. Owns its connection and its watches of kvproxy.

    The caller keeps `pidfds` and `pool_fd` open for as long as `run` runs.
    """

    def __init__(
        self,
        path: Path,
        role: Role,
        instance: InstanceId,
        pidfds: Mapping[str, int],
        pool: str,
        pool_fd: int | None,
        on_up: Callable[[InstanceId], None],
        on_died: Callable[[InstanceId], None],
    ) -> None:
        self._path = path
        self._send = partial(
            send_registration,
            role=role,
            instance=instance,
            pidfds=dict(pidfds),
            pool=pool,
            pool_fd=pool_fd,
        )
        self._on_up = on_up
        self._on_died = on_died
        self._watches: dict[InstanceId, DeathWatch] = {}

    async def run(self) -> None:
        """Connect, and again whenever the connection ends; ends by being cancelled.

        Raises:
            Exception: whatever `on_up` raised.
        """
        backoff_s = BACKOFF_FIRST_S
        try:
            while True:
                answered = await self._one_connection()
                backoff_s = BACKOFF_FIRST_S if answered else min(2 * backoff_s, BACKOFF_MOST_S)
                await asyncio.sleep(backoff_s)
        finally:
            for watch in self._watches.values():
                watch.close()
            self._watches.clear()

    async def _one_connection(self) -> bool:
        """One connection from connect to end; whether kvproxy answered on it."""
        answered = False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        with sock:
            try:
                sock.connect(str(self._path))
                self._send(sock)
                while True:
                    await _readable(sock)
                    arrived = receive_registration(sock)
                    if arrived is None:
                        return answered
                    answered = True
                    self._take(*arrived)
            except (OSError, LifelineError) as error:
                _log.debug("lifeline connection ended", detail=str(error))
                return answered

    def _take(self, message: Registration, fds: Descriptors) -> None:
        instance = message.instance
        try:
            if message.role != Role.KVPROXY:
                raise LifelineError(f"{message.role} answered in kvproxy's place")
            if instance in self._watches:
                return
            if len(self._watches) >= MAX_INSTANCES:
                raise LifelineError("too many living instances of kvproxy")
            pidfds = {name: fds.take(name) for name in tuple(fds) if name != POOL}
        finally:
            fds.close()
        self._watches[instance] = DeathWatch(pidfds, partial(self._died, instance))
        _log.info("lifeline up", peer=Role.KVPROXY, peer_instance=instance)
        self._on_up(instance)

    def _died(self, instance: InstanceId) -> None:
        del self._watches[instance]
        _log.info("instance died", peer=Role.KVPROXY, peer_instance=instance)
        self._on_died(instance)


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock.fileno(), _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
