"""The faults that happen to a simulated unit at moments; `swarm.TIMED` names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from duplet_core.host import HostMachine
from duplet_core.ids import Role, TransferId
from duplet_core.messages import AbortAck, Drop, Move, SourceReleased
from duplet_sim import content
from duplet_sim.parts import Process

if TYPE_CHECKING:
    from duplet_sim.simulator import Simulator


def _somebody(sim: Simulator) -> Process | None:
    running = [p for p in sim.processes.values() if p.runs]
    return sim.plan.choice(running) if running else None


def sever(sim: Simulator) -> None:
    whole = [key for key, stream in sim.streams.items() if not stream.broken]
    if whole:
        sim.sever(sim.plan.choice(whole))


def partition(sim: Simulator) -> None:
    process = _somebody(sim)
    if process is not None:
        sim.blocked_until[process.instance] = sim.now + sim.plan.randrange(20, 400)
        for key in list(process.streams.values()):
            if not sim.streams[key].broken:
                sim.sever(key)


def stop(sim: Simulator) -> None:
    process = _somebody(sim)
    if process is not None:
        sim.stop(process.instance)
        sim.at(sim.plan.choice((10, 100, 1000)), sim._do_resume, process.instance)


def kill(sim: Simulator) -> None:
    alive = [p for p in sim.processes.values() if not p.exited]
    if alive:
        sim.kill(sim.plan.choice(alive).instance)


def zombie(sim: Simulator) -> None:
    """A new instance comes up while the old one is stopped, not dead."""
    process = _somebody(sim)
    if process is not None:
        if sim.current[process.role] != process.instance:
            return
        sim.marks.add("two instances at a time")
        sim.stop(process.instance)
        sim.begin(process.role)
        sim.at(sim.plan.randrange(20, 600), sim._do_resume, process.instance)


def jump(sim: Simulator) -> None:
    process = _somebody(sim)
    if process is not None:
        process.skew += sim.plan.choice((10, 1000))


def storm(sim: Simulator) -> None:
    """All clients give up, and some come again at once, under the id that they had."""
    for transfer, client in list(sim.clients.items()):
        sim._do_cancel(transfer)
        again = transfer not in sim.clients and sim.plan.random() < 0.3
        if again and sim.primary(Role.LB) is not None:
            order = sim.workload.draw(sim.submitted + 1)
            sim.request(order, sim.swarm.deadline, client.submit.request_id)


def drain(sim: Simulator) -> None:
    process = _somebody(sim)
    if process is not None and not process.asked:
        sim.drain(process.instance)


def damage(sim: Simulator) -> None:
    """A cached page of prefill that nobody uses goes bad, in memory: with the next prompt that
    has it, its digest will not match."""
    prefill = sim.primary(Role.PREFILL)
    if prefill is None or sim.config.host is not None or not sim.config.prefix:
        return
    jobs = prefill.node.machine.jobs
    unused = [page for page in jobs.index._known if jobs.pages.holds(page) == 1]
    if unused:
        page = sim.plan.choice(unused)
        first, *others = prefill.rows[page]
        if first < content.DAMAGED:
            prefill.rows[page] = (first + content.DAMAGED, *others)
            sim.damaged = True


def twice(sim: Simulator) -> None:
    """A client uses a request id that is live, or lb hears of a transfer id that is."""
    lb = sim.primary(Role.LB)
    if lb is None or not lb.runs or not sim.clients:
        return
    live = sim.plan.choice(list(sim.clients.values()))
    if live.lb == lb.instance and sim.plan.random() < 0.5:
        sim.marks.add("transfer id submitted twice")
        sim.submit(replace(live.submit, request_id="another"), live.content)
    else:
        sim.request(sim.workload.draw(sim.submitted + 1), 100, live.submit.request_id)


def orphan(sim: Simulator) -> None:
    """Messages about a transfer that nobody knows, or that ended long ago."""
    number = sim.plan.randrange(sim.submitted + 1)
    transfer = TransferId(f"t{number}")  # t0 was never minted
    if transfer in sim.clients or transfer in _known(sim) or _is_queued(sim, transfer):
        transfer = TransferId("t0")
    for process in sim.processes.values():
        if not process.runs:
            continue
        for (peer, local), key in list(process.streams.items()):
            if sim.streams[key].broken:
                continue
            for message in _orphans(process.role, peer, transfer):
                sim.put(process, peer, local, message)


def _is_queued(sim: Simulator, transfer: TransferId) -> bool:
    return any(
        getattr(message, "transfer", None) == transfer
        for stream in sim.streams.values()
        for queue in stream.queues
        for message in queue
    )


def _known(sim: Simulator) -> list[TransferId]:
    known: list[TransferId] = []
    for process in sim.processes.values():
        machine = process.node.machine
        if process.exited:
            continue
        if isinstance(machine, HostMachine):
            known += machine.stays.by_transfer
        elif process.role is Role.DECODE:
            known += machine.transfers.by_transfer
        elif process.role is Role.PREFILL:
            known += machine.jobs.by_transfer
        elif process.role is Role.KVPROXY:
            known += machine.transfers.by_id
    return known


def _orphans(sender: Role, receiver: Role, transfer: TransferId) -> list[Any]:
    if (sender, receiver) == (Role.KVPROXY, Role.DECODE):
        return [AbortAck(transfer)]
    if (sender, receiver) == (Role.KVPROXY, Role.PREFILL):
        return [SourceReleased(transfer, landed=False)]
    if (sender, receiver) == (Role.PREFILL, Role.KVPROXY):
        late = Move(transfer, 1, 1, (0,))
        again = Move(transfer, 0, 1, (0,))
        return [late, again, Drop(transfer)]
    return []


FAULTS: dict[str, Callable[[Simulator], None]] = {
    "sever": sever,
    "partition": partition,
    "stop": stop,
    "kill": kill,
    "zombie": zombie,
    "jump": jump,
    "storm": storm,
    "drain": drain,
    "orphan": orphan,
    "twice": twice,
    "damage": damage,
}
