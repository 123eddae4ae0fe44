"""The compose files and Dockerfiles agree with each other and with the code."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from docker.dependencies import closure, own_projects
from docs.settings_tables import CLASSES, texts_of
from duplet_core.ids import Role
from duplet_runtime.settings import MONOLITH, PREFIX, ServiceSettings

ROOT = Path(__file__).parents[2]
SERVICES = tuple(str(role) for role in Role)
FILES = ("compose.yaml", "compose.gpu.yaml", "tests/compose/slow_copies.yaml")
VALIDATOR = jsonschema.Draft7Validator(
    json.loads(Path(__file__).with_name("compose-spec.schema.json").read_text())
)
"""Of the Compose specification: github.com/compose-spec/compose-spec, Apache-2.0."""

SECONDS = re.compile(r"(?:\$\{\w+:-)?(\d+)s?\}?")


def compose(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / name).read_text())
    assert isinstance(loaded, dict)
    return loaded


def settings_of(service: str) -> type[ServiceSettings]:
    [kind] = [kind for kind in CLASSES if kind.role == service]
    return kind


def dockerfile(service: str) -> str:
    return (ROOT / "docker" / f"{service}.Dockerfile").read_text()


def stage(service: str, name: str) -> str:
    """The text of one stage of a service's Dockerfile."""
    stages = re.split(r"^(?=FROM )", dockerfile(service), flags=re.M)
    [found] = [text for text in stages if re.match(rf"FROM \S+ AS {name}\n", text)]
    return found


# --- compose files --------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_file_follows_the_compose_specification(name: str) -> None:
    VALIDATOR.validate(compose(name))


def test_the_schema_refuses_what_is_no_compose_file() -> None:
    wrong = compose("compose.yaml")
    wrong["services"]["lb"]["prots"] = wrong["services"]["lb"].pop("ports")
    with pytest.raises(jsonschema.ValidationError, match="prots"):
        VALIDATOR.validate(wrong)


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_is_passed_on(service: str) -> None:
    """But for what the image fixes, and for what exists for fault tests."""
    passed = set(compose("compose.yaml")["services"][service]["environment"])
    kind = settings_of(service)
    texts = texts_of(kind)
    shared = {f"{PREFIX}{name.upper()}" for name in ServiceSettings.model_fields}
    own = {
        f"{PREFIX}{service.upper()}_{name.upper()}"
        for name in kind.model_fields
        if name not in ServiceSettings.model_fields and "ault tests" not in texts.get(name, "")
    }
    fixed = set(re.findall(r"(DUPLET_\w+)=", dockerfile(service)))
    wanted = (shared | own) - fixed
    assert passed == wanted, f"compose.yaml, {service}: {sorted(passed ^ wanted)}"


@pytest.mark.parametrize("service", SERVICES)
def test_no_container_is_privileged(service: str) -> None:
    told = compose("compose.yaml")["services"][service]
    assert told["cap_drop"] == ["ALL"]
    assert told["security_opt"] == ["no-new-privileges:true"]
    assert told["read_only"] is True
    for name in FILES:
        told = compose(name)["services"].get(service, {})
        assert not {"privileged", "cap_add", "ipc", "pid", "network_mode", "user"} & set(told), name


@pytest.mark.parametrize("service", SERVICES)
def test_who_stops_in_time_finishes_what_it_has(service: str) -> None:
    told = compose("compose.yaml")["services"][service]
    named = told["environment"].get(f"{PREFIX}{service.upper()}_DRAIN_S")
    drain = settings_of(service).model_fields["drain_s"].default
    drain_s = float(seconds(named)) if named else drain
    assert drain_s < float(seconds(told["stop_grace_period"]))
    if service == Role.LB:
        assert settings_of(service).model_fields["longest_s"].default < drain_s


def seconds(text: str) -> str:
    match = SECONDS.fullmatch(text)
    assert match is not None, text
    return match[1]


def test_lb_stops_first_and_the_writer_last() -> None:
    """Compose starts in the order of dependence and stops in the opposite one."""
    needs = {s: set(compose("compose.yaml")["services"][s].get("depends_on", ())) for s in SERVICES}
    assert needs[Role.LB] == {Role.PREFILL, Role.DECODE}
    assert needs[Role.PREFILL] == needs[Role.DECODE] == {Role.KVPROXY}
    assert needs[Role.KVPROXY] == set()


def test_kvproxy_sees_the_engines_gpus_and_no_other() -> None:
    services = compose("compose.gpu.yaml")["services"]

    def gpus(name: str) -> list[str]:
        [device] = services[name]["deploy"]["resources"]["reservations"]["devices"]
        ids = device["device_ids"]
        assert isinstance(ids, list)
        return ids

    assert gpus("kvproxy") == gpus("prefill") + gpus("decode")
    assert gpus("prefill") != gpus("decode")
    assert "lb" not in services


# --- images ---------------------------------------------------------------------------


def test_one_version() -> None:
    wanted = version("duplet-unit")
    for _, project in own_projects().values():
        assert project["version"] == wanted, project["name"]
    for service in SERVICES:
        told = compose("compose.yaml")["services"][service]
        assert told["image"] == f"duplet-{service}:{wanted}"
        assert told["build"]["dockerfile"] == f"docker/{service}.Dockerfile"
        assert f"\nARG VERSION={wanted}\n" in dockerfile(service)
        changed = compose("compose.gpu.yaml")["services"].get(service)
        assert changed is None or changed["image"] == f"duplet-{service}:{wanted}-gpu"


def test_what_images_share_is_one_layer() -> None:
    """Equal instructions are built once: the Python of all four, the torch of two."""
    assert len({stage(service, "python") for service in SERVICES}) == 1
    assert stage("prefill", "dependencies") == stage("decode", "dependencies")
    assert closure("prefill", "")[1] == closure("decode", "")[1]
    assert closure("prefill", "gpu")[1] == closure("decode", "gpu")[1]


@pytest.mark.parametrize("service", SERVICES)
def test_who_has_torch(service: str) -> None:
    for extra in ("", "gpu"):
        others = closure(service, extra)[1]
        assert ("torch" in others) is (service in (Role.PREFILL, Role.DECODE))
        assert {"grpcio", "typer"} <= others


@pytest.mark.parametrize("service", ["kvproxy", "prefill"])
def test_gpus_need_more(service: str) -> None:
    more = closure(service, "gpu")[1] - closure(service, "")[1]
    assert "triton" in {re.split("[<>=!~]", needed)[0] for needed in more}


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_starts_its_service(service: str) -> None:
    text = dockerfile(service)
    assert text.endswith(f'CMD ["python", "-m", "duplet_{service}"]\n')
    assert "\nUSER 10001:10001\n" in text.rpartition("\nFROM ")[2]
    assert f"duplet-{MONOLITH}" not in closure(service, "")[0]


def test_what_others_made_is_pinned() -> None:
    """pip takes from constraints.txt what it names and anything for the rest."""
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    for service in SERVICES:
        for requirement in closure(service, "gpu")[1]:
            name = re.split(r"[^\w-]", requirement)[0]
            assert name in pinned, name


# --- observability --------------------------------------------------------------------


def test_prometheus_asks_every_service() -> None:
    told = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())
    [job] = told["scrape_configs"]
    [targets] = job["static_configs"]
    services = compose("compose.yaml")["services"]
    ports = {s: services[s]["environment"]["DUPLET_METRICS_PORT"] for s in SERVICES}
    assert set(targets["targets"]) == {f"{service}:{port}" for service, port in ports.items()}
    assert all((ROOT / "docker/prometheus" / name).is_file() for name in told["rule_files"])


def test_grafana_has_the_dashboard_and_its_sources() -> None:
    mounted = compose("compose.yaml")["services"]["grafana"]["volumes"]
    inside = dict(volume.split(":")[:2][::-1] for volume in mounted)
    provisioning = ROOT / inside["/etc/grafana/provisioning"]
    [provider] = yaml.safe_load((provisioning / "dashboards/duplet.yml").read_text())["providers"]
    folder = ROOT / inside[provider["options"]["path"]]
    assert list(folder.glob("*.json"))
    sources = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())
    hosts = {re.split(r"[/:]+", source["url"])[1] for source in sources["datasources"]}
    assert hosts == {"prometheus", "traces"} <= set(compose("compose.yaml")["services"])
