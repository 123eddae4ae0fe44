"""Mutants of what comes again: streams, instances, ids, pages that were in quarantine."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from duplet_core.decode_transfers import Transfers
from duplet_core.errors import Reason
from duplet_core.front import FrontMachine
from duplet_core.link import Link
from duplet_core.machine import Machine
from duplet_core.messages import Hello
from duplet_sim.mutant import Mutants, method

MUTANTS = Mutants()
mutant = MUTANTS.add


# --- streams and instances ---------------------------------------------------------------


@mutant("message of an older stream accepted", "ack", search="grants")
def stale_accepted(stack: ExitStack) -> None:
    take = Machine._take_message

    def lax(self: Any, event: Any, now: int) -> None:
        current = self.links[event.peer].current
        if current is not None and not isinstance(event.message, Hello):
            event = replace(event, stream=current.stream)
        take(self, event, now)

    method(stack, Machine, "_take_message", lax)


@mutant("hello supersedes another instance's stream", "superseded", timed={"zombie": 2})
def pushes_out(stack: ExitStack) -> None:
    check = Link.check_hello

    def lax(self: Any, stream: int, hello: Hello) -> Any:
        refusal = check(self, stream, hello)
        if refusal is not None and refusal.reason is Reason.OTHER_INSTANCE:
            return None
        return refusal

    method(stack, Link, "check_hello", lax)


@mutant("only the newest lifeline is remembered", "liveness", timed={"zombie": 6})
def one_lifeline(stack: ExitStack) -> None:
    watch = Link.watch

    def single(self: Any, instance: Any) -> None:
        self._watched.clear()
        watch(self, instance)

    method(stack, Link, "watch", single)


# --- ids and pages -------------------------------------------------------------------------


@mutant(
    "a late message is about whoever has the request id now",
    "foreign-rows",
    timed={"storm": 6},
    requests=8,
)
def by_request_id(stack: ExitStack) -> None:
    take = FrontMachine._take_transfer

    def lax(self: Any, message: Any, now: int) -> None:
        if message.transfer not in self.requests:
            for transfer, request in self.requests.items():
                if request.submit.request_id == message.request_id:
                    message = replace(message, transfer=transfer)
                    break
        take(self, message, now)

    method(stack, FrontMachine, "_take_transfer", lax)


@mutant("a transfer id is taken that is live", "ended-once", timed={"twice": 6})
def id_taken_twice(stack: ExitStack) -> None:
    refusal = FrontMachine._refusal

    def lax(self: Any, submit: Any) -> Any:
        live = self.requests.pop(submit.transfer, None)
        found = refusal(self, submit)
        if live is not None:
            self.requests[submit.transfer] = live
        return found

    method(stack, FrontMachine, "_refusal", lax)


@mutant("a quarantine counts at once", "bound", timed={"storm": 6})
def no_grace(stack: ExitStack) -> None:
    set_aside = Transfers._set_aside

    def counted(self: Any, t: Any, now: int) -> None:
        set_aside(self, t, now)
        self._count_at[t.transfer] = now

    method(stack, Transfers, "_set_aside", counted)
