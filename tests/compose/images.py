"""Builds the four images with what this machine's pip is told, and checks what is in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

from duplet_core.ids import Role
from tests.compose.docker_engine import Engine

ROOT = Path(__file__).parents[2]
SERVICES = (Role.KVPROXY, Role.PREFILL, Role.DECODE, Role.LB)
VERSION = version("duplet-unit")

LB_MOST_BYTES = 200 * 10**6
"""lb's image on a slim Debian."""

TOOLS = ("gcc", "cc", "g++", "ld", "as", "make", "pip", "pip3", "strip", "git")
BUILD_MODULES = {"setuptools", "pkg_resources", "_distutils_hack", "pip", "wheel", "hatchling"}
PRESENT = "python3"
"""What every image has, so that a look for tools which finds nothing is noticed."""
LABELS = ("title", "description", "version", "revision", "source", "licenses")


def image_of(service: Role) -> str:
    return f"duplet-{service}:{VERSION}"


@cache
def source_labels() -> dict[str, str]:
    """REVISION and SOURCE, for the labels; the same for all that one run builds."""

    def git(*arguments: str) -> str:
        command = ("git", *arguments)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "REVISION": git("describe", "--always", "--dirty", "--abbrev=40"),
        "SOURCE": git("config", "--get", "remote.origin.url"),
    }


def build_images(engine: Engine, base: str) -> None:
    """`make images`, on the host's network and with pip's configuration as build secrets.

    Raises:
        subprocess.CalledProcessError: a build failed; its output went to ours.
    """
    with pip_secrets() as flags:
        flags += ["--network", "host", "--build-arg", f"BASE={base}", "-q"]
        told = [f"DOCKER={engine.docker}", f"BUILD_FLAGS={' '.join(flags)}"]
        told += [f"{name}={value}" for name, value in source_labels().items()]
        subprocess.run(
            ["make", "-s", "-C", str(ROOT), "images", *told],
            env=dict(engine.environment),
            stdout=subprocess.DEVNULL,
            check=True,
        )


@contextmanager
def pip_secrets() -> Iterator[list[str]]:
    """Flags of `docker build` that let pip install there as it does here: index, certificates,
    and folders of wheels, which are served on the loopback interface meanwhile."""
    told = pip_configuration()
    lines, flags = ["[global]"], []
    if "cert" in told:
        lines.append("cert = /ca.crt")
        flags += ["--secret", f"id=ca,src={told['cert']}"]
    if "index-url" in told:
        lines.append(f"index-url = {told['index-url']}")
    folders = [Path(f) for f in told.get("find-links", "").split() if Path(f).is_dir()]
    if any(folder.glob("torch-*.whl") for folder in folders):
        flags += ["--build-arg", "TORCH_INDEX="]
    with served(folders) as addresses, tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        if addresses:
            lines += [f"find-links = {' '.join(addresses)}", "trusted-host = 127.0.0.1"]
        file.write("\n".join(lines) + "\n")
        file.flush()
        yield [*flags, "--secret", f"id=pip,src={file.name}"]


def pip_configuration() -> dict[str, str]:
    """pip's settings by their names; what the environment says wins."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    pairs = [line.partition("=")[::2] for line in listed.stdout.splitlines()]
    pairs.sort(key=lambda pair: pair[0].startswith(":env:"))
    return {name.rpartition(".")[2]: value.strip("'\"") for name, value in pairs}


@contextmanager
def served(folders: list[Path]) -> Iterator[list[str]]:
    """Serve the folders' files to this machine alone while the context lasts."""
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=os.fspath(folder)))
        for folder in folders
    ]
    threads = [threading.Thread(target=server.serve_forever) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield [f"http://127.0.0.1:{server.server_address[1]}/" for server in servers]
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    """Says nothing about what it serves."""

    def log_message(self, *_: Any) -> None:
        pass


def check_images(engine: Engine) -> None:
    """Version, user, size; no torch where none belongs; no build tools and no tests anywhere.

    Raises:
        AssertionError: names the image and what is wrong.
    """
    for service in SERVICES:
        name = image_of(service)
        [image] = json.loads(engine.run("image", "inspect", name))
        config = image["Config"]
        assert config["User"] == "10001:10001", name
        labels = {label: config["Labels"][f"org.opencontainers.image.{label}"] for label in LABELS}
        assert labels["title"] == f"duplet-{service}", name
        assert labels["version"] == VERSION, name
        assert {n.upper(): labels[n] for n in ("revision", "source")} == source_labels(), name
        assert config["Healthcheck"]["Test"][1] == "duplet-probe", name
        inside = partial(engine.run, "run", "--rm", "--network", "none", name)
        if service is Role.LB:
            assert image["Size"] <= LB_MOST_BYTES, f"{name} has {image['Size']} bytes"
            inside("python", "-c", "import duplet_lb.tracing")  # loaded with the first span only
        assert inside("duplet", "--version") == f"duplet {VERSION}", name
        look = 'for tool in "$@"; do command -v "$tool" || true; done'
        found = inside("sh", "-c", look, "sh", *TOOLS, PRESENT).split()
        assert [Path(tool).name for tool in found] == [PRESENT], f"{name} has {found}"
        modules = set(inside("sh", "-c", "ls /opt/duplet/lib/python3*/site-packages").split())
        assert not BUILD_MODULES & modules, f"{name} has {BUILD_MODULES & modules}"
        assert ("torch" in modules) is (service in (Role.PREFILL, Role.DECODE)), name
        tests = inside("find", "/opt/duplet", "-name", "tests", "-o", "-name", "conftest.py")
        assert not tests, f"{name} has {tests}"


def remove_untagged(engine: Engine) -> None:
    """Images of ours that a newer one has taken the name of."""
    for service in SERVICES:
        label = f"label=org.opencontainers.image.title=duplet-{service}"
        engine.run("image", "prune", "--force", "--filter", label)
