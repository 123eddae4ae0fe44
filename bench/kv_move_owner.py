"""One owner of a GPU pool, as an engine process is: sees one GPU, obeys one command at a time.

`python bench/kv_move_owner.py FD`: FD is one end of a Unix SEQPACKET socket pair. Commands and
answers are JSON; the first answer carries the pool's description, its descriptor and a pidfd.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from collections import deque
from typing import Any

import torch

from duplet_engine.kv_hash import finish_digests, launch_page_sums
from duplet_memory.cuda_driver import open_devices
from duplet_memory.cuda_pool import CudaPool, create_cuda_pool
from duplet_memory.layout import describe_pool

MESSAGE_BYTES = 1 << 20
POISON = -1
MATMUL_SIZE = 8192
SUM_ITEMS = 4 << 30
IN_FLIGHT = 2
WARM_STEPS = 20


def timed_event() -> Any:
    """An event that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Load:
    """The engine's own work: one kind of step, again and again, two steps ahead."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.times_ms: list[float] = []
        self._launched: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        if kind == "matmul":
            shape = (MATMUL_SIZE, MATMUL_SIZE)
            self._a = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            self._b = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        else:
            self._a = torch.ones(SUM_ITEMS, device="cuda", dtype=torch.bfloat16)

    def warm(self) -> None:
        """Run some steps: the first of a process takes far longer than a whole case does, for it
        loads its kernels, and the GPU is idle meanwhile."""
        for _ in range(WARM_STEPS):
            self.step()
        self.times_ms = []

    def step(self) -> None:
        """Launch one step; wait for the one before the last."""
        start, end = timed_event(), timed_event()
        start.record()
        if self.kind == "matmul":
            for _ in range(3):
                torch.mm(self._a, self._b)
        else:
            # Twice 8 GiB, read once each: about 4 ms of memory traffic.
            self._a.view(torch.int32).sum(dtype=torch.int32)
            self._a.view(torch.int32).sum(dtype=torch.int32)
        end.record()
        self._launched.append((start, end))
        if len(self._launched) > IN_FLIGHT:
            start, end = self._launched.popleft()
            end.synchronize()
            self.times_ms.append(start.elapsed_time(end))


class Owner:
    """The pool and what is done to it. Owns the pool until `close`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        kind = arguments.pop("handle")
        self.pool: CudaPool = create_cuda_pool(describe_pool(**arguments), kind, open_devices()[0])
        self.memory: torch.Tensor | None = torch.as_tensor(self.pool, device="cuda")
        self.load: Load | None = None

    @property
    def units(self) -> torch.Tensor:
        """int64 [pages, slabs, page_rows, row_units], whatever the arrangement."""
        d = self.pool.description
        assert self.memory is not None
        flat = self.memory[d.offset :].view(torch.int64)
        inner = (d.page_rows, d.row_bytes // 8)
        if d.arrangement == "page-major":
            return flat.view(d.pages, d.slabs, *inner)
        return flat.view(d.slabs, d.pages, *inner).transpose(0, 1)

    def fill(self, poison: bool = False) -> None:
        """Every unit says its page and its place in it; or all are poison."""
        units = self.units
        if poison:
            units.fill_(POISON)
            return
        for page in range(0, len(units), 256):
            part = units[page : page + 256]
            part.copy_(_pattern(torch.arange(page, page + len(part)), part.shape))

    def check(self, pages: list[int], source_pages: list[int], first: int, count: int) -> int:
        """Rows in `pages` that are not the source's, plus rows elsewhere that are not poison."""
        units = self.units
        here, there = torch.tensor(pages), torch.tensor(source_pages)
        rows = torch.arange(units.shape[2] * len(pages), device="cuda")
        wanted_row = ((rows >= first) & (rows < first + count)).view(len(pages), -1)
        wrong = 0
        for start in range(0, len(pages), 256):
            part = units[here[start : start + 256].cuda()]
            right = _pattern(there[start : start + 256], part.shape)
            copied = wanted_row[start : start + 256][:, None, :, None]
            same = torch.where(copied, part == right, (part == right) | (part == POISON))
            wrong += int((~same).any(dim=(1, 3)).sum())
        untouched = torch.ones(len(units), dtype=torch.bool, device="cuda")
        untouched[here.cuda()] = False
        for start in range(0, len(units), 256):
            dirty = (units[start : start + 256] != POISON).any(-1).any(-1).any(-1)
            wrong += int((dirty & untouched[start : start + 256]).sum())
        return wrong

    def digest(self, pages: list[int], rows: int, repeats: int) -> dict[str, Any]:
        """Digests of `pages`, and the kernel's time on this GPU, behind the load's steps."""
        d = self.pool.description
        assert self.memory is not None
        valid = [min(d.page_rows, rows - i * d.page_rows) for i in range(len(pages))]
        numbers = torch.tensor(pages, device="cuda")
        counts = torch.tensor(valid, dtype=torch.int32, device="cuda")
        times_ms = []
        for _ in range(repeats):
            if self.load is not None:
                self.load.step()
            start, end = timed_event(), timed_event()
            start.record()
            sums = launch_page_sums(self.memory, d, numbers, counts)
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        digests = [digest.hex() for digest in finish_digests(sums.cpu(), valid)]
        return {"digests": digests, "time_ms": statistics.median(times_ms[repeats // 5 :])}

    def obey(self, command: dict[str, Any]) -> Any:
        """Carry out one command; what it answers."""
        name = command.pop("do")
        if name == "load":
            self.load = Load(command["kind"]) if command["kind"] else None
            if self.load is not None:
                self.load.warm()
            return None
        if name == "steps":
            times = self.load.times_ms if self.load is not None else []
            if self.load is not None:
                self.load.times_ms = []
            return times
        if name == "free":
            self.memory = None
            self.pool.close()
            return None
        result = getattr(self, name)(**command)
        torch.cuda.synchronize()
        return result


def _pattern(pages: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    in_page = torch.arange(shape[1:].numel(), device="cuda").view(shape[1:])
    # Spread over all bits, so that no two units have long runs of equal bytes.
    return (pages.cuda().view(-1, 1, 1, 1) * in_page.numel() + in_page) * 0x9E3779B97F4A7C1


def main() -> int:
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setblocking(True)
    owner = Owner(json.loads(sock.recv(MESSAGE_BYTES)))
    fds = [os.pidfd_open(os.getpid())]
    if owner.pool.fd >= 0:
        fds.append(owner.pool.fd)
    socket.send_fds(sock, [owner.pool.description.to_json().encode()], fds)
    while True:
        if owner.load is not None:
            owner.load.step()
        try:
            message = sock.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT if owner.load else 0)
        except BlockingIOError:
            continue
        if not message:
            return 0
        sock.send(json.dumps(owner.obey(json.loads(message))).encode())


if __name__ == "__main__":
    sys.exit(main())
