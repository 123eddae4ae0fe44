"""`python -m duplet_unit.child PARENT COMMAND…`: run a command that dies with its supervisor.

The kernel kills it when the parent ends, however it ends. The setting survives `exec`, so the
command needs to know nothing of it, and no orphan is left when the supervisor is killed.
"""

from __future__ import annotations

import os
import sys

from duplet_runtime.fate import die_with_parent


def main() -> None:
    """Tie this process to PARENT (a pid), then become COMMAND.

    Exits with 1 when the parent is gone already; raises OSError when the kernel refuses.
    """
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # It died before the tie was made.
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
