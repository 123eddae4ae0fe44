"""A unit of containers, seen from outside: through Compose and the published port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from duplet_client import AsyncClient, GenerateError, Unit
from duplet_core.ids import Role
from tests.compose.docker_engine import Engine
from tests.compose.images import ROOT, SERVICES, source_labels
from tests.e2e.live_unit import until

PROJECT = "duplet-compose-test"
START_LIMIT_S = 120.0
UNIT_FILES = ("compose.yaml", "tests/compose/slow_copies.yaml", "tests/compose/build_here.yaml")
GPU_FILES = ("compose.yaml", "compose.gpu.yaml")
ALL_PROFILES = ("--profile", "observability")


@dataclass(slots=True)
class ComposedUnit:
    """One unit under one project name. Its containers, networks and volume last until `down`."""

    engine: Engine
    address: str
    """HOST:PORT where lb's port is published."""
    base: str
    """Base image of what Compose builds."""
    project: str = PROJECT
    checks: dict[str, int] = field(default_factory=dict)
    """KV checks by decode's instance, as last told."""
    mismatches: int = 0

    # --- Compose -----------------------------------------------------------

    async def compose(self, *arguments: str, files: Sequence[str] = UNIT_FILES) -> str:
        """Run Compose on this unit, which `files` make; returns what it printed.

        Raises:
            AssertionError: it failed; the text has its words.
        """
        return await self._compose(files, *arguments)

    async def _compose(self, files: Sequence[str], *arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *self.engine.compose,
            *(word for file in files for word in ("-f", file)),
            *arguments,
            cwd=ROOT,
            env=self.environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, f"compose {arguments}: {said.decode(errors='replace')}"
        return said.decode(errors="replace")

    def environment(self) -> dict[str, str]:
        """Of every command that concerns this unit."""
        named = {
            "COMPOSE_PROJECT_NAME": self.project,
            "PUBLISH_LB": self.address,
            "UNIT_MODEL": "/model",
            "BUILD_BASE": self.base,
            "BUILD_TORCH_INDEX": "",
        }
        labels = {f"BUILD_{name}": value for name, value in source_labels().items()}
        return {**self.engine.environment, **named, **labels}

    async def check_files(self) -> None:
        """Compose's own word on our files, the GPU pair and all profiles included."""
        await self._compose(GPU_FILES, *ALL_PROFILES, "config", "-q")

    async def down(self) -> None:
        """Take everything down, also what a broken run has left.

        Raises:
            AssertionError: something of the project is still there.
        """
        await self.compose(*ALL_PROFILES, "down", "-v", "-t", "1", "--remove-orphans")
        label = f"label=com.docker.compose.project={self.project}"
        for listed in (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q")):
            left = self.engine.run(*listed, "--filter", label)
            assert not left, f"docker {' '.join(listed)}: {left.split()}"

    # --- containers --------------------------------------------------------

    def container(self, service: Role) -> dict[str, Any]:
        """The one container of a service, as Docker tells it."""
        ids = self._container_ids(service)
        assert len(ids) == 1, f"{service} has the containers {ids}"
        [found] = json.loads(self.engine.run("inspect", ids[0]))
        assert isinstance(found, dict)
        return found

    def has_container(self, service: Role) -> bool:
        return bool(self._container_ids(service))

    def _container_ids(self, service: Role) -> list[str]:
        labels = {"project": self.project, "service": str(service)}
        filters = [f"--filter=label=com.docker.compose.{k}={v}" for k, v in labels.items()]
        return self.engine.run("ps", "-aq", *filters).split()

    def kill_process(self, service: Role) -> None:
        """Kill the container's first process, as a crash: the restart policy answers."""
        os.kill(self.container(service)["State"]["Pid"], signal.SIGKILL)

    def logs(self, service: Role) -> str:
        """All that the service's container has said, over all its lives."""
        done = subprocess.run(
            [self.engine.docker, "logs", *self._container_ids(service)],
            env=dict(self.engine.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return done.stdout

    # --- what it says ------------------------------------------------------

    async def ask(self) -> Unit | None:
        """GetUnit; None while lb does not answer."""
        async with AsyncClient(self.address) as client:
            try:
                return await client.unit()
            except GenerateError:
                return None

    async def wait_serving(self) -> None:
        """lb is ready and decode takes new work."""

        async def serves() -> bool:
            unit = await self.ask()
            if unit is None or unit.credit is None or unit.credit.refusing:
                return False
            return all(condition.ok for condition in unit.conditions)

        await until(serves, "the unit serves", START_LIMIT_S)

    async def wait_healthy(self) -> None:
        """Docker's own word on every container."""

        async def healthy() -> bool:
            states = [self.container(s)["State"]["Health"]["Status"] for s in SERVICES]
            return set(states) == {"healthy"}

        await until(healthy, "all containers healthy", START_LIMIT_S)

    async def wait_pages_free(self) -> None:
        """Every page of decode's pool came back."""

        async def free() -> bool:
            unit = await self.ask()
            if unit is None or unit.credit is None or unit.live_streams:
                return False
            return {n: p for n, p in unit.pages.items() if p} == {"free": unit.credit.total_pages}

        await until(free, "all of decode's pages free", START_LIMIT_S)

    async def has_quarantine(self) -> bool:
        """Whether decode has pages in quarantine, as lb was told."""
        unit = await self.ask()
        return unit is not None and unit.pages.get("quarantined", 0) > 0

    async def wait_lost(self, service: Role) -> None:
        """lb knows that the service is away."""

        async def lost() -> bool:
            unit = await self.ask()
            return unit is not None and any(
                c.name == f"peer.{service}" and not c.ok for c in unit.conditions
            )

        await until(lost, f"lb misses {service}", START_LIMIT_S)

    async def observe(self) -> None:
        """Take the unit's word on its KV checks: before decode's life ends, or they are lost.
        What decode has logged counts also afterwards.

        Raises:
            AssertionError: KV did not match.
        """
        unit = await self.ask()
        if unit is not None and unit.kv_checks:
            decode = next(s.instance for s in unit.services if s.name == Role.DECODE)
            self.checks[decode] = max(self.checks.get(decode, 0), unit.kv_checks)
        self.mismatches = max(self.mismatches, *await self.count_mismatches())
        assert self.mismatches == 0, f"{self.mismatches} KV mismatches"

    async def count_mismatches(self) -> tuple[int, int]:
        """KV mismatches as lb tells them, and as decode's container has logged them."""
        unit = await self.ask()
        told = unit.kv_mismatches if unit is not None else 0
        return told, self.logs(Role.DECODE).count('"event": "kv mismatch"')
