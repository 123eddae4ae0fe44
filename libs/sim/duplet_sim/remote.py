"""Prefill on another host: its rows reach decode's kvproxy over TCP.

The design: between two hosts the receiving kvproxy is the writer, so a grant and its end are
local to it; a chunk that comes late is dropped by the receiver. Core has one class of writer
for both, `WriterMachine`, and here it is the receiver. Its copies have two halves, taken at any
time each: `send_chunk` reads prefill's pages into a chunk on the wire, and the copy's own write
takes the chunk off the wire and puts it into decode's pages.

What is assumed of a mover over TCP, for none is written yet:

- A copy that is cut off is reported as NOT_STARTED, and only when its sender does not read any
  more: the sender's word, or its death, comes before. So SourceReleased stays true.
- A copy whose chunk was taken off the wire is reported when its write has completed, as on one
  host: the proof of quiet is the receiver's.
- A chunk names its copy. The receiver writes it only while that copy is outstanding
  (`is_wanted`), however late it comes; nothing else stands between a late chunk and a page.
- The sender loses its half with the connection: its own death is a cut.
"""

from __future__ import annotations

from duplet_core.effects import CopyResult
from duplet_core.ids import InstanceId
from duplet_sim.content import Rows
from duplet_sim.copying import CopyKey
from duplet_sim.nodes import Interner
from duplet_sim.parts import Copy
from duplet_sim.world import World, WorldConfig


class RemoteWorld(World):
    """A world whose copies cross a network."""

    def __init__(self, config: WorldConfig, interner: Interner | None = None) -> None:
        super().__init__(config, interner)
        self.chunks: dict[CopyKey, Rows] = {}
        """What the outstanding copies have on the wire."""
        self.late: dict[CopyKey, tuple[Copy, Rows]] = {}
        """Chunks of copies that were cut off, still on their way."""

    def send_chunk(self, key: CopyKey) -> None:
        """The first half of a copy: its source rows are read."""
        self.chunks[key] = super()._read(self.copies[key])

    def _read(self, copy: Copy) -> Rows:
        """The second half finds the rows in the chunk."""
        self.marks.add("chunk received")
        return self.chunks[(copy.writer, copy.number)]

    def cut(self, key: CopyKey) -> None:
        """The connection is gone: the copy will not be written, whatever still arrives."""
        if key in self.chunks:
            self.marks.add("chunk cut off")
            self.late[key] = (self.copies[key], self.chunks[key])
        self.end_copy(key, CopyResult.NOT_STARTED)

    def take_late(self, key: CopyKey) -> None:
        """The receiver takes a late chunk off the wire."""
        copy, rows = self.late.pop(key)
        if self.is_wanted(key):
            self.copies[key], self.chunks[key] = copy, rows
            self.write_copy(key)
            self._forget_copy(key)
        else:
            self.marks.add("late chunk dropped")

    def is_wanted(self, key: CopyKey) -> bool:
        """The receiver's test of every chunk."""
        return key in self.copies

    def _forget_copy(self, key: CopyKey) -> None:
        super()._forget_copy(key)
        self.chunks.pop(key, None)

    def kill(self, instance: InstanceId) -> None:
        """What is on the wire to a dead receiver goes nowhere."""
        super().kill(instance)
        self.chunks = {key: rows for key, rows in self.chunks.items() if key[0] != instance}
        self.late = {key: chunk for key, chunk in self.late.items() if key[0] != instance}
