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

from docker.dependencies import closure, constraint_lines, index_lines, own_projects
from docs.compose_tables import environment, image_environment, setting_names
from docs.settings_tables import CLASSES, texts_of
from duplet_core.ids import Role
from duplet_runtime.settings import CONFIG_VARIABLE, MONOLITH, PREFIX, ServiceSettings

ROOT = Path(__file__).parents[2]
SERVICES = tuple(str(role) for role in Role)
OURS = ("compose.yaml", "compose.gpu.yaml")
FILES = (*OURS, *(f"tests/compose/{p.name}" for p in Path(__file__).parent.glob("*.yaml")))
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
    """Under all its names, but for what is fixed for all services, or exists for tests."""
    kind = settings_of(service)
    passed = environment("compose.yaml", service)
    fixed = set(image_environment(service)) | {n for n, value in passed.items() if value}
    wanted = set()
    for name in setting_names(kind):
        field = name.removeprefix(PREFIX).removeprefix(f"{service.upper()}_").lower()
        for_all = f"{PREFIX}{field.upper()}"
        is_test = field in kind.model_fields and "ault tests" in texts_of(kind).get(field, "")
        if not is_test and (name == for_all or for_all not in fixed):
            wanted.add(name)
    wanted -= set(image_environment(service))
    assert set(passed) == wanted, f"compose.yaml, {service}: {sorted(set(passed) ^ wanted)}"


def test_the_pages_words_on_containers() -> None:
    """Names are passed on, a file is read by all, and what is fixed is no variable."""
    told = {service: environment("compose.yaml", service) for service in SERVICES}
    both = ("DUPLET_LOG_LEVEL", "DUPLET_DECODE_LOG_LEVEL")
    assert all(told["decode"][name] is None for name in both)
    for service in SERVICES:
        path = told[service][CONFIG_VARIABLE]
        mounted = compose("compose.yaml")["services"][service]["volumes"]
        assert f"${{UNIT_CONFIG:-/dev/null}}:{path}:ro" in mounted
        # No name that the service would refuse, and no other service's.
        assert set(told[service]) <= set(setting_names(settings_of(service)))


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
    drain_s = seconds(named) if named else drain
    assert drain_s < seconds(told["stop_grace_period"])
    assert told["stop_grace_period"].startswith("${STOP_GRACE:-")
    if service == Role.LB:
        assert settings_of(service).model_fields["longest_s"].default < drain_s


def seconds(text: str) -> float:
    match = SECONDS.fullmatch(text)
    assert match is not None, text
    return float(match[1])


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


@pytest.mark.parametrize("name", ["python", "manifest", "dependencies", "code"])
def test_what_images_share_is_one_layer(name: str) -> None:
    """Equal instructions are built once: the Python of all four, the torch of two."""
    told = {
        stage(s, name).replace(f"dependencies.py {s} ", "dependencies.py SERVICE ")
        for s in SERVICES
    }
    assert len(told) == 1, name


def test_engines_share_their_dependencies() -> None:
    assert closure("prefill", "")[1] == closure("decode", "")[1]
    assert closure("prefill", "gpu")[1] == closure("decode", "gpu")[1]


def test_the_last_stages_differ_in_names_only() -> None:
    """Of the two engines: their module, their socket, their words about themselves."""
    prefill, decode = (
        re.sub(r"(image\.description=).*", r"\1", dockerfile(s).rpartition("\nFROM ")[2]).replace(
            s, "X"
        )
        for s in ("prefill", "decode")
    )
    assert prefill == decode


@pytest.mark.parametrize("service", SERVICES)
def test_one_argument_selects_cuda(service: str) -> None:
    """torch's build and the bindings: in the Dockerfiles, and by the GPU pair's file."""
    manifest = stage(service, "manifest")
    for kind in ("index", "constraints"):
        assert f"dependencies.py {service} {kind} ${{CUDA}} > /{kind}.txt" in manifest
    assert "-c /constraints.txt -r /index.txt" in stage(service, "dependencies")
    assert "COPY --from=manifest /index.txt /constraints.txt /" in stage(service, "dependencies")
    told = compose("compose.gpu.yaml")["services"].get(service, {})
    assert service == "lb" or told["build"]["args"] == {"CUDA": "${BUILD_CUDA:-13.0}"}
    if service in (Role.PREFILL, Role.DECODE):
        assert "assert (torch.version.cuda or '') == '${CUDA}'" in dockerfile(service)


def test_what_the_argument_selects() -> None:
    whl = "https://mirror/whl/"
    assert index_lines("decode", "", whl)[0] == "--extra-index-url https://mirror/whl/cpu"
    assert index_lines("decode", "13.2", whl)[0] == "--extra-index-url https://mirror/whl/cu132"
    assert index_lines("kvproxy", "13.0", whl) == index_lines("kvproxy", "13.0", "")
    assert "torch" in index_lines("decode", "13.0", "")
    assert any(line.startswith("cuda-bindings") for line in index_lines("kvproxy", "13.0", ""))
    pinned = "# Why.\ncuda-bindings==13.0.3\nnumpy==2.4.6\n"
    assert constraint_lines(pinned, "") == ["cuda-bindings==13.0.3", "numpy==2.4.6"]
    assert constraint_lines(pinned, "13.0") == constraint_lines(pinned, "")
    assert constraint_lines(pinned, "13.2") == ["cuda-bindings==13.2.*", "numpy==2.4.6"]


def test_compose_hands_on_every_build_argument() -> None:
    """But for VERSION, which the Dockerfile has, and CUDA, which makes it the GPU pair."""
    for service in SERVICES:
        known = set(re.findall(r"^ARG (\w+)", dockerfile(service), re.MULTILINE))
        passed = set(compose("compose.yaml")["services"][service]["build"]["args"])
        assert passed == known - {"VERSION", "CUDA"}, service


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
