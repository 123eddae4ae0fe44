"""One run of the canary between two addresses, from the first question to the verdict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from duplet_canary.ear import EarPool
from duplet_canary.equivalence import MARGIN, Difference
from duplet_canary.journal import open_journal
from duplet_canary.plan import Jobs, Pair, Plan
from duplet_canary.recognisers import RecogniserName, describe_recogniser
from duplet_canary.speaker import GrpcSpeaker
from duplet_canary.tally import Tally
from duplet_canary.utterances import (
    Length,
    Utterance,
    digest_of,
    made_utterances,
    read_utterances,
)
from duplet_canary.verdict import Judgement, judge
from duplet_canary.watch import Sides, Watch, observe
from duplet_client import AsyncClient, GenerateError, Unit
from duplet_client.client import DEFAULT_TIMEOUT_S
from duplet_client.front_end import front_end
from duplet_core.errors import InvalidInput, Reason, Unavailable
from duplet_core.ids import Role
from duplet_pages.spec import ModelSpec
from duplet_runtime.metrics import Metrics

HEARD_MODEL = "wren"
"""The model whose rows can be made audible."""
CPU_KV_HASH = "xxh3-128"
"""Page digest of engines on a CPU."""
NAMED_VOICES = ("ada", "bo", "cleo", "dee")
"""Of models that make a voice up from any name."""

LEAST_PAIRS = 1_000
"""A run is not ended for its power before."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of a run."""

    pairs: int = 0
    """In all, with those of the log; 0: until stopped."""
    minutes: float = 0.0
    """Nothing new is sent after so long; 0: no limit."""
    enough_power: float = 0.0
    """From `LEAST_PAIRS` on, nothing new is sent once the equivalence test has so much; 0: not
    asked. What ends the run then is how much pairs scatter, never how the sides differ."""
    at_once: int = 8
    """Pairs that are spoken at the same time."""
    lengths: tuple[Length, ...] = tuple(Length)
    texts: Path | None = None
    """A file of utterances instead of made ones."""
    voices: tuple[str, ...] = ()
    """Empty: all."""
    recogniser: RecogniserName = RecogniserName.PHONEMES
    listeners: int = 1
    """Processes that listen."""
    other_seeds: bool = False
    first_seed: int = 0
    margin: float = MARGIN
    log: Path | None = None
    metrics_port: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Of one request."""
    damaged_pages: int = 0
    """What the unit was told to damage; the log must know."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    tally: Tally
    judgement: Judgement
    rows_must_equal: bool
    kv: str
    """The unit's own word on its KV, since it started."""


@dataclass(slots=True)
class Canary:
    """An open run. Owned by `open_canary`, with all that it uses."""

    options: Options
    watch: Watch
    rows_must_equal: bool
    unit: AsyncClient = field(repr=False)

    async def run(self) -> Result:
        """Send pairs until the options or `watch.stop` end it."""
        loop, minutes = asyncio.get_running_loop(), self.options.minutes
        timer = loop.call_later(60 * minutes, self.watch.stop) if minutes else None
        try:
            await self.watch.run(self.options.pairs, self.options.at_once)
        finally:
            if timer is not None:
                timer.cancel()
        tally = self.watch.tally
        judgement = judge(tally, self.options.margin, rows_must_equal=self.rows_must_equal)
        return Result(tally, judgement, self.rows_must_equal, await self._ask_kv())

    async def _ask_kv(self) -> str:
        try:
            told = await self.unit.unit()
        except GenerateError as error:  # it may be gone; what was heard stays true
            return f"kv checks not known: {error}"
        damage = f"; damaged on purpose: {told.damaged_pages} of every prompt's pages"
        said = f"kv checks {told.kv_checks}, mismatches {told.kv_mismatches}"
        return f"{said}{damage if told.damaged_pages else ''}"


@asynccontextmanager
async def open_canary(
    options: Options,
    monolith_address: str,
    unit_address: str,
    on_pair: Callable[[Watch, Pair], None],
) -> AsyncIterator[Canary]:
    """Ask both sides who they are, read the log, start the listeners.

    `on_pair` is called after each new pair.

    Raises:
        GenerateError: a side does not answer.
        InvalidInput: the sides, the options or the log do not fit together.
        Unavailable: NOT_READY; a side is not complete yet.
        SettingsError: the metrics port is taken.
    """
    async with AsyncExitStack() as stack:
        monolith = await stack.enter_async_context(AsyncClient(monolith_address))
        unit = await stack.enter_async_context(AsyncClient(unit_address))
        sides_say = await monolith.unit(), await unit.unit()
        check_kinds(*sides_say)
        spec = common_spec(*map(_known_spec, sides_say))
        made = front_end(spec)
        if made is None:
            raise _invalid(f"model: {spec.name} has no text front end; nothing can be said")
        utterances = _utterances(options)
        plan = make_plan(options, spec, utterances)
        if options.texts is not None:  # nobody has tried these before
            for utterance in utterances:
                made.rows(utterance.text, plan.voices[0])
        ear = None
        if options.recogniser is not RecogniserName.NONE:
            pool = EarPool(options.recogniser, spec, options.listeners)
            ear = await stack.enter_async_context(pool)
        journal, done = stack.enter_context(open_journal(options.log, plan))
        sides = Sides(
            GrpcSpeaker(monolith, spec, options.timeout_s),
            GrpcSpeaker(unit, spec, options.timeout_s),
            made.rows,
            ear,
        )
        rows_must_equal = must_rows_be_equal(options, spec)

        def after(pair: Pair) -> None:
            on_pair(watch, pair)
            if has_enough_power(watch.difference, options):
                watch.stop()

        watch = Watch(
            sides,
            Jobs(plan, utterances),
            journal,
            done,
            margin=options.margin,
            rows_must_equal=rows_must_equal,
            on_pair=after,
        )
        metrics = Metrics("canary")
        observe(watch, metrics)
        metrics.serve(options.metrics_port)
        stack.callback(metrics.close)
        yield Canary(options, watch, rows_must_equal, unit)


def has_enough_power(difference: Difference | None, options: Options) -> bool:
    """Whether the run may end for its power."""
    if not options.enough_power or difference is None or difference.pairs < LEAST_PAIRS:
        return False
    return difference.power(options.margin) >= options.enough_power


def must_rows_be_equal(options: Options, spec: ModelSpec) -> bool:
    """Whether both sides must answer with the same rows: on CPUs in float32, where they depend on
    neither company nor chunks nor process, and from the same seed."""
    exact = spec.kv_hash == CPU_KV_HASH and spec.dtype == "float32"
    return exact and not options.other_seeds


def _utterances(options: Options) -> tuple[Utterance, ...]:
    if options.texts is not None:
        return read_utterances(options.texts)
    return made_utterances(options.lengths)


def make_plan(options: Options, spec: ModelSpec, utterances: tuple[Utterance, ...]) -> Plan:
    """
    Raises:
        InvalidInput: INVALID_REQUEST; an unknown voice, a recogniser that is not installed, or
            a model that nobody can hear.
    """
    heard = options.recogniser is not RecogniserName.NONE
    if heard and spec.name != HEARD_MODEL:
        raise _invalid(
            f"recogniser: rows of {spec.name} cannot be made audible, only those of "
            f"{HEARD_MODEL}; compare rows alone with '{RecogniserName.NONE}'"
        )
    known = _known_voices() if spec.name == HEARD_MODEL else ()
    unknown = [voice for voice in options.voices if known and voice not in known]
    if unknown:
        raise _invalid(f"voices: no voice {unknown[0]!r}; there are {', '.join(known)}")
    return Plan(
        model=f"{spec.name} {spec.fingerprint}",
        recogniser=describe_recogniser(options.recogniser),
        texts=digest_of(utterances),
        voices=options.voices or known or NAMED_VOICES,
        first_seed=options.first_seed,
        other_seeds=options.other_seeds,
        damaged_pages=options.damaged_pages,
    )


def _known_voices() -> tuple[str, ...]:
    # Reads files of the model; other models need none of it.
    from duplet_voice.voices import load_voices

    return tuple(load_voices().names)


def common_spec(monolith: ModelSpec, unit: ModelSpec) -> ModelSpec:
    """The model of both sides.

    Raises:
        InvalidInput: INVALID_REQUEST; they have two.
    """
    if monolith.fingerprint != unit.fingerprint:
        raise _invalid(
            f"model: the monolith has {monolith.name} {monolith.fingerprint}, the unit "
            f"{unit.name} {unit.fingerprint}; two models cannot be compared"
        )
    return unit


def check_kinds(monolith: Unit, unit: Unit) -> None:
    """See that one side is a monolith, whose prefill and decode are one process, and the other a
    unit, whose are two.

    Raises:
        Unavailable: NOT_READY; a side has no prefill or no decode now.
        InvalidInput: INVALID_REQUEST; a side is what the other should be.
    """
    if not _is_one_process(monolith, "monolith"):
        raise _invalid("monolith: a unit answers there: its prefill and decode are two processes")
    if _is_one_process(unit, "unit"):
        raise _invalid("unit: a monolith answers there: its prefill and decode are one process")


def _is_one_process(side: Unit, name: str) -> bool:
    instances = {service.name: service.instance for service in side.services}
    prefill, decode = instances.get(Role.PREFILL, ""), instances.get(Role.DECODE, "")
    if not prefill or not decode:
        missing = Role.DECODE if prefill else Role.PREFILL
        raise Unavailable(Reason.NOT_READY, f"{name}: it has no {missing} now")
    return prefill == decode


def _known_spec(side: Unit) -> ModelSpec:
    if side.spec is None:
        raise Unavailable(Reason.NOT_READY, "a side does not know its model yet")
    return side.spec


def _invalid(detail: str) -> InvalidInput:
    return InvalidInput(Reason.INVALID_REQUEST, detail)
