"""The copy engine of a world: an actor of its own.

A queued copy goes on while the process that ordered it is stopped, may stand half done, and
may be reported as failed and write all the same. Where copies are staged, one reads all its
rows into a slot first, and waits for its turn when none is free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from duplet_core.effects import CopyDone, CopyResult
from duplet_core.ids import InstanceId
from duplet_sim import checks, content
from duplet_sim.content import Rows
from duplet_sim.parts import Copy, Process
from duplet_sim.violation import Violation

CopyKey = tuple[InstanceId, int]


class CopyEngine:
    """The part of a world that moves bytes. Owns the queued copies."""

    processes: dict[InstanceId, Process]
    marks: set[str]
    now: int

    def __init__(self) -> None:
        self.copies: dict[CopyKey, Copy] = {}

    def touch(self, instance: InstanceId) -> Process:
        raise NotImplementedError

    def feed(self, instance: InstanceId, event: Any, now: int | None = None) -> None:
        raise NotImplementedError

    def note(self, subject: str, what: str) -> None:
        raise NotImplementedError

    def work(self, kind: str, key: Any) -> None:
        raise NotImplementedError

    def write_copy(self, key: CopyKey, rows: int | None = None) -> None:
        """The copy writes bytes: `rows` more of them, or all that are left."""
        copy = self.copies[key]
        left = copy.count - copy.written
        rows = left if rows is None else min(rows, left)
        dest, writer = self.processes.get(copy.dest), self.processes[copy.writer]
        if dest is None:
            raise Violation("unmapped", f"{copy.transfer} touches a pool that is gone")
        checks.check_mapped(copy, writer)
        checks.check_written(copy, dest)
        checks.check_lone_writer(self.processes, dest, copy.transfer, copy.dest_pages)
        staging, skip = writer.staging, copy.written
        moved = self._read(copy) if staging is None else staging.scatter(copy.number)
        dest = self.touch(copy.dest)
        row = copy.start + skip
        at = row // dest.page_rows - copy.start // dest.page_rows
        tags = moved[skip : skip + rows]
        content.write_rows(dest.rows, copy.dest_pages[at:], row, tags, dest.page_rows)
        self.copies[key] = replace(copy, written=skip + rows)
        self.note(key[0], f"copy {key[1]} of {copy.transfer} writes rows {row} + {rows}")
        if copy.told:
            self.marks.add("copy wrote after its end was unknown")

    def gather_copy(self, key: CopyKey) -> bool:
        """The copy reads all its rows into a staging slot; False, nothing done: none is free."""
        copy = self.copies[key]
        staging = self.processes[copy.writer].staging
        assert staging is not None
        if not staging.has_room():
            self.marks.add("copy waits for a staging slot")
            staging.waiting.append(copy.number)
            return False
        checks.check_mapped(copy, self.processes[copy.writer])
        staging.gather(copy.number, self._read(copy))
        return True

    def _read(self, copy: Copy) -> Rows:
        """What the copy's source pages hold now."""
        source = self.processes.get(copy.source)
        if source is None:
            raise Violation("unmapped", f"{copy.transfer} reads from a pool that is gone")
        checks.check_read(copy, source)
        held: list[int] = []
        for page in copy.source_pages:
            held += source.rows[page]
        skip = copy.start % source.page_rows
        return tuple(held[skip : skip + copy.count])

    def end_copy(self, key: CopyKey, result: CopyResult) -> None:
        """The mover reports a copy: OK (all written), NOT_STARTED, or UNKNOWN (it goes on)."""
        copy = self.copies[key]
        if result is CopyResult.UNKNOWN:
            self.copies[key] = replace(copy, told=True)
        else:
            self._forget_copy(key)
        writer = self.processes[copy.writer]
        done = CopyDone(copy.number, result, "simulated", self.now + writer.skew)
        self.feed(copy.writer, done)

    def cancel_copy(self, key: CopyKey) -> None:
        """The transfer is over: a copy that waits for its turn never begins."""
        copy = self.copies.get(key)
        staging = self.processes[key[0]].staging
        if copy is not None and staging is not None and copy.number in staging.waiting:
            staging.waiting.remove(copy.number)
            self.work("cancelled", key)

    def _forget_copy(self, key: CopyKey) -> None:
        del self.copies[key]
        staging = self.processes[key[0]].staging
        if staging is not None:
            staging.give_back(key[1])
            if staging.waiting:
                self.work("copy", (key[0], staging.waiting.popleft()))
