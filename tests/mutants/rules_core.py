"""Rules of the machines that no simulated peer can show, for none of them breaks its own word."""

from __future__ import annotations

from tests.mutants.rule import Rule

FRONT = "tests/core/test_core_front.py"
WRITER = "tests/core/test_core_writer_table.py"
BOUNDS = "tests/core/test_core_bounds.py"
LINK = "tests/core/test_core_link.py"

MACHINES = (
    Rule(
        "a copy ends a second time",
        "duplet_core.writer_transfers",
        "        t = self._by_copy.pop(done.copy, None)\n",
        "        t = self._by_copy.get(done.copy)\n",
        (f"{WRITER}::test_a_copy_ends_once",),
    ),
    Rule(
        "copies that take their time count as withheld",
        "duplet_core.writer",
        "for t in ending if t.unknown or t.ending_since_ns <= late)",
        "for t in ending)",
        (f"{BOUNDS}::test_s9_an_abort_storm_during_healthy_copies_does_not_turn_red",),
    ),
    Rule(
        "an older instance answers a hello after a newer one's lifeline came",
        "duplet_core.link",
        "known = hello.instance == self.watched if self.dials else hello.instance in self._watched",
        "known = hello.instance in self._watched",
        (f"{LINK}::test_a_newer_lifeline_voids_the_hello_on_its_way_to_the_older_instance",),
    ),
    Rule(
        "a stream id that is in use is taken over",
        "duplet_core.front",
        "        if message.stream_id in self._by_stream:\n",
        "        if False:\n",
        (f"{FRONT}::test_a_stream_id_that_is_in_use_breaks_the_protocol",),
    ),
    Rule(
        "a unit is ready whose decode takes nothing new",
        "duplet_core.front",
        'return "" if refusing is None else f"{refusing[0]} takes nothing new: {refusing[1]}"',
        'return ""',
        (f"{FRONT}::test_a_unit_whose_decode_takes_nothing_new_is_not_ready_and_says_why",),
    ),
)
