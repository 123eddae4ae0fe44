from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from duplet_core.ids import Role
from duplet_runtime.engine_host import EngineSettings
from duplet_runtime.settings import (
    MONOLITH,
    ServiceSettings,
    SettingsError,
    load_settings,
    prepare_run_dir,
)


class LbLike(ServiceSettings):
    role: ClassVar[Role] = Role.LB
    listen: str = "127.0.0.1:0"
    weights: list[int] = []  # noqa: RUF012


class DecodeLike(ServiceSettings):
    role: ClassVar[Role] = Role.DECODE


class Engined(EngineSettings):
    role: ClassVar[Role] = Role.PREFILL


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DUPLET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path)[:40])


def problem(kind: type[ServiceSettings]) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(kind)
    return str(caught.value)


def test_addresses_come_from_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_RUN_DIR", "/tmp/unit-1")
    settings = load_settings(DecodeLike)
    assert settings.peer_address(Role.KVPROXY) == "unix:/tmp/unit-1/kvproxy.sock"
    assert settings.lifeline_path == Path("/tmp/unit-1/lifeline.sock")
    assert settings.lock_path(Role.KVPROXY) == Path("/tmp/unit-1/kvproxy.lock")


def test_default_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert load_settings(DecodeLike).run_dir == Path("/run/user/7/duplet")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert load_settings(DecodeLike).run_dir.name.startswith("duplet-")


def test_role_wins_over_all_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_METRICS_PORT", "9000")
    monkeypatch.setenv("DUPLET_LB_METRICS_PORT", "9001")
    monkeypatch.setenv("DUPLET_LB_LISTEN", "127.0.0.1:7000")
    assert load_settings(LbLike).metrics_port == 9001
    assert load_settings(LbLike).listen == "127.0.0.1:7000"
    assert load_settings(DecodeLike).metrics_port == 9000


def test_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_RUN_DIRR", "/tmp/x")
    assert "DUPLET_RUN_DIRR" in problem(DecodeLike)
    assert "did you mean DUPLET_RUN_DIR?" in problem(DecodeLike)


def test_other_roles_variables_are_theirs_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_LB_LISTENN", "x")
    load_settings(DecodeLike)
    assert "DUPLET_LB_LISTENN" in problem(LbLike)


def test_the_monoliths_variables_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class MonolithLike(ServiceSettings):
        role: ClassVar[str] = MONOLITH
        slots: int = 1

    monkeypatch.setenv("DUPLET_MONOLITH_SLOTS", "3")
    monkeypatch.setenv("DUPLET_LB_LISTENN", "x")
    assert load_settings(MonolithLike).slots == 3
    load_settings(DecodeLike)
    monkeypatch.setenv("DUPLET_MONOLITH_SLOTSS", "3")
    assert "did you mean DUPLET_MONOLITH_SLOTS?" in problem(MonolithLike)


def test_own_field_needs_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_LISTEN", "x")
    assert "DUPLET_LISTEN: no such setting; did you mean DUPLET_LB_LISTEN?" in problem(LbLike)
    assert problem(DecodeLike) == "DUPLET_LISTEN: no such setting", "nothing of its own is near"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DUPLET_METRICS_PORT", "http"),
        ("DUPLET_LB_METRICS_PORT", "70000"),
        ("DUPLET_LOG_FORMAT", "xml"),
        ("DUPLET_LB_WEIGHTS", "[1, 'a'"),
    ],
)
def test_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    text = problem(LbLike)
    assert name in text or name.removeprefix("DUPLET_LB_").lower() in text


def test_file_and_its_mistakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "duplet.toml"
    monkeypatch.setenv("DUPLET_CONFIG", str(file))
    file.write_text('log_level = "debug"\n[lb]\nlisten = "a:1"\n[decode]\nlog_level = "error"\n')
    assert load_settings(LbLike).listen == "a:1"
    assert load_settings(LbLike).log_level == "debug"
    assert load_settings(DecodeLike).log_level == "error"
    monkeypatch.setenv("DUPLET_LOG_LEVEL", "warning")
    assert load_settings(DecodeLike).log_level == "warning"

    file.write_text("[lb]\nlistten = 1\n")
    assert "listten" in problem(LbLike)
    load_settings(DecodeLike)
    file.write_text("log_levle = 1\n")
    assert "log_levle: no such setting; did you mean log_level?" in problem(DecodeLike)
    file.write_text("[decod]\nlog_level = 1\n")
    assert "decod: no such setting; did you mean [decode]?" in problem(DecodeLike)
    file.write_text('listen = "a:1"\n')
    assert "listen: no such setting; it belongs into [lb]" in problem(LbLike)
    monkeypatch.delenv("DUPLET_LOG_LEVEL")
    file.write_text('log_level = "loud"\n')
    assert problem(DecodeLike).startswith(f"{file}: log_level: ")
    file.write_text("log_level =\n")
    assert str(file) in problem(DecodeLike)
    file.unlink()
    assert str(file) in problem(DecodeLike)


def test_long_run_dir_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_RUN_DIR", "/tmp/" + "x" * 90)
    assert "DUPLET_RUN_DIR" in problem(LbLike)
    assert "shorter" in problem(LbLike)


def test_run_dir_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "new"
    prepare_run_dir(path)
    assert path.stat().st_mode & 0o777 == 0o700
    prepare_run_dir(path)
    path.chmod(0o750)
    with pytest.raises(SettingsError, match="0750"):
        prepare_run_dir(path)


def test_bad_settings_end_the_process_without_traceback() -> None:
    code = (
        "from typing import ClassVar\n"
        "from duplet_core.ids import Role\n"
        "from duplet_runtime.settings import ServiceSettings, load_settings_or_exit\n"
        "class K(ServiceSettings):\n"
        "    role: ClassVar[Role] = Role.KVPROXY\n"
        "load_settings_or_exit(K)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"DUPLET_LOG_LEVEL": "loud", "DUPLET_RUN_DIR": "/tmp/u"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("duplet kvproxy: DUPLET_LOG_LEVEL: ")
    assert "Traceback" not in done.stderr


def test_defaults_follow_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[str, int]:
        settings = load_settings(Engined)
        return settings.dtype, settings.pool_pages

    assert found() == ("float32", 2048)
    monkeypatch.setenv("DUPLET_PREFILL_DEVICE", "cuda")
    assert found() == ("bfloat16", 0)
    monkeypatch.setenv("DUPLET_PREFILL_POOL_PAGES", "7")
    assert found() == ("bfloat16", 7)


def test_a_bad_device_is_the_only_problem_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_PREFILL_DEVICE", "gpu")
    (line,) = problem(Engined).splitlines()
    assert line.startswith("DUPLET_PREFILL_DEVICE: ")


def test_a_pool_on_the_cpu_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUPLET_PREFILL_POOL_PAGES", "0")
    with pytest.raises(SettingsError, match="DUPLET_PREFILL_POOL_PAGES: only on a GPU"):
        load_settings(Engined)
