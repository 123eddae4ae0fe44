"""Settings are judged once, before a unit's services start."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from duplet_engine.shapes import SHAPES
from duplet_memory.cuda_driver import CudaError
from duplet_pages.engine_config import RANDOM, RANDOM_SHAPES, check_model
from duplet_runtime.settings import SERVICE_NAMES, SettingsError
from duplet_unit.commands import app
from duplet_unit.gpus import on_gpus
from duplet_unit.settings_check import check_settings, find_problems
from duplet_unit.unit import free_local_address, unit_services

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


def test_what_one_service_knows_better_is_said_by_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DUPLET_SLOTS", "4")
    assert find_problems(UNIT) == [
        "decode: DUPLET_SLOTS: no such setting; did you mean DUPLET_DECODE_SLOTS?"
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


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [("MODEL", "tiny", "wren"), ("DTYPE", "bfloat16", "float32"), ("PAGE_ROWS", "8", "16")],
)
def test_engines_that_could_never_agree_are_not_started(
    monkeypatch: pytest.MonkeyPatch, field: str, value: str, other: str
) -> None:
    monkeypatch.setenv(f"DUPLET_PREFILL_{field}", value)
    (problem,) = find_problems(UNIT)
    assert problem.startswith(f"{field.lower()}: prefill has ")
    assert value in problem and other in problem
    monkeypatch.setenv(f"DUPLET_DECODE_{field}", value)
    assert find_problems(UNIT) == []


def test_two_directories_may_hold_one_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for role in ("prefill", "decode"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text("{}")
        monkeypatch.setenv(f"DUPLET_{role.upper()}_MODEL", str(tmp_path / role))
    assert find_problems(UNIT) == []


class Gpus(types.ModuleType):
    """In the place of CUDA's driver: shows so many GPUs, or fails."""

    def __init__(self, answer: int | CudaError) -> None:
        super().__init__("duplet_memory.cuda_driver")
        self.answer = answer
        self.CudaError = CudaError

    def call(self, name: str, *_arguments: object) -> int:
        if isinstance(self.answer, CudaError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (2, ""),
        (1, "device: cuda, but of the GPUs 0,7 this machine shows 1: "),
        (
            CudaError("cuInit", "Failed to dlopen libcuda.so.1"),
            "device: cuda, but no NVIDIA GPU with a driver is here (cuInit: Failed to dlopen ",
        ),
    ],
)
def test_gpus_that_are_not_here_are_missed_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, answer: int | CudaError, told: str
) -> None:
    monkeypatch.setitem(sys.modules, "duplet_memory.cuda_driver", Gpus(answer))
    services = on_gpus(unit_services(Path("/tmp/unit"), "127.0.0.1:1", {}), ("0", "7"))
    for name, value in services[0].environment.items():
        monkeypatch.setenv(name, value)
    problems = find_problems(UNIT)
    assert len(problems) == bool(told)
    assert all(problem.startswith(told) for problem in problems)


async def test_problems_come_back_from_the_checking_process() -> None:
    await check_settings(UNIT, os.environ)
    with pytest.raises(SettingsError, match="DUPLET_FOO: no such setting"):
        await check_settings(UNIT, {**os.environ, "DUPLET_FOO": "1"})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "DUPLET_FOO: no such setting"),
        (["--random", "nosuch"], "--random: there is no shape 'nosuch', but s2-pro, "),
        (["--model", "nosuch"], "--model: there is no model 'nosuch', but wren, "),
        (["--model", "random:nosuch"], "--model: there is no shape 'nosuch', but "),
        (["--model", str(Path(__file__).parent)], "it has no config.json"),
        (["--model", "x" * 5000], "cannot be read: File name too long"),
        (["--gpu", "0"], "--gpu '0': name prefill's and decode's GPU"),
    ],
)
def test_up_starts_nothing_with_bad_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], told: str
) -> None:
    if not arguments:
        monkeypatch.setenv("DUPLET_FOO", "1")
    run_dir = tmp_path / "run"
    listening = ["--listen", free_local_address(), "--run-dir", str(run_dir)]
    done = CliRunner().invoke(app, ["up", *listening, *arguments])
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("duplet: USAGE: ") and told in line
    assert not list(run_dir.glob("logs/*"))


UNREADABLE = {
    "empty": (b"", "is no JSON: Expecting value"),
    "cut": (b'{"n_layer": 2', "is no JSON: Expecting ',' delimiter"),
    "weights": (b"\x80\x02}q\x00.", "is no JSON: "),
    "endless": (b"[" * 100_000, "is no JSON: "),
    "list": (b"[1, 2]", "is no JSON object"),
    "broken disk": (None, "cannot be read: Input/output error"),
}


@pytest.mark.parametrize("kind", list(UNREADABLE))
def test_up_starts_nothing_where_config_json_cannot_be_read(tmp_path: Path, kind: str) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    config = model / "config.json"
    content, told = UNREADABLE[kind]
    if content is None:
        config.symlink_to("/proc/self/mem")  # a regular file whose first byte cannot be read
    else:
        config.write_bytes(content)
    listening = ["--listen", free_local_address(), "--run-dir", str(run_dir)]
    done = CliRunner().invoke(app, ["up", *listening, "--model", str(model)])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"duplet: USAGE: --model: '{config}' {told}")
    assert not list(run_dir.glob("logs/*"))


def test_every_random_shape_is_made() -> None:
    assert tuple(SHAPES) == RANDOM_SHAPES
    for shape in RANDOM_SHAPES:
        check_model(f"{RANDOM}{shape}")


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
