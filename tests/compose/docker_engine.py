"""A Docker engine to test with: the one that runs, or one that is installed and started here.

On a machine without an engine, and as root on Debian, the distribution's packages are installed
and `dockerd` runs on sockets of its own, without its default bridge, until the context ends, and
leaves the packet filter as it was. Its images stay, for the next run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.compose.firewall import kept_firewall

PACKAGES = ("docker.io", "docker-compose", "tini", "debootstrap")
DEBIANS_DOCKER = "/usr/bin/docker"
"""Another one on PATH may be a client without BuildKit."""

COMPOSE_VARIABLE = "COMPOSE"
"""Names the Compose to test with, such as `docker compose`."""

START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
POLL_S = 0.2

BASE_SUITE = "bookworm"
BASE_IMAGE = f"duplet-compose-test-base:{BASE_SUITE}"
LEFT_OUT = (
    *("dev", "proc", "sys", "var/cache/apt", "var/lib/apt/lists"),
    *("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"),
)
"""Folders of the bootstrapped system whose content a slim image does not have."""


class NoEngine(Exception):
    """No Docker engine runs and none can be started; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How to talk to a Docker engine."""

    docker: str
    compose: tuple[str, ...]
    environment: Mapping[str, str]
    """Of every command: ours without anybody's Duplet settings, and where the engine is."""
    is_ours: bool

    def run(self, *arguments: str) -> str:
        """`docker ARGUMENTS`; returns what it printed.

        Raises:
            AssertionError: it failed; the text has its words.
        """
        done = subprocess.run(
            [self.docker, *arguments],
            env=dict(self.environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()


@contextmanager
def running_engine() -> Iterator[Engine]:
    """An engine that answers while the context lasts; one that was started here ends with it.

    Raises:
        NoEngine: there is none and it cannot be started.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DUPLET_")}
    docker = shutil.which("docker")
    if docker is None or not answers(docker, environment):
        install()
        docker = DEBIANS_DOCKER
    if answers(
        docker, environment
    ):  # Perhaps since the installation: a package starts its service.
        yield Engine(docker, compose_command(docker, environment), environment, is_ours=False)
        return
    with tempfile.TemporaryDirectory(prefix="duplet-docker-") as folder:
        environment["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
        with kept_firewall(), started_daemon(Path(folder), docker, environment):
            yield Engine(docker, compose_command(docker, environment), environment, is_ours=True)


def answers(docker: str, environment: Mapping[str, str]) -> bool:
    """Whether an engine is behind this client."""
    return succeeds((docker, "info"), environment)


def succeeds(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def compose_command(docker: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What COMPOSE says, else Compose v2 where there is one, else docker-compose 1.29.

    Raises:
        NoEngine: what COMPOSE says does not run, or neither is there.
    """
    if named := tuple(environment.get(COMPOSE_VARIABLE, "").split()):
        if not succeeds((*named, "version"), environment):
            raise NoEngine(f"{COMPOSE_VARIABLE}: `{' '.join(named)} version` fails")
        return named
    if succeeds((docker, "compose", "version"), environment):
        return (docker, "compose")
    standalone = shutil.which("docker-compose")
    if standalone is None:
        raise NoEngine("neither `docker compose` nor docker-compose is installed")
    return (standalone,)


def install() -> None:
    """Install engine, Compose and debootstrap where they are missing.

    Raises:
        NoEngine: not root, no apt, or apt failed.
    """
    programs = ("dockerd", DEBIANS_DOCKER, "docker-compose", "docker-init", "debootstrap")
    if all(shutil.which(program) for program in programs):
        return
    apt = shutil.which("apt-get")
    if apt is None or os.getuid() != 0:
        raise NoEngine(f"no Docker engine runs; as root on Debian it would be {PACKAGES}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        (apt, "update", "-q"),
        (apt, "install", "-q", "-y", "--no-install-recommends", *PACKAGES),
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoEngine(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


@contextmanager
def started_daemon(folder: Path, docker: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Run dockerd, with its sockets in `folder`, while the context lasts.

    Raises:
        NoEngine: it ended, or does not answer in time; the text has the end of its log.
    """
    log_path = folder / "dockerd.log"
    command = ("dockerd", "--host", environment["DOCKER_HOST"], "--bridge", "none")
    places = ("--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/dockerd.pid")
    with log_path.open("wb") as log:
        daemon = subprocess.Popen([*command, *places], stdout=log, stderr=log, process_group=0)
    try:
        give_up_s = time.monotonic() + START_LIMIT_S
        while not answers(docker, environment):
            if daemon.poll() is not None or time.monotonic() > give_up_s:
                raise NoEngine(f"dockerd does not start: {log_path.read_text()[-3000:]}")
            time.sleep(POLL_S)
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def make_base_image(engine: Engine) -> str:
    """A slim Debian without a registry: debootstrap, then import. Returns the image's name."""
    if engine.run("images", "-q", BASE_IMAGE):
        return BASE_IMAGE
    with tempfile.TemporaryDirectory(prefix="duplet-base-") as folder:
        root = f"{folder}/root"
        subprocess.run(
            ["debootstrap", "--variant=minbase", BASE_SUITE, root],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        archive = f"{folder}/base.tar"
        excluded = [f"--exclude=./{left_out}/*" for left_out in LEFT_OUT]
        subprocess.run(["tar", "-C", root, *excluded, "-cf", archive, "."], check=True)
        engine.run("import", archive, BASE_IMAGE)
    return BASE_IMAGE
