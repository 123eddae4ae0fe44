"""The simulator: safe over many seeds, repeatable, and it takes the rare paths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from duplet_core.decode_state import State as DecodeState
from duplet_core.effects import Effect, Send
from duplet_core.ids import InstanceId, Role
from duplet_core.messages import Credit, Hello
from duplet_core.writer_state import State as WriterState
from duplet_sim import content
from duplet_sim.parts import Process
from duplet_sim.simulate import main, simulate, trace_hash
from duplet_sim.simulator import Simulator
from duplet_sim.story import describe, tell
from duplet_sim.swarm import CHANCES, TIMED, draw

SEEDS = 8000
RARE = (
    "aborts_resent",
    "admits_refused_within_credit",
    "cached_rows",
    "closed OTHER_INSTANCE",
    "closed PEER_DIED",
    "closed STALE_STREAM",
    "closed SUPERSEDED",
    "copy waits for a staging slot",
    "copies_unknown",
    "copy hangs",
    "copy wrote after its end was unknown",
    "ended DEADLINE",
    "ended DECODE_LOST",
    "ended DRAINING",
    "ended DUPLICATE_REQUEST",
    "ended ENGINE_FAILED",
    "ended KV_MISMATCH",
    "ended OVERLOADED",
    "ended PREFILL_LOST",
    "ended PROMPT_TOO_LONG",
    "ended QUARANTINE",
    "ended TRANSFER_DEADLINE",
    "ended TRANSFER_FAILED",
    "ended WRITER_LOST",
    "engine fails",
    "grant beside quarantine",
    "grants_ignored",
    "hellos_refused",
    "mapping closed",
    "messages came together",
    "prefix_cache_forgotten",
    "red quarantine",
    "red writer",
    "refusal for quarantine while prefill computes",
    "reports_ignored",
    "stale_messages",
    "transfer id submitted twice",
    "two instances at a time",
)
"""Marks that these seeds must reach; each is a path that faults alone open."""


def test_many_seeds_are_safe_and_live_and_take_every_rare_path() -> None:
    marks: set[str] = set()
    for seed in range(SEEDS):
        simulator = Simulator(seed)
        simulator.run()
        marks |= simulator.marks
    assert [mark for mark in RARE if mark not in marks] == []


def test_a_seed_is_one_story() -> None:
    hashes = [trace_hash(seed) for seed in range(20)]
    assert hashes == [trace_hash(seed) for seed in range(20)]
    assert len(set(hashes)) == 20  # the hash sees what happens


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_is_the_same_story_in_another_process(hash_seed: str) -> None:
    program = "from duplet_sim.simulate import trace_hash; print(*map(trace_hash, range(20)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [trace_hash(seed) for seed in range(20)]


class Recounter(Simulator):
    """After each event, counts anew what machines count along."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.told: dict[InstanceId, Credit] = {}
        self.on_effect = self._note

    def _note(self, process: Process, effect: Effect) -> None:
        message = effect.message if isinstance(effect, Send) else None
        credit = message.credit if isinstance(message, Hello) else message
        if isinstance(credit, Credit):
            self.told[process.instance] = credit

    def feed(self, instance: InstanceId, event: Any, now: int | None = None) -> None:
        super().feed(instance, event, now)
        process = self.processes.get(instance)
        if process is None or process.exited or self.config.host is not None:
            return
        machine = process.node.machine
        if process.role is Role.DECODE:
            states = [t.state for t in machine.transfers.by_transfer.values()]
            assert machine.transfers.pending_aborts() == states.count(DecodeState.QUARANTINED)
            if machine.links[Role.LB].current is not None:
                assert self.told[instance] == machine._credit()
        elif process.role is Role.KVPROXY:
            known = machine.transfers.by_id.values()
            ending = [t for t in known if t.state is WriterState.ENDING]
            assert sorted(map(id, machine.transfers.ending.values())) == sorted(map(id, ending))


def test_what_is_counted_along_is_right_after_each_event() -> None:
    for seed in range(200):
        Recounter(seed).run()


def test_every_fault_is_off_in_some_seeds_and_on_in_others() -> None:
    swarms = [draw(seed) for seed in range(200)]
    for kind in TIMED:
        assert {s.timed[kind] > 0 for s in swarms} == {True, False}
    for kind in CHANCES:
        assert {s.chances[kind] > 0 for s in swarms} == {True, False}


def test_the_trace_is_a_readable_story() -> None:
    lines = tell(6)
    assert any(" <- Submit " in line for line in lines)
    assert any(" -> decode/" in line and ": Admit " in line for line in lines)
    assert not any("VIOLATION" in line for line in lines)
    assert not any("\\x" in line for line in lines)
    assert max(map(len, lines)) < 200


def test_who_reads_only_the_beginning_of_a_story_gets_that(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duplet_sim.simulate", "--seed", "6", "--trace"]
    with (tmp_path / "errors").open("w+b") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as story:
            assert story.stdout is not None
            story.stdout.close()
        assert story.returncode == 0
        errors.seek(0)
        assert errors.read() == b""


@pytest.mark.parametrize("stops_at_once", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_prompts_and_rows_are_told_apart(rows: int, stops_at_once: bool) -> None:
    prompt = content.pack_prompt(content.tags(7, 0, rows), stops_at_once)
    assert describe(prompt) == f"7:0-{rows - 1}"
    output = b"".join(content.pack_row(7, index) for index in range(rows))
    assert describe(output) == " ".join(f"7#{index}" for index in range(rows))


def test_two_processes_find_what_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1001", "--jobs", "2"]) == 0
    events = int(capsys.readouterr().out.split()[0])
    assert events == simulate(0, 1001).events


def test_the_last_line_counts_violations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "5"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("5 schedules, ")
    assert last.endswith(", 0 violations")
