"""The command line against a stand-in for lb that answers from a script."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import typer
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from rich.console import Console
from typer.testing import CliRunner, Result

from duplet.speech.v1 import speech_pb2 as pb
from duplet.speech.v1 import speech_pb2_grpc
from duplet_client import AsyncClient
from duplet_client.front_end import rows_from_text
from duplet_core.errors import DupletError, Reason, Unavailable
from duplet_core.timeline import POINTS, SEGMENTS
from duplet_pages.spec import ModelSpec
from duplet_runtime.status import STATUS_OF, status_proto
from duplet_unit.commands import app
from duplet_unit.demo import MADE_UP_VOICES, conclude, outcome_table, send_requests, write_rows
from duplet_unit.speaking import add_speaking_commands
from duplet_unit.terminal import INTERRUPTED

SPEC = ModelSpec(
    name="tiny",
    fingerprint="f00d",
    codebooks=2,
    vocab=400,
    codebook_sizes=(8, 8),
    semantic_first=300,
    semantic_last=307,
    stop_id=259,
    page_rows=16,
    longest_sequence=512,
    default_max_rows=64,
    layers=1,
    kv_heads=1,
    head_dim=16,
    dtype="float32",
    kv_hash="xxh3-128",
    rows_per_second=21.0,
)
OUTPUT = np.arange(36, dtype="<i4").reshape(12, 3)


@dataclass
class StandIn(speech_pb2_grpc.SpeechServicer):
    """Answers every Generate with OUTPUT, or with the refusal that the test sets."""

    requests: list[pb.GenerateRequest] = field(default_factory=list)
    refusal: DupletError | None = None
    knows_model: bool = True
    instances: dict[str, str] = field(default_factory=lambda: {"lb": "ab"})
    """By service; the byte that its instance is made of."""
    damaged_pages: int = 0

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        if self.refusal is not None:
            status = status_proto(self.refusal).SerializeToString()
            context.set_trailing_metadata((("grpc-status-details-bin", status),))
            context.abort(STATUS_OF[self.refusal.reason], self.refusal.detail)
        yield pb.GenerateResponse(started=pb.Started(request_id="r1", seed=request.sampling.seed))
        for first in (0, 6):
            rows = pb.Rows(first_index=first, rows=OUTPUT[first : first + 6].tobytes())
            yield pb.GenerateResponse(rows=rows)
        points = [pb.TimePoint(name=name, at_ns=time.monotonic_ns()) for name in POINTS[1:-1]]
        usage = pb.Usage(prompt_rows=len(request.prompt) // 12, output_rows=12, kv_checks=5)
        reason = pb.FINISH_REASON_LENGTH
        yield pb.GenerateResponse(finished=pb.Finished(reason=reason, usage=usage, timeline=points))

    def GetUnit(self, request: pb.GetUnitRequest, context: Any) -> pb.GetUnitResponse:
        return pb.GetUnitResponse(
            model_spec=SPEC.to_json() if self.knows_model else "",
            services=[
                pb.ServiceInfo(
                    name=name,
                    instance=byte * 16,
                    version="7.8.9" if name == "lb" else "",
                    connected=bool(byte),
                )
                for name, byte in self.instances.items()
            ],
            conditions=[pb.Condition(name="decode", ok=self.knows_model, detail="no [stream] yet")],
            live_streams=3,
            totals=pb.Totals(
                kv_checks=41,
                requests={"STOP": 7},
                pages={"free": 100},
                pending_aborts=2,
                aborts_resent=5,
                writers=1,
                damaged_pages=self.damaged_pages,
                ends_withheld=6,
            ),
        )

    def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        return pb.DrainResponse(live_streams=3)


@dataclass
class Lb:
    """A running stand-in and the command that talks to it."""

    speech: StandIn
    health: Any
    address: str
    server: grpc.Server

    def duplet(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--address", self.address])


@pytest.fixture
def lb() -> Iterator[Lb]:
    server = grpc.server(ThreadPoolExecutor(4))
    speech, served = StandIn(), health.HealthServicer()
    for name in ("ready", "live"):
        served.set(name, health_pb2.HealthCheckResponse.SERVING)
    speech_pb2_grpc.add_SpeechServicer_to_server(speech, server)
    health_pb2_grpc.add_HealthServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Lb(speech, served, f"127.0.0.1:{port}", server)
    server.stop(None).wait()


def test_generate_sends_text_and_says_what_came(lb: Lb, tmp_path: Path) -> None:
    out = tmp_path / "rows.npy"
    done = lb.duplet("generate", "Hello.", "--voice", "ben", "--seed", "7", "--out", str(out))
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("LENGTH: 12 rows in ")
    assert "5 kv checks; seed 7" in done.stdout
    assert "not speech" in done.stderr
    sent = lb.speech.requests[0]
    assert sent.prompt == rows_from_text(SPEC, "Hello.", "ben").astype("<i4").tobytes()
    assert (sent.voice, sent.sampling.seed) == ("ben", 7)
    assert np.array_equal(np.load(out), OUTPUT)


@pytest.mark.parametrize("suffix", [".npy", ".raw"])
def test_generate_takes_rows_from_a_file(lb: Lb, tmp_path: Path, suffix: str) -> None:
    rows = np.array([[1, 0, 0], [2, 0, 0]], dtype="<i4")
    path = tmp_path / f"prompt{suffix}"
    if suffix == ".npy":
        np.save(path, rows)
    else:
        path.write_bytes(rows.tobytes())
    done = lb.duplet("generate", "--rows", str(path))
    assert done.exit_code == 0, done.stderr
    assert lb.speech.requests[0].prompt == rows.tobytes()


def test_generate_refuses_a_file_of_broken_rows(lb: Lb, tmp_path: Path) -> None:
    path = tmp_path / "prompt.raw"
    path.write_bytes(b"x" * 13)
    done = lb.duplet("generate", "--rows", str(path))
    assert done.exit_code == 2
    assert "INVALID_PROMPT" in done.stderr
    assert "13 bytes are not whole rows of 3 int32" in done.stderr
    assert not lb.speech.requests


@pytest.mark.parametrize("arguments", [[], ["text", "--rows", __file__]])
def test_generate_wants_one_prompt(lb: Lb, arguments: list[str]) -> None:
    done = lb.duplet("generate", *arguments)
    assert done.exit_code == 2
    assert not lb.speech.requests


def test_a_refusal_names_reason_detail_and_delay(lb: Lb) -> None:
    lb.speech.refusal = Unavailable(Reason.OVERLOADED, "no pages")
    done = lb.duplet("generate", "Hello.", "--json")
    assert done.exit_code == 1
    assert "duplet: OVERLOADED: no pages (try again in 0.5 s)" in done.stderr
    assert json.loads(done.stdout)["error"]["reason"] == "OVERLOADED"


def test_generate_json_feeds_waterfall(lb: Lb, tmp_path: Path) -> None:
    done = lb.duplet("generate", "Hello.", "--json")
    fields = json.loads(done.stdout)
    assert fields["usage"]["output_rows"] == 12
    assert fields["ttft_s"] <= fields["ttfa_s"]
    path = tmp_path / "answer.json"
    path.write_text(done.stdout)
    table = lb.duplet("waterfall", str(path))
    assert table.exit_code == 0, table.stderr
    assert all(segment in table.stdout for segment in SEGMENTS)
    assert len(lb.speech.requests) == 1


def test_waterfall_sends_a_request_of_its_own(lb: Lb) -> None:
    done = lb.duplet("waterfall", "--max-rows", "9")
    assert done.exit_code == 0, done.stderr
    assert "prefill chunks" in done.stdout
    assert lb.speech.requests[0].max_rows == 9


def test_waterfall_writes_pictures_and_traces(lb: Lb, tmp_path: Path) -> None:
    asked = lb.duplet("generate", "Hello.", "--json").stdout
    path = tmp_path / "answers.jsonl"
    path.write_text(asked + asked)
    many = lb.duplet("waterfall", str(path))
    assert "2 requests" in many.stdout
    for name in ("a.svg", "a.png", "a.json"):
        done = lb.duplet("waterfall", str(path), "-o", str(tmp_path / name))
        assert done.exit_code == 0, done.stderr
        assert (tmp_path / name).stat().st_size > 1_000
    done = lb.duplet("waterfall", str(path), "-o", str(tmp_path / "a.txt"))
    assert done.exit_code == 2
    assert "a.txt" in done.stderr.replace("│", "").replace("\n", "").replace(" ", "")


def test_waterfall_refuses_other_files(lb: Lb, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text("{}")
    assert lb.duplet("waterfall", str(path)).exit_code == 2


def test_health_of_a_ready_unit(lb: Lb) -> None:
    done = lb.duplet("health", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ready"] is True
    assert set(found["conditions"]) == {"ready", "live", "decode"}


def test_health_of_a_unit_that_is_not_ready(lb: Lb) -> None:
    lb.speech.knows_model = False
    lb.health.set("ready", health_pb2.HealthCheckResponse.NOT_SERVING)
    done = lb.duplet("health")
    assert done.exit_code == 1
    assert "no [stream] yet" in done.stdout
    assert done.stdout.count("not met") == 2


def test_unit_shows_its_counters(lb: Lb) -> None:
    done = lb.duplet("unit")
    assert done.exit_code == 0, done.stderr
    for part in ("ab" * 16, "7.8.9", "tiny (f00d)", "41, 0", "STOP 7", "free 100", "2, 5", "1, 6"):
        assert part in done.stdout
    found = json.loads(lb.duplet("unit", "--json").stdout)
    assert found["kv_checks"] == 41
    assert (found["pending_aborts"], found["aborts_resent"], found["writers"]) == (2, 5, 1)
    assert found["ends_withheld"] == 6


@pytest.mark.parametrize("command", ["health", "unit"])
def test_damage_on_purpose_is_told_loudly(lb: Lb, command: str) -> None:
    told = "KV IS DAMAGED ON PURPOSE: listeners hear the wrong thing"
    assert json.loads(lb.duplet(command, "--json").stdout)["warnings"] == []
    assert "DAMAGED" not in lb.duplet(command).stdout
    lb.speech.damaged_pages = 2
    (warning,) = json.loads(lb.duplet(command, "--json").stdout)["warnings"]
    assert warning.startswith(told) and "damage_pages of decode is 2" in warning
    done = lb.duplet(command)
    assert done.stdout.startswith(told)
    assert done.exit_code == 0, "the unit is ready all the same"


def test_unit_is_watched_until_it_is_enough_also_while_lb_is_away(lb: Lb) -> None:
    argv = ["unit", "--watch", "--json", "--address", lb.address]
    with subprocess.Popen(
        [sys.executable, "-c", "from duplet_unit.cli import main; main()", *argv],
        stdout=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["live_streams"] == 3
        lb.server.stop(None).wait()
        while "error" not in (seen := json.loads(watching.stdout.readline())):
            pass
        assert seen["error"]["reason"] == "UNAVAILABLE"
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == INTERRUPTED


def test_services_of_one_process_are_shown_as_one(lb: Lb) -> None:
    lb.speech.instances = {"lb": "ab", "prefill": "cd", "decode": "cd"}
    lines = [line.split() for line in lb.duplet("unit").stdout.splitlines()]
    (shown,) = (i for i, words in enumerate(lines) if "cd" * 16 in words)
    assert (lines[shown][0], lines[shown + 1][0]) == ("prefill", "decode")
    lb.speech.instances = {"lb": "ab", "prefill": "", "decode": ""}
    lines = [line.split() for line in lb.duplet("unit").stdout.splitlines()]
    assert {"prefill", "decode"} <= {words[0] for words in lines if words}


def test_a_unit_without_a_model_takes_no_text(lb: Lb) -> None:
    lb.speech.knows_model = False
    done = lb.duplet("generate", "Hello.")
    assert done.exit_code == 1
    assert "NOT_READY" in done.stderr


def test_drain_says_how_many_still_run(lb: Lb) -> None:
    told = lb.duplet("drain").stdout
    assert told == "draining; 3 streams run; lb takes nothing until it is started again\n"


async def test_demo_asks_every_text_in_every_voice(lb: Lb, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    async with AsyncClient(lb.address) as client:
        outcomes = await send_requests(client, SPEC, console)
        unit = await client.unit()
    assert [outcome.problem for outcome in outcomes] == [""] * 16
    assert {request.voice for request in lb.speech.requests} == set(MADE_UP_VOICES)
    assert len({request.prompt for request in lb.speech.requests}) == 16
    write_rows(outcomes, tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == 16
    console.print(outcome_table(outcomes))
    assert conclude(outcomes, (), unit, True, tmp_path, console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[-1] == "kv checks 41, mismatches 0"
    assert sum("demo-" in line for line in lines) == 16


async def test_demo_fails_with_a_request_a_mismatch_or_a_unit_that_hangs(
    lb: Lb, tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=160)
    async with AsyncClient(lb.address) as client:
        good = await send_requests(client, SPEC, console)
        unit = await client.unit()
        lb.speech.refusal = Unavailable(Reason.DECODE_LOST, "decode has exited")
        bad = await send_requests(client, SPEC, console)
    assert all("DECODE_LOST: decode has exited" in outcome.problem for outcome in bad)
    assert not conclude(bad, (), unit, True, tmp_path, console)
    assert not conclude(good, (), replace(unit, kv_mismatches=1), True, tmp_path, console)
    assert not conclude(good, (), replace(unit, kv_checks=0), True, tmp_path, console)
    assert not conclude(good, (), unit, False, tmp_path, console)
    assert not conclude(good, ("amber: is silent",), unit, True, tmp_path, console)


def test_no_unit_is_an_error_of_its_own() -> None:
    done = CliRunner().invoke(app, ["health", "--address", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "UNAVAILABLE" in done.stderr


def test_up_refuses_an_address_that_is_none() -> None:
    done = CliRunner().invoke(app, ["up", "--listen", "here"])
    assert done.exit_code == 2
    assert "--listen: 'here' is not HOST:PORT" in done.stderr


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == "duplet 0.1.0\n"


@pytest.mark.parametrize("name", ["say", "canary", "demo"])
def test_speaking_commands_say_what_they_lack(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duplet_unit.speaking.find_spec", lambda _: None)
    bare = typer.Typer()
    add_speaking_commands(bare)
    done = CliRunner().invoke(bare, [name, "Hello there", "-o", "hello.wav"])
    assert done.exit_code == 2
    assert "pip install" in done.output and "duplet-unit[voice]" in done.output
