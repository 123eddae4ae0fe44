"""Starts owners of GPU pools as processes that see one GPU each, and maps what they own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from duplet_memory.cuda_driver import open_devices
from duplet_memory.cuda_pool import MappedPool, map_cuda_pool
from duplet_memory.layout import PoolDescription, describe_pool
from duplet_memory.pool import Pool, create_pool
from duplet_runtime.engine_link import receive_fds

MESSAGE_BYTES = 1 << 20
OWNER = Path(__file__).with_name("kv_move_owner.py")

SHAPE: dict[str, Any] = {"layers": 36, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
"""The article's model: 144 KiB of KV a row."""
SMALL_SHAPE: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 8, "dtype": "bfloat16"}


class OwnerProcess:
    """One owner. Owns the process, its socket, the received descriptors and our mapping."""

    def __init__(self, device_uuid: str, handle: str, **layout: Any) -> None:
        """Start it; `wait_ready` waits until its pool is there."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device_uuid}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(OWNER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self._sock = ours
        self._sock.settimeout(120)
        self._sock.send(json.dumps({"handle": handle, **SHAPE, **layout}).encode())
        self.pidfd = -1
        self.pool_fd = -1
        self.pool: MappedPool | None = None
        self.description: PoolDescription

    def wait_ready(self) -> None:
        """Receive the pool's description and descriptors."""
        text, fds, _ = receive_fds(self._sock, MESSAGE_BYTES, 2)
        if not fds:
            raise RuntimeError(f"owner ended with {self.process.wait()}")
        self.pidfd, self.pool_fd = (*fds, -1)[:2]
        self.description = PoolDescription.from_json(text.decode())

    def map(self) -> MappedPool:
        """Map the pool for all GPUs that we see."""
        self.pool = map_cuda_pool(self.pool_fd, self.description, open_devices())
        return self.pool

    def ask(self, **command: Any) -> Any:
        """Send one command and wait for its answer."""
        self._sock.send(json.dumps(command).encode())
        return json.loads(self._sock.recv(MESSAGE_BYTES))

    def close(self) -> None:
        """Unmap, end the process, close everything."""
        if self.pool is not None:
            self.pool.close()
        self._sock.close()
        self.process.wait(60)
        for fd in (self.pidfd, self.pool_fd):
            if fd >= 0:
                os.close(fd)


class CpuOwner:
    """A pool of this process with rows so small that copies cost next to nothing. Owns it and the
    pidfd."""

    def __init__(self, **layout: Any) -> None:
        self._pool: Pool = create_pool(describe_pool(**SMALL_SHAPE, **layout))
        self.description = self._pool.description
        self.pool_fd = self._pool.fd
        self.pidfd = os.pidfd_open(os.getpid())

    def close(self) -> None:
        self._pool.close()
        os.close(self.pidfd)


def start_pair(
    handle: str, arrangement: str, page_rows: int, pages: int, **layout: Any
) -> tuple[OwnerProcess, OwnerProcess]:
    """Two ready owners, source first, on the first and the last GPU; pools mapped and filled."""
    devices = open_devices()
    layout |= {"arrangement": arrangement, "page_rows": page_rows, "pages": pages}
    owners = tuple(OwnerProcess(d.uuid, handle, **layout) for d in (devices[0], devices[-1]))
    source, dest = owners
    for owner in owners:
        owner.wait_ready()
        owner.map()
    source.ask(do="fill")
    dest.ask(do="fill", poison=True)
    return source, dest
