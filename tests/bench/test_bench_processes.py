"""Children of benchmarks."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from bench.processes import cpu_seconds
from bench.results import ROOT

LIMIT_S = 60
PARENT = """
import asyncio, time
from bench.processes import running

async def main():
    async with running("timeit", "-n1", "-r1", "print('here', flush=True); {wait}") as child:
        print(await child.read(), child.pid, flush=True)
        await asyncio.sleep({limit_s})

asyncio.run(main())
"""


def test_a_child_does_not_outlive_a_benchmark_that_is_killed() -> None:
    program = PARENT.format(wait=f"__import__('time').sleep({LIMIT_S})", limit_s=LIMIT_S)
    command = (sys.executable, "-c", program)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        word, pid = parent.stdout.readline().split()
        assert word == "here"
        child = os.pidfd_open(int(pid))
        try:
            assert cpu_seconds(int(pid)) > 0
            parent.kill()
            assert select.select([child], [], [], LIMIT_S / 2)[0], "the child lives on"
        finally:
            os.close(child)
