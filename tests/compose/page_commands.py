"""The commands of docs/operations.md, run as they stand there, on a unit of the compose test.

A `docker` of our own comes first on PATH: it is the client and the Compose of this run, asks for
no terminal, and builds as this machine has to. Addresses and names of the page become the test's.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.compose.composed_unit import UNIT_FILES, ComposedUnit
from tests.compose.docker_engine import Engine
from tests.compose.images import ROOT, pip_secrets

PAGE = ROOT / "docs" / "operations.md"
LIMIT_S = 300.0

CLIENT = """\
#!/bin/sh
case "$1" in
  compose)
    shift
    case "$1" in
      exec|run) verb=$1; shift; exec {compose} "$verb" -T "$@" ;;
      *) exec {compose} "$@" ;;
    esac ;;
  build) shift; exec {docker} build {flags} "$@" ;;
  *) exec {docker} "$@" ;;
esac
"""
"""docker-compose 1.29 builds with the client that is on PATH and leaves the network to it."""


def blocks(heading: str) -> list[str]:
    """The fenced blocks below a heading of the page, up to the next heading.

    Raises:
        AssertionError: no such heading.
    """
    parts = re.split(r"^#+ (.+)\n", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert heading in sections, f"{PAGE.name} has no heading `{heading}`"
    return re.findall(r"^```\n(.*?)^```\n", sections[heading], flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class PageShell:
    """A shell for the page's blocks. Its folder, with the `docker` in it, lasts as its context."""

    folder: Path

    async def run(
        self, block: str, unit: ComposedUnit, names: Mapping[str, str] | None = None
    ) -> str:
        """Run a block for a unit, with some of its words replaced; returns what it printed.

        Raises:
            AssertionError: a word is not there, or the block failed or takes too long; the text
                has what it printed.
        """
        for word, ours in (names or {}).items():
            assert word in block, f"{word} is not in: {block}"
            block = block.replace(word, ours)
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euc", block),
            cwd=ROOT,
            env=self._environment(unit),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        except TimeoutError:
            os.killpg(process.pid, 9)
            raise AssertionError(f"not over within {LIMIT_S:g} s: {block}") from None
        text = said.decode(errors="replace")
        assert process.returncode == 0, f"exit code {process.returncode} of: {block}{text}"
        return text

    def _environment(self, unit: ComposedUnit) -> dict[str, str]:
        told = unit.environment()
        return {
            **told,
            "PATH": f"{self.folder}:{told['PATH']}",
            "COMPOSE_FILE": ":".join(UNIT_FILES),
            "DUPLET_LB_LISTEN": unit.address,
            # As the page asks for docker-compose 1.29.
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_DOCKER_CLI_BUILD": "1",
        }


@contextmanager
def page_shell(engine: Engine) -> Iterator[PageShell]:
    """A shell for the page's commands, with this engine's client and Compose."""
    with pip_secrets() as flags, tempfile.TemporaryDirectory(prefix="duplet-page-") as folder:
        client = Path(folder) / "docker"
        told = {
            "docker": shlex.quote(engine.docker),
            "compose": shlex.join(engine.compose),
            "flags": shlex.join(["--network", "host", *flags]),
        }
        client.write_text(CLIENT.format(**told))
        client.chmod(0o755)
        yield PageShell(Path(folder))
