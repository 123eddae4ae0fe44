"""Which service sees which GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from duplet_kvproxy.choice import parse_transports
from duplet_unit.gpus import TRANSPORTS, model_settings, on_gpus, parse_gpus
from duplet_unit.settings_check import find_problems
from duplet_unit.unit import UnitError, monolith_services, unit_services

BASE = {"PATH": "/bin"}


def test_each_engine_sees_its_own_gpu_and_the_writer_both() -> None:
    services = on_gpus(unit_services(Path("/run/unit"), "127.0.0.1:1", BASE), ("2", "5"))
    visible = {s.name: s.environment["CUDA_VISIBLE_DEVICES"] for s in services}
    assert visible == {"prefill": "2", "decode": "5", "kvproxy": "2,5", "lb": ""}
    for service in services:
        assert service.environment["DUPLET_PREFILL_DEVICE"] == "cuda"
        assert service.environment["DUPLET_DECODE_DEVICE"] == "cuda"
        assert service.environment["DUPLET_RUN_DIR"] == "/run/unit"


def test_a_monolith_sees_one_gpu() -> None:
    services = on_gpus(monolith_services(Path("/run/unit"), "127.0.0.1:1", BASE), ("3",))
    visible = {s.name: s.environment["CUDA_VISIBLE_DEVICES"] for s in services}
    assert visible == {"monolith": "3", "lb": ""}


def test_transports_are_those_of_the_environment_where_it_names_some() -> None:
    named = {**BASE, "DUPLET_KVPROXY_TRANSPORTS": "staged"}
    for base, wanted in ((BASE, TRANSPORTS), (named, "staged")):
        services = on_gpus(unit_services(Path("/run/unit"), "127.0.0.1:1", base), ("0", "1"))
        assert {s.environment["DUPLET_KVPROXY_TRANSPORTS"] for s in services} == {wanted}
    assert "shm" not in parse_transports(TRANSPORTS)


def test_one_gpu_may_be_both() -> None:
    services = on_gpus(unit_services(Path("/run/unit"), "127.0.0.1:1", BASE), ("1", "1"))
    (writer,) = [s for s in services if s.name == "kvproxy"]
    assert writer.environment["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    ("text", "monolith"), [("0", False), ("0,1", True), ("0,1,2", False), ("0,", False), ("", True)]
)
def test_another_number_of_gpus_is_refused(text: str, monolith: bool) -> None:
    with pytest.raises(UnitError, match="--gpu"):
        parse_gpus(text, monolith=monolith)
    assert parse_gpus("GPU-1, 0", monolith=False) == ("GPU-1", "0")


def test_what_is_set_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duplet_unit.settings_check._missing_gpus", lambda _loaded: [])
    services = on_gpus(unit_services(Path("/tmp/unit"), "127.0.0.1:1", BASE), ("0", "1"))
    for name, value in {**services[0].environment, **model_settings("random:s2-pro")}.items():
        monkeypatch.setenv(name, value)
    assert find_problems(["lb", "prefill", "decode", "kvproxy", "monolith"]) == []
