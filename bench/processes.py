"""Child processes that benchmarks talk to by lines, and what the kernel says about a process."""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from bench.results import ROOT
from duplet_runtime.fate import die_with_parent

LINE_BYTES = 1 << 24
LIMIT_S = 120.0
"""For any one answer; far beyond what one takes."""

_WHOLE_PROCESS = 2
"""Which of a process's clocks: CPUCLOCK_SCHED in the kernel's words."""


class Child:
    """A Python module that runs as a process of its own. Owned by `running`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process

    def tell(self, line: str) -> None:
        """Write one line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def read(self) -> str:
        """The next line of its stdout.

        Raises:
            RuntimeError: it has exited; its own words are on stderr.
            TimeoutError: no line came.
        """
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} exited with {await self._process.wait()}")
        return line.decode().rstrip("\n")


@asynccontextmanager
async def running(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """`python -m MODULE ARGUMENTS` while the context lasts; it is killed after it, or when we
    are killed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.processes", module, *arguments),
        cwd=ROOT,
        env=None if environment is None else dict(environment),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )
    try:
        yield Child(module, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all its threads, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | _WHOLE_PROCESS)


def children_of(pid: int) -> list[int]:
    """The processes that its threads have started and that are still there."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def resident_mb(pid: int) -> float:
    """Memory of a process: the most that was resident so far, in 10^6 bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"the kernel says nothing about the memory of process {pid}")


TINY = {f"DUPLET_{service}_MODEL": "tiny" for service in ("PREFILL", "DECODE", "MONOLITH")}


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without anybody's Duplet settings, the quick model, and `extra`."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("DUPLET_")}
    return {**base, **TINY, **extra}


if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
