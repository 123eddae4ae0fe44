"""How waits for errors are measured: on logs made up here."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import grpc

from duplet_client import GenerateError
from duplet_core.ids import Role
from tests.e2e.streams import Ask, Stream
from tests.faults.error_times import QUEUE_WAIT_S, Knowledge, LogLine, measure, read_lines


def failed(reason: str, *, over_s: float, sent_s: float = 10.0) -> Stream:
    stream = Stream(Ask(1), request_id="r", sent_s=sent_s, over_s=over_s)
    stream.error = GenerateError(grpc.StatusCode.UNAVAILABLE, reason, "as told")
    return stream


def told(event: str, at_s: float, *, request_id: str = "", detail: str = "") -> LogLine:
    role = Role.LB if event == "peer lost" else Role.DECODE
    return LogLine(role, at_s, event, request_id, detail)


def waits(stream: Stream, known: Knowledge) -> tuple[list[float], list[float], int]:
    """Of failed and of refused requests, and how many errors nothing explains."""
    times = measure([stream], known)
    rounded = [[round(wait, 6) for wait in waits] for waits in (times.failed_s, times.refused_s)]
    return rounded[0], rounded[1], len(times.unexplained)


def test_a_failure_counts_from_the_line_that_names_the_request() -> None:
    lines = [
        told("failed", 11.0, request_id="r"),
        told("failed", 11.9, request_id="another"),
    ]
    stream = failed("TRANSFER_DEADLINE", over_s=12.0)
    assert waits(stream, Knowledge(lines)) == ([1.0], [], 0)


def test_a_lost_part_counts_from_the_last_loss_of_that_part_before_the_error() -> None:
    lines = [
        told("peer lost", 10.5, detail="decode instance a"),
        told("peer lost", 11.0, detail="decode instance b"),
        told("peer lost", 11.9, detail="prefill instance c"),
        told("peer lost", 12.5, detail="decode instance d"),
    ]
    stream = failed("DECODE_LOST", over_s=12.0)
    assert waits(stream, Knowledge(lines)) == ([1.0], [], 0)


def test_a_stopped_lb_knows_nothing() -> None:
    known = Knowledge([told("failed", 11.0, request_id="r")], lb_awake_s=[11.75, 13.0])
    assert waits(failed("KV_MISMATCH", over_s=12.0), known) == ([0.25], [], 0)


def test_an_lb_that_is_gone_counts_from_its_death() -> None:
    known = Knowledge([], lb_deaths_s=[11.5])
    assert waits(failed("", over_s=12.0), known) == ([0.5], [], 0)
    called_after_it = failed("", over_s=12.0, sent_s=11.6)
    assert waits(called_after_it, known) == ([], [], 0)


def test_a_refusal_is_told_apart() -> None:
    stream = failed("NOT_READY", over_s=10.25 + QUEUE_WAIT_S)
    assert waits(stream, Knowledge([])) == ([], [0.25], 0)


def test_an_error_that_nothing_explains_is_not_forgotten() -> None:
    assert waits(failed("TRANSFER_FAILED", over_s=12.0), Knowledge([])) == ([], [], 1)
    assert waits(failed("", over_s=12.0), Knowledge([])) == ([], [], 1)


def test_lines_are_read_from_the_offset_on_and_in_order(tmp_path: Path) -> None:
    def line(event: str, second: int) -> bytes:
        at = datetime(2026, 1, 2, 3, 4, second, tzinfo=UTC).isoformat().replace("+00:00", "Z")
        return json.dumps({"timestamp": at, "event": event, "detail": "d"}).encode() + b"\n"

    logs = {Role.LB: tmp_path / "lb.log", Role.DECODE: tmp_path / "decode.log"}
    before = line("earlier", 1)
    logs[Role.LB].write_bytes(before + b"not ours\n" + line("third", 9) + line("first", 5))
    logs[Role.DECODE].write_bytes(line("second", 7) + b'{"half of a li')
    found = read_lines(logs, {Role.LB: len(before), Role.DECODE: 0})
    assert [(each.event, each.role) for each in found] == [
        ("first", Role.LB),
        ("second", Role.DECODE),
        ("third", Role.LB),
    ]
    assert found[1].at_s - found[0].at_s == 2.0
