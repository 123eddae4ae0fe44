"""A unit of four services, each told what its container would be told by the compose files.

Compose puts the values in, the images add theirs, and nothing is shared but the folder of the
sockets. On GPUs each service sees those that its reservation names.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from duplet_client import AsyncClient
from duplet_core.ids import Role
from duplet_unit.gpus import VISIBLE
from tests.e2e.live_unit import SERVICES, live_unit
from tests.e2e.streams import Ask, known_spec, read_all

ROOT = Path(__file__).parents[2]
FILES = ("compose.yaml", "compose.gpu.yaml")
VALUE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
ASKS = [Ask(seed, max_rows=40) for seed in range(900, 904)]
SHELL = {"DUPLET_PREFILL_MODEL": "tiny", "DUPLET_DECODE_MODEL": "tiny"}
"""What whoever starts the unit has set."""
ON_CPU = {"DUPLET_PREFILL_DEVICE": "cpu", "DUPLET_DECODE_DEVICE": "cpu"}


def services_of(files: tuple[str, ...]) -> dict[str, list[dict[str, object]]]:
    """Each service's section of every file that has one."""
    loaded = [yaml.safe_load((ROOT / name).read_text())["services"] for name in files]
    return {role: [file[role] for file in loaded if role in file] for role in SERVICES}


def put_in(text: str, shell: dict[str, str]) -> str:
    """Compose's `${NAME:-default}`."""
    return VALUE.sub(lambda found: shell.get(found[1]) or found[2] or "", text)


def environment_of(service: Role, shell: dict[str, str], *, gpus: bool) -> dict[str, str]:
    """All variables of a service's container, of its image's too."""
    lines = (ROOT / "docker" / f"{service}.Dockerfile").read_text().rpartition("\nFROM ")[2]
    told: dict[str, str] = dict(re.findall(r"(DUPLET_\w+)=(\S+)", lines))
    for section in services_of(FILES if gpus else FILES[:1])[service]:
        environment = section["environment"]
        assert isinstance(environment, dict)
        for name, value in environment.items():
            if value is not None:
                told[name] = put_in(str(value), shell)
            elif name in shell:
                told[name] = shell[name]
        told.pop("DUPLET_CONFIG", None)  # An empty file, unless UNIT_CONFIG names another.
        if gpus and "deploy" in section:
            told[VISIBLE] = ",".join(dict.fromkeys(reserved(section["deploy"], shell)))
    return told


def reserved(deploy: object, shell: dict[str, str]) -> list[str]:
    """The GPUs that a service's reservation names."""
    assert isinstance(deploy, dict)
    [device] = deploy["resources"]["reservations"]["devices"]
    return [put_in(one, shell) for one in device["device_ids"]]


def count_gpus() -> int:
    try:
        listed = subprocess.run(("nvidia-smi", "-L"), capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return 0
    return len(listed.stdout.splitlines())


async def serve(environments: dict[str, dict[str, str]]) -> None:
    """The unit serves: every request ends well, every transfer is checked."""
    async with live_unit(environments=environments) as unit, AsyncClient(unit.listen) as client:
        streams = await read_all(client, await known_spec(client), ASKS)
        assert all(stream.error is None and stream.count for stream in streams)
        await unit.wait_pages_free()
        found = await client.unit()
        assert (found.kv_checks, found.kv_mismatches) == (len(ASKS), 0)


async def test_each_service_needs_only_what_its_container_is_told() -> None:
    environments = {str(r): environment_of(r, SHELL, gpus=False) for r in SERVICES}
    for name, told in environments.items():
        assert {f"DUPLET_{role}" for role in ("LB", "PREFILL", "DECODE", "KVPROXY")} & {
            "_".join(variable.split("_")[:2]) for variable in told
        } <= {f"DUPLET_{name.upper()}"}
    await serve(environments)


async def test_the_gpu_files_variables_on_a_cpu() -> None:
    """The GPU pair's own names and values, but for the device and the way between GPUs."""
    shell = {**SHELL, "DUPLET_KVPROXY_TRANSPORTS": "shm"}
    environments = {str(r): environment_of(r, shell, gpus=True) for r in SERVICES}
    seen = {name: told.get(VISIBLE) for name, told in environments.items()}
    assert seen == {"lb": None, "prefill": "0", "decode": "1", "kvproxy": "0,1"}
    for told in environments.values():
        told |= {name: value for name, value in ON_CPU.items() if name in told}
    await serve(environments)


@pytest.mark.skipif(count_gpus() == 0, reason="no GPU here")
async def test_the_gpu_files_variables_on_gpus() -> None:
    """With one GPU, prefill and decode share it."""
    shell = {**SHELL, "PREFILL_GPU": "0", "DECODE_GPU": str(min(1, count_gpus() - 1))}
    await serve({str(r): environment_of(r, shell, gpus=True) for r in SERVICES})
