"""Where speech goes: a WAV file, raw samples on stdout, a player."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
import sys
import wave
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from select import PIPE_BUF
from typing import IO, Final

from duplet_core.errors import InvalidInput, Reason, Unavailable
from duplet_unit.output_files import replacing
from duplet_voice.features import SAMPLE_RATE
from duplet_voice.vocoder import Samples, pcm16

Write = Callable[[Samples], Awaitable[None]]

RAW_FORMAT: Final = f"16-bit little-endian, mono, {SAMPLE_RATE} Hz"

PLAYERS: Final = (
    ("pw-cat", "--playback", "--raw", "--format=s16", f"--rate={SAMPLE_RATE}", "--channels=1", "-"),
    ("paplay", "--raw", "--format=s16le", f"--rate={SAMPLE_RATE}", "--channels=1"),
    ("aplay", "-q", "-t", "raw", "-f", "S16_LE", "-r", str(SAMPLE_RATE), "-c", "1"),
    ("play", "-q", "-t", "raw", "-e", "signed", "-b", "16", "-r", str(SAMPLE_RATE), "-c", "1", "-"),
)
"""Of PipeWire, PulseAudio, ALSA and SoX, the first that is installed; all read raw stdin."""
OTHER_FORMATS: Final = (".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aiff")
"""What a file of these names should hold is not written here."""
_PLAYER_END_S: Final = 5.0
"""After its stdin has ended and its last samples have been played."""


@contextlib.asynccontextmanager
async def wav_file(path: Path) -> AsyncIterator[Write]:
    """Writes a WAV file that takes the place of `path` when all is spoken.

    What was spoken until something failed, or until Ctrl-C, is kept as `part_of(path)`, for a
    link beside what it leads to, for a mounted file in the folder for temporary files, and that
    is said; `path` is then as it was before.

    Raises:
        InvalidInput: INVALID_REQUEST; there can be no such file, it is a pipe, or its name
            promises another format.
        Unavailable: CANCELLED; it cannot be written any further.
    """
    if path.suffix.lower() in OTHER_FORMATS:
        raise InvalidInput(
            Reason.INVALID_REQUEST, f"out: {path}: what is written is WAV; name it {path.stem}.wav"
        )
    if path.is_fifo():  # Opening one would wait for its reader.
        raise _no_wav(path)
    spoken = whole = False
    with replacing(path) as draft:
        try:
            with draft.open("wb") as file:
                if not file.seekable():
                    raise _no_wav(path)
                with wave.open(file, "wb") as writer:
                    writer.setnchannels(1)
                    writer.setsampwidth(2)
                    writer.setframerate(SAMPLE_RATE)

                    async def write(samples: Samples) -> None:
                        nonlocal spoken
                        writer.writeframes(pcm16(samples).tobytes())
                        spoken = True

                    yield write
            whole = True
        finally:
            if spoken and not whole and draft.is_file():
                # Where the draft is: a link may lead to another disk.
                part = draft.replace(draft.with_name(part_of(path).name))
                print(f"duplet: what was spoken until then is in {part}", file=sys.stderr)


def part_of(path: Path) -> Path:
    """Where an unfinished WAV file stays."""
    return path.with_name(f"{path.stem}.part{path.suffix}")


def _no_wav(path: Path) -> InvalidInput:
    return InvalidInput(
        Reason.INVALID_REQUEST,
        f"out: {path} is no file, and a WAV file's length is written last; --stream writes raw "
        "samples to a pipe",
    )


@contextlib.asynccontextmanager
async def raw_stream(file: IO[bytes] | None = None) -> AsyncIterator[Write]:
    """Writes raw samples, RAW_FORMAT, to a file that stays the caller's; without one, stdout.

    Raises:
        InvalidInput: INVALID_REQUEST; stdout is closed.
        Unavailable: CANCELLED; whoever read it has left, or it takes no more.
    """
    if file is None and sys.stdout is None:
        raise InvalidInput(Reason.INVALID_REQUEST, "stream: stdout is closed")
    out = file if file is not None else sys.stdout.buffer

    async def write(samples: Samples) -> None:
        data = pcm16(samples).tobytes()
        try:
            for first in range(0, len(data), PIPE_BUF):
                # A pipe's reader may take its time, and the unit's rows must be read meanwhile.
                # No thread waits for it: nothing could end one that does.
                await _room(out)
                out.write(data[first : first + PIPE_BUF])
                out.flush()
        except BrokenPipeError as error:
            raise Unavailable(Reason.CANCELLED, "whoever read the samples has left") from error
        except OSError as error:
            raise Unavailable(Reason.CANCELLED, f"stream: stdout: {error.strerror}") from error

    yield write


async def _room(file: IO[bytes]) -> None:
    """Wait until a pipe takes PIPE_BUF bytes at once; what is no pipe always does."""
    try:
        number = file.fileno()
        if not stat.S_ISFIFO(os.fstat(number).st_mode):
            return
    except OSError:  # a file in memory
        return
    loop = asyncio.get_running_loop()
    room = asyncio.Event()
    loop.add_writer(number, room.set)
    try:
        await room.wait()
    finally:
        loop.remove_writer(number)


def find_player(players: Sequence[tuple[str, ...]] = PLAYERS) -> tuple[str, ...]:
    """Command line of the first player that is installed.

    Raises:
        InvalidInput: INVALID_REQUEST; there is none.
    """
    for command in players:
        if shutil.which(command[0]):
            return command
    names = ", ".join(command[0] for command in players)
    raise InvalidInput(
        Reason.INVALID_REQUEST,
        f"play: no player is installed here (one of {names}); -o FILE writes a WAV file instead",
    )


@contextlib.asynccontextmanager
async def player(command: Sequence[str]) -> AsyncIterator[Write]:
    """Plays through a process that it owns: at the end it is waited for, on an error killed.

    Raises:
        Unavailable: ENGINE_FAILED; the player failed. The detail has its last words.
    """
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stderr=PIPE)
    assert process.stdin is not None and process.stderr is not None
    stdin = process.stdin
    # Read all along, or a player that complains much would wait for us.
    words = asyncio.create_task(process.stderr.read())
    played_s = 0.0

    async def write(samples: Samples) -> None:
        nonlocal played_s
        played_s += len(samples) / SAMPLE_RATE
        stdin.write(pcm16(samples).tobytes())
        try:
            await stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise await _failure(command[0], process, words) from error

    try:
        yield write
        stdin.close()
        # No longer than if it had played nothing yet.
        async with asyncio.timeout(played_s + _PLAYER_END_S):
            if await process.wait():
                raise await _failure(command[0], process, words)
    except TimeoutError as error:
        raise Unavailable(Reason.ENGINE_FAILED, f"player {command[0]} does not end") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        words.cancel()
        await asyncio.wait([words])


async def _failure(name: str, process: Process, words: asyncio.Task[bytes]) -> Unavailable:
    await process.wait()
    said = (await words).decode(errors="replace").strip().splitlines()
    return Unavailable(
        Reason.ENGINE_FAILED,
        f"player {name} ended with {process.returncode}: {said[-1] if said else 'it said nothing'}",
    )
