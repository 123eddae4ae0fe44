"""What one seed draws: how large the world is, how slow its parts are, which faults happen.

Each kind of fault is off, on or extreme in a run, drawn on its own, so some runs have one
kind alone and some have all at once. Times are ticks; a message takes a few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from duplet_core.decode_state import DecodeConfig
from duplet_core.front_state import FrontConfig
from duplet_core.host_state import HostConfig
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer_state import WriterConfig
from duplet_sim.world import WorldConfig

TIMED = (
    "sever", "partition", "stop", "kill", "zombie", "jump", "storm", "drain", "orphan", "twice",
    "damage",
)  # fmt: skip
"""Faults that happen at moments; the number of moments is drawn."""

CHANCES = ("unknown", "refuse", "hang", "duplicate", "stop_row", "engine", "again", "together")
"""Faults that happen to a copy, a message, a request or a turn of an engine, each with a
drawn chance."""


LARGE = 0.06
"""The share of large worlds."""


@dataclass(frozen=True, slots=True)
class Swarm:
    """The plan of one run."""

    config: WorldConfig
    length: int
    """Ticks of the phase with faults."""
    by_turns: bool
    """Prefill's engine computes its prompts by turns, not one after the other."""
    cold: bool
    """That phase begins before the services have found each other."""
    requests: int
    arrival_ticks: int
    """They come within so many ticks."""
    probe: bool
    """In the end a new request must be served."""
    voices: int
    """Beginnings that prompts share."""
    voice_rows: int
    text_rows: int
    """Most rows of a prompt behind its voice."""
    longest_output: int
    timed: dict[str, int]
    chances: dict[str, float]
    message_ticks: int
    engine_ticks: int
    copy_ticks: int
    notice_ticks: int
    """Until a side notices a broken stream, or the kernel tells a death."""
    restart_ticks: int
    deadline: int
    """Of requests."""


def draw(seed: int) -> Swarm:
    """Most worlds are small: few requests that come close together, few faults. What it takes
    to break a rule is seldom more than that, and it is found sooner by trying more often."""
    rng = Random(f"swarm {seed}")
    large = rng.random() < LARGE
    length = rng.choice((400, 800, 1600) if large else (100, 200, 400))
    page_rows = rng.choice((1, 2, 4))
    voices = rng.choice((0, 1, 2, 4))
    pages = rng.choice((6, 8, 12) if voices else (4, 6, 8, 12))
    off = rng.choice((0.3, 0.6, 0.85) if large else (0.7, 0.85, 0.95))
    often = (1, 1, 2, 6) if large else (1, 1, 2)
    timed = {kind: 0 if rng.random() < off else rng.choice(often) for kind in TIMED}
    chances = {
        kind: 0.0 if rng.random() < off else rng.choice((0.05, 0.05, 0.3)) for kind in CHANCES
    }
    copy_ticks = rng.choice((2, 5, 40, 150))
    config = WorldConfig(
        DecodeConfig(
            pages,
            page_rows,
            slots=rng.choice((1, 2, 4, 8)),
            longest_sequence=page_rows * pages,
            spec="spec",
            transfer_deadline_ns=rng.choice((60, 300)),
            quarantine_percent=rng.choice((25, 25, 50, 75)),
            quarantine_grace_ns=rng.choice((0, 0, 50)),
        ),
        PrefillConfig(
            rng.choice((3, 3, 5, 12) if voices else (2, 2, 4, 12)),
            page_rows,
            "spec",
            rng.choice((1, 1, 4)),
            open_limit=rng.choice((1, 2, 32)),
        ),
        WriterConfig(3, rng.choice((50, 200)), 700, 20),
        FrontConfig(rng.choice((1, 4, 64)), rng.choice((20, 200))),
        chunk_rows=rng.choice((1, page_rows, page_rows * 2)),
        depth=rng.choice((1, 2)),
        prefix=voices > 0,
        staging=rng.choice((0, 0, 0, 1, 3)),
    )
    if rng.random() < 0.1:
        config = replace(config, host=host_config(config.decode, rng.choice((1, 4, 64))))
    return Swarm(
        config,
        length,
        by_turns=rng.random() < 0.5,
        cold=large and rng.random() < 0.5,
        requests=rng.choice((2, 4, 6, 8) if large else (1, 2, 3, 4)),
        arrival_ticks=rng.choice((1, 20, length)),
        probe=large or rng.random() < 0.1,
        voices=voices,
        voice_rows=rng.randint(page_rows, page_rows * 2),
        text_rows=page_rows * rng.choice((1, 2)),
        longest_output=rng.choice((2, 4, 6)),
        timed=timed,
        chances=chances,
        message_ticks=rng.choice((2, 6, 40)),
        engine_ticks=rng.choice((3, 10, 40)),
        copy_ticks=copy_ticks,
        notice_ticks=rng.choice((5, 50, 200)),
        restart_ticks=rng.choice((10, 100)),
        deadline=rng.choice((400, 2000)),
    )


def host_config(decode: DecodeConfig, queue_limit: int) -> HostConfig:
    """A monolith's host with decode's pool."""
    rows = (decode.page_rows, decode.slots, decode.longest_sequence)
    return HostConfig(decode.pages, *rows, "spec", queue_limit)
