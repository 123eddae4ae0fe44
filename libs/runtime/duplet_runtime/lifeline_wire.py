"""What travels over a lifeline socket: one message each way, with descriptors beside it.

The socket is a Unix SEQPACKET socket: the kernel keeps a message and its descriptors together
and tells when it was too long. The message is JSON.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_core.link import versions_differ
from duplet_runtime.engine_link import receive_fds

MESSAGE_BYTES = 16 << 10
"""Longest message; a pool's description is some hundred bytes."""

MAX_PROCESSES = 4
"""Most processes of one instance."""

POOL = "pool"
"""The name of the pool's descriptor; every other name is a process."""


class LifelineError(Exception):
    """The other end sent what a lifeline does not carry, or speaks another version."""


class VersionError(LifelineError):
    """The other end speaks another transfer protocol."""

    def __init__(self, role: Role, version: int) -> None:
        super().__init__(versions_differ(role, version))
        self.role = role
        self.version = version


@dataclass(frozen=True, slots=True)
class _Introduction:
    """What every version's Registration has."""

    role: Role
    version: int


@dataclass(frozen=True, slots=True)
class Registration:
    """One instance introduces itself. `fds` names the descriptors beside it, in order."""

    role: Role
    instance: InstanceId
    version: int
    fds: tuple[str, ...]
    pool: str
    """Text that says how to use the pool; empty where there is none."""


class Descriptors(dict[str, int]):
    """Received descriptors by name. Owned by whoever holds this object, until taken."""

    def take(self, name: str) -> int:
        """Hand one over to the caller."""
        return self.pop(name)

    def close(self) -> None:
        """Close those that nobody took."""
        for fd in self.values():
            os.close(fd)
        self.clear()


def send_registration(
    sock: socket.socket,
    role: Role,
    instance: InstanceId,
    pidfds: Mapping[str, int],
    pool: str = "",
    pool_fd: int | None = None,
) -> None:
    """Introduce an instance; the caller keeps its descriptors.

    Raises:
        OSError: the socket is broken, or its other end does not read.
    """
    fds = dict(pidfds)
    if pool_fd is not None:
        fds[POOL] = pool_fd
    message = Registration(role, instance, PROTOCOL_VERSION, tuple(fds), pool)
    socket.send_fds(sock, [msgspec.json.encode(message)], list(fds.values()))


def receive_registration(sock: socket.socket) -> tuple[Registration, Descriptors] | None:
    """The other end's introduction and its checked descriptors, owned by the caller; None at
    the end of the connection.

    Raises:
        BlockingIOError: nothing waits.
        OSError: the socket is broken.
        VersionError: of another version, whatever else is in it; every received descriptor has
            been closed.
        LifelineError: malformed; every received descriptor has been closed.
    """
    data, received, flags = receive_fds(sock, MESSAGE_BYTES, MAX_PROCESSES + 1)
    if not data and not received:
        return None
    accepted = False
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise LifelineError("message or descriptors beyond the limit")
        result = _check(data, received)
        accepted = True
        return result
    finally:
        if not accepted:
            for fd in received:
                os.close(fd)


def _check(data: bytes, fds: list[int]) -> tuple[Registration, Descriptors]:
    try:
        one = msgspec.json.decode(data, type=_Introduction)
        if one.version != PROTOCOL_VERSION:
            raise VersionError(one.role, one.version)
        message = msgspec.json.decode(data, type=Registration)
    except msgspec.MsgspecError as error:
        raise LifelineError(str(error)) from error
    if len(set(message.fds)) != len(message.fds) or len(message.fds) != len(fds):
        raise LifelineError(f"names {message.fds} for {len(fds)} descriptors")
    named = Descriptors(zip(message.fds, fds, strict=True))
    processes = [name for name in named if name != POOL]
    if not processes:
        raise LifelineError("no process")
    for name in processes:
        if not is_pidfd(named[name]):
            raise LifelineError(f"{name} is no pidfd")
    if bool(message.pool) != (POOL in named):
        raise LifelineError("a pool needs its description and its descriptor")
    return message, named


def is_pidfd(fd: int) -> bool:
    """Whether the kernel knows this descriptor of ours as a process."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as info:
        return any(line.startswith("Pid:") for line in info)
