"""`python -m duplet_unit.settings_check SERVICE…`: judge services' settings before any starts.

A process of its own, with the services' environment: it needs their classes of settings, and
the `duplet` command loads no service. It prints a line a problem and exits with 2, or with 0.
Warnings go to stderr, which it shares with whoever asked.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Mapping, Sequence

from duplet_runtime.settings import (
    BAD_SETTINGS_EXIT,
    ServiceSettings,
    SettingsError,
    load_settings,
)

EVERY_HOST = ("0.0.0.0", "::")
"""A server that listens there takes the port on all addresses."""


async def check_settings(names: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have the settings of these services judged.

    Raises:
        SettingsError: some are wrong; a line for each.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "duplet_unit.settings_check", *names),
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise SettingsError(out.decode().rstrip() or "the check of the settings failed")


def find_problems(names: Sequence[str]) -> list[str]:
    """What is wrong with these services' settings in this environment, each thing once."""
    problems: dict[str, list[str]] = {}
    ports: dict[int, list[tuple[str, str]]] = {}
    for name in names:
        try:
            settings = load_settings(_kind_of(name))
        except SettingsError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(name)
            continue
        for warning in settings.warnings():
            print(f"duplet: warning: {name}: {warning}", file=sys.stderr)
        port, host = settings.metrics_port, settings.metrics_host
        taken = ports.setdefault(port, []) if port else []
        for other, other_host in taken:
            if host == other_host or not {host, other_host}.isdisjoint(EVERY_HOST):
                problems[f"metrics_port: {other} and {name} cannot both have {port}"] = []
        taken.append((name, host))
    # What all of them say is nobody's own.
    return [
        line if len(said) in (0, len(names)) else f"{', '.join(said)}: {line}"
        for line, said in problems.items()
    ]


def _kind_of(name: str) -> type[ServiceSettings]:
    module = importlib.import_module(f"duplet_{name}.__main__")
    (kind,) = {kind for kind in vars(module).values() if getattr(kind, "role", None) == name}
    assert issubclass(kind, ServiceSettings)
    return kind


def main() -> int:
    problems = find_problems(sys.argv[1:])
    for problem in problems:
        print(problem)
    return BAD_SETTINGS_EXIT if problems else 0


if __name__ == "__main__":
    sys.exit(main())
