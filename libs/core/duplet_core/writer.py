"""The writer's machine (kvproxy): grants and Aborts from decode, Moves and Drops from prefill.

What happens to one transfer stands in `writer_transfers`; here is who may speak, what a new
stream means (Reconnect), when a dead peer's mapping is closed (S12), and the writer's own
bound (S9): ends that stay withheld turn health red and then end the process, whose exit is
the proof that decode and prefill wait for.
"""

from __future__ import annotations

from typing import Any, ClassVar

from duplet_core.effects import (
    CloseMapping,
    CopyDone,
    CopyResult,
    Count,
    Drained,
    Exit,
    LifelineUp,
    SetHealth,
)
from duplet_core.errors import RemoteProtocolError
from duplet_core.ids import PROTOCOL_VERSION, InstanceId, Role
from duplet_core.link import Link
from duplet_core.machine import Machine
from duplet_core.messages import Abort, AbortAck, Drop, Grant, Hello, Leaving, Move, Route
from duplet_core.writer_state import Input, Pool, WriterConfig
from duplet_core.writer_transfers import Transfers


class WriterMachine(Machine):
    """Runs in kvproxy; owns its transfers and decides about mappings, which the mover holds."""

    ROLE = Role.KVPROXY
    _HANDLERS: ClassVar[dict[tuple[Role, type], str]] = {
        (Role.DECODE, Grant): "_take_grant",
        (Role.DECODE, Abort): "_take_abort",
        (Role.PREFILL, Move): "_take_move",
        (Role.PREFILL, Drop): "_take_drop",
    }

    def __init__(self, instance: InstanceId, config: WriterConfig) -> None:
        super().__init__(
            instance,
            (
                Link(Role.PREFILL, instance, dials=False, needs_lifeline=True),
                Link(Role.DECODE, instance, dials=False, needs_lifeline=True),
            ),
        )
        self.config = config
        self.pools: dict[InstanceId, Pool] = {}
        """Pools of instances that live, or died with copies outstanding."""
        self.transfers = Transfers(self, self._pool_of)
        self._dead: set[InstanceId] = set()
        """Dead instances whose mapping is still open; each leaves with its last copy."""
        self.ends_withheld = 0
        """As of the last event or timer; for people."""
        self.transport = ""
        """How copies go, in words for Hello and Route; the service says it, no rule reads it."""
        self._red_since: int | None = None
        self._checked_at = 0
        self._exit_told = False
        self._leaving_told: int | None = None
        """The stream on which decode was told that we leave."""
        self._drained_told = False

    def _pool_of(self, instance: InstanceId) -> Pool:
        return self.pools[instance]

    def _own_hello(self, peer: Role, number: int, to: InstanceId | None) -> Hello:
        ids = (Role.KVPROXY, self.instance, PROTOCOL_VERSION, number, to)
        return Hello(*ids, transport=self.transport)

    # --- decode -----------------------------------------------------------------

    def _take_grant(self, grant: Grant, now: int) -> None:
        dest = self._speaker(Role.DECODE)
        pool = self.pools[dest]
        if grant.rows < 1 or len(grant.pages) != -(-grant.rows // pool.page_rows):
            raise RemoteProtocolError(f"Grant: {len(grant.pages)} pages for {grant.rows} rows")
        if len(set(grant.pages)) != len(grant.pages) or not _within(grant.pages, pool.pages):
            raise RemoteProtocolError("Grant: pages repeat or lie outside decode's pool")
        t = self.transfers.by_id.get(grant.transfer)
        if t is None:
            self.transfers.open_grant(grant, dest)
        else:
            self.transfers.step(t, Input.GRANT, (grant, dest), now)

    def _take_abort(self, abort: Abort, now: int) -> None:
        dest = self._speaker(Role.DECODE)
        t = self.transfers.by_id.get(abort.transfer)
        if t is None or (t.dest is not None and t.dest != dest):
            self.send(Role.DECODE, AbortAck(abort.transfer))
        else:
            self.transfers.step(t, Input.ABORT, abort, now)

    # --- prefill ----------------------------------------------------------------

    def _take_move(self, move: Move, now: int) -> None:
        source = self._speaker(Role.PREFILL)
        pool = self.pools[source]
        if move.start_row < 0 or move.count < 1:
            raise RemoteProtocolError(f"Move: rows {move.start_row} + {move.count}")
        first = move.start_row // pool.page_rows
        last = (move.start_row + move.count - 1) // pool.page_rows
        if len(move.pages) != last - first + 1 or not _within(move.pages, pool.pages):
            raise RemoteProtocolError("Move: wrong number of pages, or outside prefill's pool")
        t = self.transfers.by_id.get(move.transfer)
        if t is None:
            if move.start_row == 0:
                self.transfers.open_move(move, source, now)
            else:
                self.transfers.release_unknown(move.transfer, source)
            return
        bad = (
            move.start_row != t.next_row
            or t.handoff is not None
            or t.source not in (None, source)
            or (t.dest is not None and move.start_row + move.count > t.rows)
        )
        self.transfers.step(t, Input.BAD_MOVE if bad else Input.MOVE, (move, source), now)

    def _take_drop(self, drop: Drop, now: int) -> None:
        source = self._speaker(Role.PREFILL)
        t = self.transfers.by_id.get(drop.transfer)
        if t is None or t.source not in (None, source):
            self.transfers.release_unknown(drop.transfer, source)
        else:
            self.transfers.step(t, Input.DROP, source, now)

    # --- peers --------------------------------------------------------------------

    def _speaker(self, peer: Role) -> InstanceId:
        current = self.links[peer].current
        assert current is not None
        return current.instance

    def _on_watched(self, event: LifelineUp, now: int) -> None:
        self.pools[event.instance] = Pool(event.peer, event.pool_pages, event.page_rows)
        if event.transport and event.transport != self.transport:
            self.transport = event.transport
            self._tell_route()

    def _tell_route(self) -> None:
        if self.links[Role.DECODE].current is not None:
            self.send(Role.DECODE, Route(self.transport, self.ends_withheld))

    def _on_up(self, peer: Role, instance: InstanceId, hello: Hello, now: int) -> None:
        if peer is Role.PREFILL:
            self._prefill_back(instance, hello, now)
        else:
            self._decode_back(instance, hello, now)

    def _prefill_back(self, source: InstanceId, hello: Hello, now: int) -> None:
        self.transfers.forget_landed(source, hello.held)
        by_id = self.transfers.by_id
        unknown = [h for h in hello.held if h not in by_id or by_id[h].source not in (None, source)]
        for t in list(by_id.values()):
            if t.source == source or (t.source is None and t.transfer in hello.held):
                self.transfers.step(t, Input.SOURCE_BACK, source, now)
        for transfer in unknown:
            self.transfers.release_unknown(transfer, source)

    def _decode_back(self, dest: InstanceId, hello: Hello, now: int) -> None:
        for transfer in hello.held:
            self._take_abort(Abort(transfer), now)
        for t in list(self.transfers.by_id.values()):
            if t.dest == dest:
                self.transfers.step(t, Input.DEST_BACK, None, now)
        if self.ends_withheld:
            self._tell_route()

    def _on_died(self, peer: Role, instance: InstanceId, now: int) -> None:
        for t in list(self.transfers.by_id.values()):
            if t.source == instance:
                self.transfers.step(t, Input.SOURCE_DIED, None, now)
            elif t.dest == instance:
                self.transfers.step(t, Input.DEST_DIED, None, now)
        if instance in self.pools:
            self._dead.add(instance)

    # --- the mover ------------------------------------------------------------------

    def _on_other(self, event: Any, now: int) -> None:
        if not isinstance(event, CopyDone):
            super()._on_other(event, now)
        elif event.result is CopyResult.OK:
            self.transfers.step_copy(event, Input.COPY_OK, now)
        elif event.result is CopyResult.NOT_STARTED:
            self.transfers.step_copy(event, Input.COPY_REFUSED, now)
        else:
            self.transfers.step_copy(event, Input.COPY_UNKNOWN, now)

    # --- bounds, mappings, timers -----------------------------------------------------

    def withheld(self, now: int) -> int:
        """Ends that cannot be told though their copies should long be done."""
        late = now - self.config.withheld_after_ns
        ending = self.transfers.ending.values()
        return sum(1 for t in ending if t.unknown or t.ending_since_ns <= late)

    def next_timer(self) -> int | None:
        if self._exit_told:
            return None
        if self._red_since is not None:
            return self._red_since + self.config.red_before_exit_ns
        if not self.transfers.ending:
            return None
        limits = (self.config.withheld_after_ns, self.config.withheld_limit_ns)
        since = [t.ending_since_ns for t in self.transfers.ending.values()]
        due = [start + limit for start in since for limit in limits]
        # A due time that has passed was acted on; only what lies ahead needs a timer.
        return min((d for d in due if d > self._checked_at), default=None)

    def _on_timer(self, now: int) -> None:
        if self._red_since is None or self._exit_told:
            return
        if now >= self._red_since + self.config.red_before_exit_ns:
            self._exit_told = True
            self.emit(Exit("ends withheld: the exit of this process is the proof"))

    def _settle(self, now: int) -> None:
        self._checked_at = now
        self._check_withheld(now)
        for instance in sorted(self._dead) if self._dead else ():
            if self.transfers.copies_of(instance) == 0:
                self._dead.remove(instance)
                del self.pools[instance]
                self.transfers.forget_landed(instance)
                self.emit(CloseMapping(instance))
        if self.draining:
            self._tell_leaving()
        if self.draining and not self._drained_told and not self.transfers.by_id:
            self._drained_told = True
            self.emit(Drained())

    def _tell_leaving(self) -> None:
        """While decode goes on granting there is no moment without a transfer."""
        decode = self.links[Role.DECODE].current
        if decode is not None and decode.stream != self._leaving_told:
            self._leaving_told = decode.stream
            self.send(Role.DECODE, Leaving())

    def _check_withheld(self, now: int) -> None:
        ending = self.transfers.ending
        withheld = self.withheld(now) if ending else 0
        if withheld != self.ends_withheld:
            self.ends_withheld = withheld
            self._tell_route()
        if self._red_since is not None or not ending:
            return
        limit = now - self.config.withheld_limit_ns
        too_old = any(t.ending_since_ns <= limit for t in ending.values())
        if withheld >= self.config.withheld_bound or too_old:
            self._red_since = now
            self.emit(Count("writer_red"))
            self.emit(SetHealth("writer", False, f"{withheld} ends withheld, exiting"))


def _within(pages: tuple[int, ...], total: int) -> bool:
    return not pages or (min(pages) >= 0 and max(pages) < total)
