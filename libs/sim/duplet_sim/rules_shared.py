"""Mutants of what requests share: prefix pages, bounds, staging memory, the monolith's host."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from duplet_core import engine
from duplet_core.effects import ToEngineEffect
from duplet_core.front import FrontMachine
from duplet_core.host_state import Input as HostInput
from duplet_core.host_state import State as HostState
from duplet_core.host_stays import Stays
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_jobs import Jobs
from duplet_core.prefix import Match
from duplet_core.sources import SourcePages
from duplet_pages.prefix import RadixIndex
from duplet_sim import content
from duplet_sim.mutant import Mutants, cell, method, without_limit
from duplet_sim.staging import Staging

MUTANTS = Mutants()
mutant = MUTANTS.add


# --- the prefix cache ------------------------------------------------------------------


@mutant("prefix page freed while a request reads it", "step-write")
def prefix_freed(stack: ExitStack) -> None:
    """The cache gives up pages that are in use, and a page that it gives up is free at once."""
    evict = RadixIndex.evict

    def greedy(self: Any, count: int, in_use: Any) -> Any:
        return evict(self, count, lambda page: False)

    def free(self: Any, page: int) -> None:
        self._holds[page] -= 1
        if page not in self._free:
            self._free.append(page)

    method(stack, RadixIndex, "evict", greedy)
    method(stack, SourcePages, "release_page", free)


@mutant("prefix key over column 0 only", "prefix")
def first_column(stack: ExitStack) -> None:
    keys = RadixIndex._keys

    def narrow(self: Any, prompt: bytes, most_pages: int) -> list[bytes]:
        row_bytes = content.COLUMNS * 4
        return [
            b"".join(key[at : at + 4] for at in range(0, len(key), row_bytes))
            for key in keys(self, prompt, most_pages)
        ]

    method(stack, RadixIndex, "_keys", narrow)


@mutant("prefix matched before it is computed", "prefix")
def matched_early(stack: ExitStack) -> None:
    match = RadixIndex.match

    def at_once(self: Any, prompt: bytes, most_pages: int) -> Match:
        found = match(self, prompt, most_pages)
        pages, node = list(found.pages), self._root
        for index, key in enumerate(self._keys(prompt, most_pages)):
            node = node.children.get(key)
            if node is None:
                break
            if index >= len(found.pages):
                pages.append(node.page)
        digests = (*found.digests, *[b"soon"] * (len(pages) - len(found.pages)))
        return Match(tuple(pages), digests)

    method(stack, RadixIndex, "match", at_once)


@mutant("a mismatch forgets nothing", "liveness", timed={"damage": 6})
def forgets_nothing(stack: ExitStack) -> None:
    method(stack, Jobs, "forget_prefixes", lambda self: None)


# --- bounds ------------------------------------------------------------------------------


@mutant("the engine has any number of prompts at once", "bound")
def openwithout_limit(stack: ExitStack) -> None:
    without_limit(stack, Jobs, "start_queued", "open_limit")


@mutant("prefill's queue has no end", "bound")
def queuewithout_limit(stack: ExitStack) -> None:
    without_limit(stack, PrefillMachine, "_refusal", "queue_limit")


@mutant("lb's queue has no end", "bound")
def frontwithout_limit(stack: ExitStack) -> None:
    without_limit(stack, FrontMachine, "_refusal", "queue_limit")


# --- staging memory -----------------------------------------------------------------------


@mutant("staging slot released early", "mismatch")
def slot_released_early(stack: ExitStack) -> None:
    """Free for the next copy once it was filled, before it was scattered. The core has no staging:
    this breaks the copy engine's model, to see that the checkers would see it. kvproxy's own
    stages are broken in `tests/mutants` (`rules_kvproxy`)."""
    gather = Staging.gather

    def hasty(self: Any, copy: int, rows: Any) -> None:
        gather(self, copy, rows)
        self._free.append(self._lent[copy])

    def forget(self: Any, copy: int) -> None:
        self._lent.pop(copy, None)

    method(stack, Staging, "gather", hasty)
    method(stack, Staging, "give_back", forget)


# --- the host ------------------------------------------------------------------------------


@mutant("host: pages freed while a step names them", "step-write", host=True)
def host_frees_early(stack: ExitStack) -> None:
    def stop(self: Any, stay: Any, message: Any, now: int) -> None:
        self._out.emit(ToEngineEffect(engine.Stop(stay.seq)))
        self._end_request(stay)
        stay.state = HostState.STOPPING
        self.pages.release(stay.transfer)

    def let_go(self: Any, stay: Any, message: Any, now: int) -> None:
        self._close_seq(stay)
        self.reserved -= stay.reserved
        del self.by_transfer[stay.transfer]

    cell(stack, Stays, HostState.RUNNING, HostInput.END, stop)
    for what in (HostInput.STOPPED, HostInput.LAST_CHUNK):
        cell(stack, Stays, HostState.STOPPING, what, let_go)
