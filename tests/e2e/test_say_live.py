"""`duplet say` against a live unit with the built-in voice: speech out, and what it says of it."""

from __future__ import annotations

import asyncio
import json
import sys
import wave
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duplet_voice.voices import load_voices
from tests.e2e.live_unit import LiveUnit, live_unit

SHORT = "Good morning, the train leaves from platform two."
LONG = (
    "The rain had begun at noon, and it fell on the roofs of the whole town until the night. "
    "Nobody wanted to leave the warm room, not even the old man from the harbour. "
    "Then, at last, somebody knocked at the door. Yes."
)
VOICES = {f"DUPLET_{service}_MODEL": "wren" for service in ("PREFILL", "DECODE")}


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: bytes
    err: str

    @property
    def fields(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        fields: dict[str, Any] = json.loads(self.out)
        return fields


async def duplet_say(unit: LiveUnit, *arguments: str, stdin: str = "") -> Done:
    program = "from duplet_unit.cli import main; main()"
    command = [sys.executable, "-c", program, "say", "-a", unit.listen, *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Done(process.returncode, out, err.decode())


def read_wav(path: Path) -> np.ndarray:
    with wave.open(str(path), "rb") as wav:
        assert (wav.getnchannels(), wav.getsampwidth(), wav.getframerate()) == (1, 2, 22_050)
        return np.frombuffer(wav.readframes(wav.getnframes()), "<i2")


@pytest.mark.timeout(180)
async def test_say_speaks(tmp_path: Path) -> None:
    path = tmp_path / "said.wav"
    async with live_unit(VOICES) as unit:
        await unit.wait_serving()
        said = await duplet_say(unit, SHORT, "--seed", "1", "-o", str(path), "--json")
        assert said.fields["problems"] == []
        assert said.fields["ttfa_s"] > 0
        samples = read_wav(path)
        assert len(samples) == 1024 * said.fields["rows"]
        assert load_voices().identify(samples.astype(np.float32) / np.float32(32768)) == "amber"

        streamed = await duplet_say(unit, SHORT, "--seed", "1", "--stream")
        assert streamed.code == 0
        assert streamed.out == samples.tobytes()
        assert "TTFA" in streamed.err and "playback underrun" in streamed.err

        options = ("--voice", "cedar", "--seed", "2", "-o", str(path), "--json", "--file", "-")
        long = await duplet_say(unit, *options, stdin=LONG)
        assert len(long.fields["pieces"]) >= 2
        assert {piece["reason"] for piece in long.fields["pieces"]} == {"STOP"}
        samples = read_wav(path)
        assert len(samples) == 1024 * long.fields["rows"]
        assert load_voices().identify(samples.astype(np.float32) / np.float32(32768)) == "cedar"

        cut = await duplet_say(unit, SHORT, "--seed", "1", "--max-rows", "12", "-o", str(path))
        assert cut.code == 1
        assert "piece 1 was cut off after 12 rows (LENGTH)" in cut.err
        assert len(read_wav(path)) == 12 * 1024

        for arguments, complaint in (
            (("Hello.", "--voice", "ada"), "'ada' is none of amber"),
            (("?!",), "has no word to speak"),
            (("\N{GRINNING FACE}",), "GRINNING FACE"),
            (("--file", "-"), "has no word to speak"),
            (("Hello.", "--temperature", "-1"), "temperature"),
        ):
            refused = await duplet_say(unit, *arguments, "-o", str(path))
            assert refused.code != 0
            assert complaint in refused.err
        assert not unit.complaints()


async def test_say_without_a_unit_says_how_to_start_one(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from duplet_unit.cli import main; main()", "say", "Hello."),
        *("-o", str(tmp_path / "x.wav"), "-a", f"unix:{tmp_path}/nobody.sock"),
        stderr=PIPE,
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "`duplet up` starts one" in err.decode()
    assert not (tmp_path / "x.wav").exists()
