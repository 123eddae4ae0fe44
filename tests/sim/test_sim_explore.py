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
from duplet_sim.explore import Explorer, main
from duplet_sim.rules import MUTANTS
from duplet_sim.scopes import SCOPES, Scope
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
    assert main(["--scope", "grants", "--limit", "300"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" states, 0 violations")
