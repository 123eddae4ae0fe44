"""One peer of a real kvproxy: prefill's or decode's I/O process over an owner of a GPU pool.

`python -m bench.kv_move_peer ROLE JSON`: the JSON says run_dir, device, transfers, window, rows,
chunk_rows, chunk_s, load. Prefill moves each transfer in chunks, chunk_s apart as a prefill
computes them, `window` transfers at a time; decode grants as many. Prints one JSON object: this
side's time of each transfer (last Move sent, or Landed received), on the machine's monotonic
clock, in ns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench.kv_move_unit import OwnerProcess
from duplet.kvproxy.v1 import kvproxy_pb2_grpc
from duplet_core.effects import Received, StreamOpened
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role, TransferId
from duplet_core.messages import Grant, Handoff, Hello, Landed, Message, Move, SourceReleased
from duplet_runtime.lifeline import LifelineClient
from duplet_runtime.peers import Dialer
from duplet_runtime.service import new_instance
from duplet_wire.streams import CODECS

PAGE_ROWS = 16
PAGES = 1024
SLOTS = 8
LIMIT_S = 40.0


class Peer:
    """One side of every transfer. Owns its dialer; the owner process is the caller's."""

    def __init__(self, role: Role, plan: dict[str, Any]) -> None:
        self.role = role
        self.plan = plan
        self.instance = new_instance()
        self.times_ns: dict[int, int] = {}
        self.done = asyncio.Event()
        self._next = 0
        self._ended = 0
        self._stream = 0
        self._kvproxy: InstanceId | None = None
        codec = CODECS[role, Role.KVPROXY]
        address = f"unix:{plan['run_dir']}/kvproxy.sock"
        stub = kvproxy_pb2_grpc.KvProxyStub

        def method(channel: Any) -> Any:
            ends = stub(channel)
            return ends.ConnectPrefill if role is Role.PREFILL else ends.ConnectDecode

        self.dialer: Dialer[Any] = Dialer(
            Role.KVPROXY, address, method, codec.encode, codec.decode, self.take
        )
        order = list(range(PAGES))
        random.Random(role).shuffle(order)
        size = PAGES // SLOTS
        self._slots = [tuple(order[i * size : (i + 1) * size]) for i in range(SLOTS)]

    def meet(self, kvproxy: InstanceId) -> None:
        """The lifeline is up."""
        self._kvproxy = kvproxy

    def take(self, event: Any) -> None:
        """What the stream brings."""
        if isinstance(event, StreamOpened):
            self._stream = event.stream
            self._send(
                Hello(self.role, self.instance, PROTOCOL_VERSION, event.stream, self._kvproxy)
            )
            return
        message = event.message if isinstance(event, Received) else None
        if isinstance(message, Hello):
            for _ in range(self.plan["window"]):
                self._begin()
        elif isinstance(message, Landed | SourceReleased):
            if isinstance(message, Landed):
                self.times_ns[int(message.transfer, 16)] = time.monotonic_ns()
            self._ended += 1
            self._begin()
            if self._ended == self.plan["transfers"]:
                self.done.set()
        elif message is not None and type(message).__name__ != "Started":
            raise SystemExit(f"{self.role}: {message}")

    def _send(self, message: Message) -> None:
        self.dialer.send(self._stream, message)

    def _begin(self) -> None:
        """Grant or move one more transfer, if there is one."""
        if self._next == self.plan["transfers"]:
            return
        number, self._next = self._next, self._next + 1
        transfer = TransferId(f"{number:032x}")
        rows = self.plan["rows"]
        pages = self._slots[number % SLOTS][: -(-rows // PAGE_ROWS)]
        if self.role is Role.DECODE:
            self._send(Grant(transfer, pages, rows))
            return
        self._move(number, transfer, pages, 0)

    def _move(self, number: int, transfer: TransferId, pages: tuple[int, ...], start: int) -> None:
        """Send the Move that begins at row `start`, and later, or at once, the next."""
        rows, pause_s = self.plan["rows"], self.plan["chunk_s"]
        while start < rows:
            count = min(self.plan["chunk_rows"], rows - start)
            part = pages[start // PAGE_ROWS : -(-(start + count) // PAGE_ROWS)]
            handoff = None
            if start + count == rows:
                handoff = Handoff(bytes(44), tuple(bytes(16) for _ in pages), (0,) * 6)
                self.times_ns[number] = time.monotonic_ns()
            self._send(Move(transfer, start, count, part, handoff))
            start += count
            if pause_s and start < rows:
                loop = asyncio.get_running_loop()
                loop.call_later(pause_s, self._move, number, transfer, pages, start)
                return


async def run(role: Role, plan: dict[str, Any]) -> dict[int, int]:
    """All transfers, over an owner with its load on."""
    layout = {"arrangement": "page-major", "page_rows": PAGE_ROWS, "pages": PAGES}
    owner = OwnerProcess(plan["device"], "cumem-fd", **layout)
    owner.wait_ready()
    owner.ask(do="load", kind=plan["load"])
    peer = Peer(role, plan)
    up = asyncio.Event()
    own_pidfd = os.pidfd_open(os.getpid())

    def meet(kvproxy: InstanceId) -> None:
        peer.meet(kvproxy)
        up.set()

    lifeline = LifelineClient(
        Path(plan["run_dir"]) / "lifeline.sock",
        role,
        peer.instance,
        {"io": own_pidfd, "engine": owner.pidfd},
        owner.description.to_json(),
        owner.pool_fd,
        meet,
        lambda instance: sys.exit(f"{role}: kvproxy {instance} died"),
    )
    tasks = [asyncio.create_task(lifeline.run())]
    async with asyncio.timeout(LIMIT_S):
        await up.wait()
        tasks.append(asyncio.create_task(peer.dialer.run()))
        await peer.done.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    os.close(own_pidfd)
    owner.close()
    return peer.times_ns


def main() -> int:
    times = asyncio.run(run(Role(sys.argv[1]), json.loads(sys.argv[2])))
    print(json.dumps({str(number): ns for number, ns in times.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
