"""What a unit at rest looks like: all is free, connected and idle."""

from __future__ import annotations

from duplet_core.host import HostMachine
from duplet_core.ids import Role
from duplet_sim.world import World


def complaints(world: World) -> list[str]:
    """What is not as it should be when nothing is left to do."""
    wrong = []
    if world.clients:
        wrong.append(f"requests that have not ended: {list(world.clients)}")
    for role in world.config.roles:
        process = world.primary(role)
        if process is None or process.stopped:
            wrong.append(f"{role} does not run")
            continue
        machine = process.node.machine
        if process.red:
            wrong.append(f"{process.instance} is red: {sorted(process.red)}")
        wrong += [
            f"{process.instance} has no stream to {peer}"
            for peer, link in machine.links.items()
            if link.current is None
        ]
        if process.engine is not None and not process.engine.idle:
            wrong.append(f"the engine of {process.instance} is not idle")
        if isinstance(machine, HostMachine):
            if machine.stays.by_transfer:
                wrong.append(f"the host holds pages of {list(machine.stays.by_transfer)}")
        elif role is Role.DECODE and machine.transfers.by_transfer:
            wrong.append(f"decode holds pages of {list(machine.transfers.by_transfer)}")
        elif role is Role.PREFILL and machine.jobs.by_transfer:
            wrong.append(f"prefill holds pages of {list(machine.jobs.by_transfer)}")
        elif role is Role.KVPROXY and machine.transfers.by_id:
            wrong.append(f"kvproxy keeps {list(machine.transfers.by_id)}")
        elif role is Role.LB and not machine.ready:
            wrong.append("lb is not ready")
    return wrong
