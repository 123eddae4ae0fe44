"""One machine and its clock, with the words to connect it, feed it and break it."""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, TypeVar

from duplet_core import engine
from duplet_core.decode import DecodeMachine
from duplet_core.decode_state import DecodeConfig
from duplet_core.decode_transfers import Transfers as DecodeTransfers
from duplet_core.effects import (
    CopyDone,
    CopyResult,
    Effect,
    Event,
    FromEngineEvent,
    InstanceDied,
    LifelineUp,
    Received,
    StartCopy,
    StreamClosed,
    StreamOpened,
)
from duplet_core.errors import Reason
from duplet_core.front import FrontMachine
from duplet_core.front_state import FrontConfig
from duplet_core.ids import InstanceId, Role, TransferId
from duplet_core.ledger import PageState
from duplet_core.machine import Machine
from duplet_core.messages import Credit, Message
from duplet_core.prefill import PrefillMachine
from duplet_core.prefill_state import PrefillConfig
from duplet_core.writer import WriterMachine
from duplet_core.writer_state import WriterConfig
from tests.core.samples import (
    DECODE1,
    DECODE_CONFIG,
    LB1,
    NAMES,
    PAGE_ROWS,
    PREFILL1,
    PREFILL_CONFIG,
    SPEC,
    WRITER1,
    hello,
    pick,
)

AnyMachine = TypeVar("AnyMachine", bound=Machine)


class Driver(Generic[AnyMachine]):
    """A machine under test. Streams are numbered by the driver, growing."""

    def __init__(self, machine: AnyMachine) -> None:
        self.machine = machine
        self.now = 1_000
        self._last_stream = 0

    def feed(self, event: Event) -> list[Effect]:
        return self.machine.receive(event, self.now)

    def hear(self, peer: Role, message: Message) -> list[Effect]:
        """The peer's current stream delivers a message."""
        return self.feed(Received(peer, self.stream(peer), message))

    def stream(self, peer: Role) -> int:
        current = self.machine.links[peer].current
        assert current is not None
        return current.stream

    def connect(
        self,
        peer: Role,
        instance: InstanceId | None = None,
        held: tuple[TransferId, ...] = (),
        spec: str = SPEC,
        credit: Credit | None = None,
        refusing: Reason | None = None,
    ) -> list[Effect]:
        """Lifeline where it is needed, a new stream, both Hellos."""
        instance = NAMES[peer] if instance is None else instance
        link = self.machine.links[peer]
        effects: list[Effect] = []
        if link.needs_lifeline and link.watched != instance:
            effects += self.feed(LifelineUp(peer, instance, pool_pages=16, page_rows=PAGE_ROWS))
        self._last_stream += 1
        number = self._last_stream
        if link.dials:
            effects += self.feed(StreamOpened(peer, number))
        said = hello(
            peer, instance, number, to=self.machine.instance, held=held, spec=spec, credit=credit
        )
        said = replace(said, refusing=refusing)
        effects += self.feed(Received(peer, number, said))
        assert link.current is not None and link.current.stream == number, "refused"
        return effects

    def lose(self, peer: Role) -> list[Effect]:
        """The peer's stream ends."""
        return self.feed(StreamClosed(peer, self.stream(peer)))

    def bury(self, peer: Role, instance: InstanceId | None = None) -> list[Effect]:
        """The kernel says that the instance has exited."""
        return self.feed(InstanceDied(peer, NAMES[peer] if instance is None else instance))

    def tick(self, later_ns: int = 0) -> list[Effect]:
        """Time passes, then the timer runs."""
        self.now += later_ns
        return self.machine.handle_timer(self.now)

    def say(self, message: engine.FromEngine) -> list[Effect]:
        """The engine speaks."""
        return self.feed(FromEngineEvent(message))


class DecodeDriver(Driver[DecodeMachine]):
    def __init__(self, config: DecodeConfig = DECODE_CONFIG, *, connected: bool = True) -> None:
        super().__init__(DecodeMachine(DECODE1, config))
        if connected:
            self.connect(Role.KVPROXY)
            self.connect(Role.LB)

    @property
    def transfers(self) -> DecodeTransfers:
        return self.machine.transfers

    def pages(self, state: PageState) -> int:
        self.transfers.ledger.check()
        return self.transfers.ledger.count(state)


class PrefillDriver(Driver[PrefillMachine]):
    def __init__(self, config: PrefillConfig = PREFILL_CONFIG, *, connected: bool = True) -> None:
        super().__init__(PrefillMachine(PREFILL1, config))
        if connected:
            self.connect(Role.KVPROXY)
            self.connect(Role.LB)

    @property
    def free_pages(self) -> int:
        self.machine.jobs.pages.check()
        return self.machine.jobs.pages.free


class WriterDriver(Driver[WriterMachine]):
    """Remembers the copies that the machine asked for and that have not ended."""

    def __init__(self, config: WriterConfig | None = None, *, connected: bool = True) -> None:
        super().__init__(WriterMachine(WRITER1, config or WriterConfig()))
        self.copies: list[StartCopy] = []
        if connected:
            self.connect(Role.DECODE)
            self.connect(Role.PREFILL)

    def feed(self, event: Event) -> list[Effect]:
        effects = super().feed(event)
        self.copies += pick(effects, StartCopy)
        return effects

    def end_copy(self, result: CopyResult = CopyResult.OK, *, started_ns: int = 0) -> list[Effect]:
        """The oldest copy ends."""
        copy = self.copies.pop(0)
        return self.feed(CopyDone(copy.copy, result, "as the test wants", self.now, started_ns))


class FrontDriver(Driver[FrontMachine]):
    """lb; the credit that decode told is the driver's to change."""

    def __init__(self, config: FrontConfig | None = None, *, connected: bool = True) -> None:
        super().__init__(FrontMachine(LB1, config or FrontConfig()))
        if connected:
            self.connect(Role.PREFILL)
            self.connect(Role.DECODE, credit=Credit(16, 16, 4, 0))
