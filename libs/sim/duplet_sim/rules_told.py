"""Mutants of what services tell each other: who refuses, who leaves, what has landed, what is
withheld.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from duplet_core.decode import DecodeMachine
from duplet_core.front import FrontMachine
from duplet_core.ids import Role
from duplet_core.messages import Handed, Leaving, Refusing, SourceReleased
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_jobs import Jobs
from duplet_core.prefill_state import Input, State
from duplet_core.writer import WriterMachine
from duplet_core.writer_transfers import Transfers
from duplet_sim.mutant import Mutants, cell, method, without_limit

MUTANTS = Mutants()
mutant = MUTANTS.add


def _never_sends(stack: ExitStack, owner: Any, kind: type) -> None:
    """The machine believes that it has told it."""
    send = owner.send

    def silent(self: Any, peer: Role, message: Any, only: Any = None) -> bool:
        return isinstance(message, kind) or send(self, peer, message, only)

    method(stack, owner, "send", silent)


# --- Refusing ------------------------------------------------------------------------


@mutant("prefill does not say that it refuses", "untold")
def silent_refusal(stack: ExitStack) -> None:
    _never_sends(stack, PrefillMachine, Refusing)


@mutant("prefill's hello does not say that it refuses", "untold")
def silent_hello(stack: ExitStack) -> None:
    own = PrefillMachine._own_hello

    def welcoming(self: Any, peer: Role, number: int, to: Any) -> Any:
        return replace(own(self, peer, number, to), refusing=None)

    method(stack, PrefillMachine, "_own_hello", welcoming)


@mutant("prefill does not say that it takes prompts again", "untold")
def silent_welcome(stack: ExitStack) -> None:
    send = PrefillMachine.send

    def sour(self: Any, peer: Role, message: Any, only: Any = None) -> bool:
        return message == Refusing(None) or send(self, peer, message, only)

    method(stack, PrefillMachine, "send", sour)


@mutant("lb gives requests to who refuses", "bound")
def deaf_front(stack: ExitStack) -> None:
    method(stack, FrontMachine, "_refusing", lambda self: None)


# --- Handed, and leaving ----------------------------------------------------------------


@mutant("a landing is not told to lb", "leaving", timed={"drain": 6})
def never_handed(stack: ExitStack) -> None:
    _never_sends(stack, PrefillMachine, Handed)


@mutant("prefill leaves before what it handed over has landed", "leaving", timed={"drain": 6})
def leaves_early(stack: ExitStack) -> None:
    settle = PrefillMachine._settle

    def hasty(self: Any, now: int) -> None:
        """It has drained when its engine has nothing more to do."""
        known = self.jobs.by_transfer
        if self.draining and all(j.state in (State.HANDED, State.OWED) for j in known.values()):
            self.jobs.by_transfer = {}
        settle(self, now)
        self.jobs.by_transfer = known

    method(stack, PrefillMachine, "_settle", hasty)


@mutant("a writer that leaves does not say so", "untold", timed={"drain": 6})
def silent_leaving(stack: ExitStack) -> None:
    _never_sends(stack, WriterMachine, Leaving)


@mutant("a writer that leaves says so on one stream only", "untold", timed={"drain": 6, "sever": 6})
def leaving_once(stack: ExitStack) -> None:
    tell = WriterMachine._tell_leaving

    def once(self: Any) -> None:
        if self._leaving_told is None:
            tell(self)

    method(stack, WriterMachine, "_tell_leaving", once)


@mutant("decode grants to a writer that leaves", "bound", timed={"drain": 6})
def grants_to_leaver(stack: ExitStack) -> None:
    method(stack, DecodeMachine, "_take_leaving", lambda self, leaving, now: None)


# --- the memory of landings ----------------------------------------------------------------


@mutant("landings are not remembered", "untold", timed={"sever": 6})
def forgets_landings(stack: ExitStack) -> None:
    method(stack, Transfers, "_remember_landed", lambda self, transfer, source: None)


@mutant(
    "a landing is remembered until it is asked for once", "untold", timed={"sever": 6}, seeds=4000
)
def forgets_when_asked(stack: ExitStack) -> None:
    release = Transfers.release_unknown

    def once(self: Any, transfer: Any, source: Any) -> None:
        release(self, transfer, source)
        self._landed.get(source, {}).pop(transfer, None)

    method(stack, Transfers, "release_unknown", once)


@mutant("the memory of landings has no end", "bound")
def remembers_all(stack: ExitStack) -> None:
    def remember(self: Any, transfer: Any, source: Any) -> None:
        self._landed.setdefault(source, {})[transfer] = None

    method(stack, Transfers, "_remember_landed", remember)


@mutant("prefill believes that all it handed over has landed", "liveness", search="handoff")
def believes_in_landings(stack: ExitStack) -> None:
    paid = Jobs._paid

    def landed(self: Any, job: Any, message: Any, now: int) -> None:
        paid(self, job, message and SourceReleased(message.transfer, landed=True), now)

    cell(stack, Jobs, State.HANDED, Input.RELEASED, landed)


# --- what is withheld ------------------------------------------------------------------------


@mutant("any number of ends may be withheld", "bound", chances={"unknown": 0.9}, requests=8)
def withholds_many(stack: ExitStack) -> None:
    without_limit(stack, WriterMachine, "_check_withheld", "withheld_bound")


@mutant("an end may be withheld for any time", "liveness", chances={"hang": 0.3})
def withholds_long(stack: ExitStack) -> None:
    without_limit(stack, WriterMachine, "_check_withheld", "withheld_limit_ns")
