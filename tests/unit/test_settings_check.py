"""Settings are judged once, before a unit's services start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from duplet_runtime.settings import SERVICE_NAMES, SettingsError
from duplet_unit.cli import app
from duplet_unit.settings_check import check_settings, find_problems

UNIT = ("kvproxy", "decode", "prefill", "lb")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DUPLET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path)[:40])


def test_the_defaults_are_right() -> None:
    assert find_problems(SERVICE_NAMES) == []


def test_what_all_services_say_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_LOG_LEVL", "debug")
    assert find_problems(UNIT) == [
        "DUPLET_LOG_LEVL: no such setting; did you mean DUPLET_LOG_LEVEL?"
    ]


def test_a_services_own_problem_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_LB_LISTEN", "127.0.0.1:115587")
    (problem,) = find_problems(UNIT)
    assert problem.startswith("lb: DUPLET_LB_LISTEN: ")
    assert "port 115587 is above 65535" in problem


def test_two_services_cannot_share_a_metrics_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_LB_METRICS_PORT", "9100")
    monkeypatch.setenv("DUPLET_DECODE_METRICS_PORT", "9100")
    assert find_problems(UNIT) == ["metrics_port: decode and lb cannot both have 9100"]


@pytest.mark.parametrize(
    ("hosts", "clash"),
    [
        (("127.0.0.1", "127.0.0.2"), False),
        (("127.0.0.1", "0.0.0.0"), True),
        (("::", "127.0.0.2"), True),
    ],
)
def test_a_metrics_port_may_be_had_on_several_addresses(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, str], clash: bool
) -> None:
    for service, host in zip(("LB", "DECODE"), hosts, strict=True):
        monkeypatch.setenv(f"DUPLET_{service}_METRICS_PORT", "9100")
        monkeypatch.setenv(f"DUPLET_{service}_METRICS_HOST", host)
    told = ["metrics_port: decode and lb cannot both have 9100"]
    assert find_problems(UNIT) == (told if clash else [])


def test_an_unknown_model_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_PREFILL_MODEL", "nosuch")
    (problem,) = find_problems(UNIT)
    assert problem.startswith("prefill: DUPLET_PREFILL_MODEL: ")
    assert "there is no model 'nosuch', but wren, tiny, random:<shape> and" in problem


async def test_problems_come_back_from_the_checking_process() -> None:
    await check_settings(UNIT, os.environ)
    with pytest.raises(SettingsError, match="DUPLET_FOO: no such setting"):
        await check_settings(UNIT, {**os.environ, "DUPLET_FOO": "1"})


def test_up_starts_nothing_with_bad_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DUPLET_FOO", "1")
    run_dir = tmp_path / "run"
    arguments = ["up", "--listen", "127.0.0.1:50987", "--run-dir", str(run_dir)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "DUPLET_FOO: no such setting" in done.stderr
    assert list((run_dir / "logs").iterdir()) == []


def test_kv_that_is_damaged_on_purpose_is_said_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_problems(UNIT) == []
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("DUPLET_DECODE_DAMAGE_PAGES", "2")
    assert find_problems(UNIT) == []
    assert capsys.readouterr().err == (
        "duplet: warning: decode: damage_pages is 2: KV is damaged on purpose, listeners hear "
        "the wrong thing\n"
    )
