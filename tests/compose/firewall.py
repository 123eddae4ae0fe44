"""The kernel's packet filter, as it was before a Docker engine of ours ran.

dockerd adds chains and rules, sets FORWARD's policy to DROP, and leaves all that behind.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

PROGRAMS = ("iptables", "ip6tables")


@contextmanager
def kept_firewall() -> Iterator[None]:
    """Take back at the end what was added meanwhile; what others took away stays away.

    Raises:
        subprocess.CalledProcessError: it cannot be read, or what was added is in use.
    """
    programs = [program for program in PROGRAMS if shutil.which(f"{program}-save")]
    before = {program: saved(program) for program in programs}
    try:
        yield
    finally:
        for program in programs:
            if script := undo(before[program], saved(program)):
                command = (f"{program}-restore", "--noflush")
                subprocess.run(command, input=script, text=True, check=True)


def saved(program: str) -> str:
    """All tables, in the words of iptables-save."""
    command = (f"{program}-save",)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def undo(before: str, after: str) -> str:
    """What iptables-restore has to be told so that `after` is `before` again; empty: nothing."""
    old = tables(before)
    script = []
    for table, (chains, rules) in tables(after).items():
        old_chains, old_rules = old.get(table, ({}, []))
        added = list((Counter(rules) - Counter(old_rules)).elements())
        lines = []
        for chain, policy in chains.items():
            # A chain of the kernel's has a policy; ACCEPT in a table that nobody had touched.
            if policy != "-" and policy != old_chains.get(chain, "ACCEPT"):
                lines.append(f":{chain} {old_chains.get(chain, 'ACCEPT')} [0:0]")
        lines += [f"-D {rule.removeprefix('-A ')}" for rule in added]
        lines += [
            f"-X {c}" for c, policy in chains.items() if policy == "-" and c not in old_chains
        ]
        if lines:
            script += [f"*{table}", *lines, "COMMIT"]
    return "".join(f"{line}\n" for line in script)


def tables(text: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """By table: its chains with their policies, and its rules."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    table = ""
    for line in text.splitlines():
        if line.startswith("*"):
            table = line[1:]
            found[table] = ({}, [])
        elif line.startswith(":"):
            chain, policy, _ = line[1:].split(" ", 2)
            found[table][0][chain] = policy
        elif line.startswith("-A "):
            found[table][1].append(line)
    return found
