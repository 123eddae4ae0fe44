"""All mutants, those of core and those of the services: `python -m tests.mutants.all_mutants`.

Each part is a process of its own: the services' runner may not have the product loaded.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

PARTS = (("-m", "duplet_sim.mutants"), ("-m", "tests.mutants.run_mutants"))
COUNTED = re.compile(r"(\d+) of (\d+) mutants\b.*killed")


def run_all(parts: Iterable[Sequence[str]]) -> int:
    """Python's arguments for each part; what it prints, then the total. 0: all were killed, and
    each part agrees."""
    killed = total = failed = 0
    for part in parts:
        command = [sys.executable, *part]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = ""
            for line in process.stdout:
                print(line, end="", flush=True)
        counted = COUNTED.match(line)
        if counted is not None:
            killed += int(counted[1])
            total += int(counted[2])
        failed += counted is None or process.returncode != 0
    if failed:
        print(f"{failed} parts failed")
    print(f"{killed} of {total} mutants killed")
    return 0 if killed == total and not failed else 1


if __name__ == "__main__":
    sys.exit(run_all(PARTS))
