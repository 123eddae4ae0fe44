"""`duplet say`: a text as speech."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from duplet_client import AsyncClient
from duplet_core.errors import InvalidInput, Reason
from duplet_models import directory
from duplet_pages.engine_config import SPEAKING_MODEL
from duplet_pages.spec import ModelSpec
from duplet_unit.ask import known_spec
from duplet_unit.say import Said, SayOptions, check_spoken, say
from duplet_unit.say_output import RAW_FORMAT, Write, find_player, player, raw_stream, wav_file
from duplet_unit.terminal import FAILED, Address, Seed, run, sampling_options, shown, told
from duplet_unit.unit import DEFAULT_LISTEN, dial_address
from duplet_voice.codec import load_codec
from duplet_voice.front_end import VoiceFrontEnd
from duplet_voice.phonemes import MOST_CHARACTERS, read_text
from duplet_voice.speech import Speech
from duplet_voice.vocoder import Samples
from duplet_voice.voices import load_voices


def say_command(
    text: Annotated[str | None, typer.Argument(help="What to say.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Text from a file instead; - is stdin.")
    ] = None,
    voice: Annotated[str, typer.Option(help="Who says it; --list names them.")] = "amber",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="WAV file to write.")] = None,
    play: Annotated[bool, typer.Option("--play", help="Play it while it comes.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help=f"Raw samples to stdout: {RAW_FORMAT}.")
    ] = False,
    seed: Seed = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 to 5; less is more even. Default: the voice's.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Most rows of each piece of the text.")
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=0.001, max=86_400, help="Seconds, for each piece."),
    ] = 120.0,
    list_voices: Annotated[bool, typer.Option("--list", help="Show the voices.")] = False,
    address: Address = DEFAULT_LISTEN,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Say a text with the built-in voices: to a WAV file, a player or stdout."""
    if list_voices:
        show_voices()
        return
    if (text is None) == (file is None):
        raise typer.BadParameter("give either TEXT or --file FILE; --file - is stdin")
    if out is None and not play and not stream:
        raise typer.BadParameter("say where to: -o FILE, --play or --stream")
    if stream and as_json:
        raise typer.BadParameter("--stream and --json both want stdout")

    options = SayOptions(voice, sampling_options(temperature, seed=seed), max_rows, timeout_s)

    async def work() -> Said:
        spoken = text if file is None else read_file(file)
        assert spoken is not None
        notice = read_text(spoken).notice
        if notice:
            told.print(notice, highlight=False, markup=False, soft_wrap=True)
        async with AsyncClient(dial_address(address)) as client, AsyncExitStack() as outputs:
            spec = speaking_spec(await known_spec(client))
            pieces = VoiceFrontEnd(spec).pieces(spoken, voice)
            speech = Speech(spec, load_codec(directory(SPEAKING_MODEL)))
            writes: list[Write] = []
            if play:
                writes.append(await outputs.enter_async_context(player(find_player())))
            if stream:
                writes.append(await outputs.enter_async_context(raw_stream()))
            if out is not None:
                writes.append(await outputs.enter_async_context(wav_file(out)))

            async def write(samples: Samples) -> None:
                for each in writes:
                    await each(samples)

            show = outputs.enter_context(progress_line())
            said = await say(client, pieces, speech, options, write, show)
            check_spoken(said)
            return said

    said = run(work(), as_json=as_json)
    report(said, as_json=as_json)
    if said.problems:
        raise typer.Exit(FAILED)


@contextmanager
def progress_line() -> Iterator[Callable[[Said], None]]:
    """Shows how far it is, live on stderr where that is a terminal."""
    if not told.is_terminal:
        yield lambda _: None
        return
    with told.status("waiting for the first row") as status:
        yield lambda said: status.update(said.progress())


def report(said: Said, *, as_json: bool) -> None:
    """The result: as JSON on stdout, or a line on stderr, for stdout may be the samples'."""
    if as_json:
        print(json.dumps(said.to_fields()))
    else:
        print(said.summary(), file=sys.stderr)
    for problem in said.problems:
        print(f"duplet: {problem}", file=sys.stderr)


def read_file(name: str) -> str:
    """The text of a file, or of stdin for '-'; UTF-8.

    Raises:
        InvalidInput: INVALID_REQUEST; it cannot be read, or is no text, or is too long.
    """
    # Characters of UTF-8 have at most four bytes; what is longer need not be read.
    most = 4 * MOST_CHARACTERS + 1
    called = "stdin" if name == "-" else name
    if name == "-" and sys.stdin is None:
        raise InvalidInput(Reason.INVALID_REQUEST, "file: stdin is closed")
    try:
        if name == "-":
            data = sys.stdin.buffer.read(most)
        else:
            with Path(name).open("rb") as file:
                data = file.read(most)
        if len(data) == most:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"file: {called} has more than {MOST_CHARACTERS} characters; send it in parts",
            )
        return data.decode("utf-8-sig")
    except OSError as error:
        raise InvalidInput(Reason.INVALID_REQUEST, f"file: {called}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(
            Reason.INVALID_REQUEST, f"file: {called} is no UTF-8 text: {error}"
        ) from error


def speaking_spec(spec: ModelSpec) -> ModelSpec:
    """The unit's model, if it is the one that speaks.

    Raises:
        InvalidInput: INVALID_REQUEST; it is another.
    """
    if spec.name != SPEAKING_MODEL:
        raise InvalidInput(
            Reason.INVALID_REQUEST,
            f"model: the unit serves {spec.name}, whose rows `say` cannot turn into speech; "
            f"`duplet up --model {SPEAKING_MODEL}` starts one that speaks",
        )
    return spec


def show_voices() -> None:
    """The built-in voices, one a line."""
    table = Table("voice", "", box=None, pad_edge=False, show_header=False)
    for name, description in load_voices().describe():
        table.add_row(name, description)
    shown.print(table)
