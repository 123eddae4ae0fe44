"""One peer of a real kvproxy: prefill's or decode's I/O process over an owner of a GPU pool.

`python -m bench.kv_move_peer ROLE JSON`: the JSON says run_dir, device (a GPU's UUID; empty: a
pool of its own on the CPU), load, arrangement and phases, each a `Phase`. Both sides run the
phases one after the other, and print a JSON object at the end of each: `times`, this side's time
of each of its transfers (last Move sent, or Landed received), and prefill's `moves`, time and
rows of every Move, all on the machine's monotonic clock, in ns.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kv_move_unit import CpuOwner, OwnerProcess
from duplet.kvproxy.v1 import kvproxy_pb2_grpc
from duplet_core.effects import Received, StreamOpened
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role, TransferId
from duplet_core.messages import (
    Grant,
    Handoff,
    Hello,
    Landed,
    Message,
    Move,
    Route,
    SourceReleased,
    Started,
)
from duplet_runtime.lifeline import LifelineClient
from duplet_runtime.peers import Dialer
from duplet_runtime.service import new_instance
from duplet_wire.streams import CODECS

PAGE_ROWS = 16
SLOT_PAGES = 128
SLOTS = 16
ROWS = 1500
CHUNK_ROWS = 256
LIMIT_S = 60.0


@dataclass(frozen=True)
class Phase:
    """How transfers arrive: an engine's steps, each a chunk of some of the prompts that are open,
    in turns."""

    name: str
    transfers: int
    window: int
    """Prompts that are open at once."""
    step_s: float
    """0: all chunks of a transfer leave at once."""
    step_prompts: int = 1


@dataclass
class _Open:
    """A transfer on its way at prefill."""

    number: int
    pages: tuple[int, ...]
    start: int = 0


class Peer:
    """One side of every transfer. Owns its dialer; the owner process is the caller's."""

    def __init__(self, role: Role, run_dir: str, phases: list[Phase]) -> None:
        self.role = role
        self.instance = new_instance()
        self.times_ns: dict[int, int] = {}
        self.moves: list[tuple[int, int]] = []
        self.done = asyncio.Event()
        self._phases = deque(phases)
        self._phase = phases[0]
        self._to_begin = 0
        self._to_end = 0
        self._number = 0
        self._stream = 0
        self._kvproxy: InstanceId | None = None
        self._turns: deque[_Open] = deque()
        codec = CODECS[role, Role.KVPROXY]
        stub = kvproxy_pb2_grpc.KvProxyStub

        def method(channel: Any) -> Any:
            ends = stub(channel)
            return ends.ConnectPrefill if role is Role.PREFILL else ends.ConnectDecode

        address = f"unix:{run_dir}/kvproxy.sock"
        self.dialer: Dialer[Any] = Dialer(
            Role.KVPROXY,
            address,
            method,
            codec.encode,
            codec.decode,
            self.take,
            together=codec.together,
        )
        order = list(range(SLOTS * SLOT_PAGES))
        random.Random(role).shuffle(order)
        self._slots = [tuple(order[i * SLOT_PAGES : (i + 1) * SLOT_PAGES]) for i in range(SLOTS)]

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
            self._next_phase()
        elif isinstance(message, Landed | SourceReleased):
            if isinstance(message, Landed):
                self.times_ns[int(message.transfer, 16)] = time.monotonic_ns()
            self._to_end -= 1
            self._begin()
            if not self._to_end:
                self._next_phase()
        elif message is not None and not isinstance(message, Started | Route):
            raise SystemExit(f"{self.role}: {message}")

    async def run_engine(self) -> None:
        """Prefill's steps, at even times."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            step_s = self._phase.step_s or 0.001
            due_s = max(due_s + step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            for _ in range(min(self._phase.step_prompts, len(self._turns))):
                transfer = self._turns.popleft()
                self._move(transfer)
                if transfer.start < ROWS:
                    self._turns.append(transfer)

    def _send(self, message: Message) -> None:
        self.dialer.send(self._stream, message)

    def _next_phase(self) -> None:
        if self._number:
            told = {"times": self.times_ns, "moves": self.moves}
            print(json.dumps(told), flush=True)
            self.times_ns, self.moves = {}, []
        if not self._phases:
            self.done.set()
            return
        self._phase = self._phases.popleft()
        self._to_begin = self._to_end = self._phase.transfers
        for _ in range(self._phase.window):
            self._begin()

    def _begin(self) -> None:
        """Grant or open one more transfer of the phase, if there is one."""
        if not self._to_begin:
            return
        self._to_begin -= 1
        number, self._number = self._number, self._number + 1
        pages = self._slots[number % SLOTS][: -(-ROWS // PAGE_ROWS)]
        if self.role is Role.DECODE:
            self._send(Grant(TransferId(f"{number:032x}"), pages, ROWS))
            return
        transfer = _Open(number, pages)
        if self._phase.step_s:
            self._turns.append(transfer)
            return
        while transfer.start < ROWS:
            self._move(transfer)

    def _move(self, transfer: _Open) -> None:
        """Send the next chunk."""
        count = min(CHUNK_ROWS, ROWS - transfer.start)
        first, transfer.start = transfer.start, transfer.start + count
        part = transfer.pages[first // PAGE_ROWS : -(-transfer.start // PAGE_ROWS)]
        now_ns = time.monotonic_ns()
        handoff = None
        if transfer.start == ROWS:
            digests = tuple(bytes(16) for _ in transfer.pages)
            handoff = Handoff(bytes(44), digests, (0, 0, 0))
            self.times_ns[transfer.number] = now_ns
        self.moves.append((now_ns, count))
        self._send(Move(TransferId(f"{transfer.number:032x}"), first, count, part, handoff))


def open_owner(plan: dict[str, Any]) -> OwnerProcess | CpuOwner:
    """The pool's owner, with its load on."""
    layout = {"page_rows": PAGE_ROWS, "pages": SLOTS * SLOT_PAGES}
    layout["arrangement"] = plan["arrangement"]
    if not plan["device"]:
        return CpuOwner(**layout)
    owner = OwnerProcess(plan["device"], "cumem-fd", **layout)
    owner.wait_ready()
    owner.ask(do="load", kind=plan["load"])
    return owner


async def run(role: Role, plan: dict[str, Any]) -> None:
    """All phases."""
    owner = open_owner(plan)
    peer = Peer(role, plan["run_dir"], [Phase(**phase) for phase in plan["phases"]])
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
        if role is Role.PREFILL:
            tasks.append(asyncio.create_task(peer.run_engine()))
        done = asyncio.create_task(peer.done.wait())
        ended, _ = await asyncio.wait([*tasks, done], return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            # What runs for ever has failed where it is here.
            task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    os.close(own_pidfd)
    owner.close()


def main() -> int:
    asyncio.run(run(Role(sys.argv[1]), json.loads(sys.argv[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
