"""Prometheus and promtool: those on PATH, else of Debian's package, unpacked and not installed.

`python -m tests.compose.debian_prometheus promtool FOLDER` prints the path of one of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "prometheus"


class NoPrometheus(Exception):
    """Neither PATH nor apt has it; the text says what to do."""


def find_program(name: str, folder: Path) -> Path:
    """The program `name`; what has to be unpacked for it goes to `folder`, which is the caller's.

    Raises:
        NoPrometheus: there is none.
    """
    if found := shutil.which(name):
        return Path(found)
    if shutil.which("apt-get") is None:
        raise NoPrometheus(f"{name} is not on PATH, and without apt it cannot be fetched")
    download = ("apt-get", "-q", "download", PACKAGE)
    if not list(folder.glob("*.deb")) and not _succeeds(download, folder):
        _run(("apt-get", "-q", "update"), folder)  # a new machine knows no packages
        _run(download, folder)
    [archive] = folder.glob("*.deb")
    _run(("dpkg", "-x", archive.name, "."), folder)
    return folder / "usr" / "bin" / name


def _succeeds(command: tuple[str, ...], folder: Path) -> bool:
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


def _run(command: tuple[str, ...], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoPrometheus(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-1000:]}")


if __name__ == "__main__":
    print(find_program(sys.argv[1], Path(sys.argv[2])))
