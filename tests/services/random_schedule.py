"""What prefill and decode say to kvproxy, and what happens to their streams, in random order:
drawn from a seed before anything runs, so that a seed is always the same schedule.

Each transfer has a script: it begins, is granted somewhere between its Moves, ends. Scripts of
many transfers are shuffled into one another, with broken streams and stops in between.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise

from tests.services.test_kvproxy_service_faults import PAGE_ROWS, PAGES

MOST_PAGES = 7
"""Of one prompt."""
OPEN_PAGES = PAGES - MOST_PAGES
"""Of all prompts whose scripts have begun and not ended: a pool has room for one more of them when
all else has come to rest, so no script waits for pages for ever."""
PAUSES_S = (0, 0, 0, 0.001, 0.004)


class Act(Enum):
    BEGIN = auto()
    """A prompt is computed: it has pages in prefill's pool."""
    GRANT = auto()
    MOVE = auto()
    ABORT = auto()
    DROP = auto()
    END = auto()
    """Both sides give the transfer up, unless all of it was granted and moved."""
    BREAK_PREFILL = auto()
    """Its stream is closed; what was said on it may be lost."""
    BREAK_DECODE = auto()
    JUNK_MOVE = auto()
    """One against the protocol: kvproxy closes the stream."""
    JUNK_GRANT = auto()
    REOPEN = auto()
    """Both streams are there again, before anything else goes on."""
    ABORT_UNKNOWN = auto()
    STOP = auto()
    """kvproxy stands still for the pause."""
    PAUSE = auto()


DISTURBANCES = (
    (Act.BREAK_PREFILL, 2),
    (Act.BREAK_DECODE, 4),
    (Act.JUNK_MOVE, 1),
    (Act.JUNK_GRANT, 1),
    (Act.ABORT_UNKNOWN, 6),
    (Act.STOP, 1),
    (Act.PAUSE, 3),
)
"""And how often, to one another."""
BREAKS = (Act.BREAK_PREFILL, Act.BREAK_DECODE, Act.JUNK_MOVE, Act.JUNK_GRANT)


@dataclass(frozen=True)
class Step:
    act: Act
    number: int = 0
    """The transfer's; of junk, its kind."""
    rows: int = 0
    """Of the whole prompt."""
    start: int = 0
    count: int = 0
    """A Move's rows: [start, start + count)."""
    has_handoff: bool = False
    completes: bool = False
    """The last Move of a prompt whose Moves all keep the rules."""
    pause_s: float = 0.0
    """Before the step."""


def draw_schedule(seed: int, transfers: int, lost: int = 0) -> list[Step]:
    """So many transfers, numbered from 1; of them `lost` may never give their pages back."""
    chance = random.Random(seed)
    steps: list[Step] = []
    scripts: list[deque[Step]] = []
    begun = 0
    open_pages = lost * MOST_PAGES
    waiting = _draw_script(chance, 1)
    while begun < transfers or scripts:
        has_room = open_pages + _pages(waiting[0]) <= OPEN_PAGES
        if begun < transfers and has_room and (not scripts or chance.random() < 0.3):
            begun += 1
            open_pages += _pages(waiting[0])
            scripts.append(waiting)
            taken, waiting = waiting, _draw_script(chance, begun + 1)
        elif chance.random() < 0.025:
            scripts.append(_draw_disturbance(chance))
            taken = scripts[-1]
        else:
            taken = chance.choice(scripts)
        step = taken.popleft()
        pause_s = step.pause_s or chance.choice(PAUSES_S)
        steps.append(replace(step, pause_s=pause_s))
        if not taken:
            scripts = [script for script in scripts if script is not taken]
            open_pages -= _pages(step)
    return steps


def _pages(step: Step) -> int:
    return -(-step.rows // PAGE_ROWS)


def _draw_disturbance(chance: random.Random) -> deque[Step]:
    acts, weights = zip(*DISTURBANCES, strict=True)
    (act,) = chance.choices(acts, weights)
    step = Step(act, chance.getrandbits(30))
    if act in (Act.STOP, Act.PAUSE):
        step = replace(step, pause_s=chance.uniform(0.01, 0.1))
    return deque([step, Step(Act.REOPEN)] if act in BREAKS else [step])


def _draw_script(chance: random.Random, number: int) -> deque[Step]:
    rows = chance.randint(1, MOST_PAGES * PAGE_ROWS)
    script = _draw_moves(chance, number, rows)
    script.insert(chance.randint(0, len(script)), Step(Act.GRANT, number, rows))
    for act, often in ((Act.ABORT, 0.3), (Act.DROP, 0.15)):
        if chance.random() < often:
            script.insert(chance.randint(0, len(script)), Step(act, number, rows))
    return deque([Step(Act.BEGIN, number, rows), *script, Step(Act.END, number, rows)])


def _draw_moves(chance: random.Random, number: int, rows: int) -> list[Step]:
    """The whole prompt in one to four parts; sometimes one part is not what it should be."""
    parts = chance.randint(1, min(4, rows))
    borders = [0, *sorted(chance.sample(range(1, rows), parts - 1)), rows]
    moves = [Step(Act.MOVE, number, rows, start, end - start) for start, end in pairwise(borders)]
    moves[-1] = replace(moves[-1], has_handoff=True, completes=True)
    if chance.random() < 0.12:
        place = chance.randrange(parts)
        moves[place] = _spoil(chance, moves[place])
        moves[-1] = replace(moves[-1], completes=False)
    return moves


def _spoil(chance: random.Random, move: Step) -> Step:
    """A Move that begins too late or too early, has more rows than were granted, or has a
    handoff where it should not, or none. None begins at row 0 that did not: prefill never says
    its first rows twice, for kvproxy would take it for a new transfer."""
    room = -(-move.rows // PAGE_ROWS) * PAGE_ROWS - move.start - move.count
    kind = chance.randrange(4)
    if kind == 0 and room:
        return replace(move, start=move.start + 1)
    if kind == 1 and move.start > 1:
        return replace(move, start=move.start - 1)
    if kind == 2 and room:
        return replace(move, count=move.count + room)
    return replace(move, has_handoff=not move.has_handoff)
