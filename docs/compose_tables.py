"""What becomes of settings in containers, for docs/settings.md: from the compose files and images.

Every variable that the files understand must be explained here, and none that they do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from duplet_core.ids import Role
from duplet_runtime.settings import CONFIG_VARIABLE, PREFIX, ServiceSettings

ROOT = Path(__file__).parents[1]
CPU_FILE = "compose.yaml"
GPU_FILE = "compose.gpu.yaml"

VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-?])([^}]*))?\}")
"""A variable, how its absence is told, and the default or what is said then."""

MEANINGS = {
    "PUBLISH_LB": "HOST:PORT of this machine where lb is reached. It has neither TLS nor "
    "authentication.",
    "PUBLISH_PROMETHEUS": "The same for Prometheus (profile `observability`).",
    "PUBLISH_GRAFANA": "The same for Grafana.",
    "PUBLISH_TRACES": "The same for the trace store's pages.",
    "UNIT_CONFIG": "Path of a TOML file with settings, with a `/` in it, which user 10001 can "
    "read. All four services read it.",
    "STOP_GRACE": "After that time a container that was told to stop is killed, whichever it is; "
    "longer than every `..._DRAIN_S`.",
    "UNIT_MODEL": "On GPUs: directory of the checkpoint, mounted as `/model`.",
    "PREFILL_GPU": "On GPUs: prefill's, by index or UUID.",
    "DECODE_GPU": "On GPUs: decode's. kvproxy sees both.",
    "BUILD_BASE": "Build argument `BASE`: a Debian or Ubuntu with Python 3.11 or newer.",
    "BUILD_CUDA": "On GPUs, build argument `CUDA`: the variant of torch and of CUDA's bindings.",
    "BUILD_TORCH_INDEX": "Build argument `TORCH_INDEX`: the folder of PyTorch's indexes, whose "
    "`cpu`, `cu130`, … is added to pip's own sources. Empty: those alone; PyPI's torch is for "
    "CUDA 13.0.",
    "BUILD_REVISION": "Build argument `REVISION`, for the images' label; `make images` asks Git.",
    "BUILD_SOURCE": "Build argument `SOURCE`, the same.",
}
"""Of each variable that is Compose's own and no service's setting."""

TEXT = f"""\
## In containers

Compose passes settings on by name: `{CPU_FILE}` gives each service its own settings from the
tables above, and of those that all share both forms, `DUPLET_LOG_LEVEL` and
`DUPLET_DECODE_LOG_LEVEL`. Set them where Compose runs, in the environment or in a file `.env`
beside `{CPU_FILE}`. A bad value ends its service with exit code 2, and so does an unknown name in
the TOML file that `UNIT_CONFIG` names. **A variable with an unknown name does not get that far:
Compose ignores it and says nothing.** `docker compose config` shows what the services are told.
What is set in the environment, or fixed or preset below, wins over the file.

These are not simply passed on, nor is one service's own form of what is fixed for all; there is
no container of the monolith:
"""


def section(kinds: Iterable[type[ServiceSettings]]) -> Iterator[str]:
    """The lines of the part about containers, for these classes of settings."""
    yield TEXT
    yield "| setting | in containers |"
    yield "|---|---|"
    for name, told in exceptions(kinds).items():
        yield f"| `{name}` | {told} |"
    yield "\nVariables of Compose's own:\n"
    yield "| variable | default | means |"
    yield "|---|---|---|"
    for name, default in variables().items():
        yield f"| `{name}` | {default} | {MEANINGS[name]} |"
    yield ""


def environment(file: str, service: str) -> dict[str, str | None]:
    """What a compose file gives a service; None: what is set where Compose runs."""
    services: dict[str, Any] = yaml.safe_load((ROOT / file).read_text("utf-8"))["services"]
    told = services.get(service, {}).get("environment", {})
    return {name: None if value is None else str(value) for name, value in told.items()}


def image_environment(service: str) -> dict[str, str]:
    """The settings that a service's image fixes."""
    text = (ROOT / "docker" / f"{service}.Dockerfile").read_text("utf-8")
    return dict(re.findall(rf"({PREFIX}\w+)=(\S+)", text))


def setting_names(kind: type[ServiceSettings]) -> list[str]:
    """All names by which a service can be told something."""
    own = [f"{PREFIX}{kind.role.upper()}_{name.upper()}" for name in kind.model_fields]
    shared = [f"{PREFIX}{name.upper()}" for name in ServiceSettings.model_fields]
    return [CONFIG_VARIABLE, *shared, *own]


def exceptions(kinds: Iterable[type[ServiceSettings]]) -> dict[str, str]:
    """Settings of which a service's container is not simply told what is set, and how it is."""
    found: dict[str, str] = {}
    for kind in kinds:
        if kind.role not in tuple(Role):
            continue
        on_cpu, on_gpu = (environment(file, kind.role) for file in (CPU_FILE, GPU_FILE))
        image = image_environment(kind.role)
        shared_forms = {n for n in setting_names(kind) if n in on_cpu or n in image}
        for name in setting_names(kind):
            field = name.removeprefix(f"{PREFIX}{kind.role.upper()}_").lower()
            if name in on_cpu and on_cpu[name] is not None:
                found[name] = preset(name, on_cpu[name] or "")
            elif name in image:
                found[name] = f"`{image[name]}`, fixed by the image"
            elif name not in on_cpu and not _is_covered(field, shared_forms):
                found[name] = "not passed on: for tests"
            if name in on_gpu:
                found[name] = f"on GPUs {preset(name, on_gpu[name] or '')}"
    return found


def _is_covered(field: str, names: set[str]) -> bool:
    """Whether the form for all services is fixed, so that one service's own would be wrong."""
    return field in ServiceSettings.model_fields and f"{PREFIX}{field.upper()}" in names


def preset(name: str, value: str) -> str:
    """A value of a compose file in words."""
    match = VARIABLE.fullmatch(value)
    if match is None:
        return f"`{value}`, fixed"
    assert match[1] == name, f"{name} is told {value}"
    return f"`{match[3]}` when it is not set"


def variables() -> dict[str, str]:
    """Compose's own variables, and their defaults in words, in the order of `MEANINGS`.

    Raises:
        AssertionError: one is not explained, or is explained and not there.
    """
    found: dict[str, str] = {}
    for file in (CPU_FILE, GPU_FILE):
        for name, sign, rest in VARIABLE.findall((ROOT / file).read_text("utf-8")):
            if not name.startswith(PREFIX):
                found[name] = "must be set" if "?" in sign else f"`{rest}`" if rest else "empty"
    assert set(found) == set(MEANINGS), f"Compose's variables: {set(found) ^ set(MEANINGS)}"
    return {name: found[name] for name in MEANINGS}
