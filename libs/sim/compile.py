"""Compile the simulator and the machines that it runs: `python libs/sim/compile.py OUT`.

OUT gets a copy of the three packages with mypyc's extension modules beside their sources. With
OUT on PYTHONPATH, `python -m duplet_sim.simulate` runs those: the same steps in less time. An
OUT that was built from these very sources by this Python stays as it is. Without a C compiler
there is no OUT, a line says why, and what is run with OUT on its path runs uncompiled.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

LIBS = Path(__file__).resolve().parents[1]
PACKAGES = {"duplet_core": "core", "duplet_pages": "pages", "duplet_sim": "sim"}
COMPILED = (
    *("duplet_core/" + name for name in (
        "decode", "decode_state", "decode_transfers", "front", "front_state", "host",
        "host_state", "host_stays", "ids", "ledger", "link", "machine", "prefill",
        "prefill_jobs", "prefill_state", "prefix", "sources", "writer", "writer_state",
        "writer_transfers",
    )),
    "duplet_pages/prefix",
    *("duplet_sim/" + name for name in (
        "agenda", "checks", "content", "copying", "engines", "executor", "faults", "goal",
        "nodes", "parts", "pool", "promises", "simulator", "staging", "swarm", "workload", "world",
    )),
)  # fmt: skip
"""What the steps of a run pass through. Not among it: `errors`, for a compiled class cannot be
an exception, and the modules of values, whose constructors are dataclasses' own and slower on
compiled classes."""

_BUILT = ".built"
"""Holds the fingerprint of what OUT was built from."""


def fingerprint() -> str:
    """Of this Python, this program and every source that goes into a build."""
    digest = hashlib.sha256(sys.version.encode())
    folders = [LIBS / lib / package for package, lib in PACKAGES.items()]
    for path in (Path(__file__), *(p for folder in folders for p in sorted(folder.glob("*.py")))):
        digest.update(f"{path.relative_to(LIBS)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def missing() -> str:
    """What a build needs and this machine has not; empty: nothing."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"no C compiler ({compiler})"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"no {header}"


def build(out: Path) -> None:
    """Copy and compile; `out` appears when all is done.

    Raises:
        subprocess.CalledProcessError: mypyc or the compiler failed; its output was printed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        copy = Path(folder) / out.name
        for package, lib in PACKAGES.items():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(LIBS / lib / package, copy / package, ignore=ignored)
        command = [sys.executable, "-m", "mypyc", "--config-file=", "--strict"]
        command += [f"{name}.py" for name in COMPILED]
        settings = {"MYPYPATH": ".", "MYPYC_OPT_LEVEL": "1", "MYPYC_DEBUG_LEVEL": "0"}
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            print(done.stdout, file=sys.stderr)
        done.check_returncode()
        for scratch in ("build", ".mypy_cache"):
            shutil.rmtree(copy / scratch)
        (copy / _BUILT).write_text(fingerprint())
        shutil.rmtree(out, ignore_errors=True)
        copy.rename(out)


def main(out: Path) -> None:
    built = out / _BUILT
    if built.is_file() and built.read_text() == fingerprint():
        return
    lacking = missing()
    if lacking:
        shutil.rmtree(out, ignore_errors=True)
        print(f"uncompiled, {lacking}: half as fast", file=sys.stderr)
    else:
        print("compiling the simulator; until its sources change this is done once", flush=True)
        build(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
