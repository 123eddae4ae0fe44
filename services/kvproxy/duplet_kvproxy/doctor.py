"""Finds out what works on this machine, by doing it: `python -m duplet_kvproxy.doctor`.

Prints one JSON object. Every handle kind is passed from another process and mapped here; every
transport moves bytes that are compared; the CPU path is always tried too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import Any

import numpy as np

from duplet_core.errors import DupletError
from duplet_kvproxy.choice import Choice
from duplet_kvproxy.transport import GPU_TRANSPORTS
from duplet_kvproxy.verdict import draw_verdict
from duplet_memory.cuda_driver import CudaError, Device, call, driver, open_devices
from duplet_memory.cuda_pool import map_cuda_pool
from duplet_memory.digest import page_digests
from duplet_memory.handles import GPU_HANDLES
from duplet_memory.layout import HandleKind, PoolDescription, describe_pool
from duplet_memory.plan import execute, plan_copy
from duplet_memory.pool import create_pool, map_pool
from duplet_runtime.engine_link import receive_fds

ANSWER_BYTES = 64 << 10
PROBE_LIMIT_S = 60.0


class ProbeFailed(Exception):
    """The owner's side of a trial failed; the text says how."""


@dataclass(frozen=True, slots=True)
class HandleTrial:
    """One handle kind from an owner on one GPU to this process."""

    kind: HandleKind
    device: str
    ok: bool
    detail: str = ""
    map_ms: float = 0.0


@contextmanager
def probe(kind: HandleKind, device_uuid: str) -> Iterator[tuple[PoolDescription, int, str]]:
    """An owner process with a pool: description, descriptor (-1: none), digests as hex.

    Raises:
        ProbeFailed: it could not make one, or did not answer.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "duplet_kvproxy.probe_owner", kind, str(theirs.fileno())]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device_uuid}
    owner = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    fd = -1
    try:
        ours.settimeout(PROBE_LIMIT_S)
        try:
            data, fds, _ = receive_fds(ours, ANSWER_BYTES, 1)
        except TimeoutError as error:
            raise ProbeFailed(f"no answer in {PROBE_LIMIT_S:g} s") from error
        fd = fds[0] if fds else -1
        answer = json.loads(data or '{"error": "the owner died"}')
        if "error" in answer:
            raise ProbeFailed(answer["error"])
        yield PoolDescription.from_json(answer["pool"]), fd, answer["digests"]
    finally:
        ours.close()
        if fd >= 0:
            os.close(fd)
        try:
            owner.wait(PROBE_LIMIT_S)
        except subprocess.TimeoutExpired:
            owner.kill()
            owner.wait()


def try_handle(kind: HandleKind, device: Device, reach: tuple[Device, ...]) -> HandleTrial:
    """Have another process make a pool on `device` and map it here for all of `reach`."""
    try:
        with probe(kind, device.uuid) as (description, fd, _):
            start_ns = time.monotonic_ns()
            mapped = map_cuda_pool(fd, description, reach)
            map_ms = (time.monotonic_ns() - start_ns) / 1e6
            mapped.close()
    except ProbeFailed as error:
        return HandleTrial(kind, device.uuid, False, f"making it: {error}")
    except DupletError as error:
        return HandleTrial(kind, device.uuid, False, f"mapping it: {error.detail}")
    return HandleTrial(kind, device.uuid, True, "", round(map_ms, 2))


def try_cpu() -> dict[str, Any]:
    """Map another process's CPU pool, copy all of it by plan, compare digests."""
    try:
        with probe("memfd", "") as (description, fd, digests):
            source = map_pool(fd, description, writable=False)
            dest = create_pool(
                describe_pool(
                    layers=description.layers,
                    page_rows=description.page_rows,
                    kv_heads=description.kv_heads,
                    head_dim=description.head_dim,
                    dtype=description.dtype,
                    pages=description.pages,
                    arrangement=description.arrangement,
                )
            )
            order = np.random.default_rng(1).permutation(description.pages).tolist()
            rows = description.pages * description.page_rows
            everything = range(description.pages)
            plan = plan_copy(description, everything, dest.description, order, 0, rows)
            start_ns = time.monotonic_ns()
            execute(plan, source.memory, dest.memory)
            gb_s = plan.copied_bytes / (time.monotonic_ns() - start_ns)
            same = b"".join(page_digests(dest, order, rows)).hex() == digests
            source.close()
            dest.close()
    except (ProbeFailed, DupletError, OSError) as error:
        return {"ok": False, "detail": str(error), "gb_s": 0.0}
    detail = "" if same else "the copy's digests differ from the owner's"
    return {"ok": same, "detail": detail, "gb_s": round(gb_s, 1)}


def describe_devices() -> tuple[tuple[Device, ...], str]:
    """The GPUs, or none and why."""
    try:
        return open_devices(), ""
    except CudaError as error:
        return (), error.detail


def describe_link(source: Device, dest: Device) -> dict[str, Any]:
    """What the driver says about a pair; the trials say what is true."""
    attribute = driver().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    atomics = call("cuDeviceGetP2PAttribute", attribute, source.handle, dest.handle)
    return {
        "source": source.uuid,
        "dest": dest.uuid,
        "peer_access": source.reaches(dest),
        "link": "NVLink" if int(atomics) else "PCIe",
    }


def examine() -> dict[str, Any]:
    """Everything there is to find out, as `duplet doctor --json` prints it."""
    devices, why_none = describe_devices()
    report: dict[str, Any] = {
        "gpus": [
            {
                "uuid": d.uuid,
                "name": d.name,
                "capability": d.capability,
                "free_gib": round(d.free_bytes() / 2**30, 1),
            }
            for d in devices
        ],
        "no_gpus_because": why_none,
        "links": [describe_link(a, b) for a, b in permutations(devices, 2)],
        "handles": [],
        "trials": [],
        "mps": False,
        "cpu": try_cpu(),
    }
    if devices:
        report["handles"] = [
            asdict(try_handle(kind, device, devices)) for kind in GPU_HANDLES for device in devices
        ]
        choice = Choice(("shm", *GPU_TRANSPORTS))
        report["trials"] = [trial.fields() for trial in choice.trials]
        report["mps"] = choice.mps
    return {**report, **draw_verdict(report)}


def main() -> int:
    report = examine()
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
