"""Checkers of what services must tell each other, so that nobody fails or waits for want of a
word. Like `checks`, they look at true state and raise a Violation that names the invariant:

    untold    prefill does not tell lb that it refuses or takes prompts again; a kvproxy that was
              told to leave keeps it from decode; kvproxy denies a landing that prefill asks for
    leaving   a service says that it can leave while another still needs it
    bound     work is given to a peer that has said that it takes none; kvproxy remembers more
              landings than its prefill has pages
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from duplet_core.ids import Role
from duplet_core.messages import Hello, Leaving, Refusing
from duplet_sim.parts import DIALER, Process
from duplet_sim.violation import Violation

if TYPE_CHECKING:
    from duplet_sim.world import World


def note_told(process: Process, stream: int, message: Any) -> None:
    """When prefill speaks to lb, or kvproxy to decode: what the peer will know by it."""
    if isinstance(message, Hello | Refusing):
        process.told = (stream, message.refusing if isinstance(message, Hello) else message.reason)
    elif isinstance(message, Leaving):
        process.told = (stream, message)


def check_told(process: Process) -> None:
    """After each event of prefill, and of a kvproxy that was told to leave."""
    links = process.node.machine.links
    peer = links[Role.LB if process.role is Role.PREFILL else Role.DECODE].current
    if peer is None:
        return
    wanted: Any = Leaving()
    if process.role is Role.PREFILL:
        writer = links[Role.KVPROXY].current
        wanted = "DRAINING" if process.asked else "WRITER_LOST" if writer is None else None
    if process.told != (peer.stream, wanted):
        raise Violation("untold", f"{process.instance} told {process.told}, it is {wanted}")


def check_landed(world: World, writer: Process, source: Any, message: Any) -> None:
    """When kvproxy says SourceReleased to the prefill `source`."""
    if message.landed:
        writer.landed |= {message.transfer}
    elif message.transfer in writer.landed and source in world.processes:
        prefill = world.processes[source]
        job = (
            None if prefill.exited else prefill.node.machine.jobs.by_transfer.get(message.transfer)
        )
        if job is not None and job.owed:
            raise Violation("untold", f"{message.transfer} landed, and prefill is told otherwise")


def check_memory(writer: Process) -> None:
    """After each event of kvproxy."""
    machine = writer.node.machine
    for source, landed in machine.transfers._landed.items():
        pages = machine.pools[source].pages
        if len(landed) > pages:
            raise Violation("bound", f"{len(landed)} landings remembered of {pages} pages")


def check_welcome(process: Process) -> None:
    """When lb gives a request to its peers."""
    machine = process.node.machine
    refusing = (machine.credit.refusing, machine._prefill_refusing)
    if refusing != (None, None):
        raise Violation("bound", f"lb admits, decode and prefill refuse for {refusing}")


def check_stays(world: World, decode: Process) -> None:
    """When decode grants: whether the writer has told it that it leaves."""
    key = decode.dialing[Role.KVPROXY]
    stream = world.streams[key]
    writer = world.processes[stream.acceptor]
    if stream.broken or not isinstance(writer.told[1], Leaving):
        return
    numbers = {number for (_, number), known in writer.streams.items() if known == key}
    on_its_way = any(isinstance(message, Leaving) for message in stream.queues[DIALER])
    if writer.told[0] in numbers and not on_its_way:
        raise Violation("bound", f"decode grants to {writer.instance}, which leaves")


def check_left(world: World, process: Process) -> None:
    """When a service says that it has drained."""
    machine = process.node.machine
    needed: list[Any] = []
    if process.role is Role.LB:
        needed = [t for t, client in world.clients.items() if client.lb == process.instance]
    elif process.role is Role.KVPROXY:
        needed = [c.transfer for c in world.copies.values() if c.writer == process.instance]
    elif process.role is Role.PREFILL:
        needed = [*machine.jobs.pages._held, *_waiting_for_word(world, process)]
    elif world.config.host is None:
        holdings = machine.transfers.ledger._holdings.items()
        needed = [t for t, holding in holdings if holding.state.value != "quarantined"]
    if needed:
        raise Violation("leaving", f"{process.instance} is needed for {needed}")


def _waiting_for_word(world: World, prefill: Process) -> list[Any]:
    """Requests whose KV has landed, of which lb believes that prefill has still to hand it over."""
    waiting: list[Any] = []
    lb = world.primary(Role.LB)
    key = None if lb is None else lb.dialing.get(Role.PREFILL)
    if lb is None or key is None or world.streams[key].acceptor != prefill.instance:
        return waiting
    stream = world.streams[key]
    told = {getattr(message, "transfer", None) for message in stream.queues[DIALER]}
    for transfer, request in lb.node.machine.requests.items():
        landed = any(transfer in process.landed for process in world.processes.values())
        if landed and request.state.value == "pending" and transfer not in told:
            waiting.append(transfer)
    return [] if stream.broken else waiting
