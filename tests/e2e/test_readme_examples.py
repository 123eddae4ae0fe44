"""What README shows in Python runs as it stands, but for the address."""

from __future__ import annotations

import asyncio
import re
import sys
import wave
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from duplet_unit.unit import DEFAULT_LISTEN
from tests.e2e.live_unit import live_unit

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
EXAMPLES: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SPEAKING = {f"DUPLET_{service}_MODEL": "wren" for service in ("PREFILL", "DECODE")}


@pytest.mark.timeout(180)
async def test_the_examples_run(tmp_path: Path) -> None:
    rows, speech = EXAMPLES
    async with live_unit(SPEAKING) as unit:
        await unit.wait_serving()

        async def run(example: str) -> str:
            assert example.count(DEFAULT_LISTEN) == 1
            command = [sys.executable, "-c", example.replace(DEFAULT_LISTEN, unit.listen)]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=tmp_path, stdout=PIPE, stderr=PIPE
            )
            out, err = await process.communicate()
            assert (process.returncode, err.decode()) == (0, "")
            return out.decode()

        assert len((await run(rows)).splitlines()) > 9
        assert await run(speech) == ""
    with wave.open(str(tmp_path / "hello.wav"), "rb") as wav:
        assert (wav.getnchannels(), wav.getsampwidth(), wav.getframerate()) == (1, 2, 22_050)
        assert wav.getnframes() > 22_050


@pytest.mark.parametrize("line", re.findall(r"^duplet .*$", README, re.MULTILINE))
def test_a_shell_keeps_texts_as_they_are(line: str) -> None:
    """In double quotes a shell reads `$3.50` as `.50`."""
    assert not re.search(r'"[^"]*[$`!\\][^"]*"', line)
