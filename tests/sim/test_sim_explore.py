"""The explorer at a scope that ends within seconds, and its power to find what is there."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest

from duplet_core.decode import DecodeMachine
from duplet_core.decode_state import DecodeConfig
from duplet_core.effects import LifelineUp
from duplet_core.ids import InstanceId, Role
from duplet_core.writer import WriterMachine
from duplet_core.writer_state import WriterConfig
from duplet_sim.explore import Job, find_missing, main, search, shares
from duplet_sim.hazards import label, labels
from duplet_sim.mutants import MUTANTS
from duplet_sim.remote import RemoteWorld
from duplet_sim.scopes import SCOPES, Scope
from duplet_sim.search import Explorer
from duplet_sim.snapshot import clone, freeze
from duplet_sim.violation import Violation

SMALL = Scope("small", 1, 0, 1)


def test_a_small_scope_ends_complete() -> None:
    explorer = Explorer(SMALL)
    states = explorer.run()
    assert explorer.complete
    assert states > 400


def test_copies_that_fail_are_safe_too() -> None:
    explorer = Explorer(replace(SMALL, faults=1, kinds=("unknown", "refuse")))
    explorer.run()
    assert explorer.complete


@pytest.mark.parametrize("name", ["parts", "handoff", "grants"])
def test_broken_streams_are_safe_at_every_moment(name: str) -> None:
    explorer = Explorer(SCOPES[name])
    explorer.run()
    assert explorer.complete


def test_the_writer_may_exit_at_every_moment() -> None:
    scope = replace(SMALL, chunk_rows=2, faults=1, cancels=0, kinds=("kill",))
    explorer = Explorer(replace(scope, killable=(Role.KVPROXY,)))
    explorer.run()
    assert explorer.complete


def test_everybody_may_be_stopped_at_every_moment() -> None:
    explorer = Explorer(replace(SMALL, faults=2, kinds=("stop",)))
    explorer.run()
    assert explorer.complete


def test_two_requests_after_each_other_share_pages_safely() -> None:
    explorer = Explorer(replace(SMALL, requests=2, chunk_rows=2))
    explorer.run()
    assert explorer.complete


def test_prompts_of_one_voice_share_pages_safely() -> None:
    scope = replace(SCOPES["voice"], requests=2, faults=0, spread=False)
    explorer = Explorer(scope)
    explorer.run()
    assert explorer.complete
    shared = Explorer(replace(scope, voice_rows=0)).run()
    assert shared != len(explorer.parents)  # the voice makes a difference


def test_a_message_that_comes_twice_ends_nothing_for_ever() -> None:
    scope = replace(SMALL, cancels=0, faults=1, chunk_rows=2, kinds=("twice",))
    explorer = Explorer(scope)
    explorer.run()
    assert explorer.complete


REMOTE = replace(SCOPES["remote"], requests=1, kinds=("cut",), spread=False)


def test_chunks_from_another_host_may_come_at_any_time() -> None:
    explorer = Explorer(REMOTE)
    explorer.run()
    assert explorer.complete


def test_a_late_chunk_that_is_written_is_found() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteWorld, "is_wanted", lambda self, key: True)
        with pytest.raises(Violation) as caught:
            Explorer(REMOTE).run()
    assert caught.value.invariant == "late-write"


ANSWERS = {
    "free on deadline": SMALL,
    "free on lost health checks": SCOPES["grants"],
}
"""Two answers to the page's question that failed review, and where they are seen to be wrong."""


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_failed_review_is_found(name: str) -> None:
    assert _verdict(name, ANSWERS[name], reduced=True) == "late-write"


def _verdict(name: str, scope: Scope, reduced: bool) -> str:
    """Which invariant a mutant breaks."""
    (mutant,) = [m for m in MUTANTS if m.name == name]
    with ExitStack() as stack:
        mutant.apply(stack)
        try:
            Explorer(scope, reduced=reduced).run()
        except Violation as violation:
            return violation.invariant
    return ""


@pytest.mark.parametrize(
    "name",
    [
        "free on deadline",
        "free on abort",
        "ack before the event",
        "grant that survives its abort",
        "source pages reused at the end of the request",
        "page freed while an overlapped step still names it",
        "drop unanswered",
    ],
)
def test_what_is_left_out_hides_no_violation(name: str) -> None:
    found = _verdict(name, SMALL, reduced=True)
    assert found
    assert found == _verdict(name, SMALL, reduced=False)


def test_with_nothing_left_out_a_right_core_is_safe_too() -> None:
    scope = replace(SMALL, cancels=0, chunk_rows=2)
    all_orders, fewer = Explorer(scope, reduced=False), Explorer(scope)
    assert all_orders.run() > fewer.run()
    assert all_orders.complete and fewer.complete


def test_the_shares_of_a_scope_are_its_faults() -> None:
    scope = replace(SMALL, faults=1, cancels=0, chunk_rows=2, kinds=SCOPES["three"].kinds)
    for first in labels(scope):
        explorer = Explorer(scope, limit=1000, first=first)
        explorer.run()
        assert {label(s) for s in explorer.steps if s[0] == "fault"} == {first}


SLICES = {
    "parts": 700,
    "handoff": 400,
    "grants": 400,
    "one": 2600,
    "twofold": 1600,
    "again": 800,
    "beside": 300,
    "pair": 600,
    "writer": 3500,
    "three": 700,
    "cancels": 700,
    "voice": 400,
    "remote": 400,
}
"""So many states of each share take all rare paths that the scope is there for."""


@pytest.mark.parametrize("name", SCOPES)
def test_a_scope_takes_the_rare_paths_that_it_is_there_for(name: str) -> None:
    found = [search(job) for job in shares(SCOPES[name], SLICES[name])]
    assert [f.violation for f in found if f.violation] == []
    assert find_missing(SCOPES[name], found) == []


def test_a_search_that_misses_what_it_is_there_for_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = replace(SCOPES["grants"], marks=("copy hangs",))
    monkeypatch.setitem(SCOPES, "grants", idle)
    assert main(["--scope", "grants", "--cores", "1"]) == 1
    assert "scope grants is empty of copy hangs" in capsys.readouterr().out.splitlines()
    share = search(Job("grants", "stop lb", 100))
    assert find_missing(replace(idle, marks=()), [share]) == ["stop lb"]


def test_a_limit_leaves_the_search_incomplete() -> None:
    explorer = Explorer(SMALL, limit=100)
    explorer.run()
    assert not explorer.complete


def test_the_states_of_a_scope_do_not_depend_on_the_run() -> None:
    assert Explorer(SMALL).run() == Explorer(SMALL).run()


def test_a_violation_comes_with_a_short_trace() -> None:
    (mutant,) = [m for m in MUTANTS if m.name == "ack before the event"]
    with ExitStack() as stack:
        mutant.apply(stack)
        with pytest.raises(Violation) as caught:
            Explorer(SMALL).run()
    assert caught.value.invariant == "ack"
    lines = caught.value.detail.splitlines()
    assert lines[1].split() == ["1", "submit"]
    assert len(lines) < 25


def test_a_clone_is_apart_and_equal() -> None:
    writer = WriterMachine(InstanceId("kvproxy1"), WriterConfig())
    writer.receive(LifelineUp(Role.DECODE, InstanceId("decode1"), 4, 2), 0)
    copy = clone(writer)
    assert freeze(copy) == freeze(writer)
    copy.receive(LifelineUp(Role.PREFILL, InstanceId("prefill1"), 4, 2), 0)
    assert freeze(copy) != freeze(writer)
    assert copy.transfers._pool_of(InstanceId("prefill1")).page_rows == 2
    assert InstanceId("prefill1") not in writer.pools


def test_the_key_sees_every_field_that_decides() -> None:
    decode = DecodeMachine(InstanceId("decode1"), DecodeConfig(4, 2, 2, 8, "spec"))
    before = freeze(decode)
    for name in ("draining", "_admits_seen", "_quarantine_red"):
        changed = clone(decode)
        setattr(changed, name, not getattr(changed, name))
        assert freeze(changed) != before, name


def test_scopes_are_named_by_their_keys_and_the_last_line_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert all(scope.name == name for name, scope in SCOPES.items())
    assert main(["--scope", "grants", "--limit", "300", "--cores", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" states, 0 violations")
