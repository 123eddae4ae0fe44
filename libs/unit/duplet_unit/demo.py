"""`duplet demo`: a unit on this machine, every text in every voice, and what came of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from duplet_client import AsyncClient, GenerateError, SamplingOptions, Unit
from duplet_core.errors import Reason, Unavailable
from duplet_core.timeline import POINTS
from duplet_pages.engine_config import SPEAKING_MODEL
from duplet_pages.spec import ModelSpec
from duplet_unit.ask import (
    Answer,
    Ask,
    describe_seconds,
    known_spec,
    prompt_from_text,
    run_request,
)
from duplet_unit.demo_speech import speak_sentence
from duplet_unit.report import ConsoleReport
from duplet_unit.settings_check import check_settings
from duplet_unit.supervisor import Supervisor
from duplet_unit.unit import (
    UnitError,
    free_local_address,
    owned_run_dir,
    unit_environment,
    unit_services,
)
from duplet_unit.up import in_background, make_supervisor, signals_to
from duplet_unit.waterfall import milliseconds, sum_ns
from duplet_voice.voices import load_voices

MADE_UP_VOICES = ("ada", "ben", "cleo", "dan")
"""For a model that has none of its own."""
TEXTS = (
    "Good morning.",
    "The train leaves in ten minutes from platform two.",
    "She counted the pages again, and this time none was missing.",
    "Nobody on the platform had noticed the small bird.",
)
VOICE_ROWS = 400
"""Of a made-up voice. As long as a real reference of some 20 s."""
ALONE_TEXTS = 2
AT_ONCE = 8
MAX_ROWS = 160
TIMEOUT_S = 120.0
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of the demo: an answer or an error."""

    name: str
    voice: str
    answer: Answer | None
    error: str = ""

    @property
    def problem(self) -> str:
        """What is wrong with it; empty when all is well."""
        if self.answer is None:
            return self.error
        timeline = self.answer.finished.timeline
        if not timeline.shares_clock:
            return "the unit's times do not lie between the client's"
        missing = set(POINTS) - {name for name, _ in timeline.points}
        if missing and self.answer.finished.usage.output_rows:  # else it never reached decode
            return f"the timeline lacks {', '.join(sorted(missing))}"
        if any(segment.duration_ns < 0 for segment in timeline.segments()):
            return "the timeline runs backwards"
        return ""


async def run_demo(out_dir: Path, console: Console) -> bool:
    """Start a unit, send the requests, write their rows to `out_dir`, stop the unit.

    Returns:
        Whether everything went well.

    Raises:
        SettingsError: the unit cannot start with the settings of our environment.
        UnitError: there can be no such folder.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnitError(f"--out: {out_dir}: {error.strerror}") from error
    with owned_run_dir(None) as run_dir:
        listen = free_local_address()
        services = unit_services(run_dir, listen, unit_environment(os.environ))
        names = [service.name for service in services]
        await check_settings(names, services[0].environment)
        report = ConsoleReport(console, names, run_dir)
        supervisor = make_supervisor(services, run_dir, report)
        outcomes: Sequence[Outcome] = ()
        spoken_badly: list[str] = []
        unit: Unit | None = None
        ours = asyncio.current_task()
        assert ours is not None
        try:
            with signals_to(ours.cancel, supervisor.kill):
                async with in_background(supervisor) as running:
                    if await wait_ready(supervisor):
                        async with AsyncClient(listen) as client:
                            spec = await known_spec(client)
                            outcomes = await send_requests(client, spec, console)
                            console.print(outcome_table(outcomes))
                            write_rows(outcomes, out_dir)
                            if spec.name == SPEAKING_MODEL:
                                spoken_badly = await speak_sentence(client, spec, out_dir, console)
                            unit = await client.unit()
                clean = running.result()
        finally:
            report.close()
    if unit is None:
        return False
    return conclude(outcomes, spoken_badly, unit, clean, out_dir, console)


async def wait_ready(supervisor: Supervisor) -> bool:
    """As the supervisor's, but not for ever.

    Raises:
        Unavailable: NOT_READY; it took too long.
    """
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await supervisor.wait_ready()
    except TimeoutError as error:
        raise Unavailable(
            Reason.NOT_READY, f"the unit was not ready within {START_TIMEOUT_S:g} s"
        ) from error


async def send_requests(client: AsyncClient, spec: ModelSpec, console: Console) -> list[Outcome]:
    """Every text in every voice; in order of sending. The first two texts' requests go one by
    one, so that each voice is met undisturbed, cold and then cached; the others at once."""
    voices = load_voices().names if spec.name == SPEAKING_MODEL else MADE_UP_VOICES
    gate = asyncio.Semaphore(AT_ONCE)

    async def send(number: int, voice: str, text: str) -> Outcome:
        prompt, _ = prompt_from_text(spec, text, voice, VOICE_ROWS)
        name = f"demo-{number:02d}"
        ask = Ask(prompt, voice, SamplingOptions(seed=number), MAX_ROWS, TIMEOUT_S, name)
        async with gate:
            try:
                return Outcome(name, voice, await run_request(client, ask, lambda _: None))
            except GenerateError as error:
                return Outcome(name, voice, None, str(error))

    _, notice = prompt_from_text(spec, TEXTS[0], voices[0], VOICE_ROWS)
    said = f"{len(TEXTS)} texts in {len(voices)} voices: {', '.join(voices)}. {notice}"
    console.print(said.rstrip(), highlight=False)
    jobs = [(number, *job) for number, job in enumerate(itertools.product(TEXTS, voices))]
    first = ALONE_TEXTS * len(voices)
    alone = [await send(number, voice, text) for number, text, voice in jobs[:first]]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(send(number, voice, text)) for number, text, voice in jobs[first:]
        ]
    return [*alone, *(task.result() for task in tasks)]


def write_rows(outcomes: Sequence[Outcome], out_dir: Path) -> None:
    """One .npy file a request that was answered."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        if outcome.answer is not None:
            np.save(out_dir / f"{outcome.name}.npy", outcome.answer.rows)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """One line a request: rows in, of them from the cache, rows out, times in ms; 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("request", no_wrap=True)
    table.add_column("voice", no_wrap=True)
    for heading in ("in", "hit", "out", "TTFT", "TTFA", "rows/s", "KV", "timeline", "client"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        answer = outcome.answer
        if answer is None:
            table.add_row(outcome.name, outcome.voice, *["-"] * 9)
            continue
        usage, rate = answer.finished.usage, answer.timing.rows_per_second
        table.add_row(
            outcome.name,
            outcome.voice,
            str(usage.prompt_rows),
            str(usage.cached_rows),
            str(usage.output_rows),
            describe_seconds(answer.timing.ttft_s),
            describe_seconds(answer.timing.ttfa_s),
            f"{rate:.1f}" if rate is not None else "-",
            str(usage.kv_checks),
            milliseconds(sum_ns(answer.finished.timeline)),
            milliseconds(answer.client_ns),
        )
    return table


def ttft_line(outcomes: Sequence[Outcome]) -> str:
    """What the prefix cache did for the time to the first row: medians of the requests that ran
    alone, hits against cold ones."""
    kinds: dict[bool, list[float]] = {False: [], True: []}
    for outcome in outcomes[: len(outcomes) * ALONE_TEXTS // len(TEXTS)]:
        if outcome.answer is not None and outcome.answer.timing.ttft_s is not None:
            hit = outcome.answer.finished.usage.cached_rows > 0
            kinds[hit].append(outcome.answer.timing.ttft_s)
    said = [
        f"{'cached' if hit else 'cold'} {describe_seconds(statistics.median(times))}"
        for hit, times in kinds.items()
        if times
    ]
    return f"TTFT of one request alone, median in ms: {', '.join(said) or 'no rows'}"


def conclude(
    outcomes: Sequence[Outcome],
    spoken_badly: Sequence[str],
    unit: Unit,
    clean: bool,
    out_dir: Path,
    console: Console,
) -> bool:
    """Say what failed, then the closing line. Returns whether nothing did."""
    problems = [*(f"{o.name}: {o.problem}" for o in outcomes if o.problem), *spoken_badly]
    if not clean:
        problems.append("the unit did not stop by itself")
    if unit.kv_checks == 0:
        problems.append("no KV was checked")
    for problem in problems:
        console.print(Text(problem, style="red"))
    console.print(Text(ttft_line(outcomes), style="bold"))
    console.print(Text(f"rows in {out_dir}/"))
    console.print(f"kv checks {unit.kv_checks}, mismatches {unit.kv_mismatches}", highlight=False)
    return not problems and unit.kv_mismatches == 0
