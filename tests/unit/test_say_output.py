"""Where `say` puts its samples, and where its texts come from."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sys
import wave
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from duplet_client import GenerateError
from duplet_core.errors import InvalidInput, Reason, Unavailable
from duplet_unit.commands import app
from duplet_unit.say_command import read_file
from duplet_unit.say_output import find_player, player, raw_stream, wav_file
from duplet_voice.vocoder import pcm16

SAMPLES = np.linspace(-0.9, 0.9, 1000, dtype=np.float32)


async def test_a_wav_file_holds_the_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    async with wav_file(path) as write:
        await write(SAMPLES[:300])
        await write(SAMPLES[300:])
    with wave.open(str(path), "rb") as wav:
        assert (wav.getnchannels(), wav.getsampwidth(), wav.getframerate()) == (1, 2, 22_050)
        assert wav.readframes(2000) == pcm16(SAMPLES).tobytes()


@pytest.mark.parametrize(
    "failure",
    [GenerateError(grpc.StatusCode.UNAVAILABLE, "DECODE_LOST", "gone"), asyncio.CancelledError()],
)
async def test_what_was_spoken_before_a_failure_is_kept_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], failure: BaseException
) -> None:
    path, part = tmp_path / "x.wav", tmp_path / "x.part.wav"
    path.write_bytes(b"of yesterday")

    async def fail() -> None:
        async with wav_file(path) as write:
            await write(SAMPLES)
            raise failure

    with pytest.raises(type(failure)):
        await fail()
    assert path.read_bytes() == b"of yesterday"
    with wave.open(str(part), "rb") as wav:
        assert wav.getnframes() == len(SAMPLES)
    assert sorted(tmp_path.iterdir()) == [part, path]
    told = f"duplet: what was spoken until then is in {part}\n"
    assert capsys.readouterr().err == told


async def test_what_was_spoken_for_a_link_is_kept_where_it_leads(tmp_path: Path) -> None:
    """The link's own folder may be on another disk."""
    link, other = tmp_path / "x.wav", tmp_path / "other"
    other.mkdir()
    link.symlink_to(other / "y.wav")

    async def fail() -> None:
        async with wav_file(link) as write:
            await write(SAMPLES)
            raise Unavailable(Reason.CANCELLED, "gone")

    with pytest.raises(Unavailable):
        await fail()
    assert [file.name for file in other.iterdir()] == ["x.part.wav"]
    assert sorted(tmp_path.iterdir()) == [other, link]


async def test_a_refusal_leaves_everything_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(b"of yesterday")

    async def refuse() -> None:
        async with wav_file(path):
            raise InvalidInput(Reason.INVALID_REQUEST, "no such voice")

    with pytest.raises(InvalidInput):
        await refuse()
    assert path.read_bytes() == b"of yesterday"
    assert list(tmp_path.iterdir()) == [path]
    assert capsys.readouterr().err == ""


async def test_a_wav_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"out: .*no/x.wav: No such file"):
        async with wav_file(tmp_path / "no" / "x.wav"):
            pass


async def test_a_full_disk_is_named() -> None:
    with pytest.raises(Unavailable, match="out: /dev/full: No space left") as caught:
        async with wav_file(Path("/dev/full")) as write:
            await write(SAMPLES)
    assert caught.value.reason is Reason.CANCELLED


@pytest.mark.parametrize("name", ["x.mp3", "x.OGG"])
async def test_a_wav_file_is_not_called_something_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"{name}: what is written is WAV; name it x\.wav"):
        async with wav_file(tmp_path / name):
            pass
    assert list(tmp_path.iterdir()) == []


async def test_a_wav_file_cannot_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInput, match=r"pipe is no file, .* --stream writes raw"):
        async with wav_file(tmp_path / "pipe"):
            pass


async def test_a_stream_is_raw_samples_as_they_come() -> None:
    file = io.BytesIO()
    async with raw_stream(file) as write:
        await write(SAMPLES[:10])
        assert file.getvalue() == pcm16(SAMPLES[:10]).tobytes()
        await write(SAMPLES[10:])
    assert file.getvalue() == pcm16(SAMPLES).tobytes()


async def test_whoever_waits_for_a_reader_can_be_ended() -> None:
    """And the samples arrive once it reads."""
    read_end, write_end = os.pipe()
    loud = np.zeros(200_000, dtype=np.float32)
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "wb", buffering=0) as file:
        async with raw_stream(file) as write:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(write(loud), 0.2)
            writing = asyncio.ensure_future(write(SAMPLES))
            while not writing.done():
                await asyncio.to_thread(os.read, reader.fileno(), 4096)
            await writing


async def test_a_reader_that_left_is_an_error() -> None:
    class Left(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError

    async with raw_stream(Left()) as write:
        with pytest.raises(Unavailable, match="has left") as caught:
            await write(SAMPLES)
    assert caught.value.reason is Reason.CANCELLED


async def test_a_stream_that_takes_no_more_is_named() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    async with raw_stream(Full()) as write:
        with pytest.raises(Unavailable, match="stdout: No space left on device"):
            await write(SAMPLES)


async def test_closed_standard_streams_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InvalidInput, match="stdin is closed"):
        read_file("-")
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(InvalidInput, match="stdout is closed"):
        async with raw_stream():
            pass


@pytest.mark.parametrize("command", ["say", "generate"])
@pytest.mark.parametrize("seconds", ["inf", "nan", "0"])
def test_a_timeout_is_a_time(command: str, seconds: str) -> None:
    done = CliRunner().invoke(app, [command, "hi", "--timeout", seconds])
    assert done.exit_code == 2
    assert "Invalid value for '--timeout'" in done.output


def test_a_machine_without_a_player_is_told_what_to_do() -> None:
    with pytest.raises(InvalidInput, match=r"one of none-1, none-2.*-o FILE"):
        find_player([("none-1",), ("none-2", "-x")])
    assert find_player([("none-1",), (sys.executable, "-x")]) == (sys.executable, "-x")


async def test_a_player_gets_the_samples_and_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "played"
    program = f"import sys; open({str(path)!r}, 'wb').write(sys.stdin.buffer.read())"
    async with player((sys.executable, "-c", program)) as write:
        await write(SAMPLES)
    assert path.read_bytes() == pcm16(SAMPLES).tobytes()


async def test_a_player_that_fails_is_an_error_with_its_last_words() -> None:
    program = "import sys; sys.stdin.buffer.read(); sys.exit('no sound card')"
    with pytest.raises(Unavailable, match="ended with 1: no sound card"):
        async with player((sys.executable, "-c", program)) as write:
            await write(SAMPLES)


async def test_a_player_that_dies_early_is_an_error() -> None:
    program = "import sys; sys.exit('no sound card')"

    async def play() -> None:
        async with player((sys.executable, "-c", program)) as write:
            for _ in range(10_000):
                await write(SAMPLES)

    with pytest.raises(Unavailable, match="no sound card"):
        await play()


async def test_a_player_does_not_outlive_a_failure() -> None:
    started = asyncio.Event()
    program = "import sys, time; sys.stdin.buffer.read(1); time.sleep(600)"

    async def play() -> None:
        async with player((sys.executable, "-c", program)) as write:
            await write(SAMPLES)
            started.set()
            await asyncio.Event().wait()

    playing = asyncio.create_task(play())
    await started.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\xff\xfe", "no UTF-8 text"), (b"a" * 400_001, "more than 100000 characters")],
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "text"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        read_file(str(path))


def test_a_file_is_text_with_or_without_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffnaïve".encode())
    assert read_file(str(path)) == "naïve"
    with pytest.raises(InvalidInput, match="No such file"):
        read_file(str(tmp_path / "none"))


def test_stdin_is_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    assert read_file("-") == "hello"
