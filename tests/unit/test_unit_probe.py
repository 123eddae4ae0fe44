"""The health command of the images."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duplet_runtime.health import Health
from duplet_runtime.server import create_server, peer_server_options, running_server


@pytest.fixture
async def health(tmp_path: Path) -> AsyncIterator[tuple[Health, str]]:
    """A server that tells one condition, and where it is."""
    health = Health(["engine"])
    address = f"unix:{tmp_path}/decode.sock"
    server = create_server(peer_server_options(), health, lambda error: None)
    async with running_server(server, [address], health, [], 0.0):
        yield health, address


async def probe(*arguments: str) -> tuple[int, str]:
    """Exit code, and what was printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "duplet_unit.probe", *arguments, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode().strip()


async def test_exit_code_is_the_answer(health: tuple[Health, str]) -> None:
    told, address = health
    assert await probe(address) == (1, "ready: not serving")
    assert await probe(address, "live") == (0, "live: serving")
    told.set("engine", True, "it is there")
    assert await probe(address) == (0, "ready: serving")


async def test_nobody_there_is_a_no(tmp_path: Path) -> None:
    assert await probe(f"unix:{tmp_path}/none.sock") == (1, "ready: not serving")
