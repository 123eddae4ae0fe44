"""The unit's folder and addresses, and how events are shown."""

from __future__ import annotations

import io
import json
import socket
import stat
from pathlib import Path

import pytest
from rich.console import Console

from duplet_runtime.fate import describe_exit
from duplet_runtime.settings import SettingsError
from duplet_unit.events import Event
from duplet_unit.report import ConsoleReport, JsonReport, follow_logs
from duplet_unit.unit import (
    MONOLITH_STAGES,
    STAGES,
    UnitError,
    check_address_is_free,
    dial_address,
    free_local_addresses,
    monolith_services,
    owned_run_dir,
    unit_services,
)


def test_own_run_dir_is_closed_to_others_and_removed() -> None:
    with owned_run_dir(None) as run_dir:
        assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
        (run_dir / "logs" / "lb.log").write_text("x")
    assert not run_dir.exists()


def test_a_named_run_dir_stays_and_has_one_owner(tmp_path: Path) -> None:
    named = tmp_path / "unit"
    with (
        owned_run_dir(named),
        pytest.raises(UnitError, match="another `duplet up`"),
        owned_run_dir(named),
    ):
        pytest.fail("two owners")
    with owned_run_dir(named):
        pass
    assert named.is_dir()


def test_a_run_dir_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(SettingsError, match="0755"), owned_run_dir(tmp_path):
        pytest.fail("an open folder was taken")


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UnitError, match=f"cannot listen on {listen}"):
            check_address_is_free(listen)
    check_address_is_free(listen)


def test_addresses_that_are_drawn_together_differ() -> None:
    """One after the other, so many would hardly ever."""
    addresses = free_local_addresses(400)
    assert len(set(addresses)) == 400
    for address in addresses[:3]:
        check_address_is_free(address)


@pytest.mark.parametrize("listen", ["localhost:http", "127.0.0.1:65536", "127.0.0.1:0"])
def test_an_address_that_no_client_could_dial_is_refused(listen: str) -> None:
    with pytest.raises(UnitError, match=f"--listen: '{listen}'"):
        check_address_is_free(listen)


@pytest.mark.parametrize(
    ("listen", "dialed"),
    [
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("0.0.0.0:1", "127.0.0.1:1"),
        ("[::]:1", "127.0.0.1:1"),
        ("192.0.2.7:1", "192.0.2.7:1"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
    ],
)
def test_addresses(listen: str, dialed: str) -> None:
    assert dial_address(listen) == dialed


def test_every_service_has_a_stage_and_only_the_writer_must_not_be_stopped() -> None:
    services = unit_services(Path("/run/unit"), "127.0.0.1:1", {"PATH": "/bin"})
    staged = [role for stage in STAGES for role in stage]
    assert sorted(staged) == sorted(service.name for service in services)
    assert [s.name for s in services if s.kill_when_stopped] == ["kvproxy"]
    assert all(s.environment["DUPLET_RUN_DIR"] == "/run/unit" for s in services)


def test_a_monolith_is_lb_and_one_host() -> None:
    services = monolith_services(Path("/run/unit"), "127.0.0.1:1", {"PATH": "/bin"})
    staged = [name for stage in MONOLITH_STAGES for name in stage]
    assert sorted(staged) == sorted(service.name for service in services) == ["lb", "monolith"]
    assert {s.name: s.address for s in services} == {
        "lb": "127.0.0.1:1",
        "monolith": "unix:/run/unit/decode.sock",
    }
    assert all(s.environment["DUPLET_RUN_DIR"] == "/run/unit" for s in services)


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-99, "signal 99")]
)
def test_exits_are_named(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_json_lines_leave_out_what_an_event_does_not_say() -> None:
    out = io.StringIO()
    report = JsonReport(out)
    report(Event("started", "lb", pid=7))
    report(Event("restarting", "lb", restarts=1, delay_s=0.25))
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"event": "started", "service": "lb", "pid": 7},
        {"event": "restarting", "service": "lb", "restarts": 1, "delay_s": 0.25},
    ]


def test_console_tells_the_start_the_crash_loop_and_the_log(tmp_path: Path) -> None:
    out = io.StringIO()
    report = ConsoleReport(Console(file=out, width=200), ["lb"], tmp_path)
    report(Event("started", "lb", pid=7))
    report(Event("ready", "lb", address="127.0.0.1:1"))
    report(Event("unit_ready", addresses={"lb": "127.0.0.1:1"}))
    report(Event("exited", "lb", how="SIGKILL"))
    report(Event("restarting", "lb", restarts=3, delay_s=1.0))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "lb.log").write_text("[no such] model\n")
    report(Event("gave_up", "lb", how="exit code 3", detail="why"))
    text = out.getvalue()
    for part in (
        "lb: ready",
        "7",
        "127.0.0.1:1",
        "unit is ready",
        "lb ended: SIGKILL",
        "starts again in 1 s, crash loop: 3 fast deaths in a row",
        "gave up: why",
        "  [no such] model",
    ):
        assert part in text


def test_console_of_a_unit_that_ends_while_it_starts(tmp_path: Path) -> None:
    out = io.StringIO()
    report = ConsoleReport(Console(file=out, width=200, force_terminal=True), ["lb"], tmp_path)
    report(Event("started", "lb", pid=7))
    report(Event("stopping", "lb"))
    began = out.getvalue()
    assert "starting: " in began
    report(Event("stopped", "lb", how="exit code 0"))
    assert "starting: " not in out.getvalue().removeprefix(began)


def test_console_leaves_bad_settings_to_the_commands_last_line(tmp_path: Path) -> None:
    out = io.StringIO()
    report = ConsoleReport(Console(file=out, width=200), ["lb"], tmp_path)
    report(Event("gave_up", "lb", how="exit code 2", detail="why"))
    assert out.getvalue() == "gave up\n"


async def test_logs_are_followed_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "lb.log"
    log.write_text("one\ntwo\nhalf")

    class Ended(Exception):
        pass

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if "half a line" in text:
                raise Ended
            if "two" in text:
                with log.open("a") as file:
                    file.write(" a line\n")
            return super().write(text)

    out = Out()
    with pytest.raises(Ended):
        await follow_logs([log], out, poll_s=0)
    assert out.getvalue() == "      lb | one\n      lb | two\n"
