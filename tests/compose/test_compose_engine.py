"""Which Compose the compose test takes."""

from __future__ import annotations

import sys

import pytest

from tests.compose.docker_engine import COMPOSE_VARIABLE, NoEngine, compose_command


def test_the_compose_that_is_named_is_taken() -> None:
    words = f"{sys.executable} --check"
    command = compose_command("no-docker", {COMPOSE_VARIABLE: f"{sys.executable} -c pass"})
    assert command == (sys.executable, "-c", "pass")
    with pytest.raises(NoEngine, match="--check version` fails"):
        compose_command("no-docker", {COMPOSE_VARIABLE: words})
    with pytest.raises(NoEngine, match="no-such-compose version` fails"):
        compose_command("no-docker", {COMPOSE_VARIABLE: "no-such-compose"})
