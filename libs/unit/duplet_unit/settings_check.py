"""`python -m duplet_unit.settings_check SERVICE…`: judge services' settings before any starts.

A process of its own, with the services' environment: it needs their classes of settings, and
the `duplet` command loads no service. It prints a line a problem and exits with 2, or with 0.
Warnings go to stderr, which it shares with whoever asked.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from duplet_core.ids import Role
from duplet_runtime.settings import (
    BAD_SETTINGS_EXIT,
    ServiceSettings,
    SettingsError,
    load_settings,
)

EVERY_HOST = ("0.0.0.0", "::")
"""A server that listens there takes the port on all addresses."""
ENGINES_SHARE = ("device", "model", "dtype", "page_rows")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


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
        process_group=0,  # A terminal's Ctrl-C is ours.
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
    loaded: dict[str, ServiceSettings] = {}
    for name in names:
        try:
            loaded[name] = load_settings(_kind_of(name))
        except SettingsError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(name)
            continue
        for warning in loaded[name].warnings():
            print(f"duplet: warning: {name}: {warning}", file=sys.stderr)
    # What all of them say is nobody's own; what one knows better, the others need not say.
    own = [
        line if len(said) == len(names) else f"{', '.join(said)}: {line}"
        for line, said in problems.items()
        if not any(other.startswith(f"{line};") for other in problems)
    ]
    return [*own, *_shared_ports(loaded), *_differences(loaded), *_missing_gpus(loaded)]


def _shared_ports(loaded: Mapping[str, ServiceSettings]) -> Iterator[str]:
    ports: dict[int, list[tuple[str, str]]] = {}
    for name, settings in loaded.items():
        port, host = settings.metrics_port, settings.metrics_host
        taken = ports.setdefault(port, []) if port else []
        for other, other_host in taken:
            if host == other_host or not {host, other_host}.isdisjoint(EVERY_HOST):
                yield f"metrics_port: {other} and {name} cannot both have {port}"
        taken.append((name, host))


def _differences(loaded: Mapping[str, ServiceSettings]) -> Iterator[str]:
    """What the two engines of a unit must have in common: with two of it, lb waits for ever."""
    prefill, decode = loaded.get(Role.PREFILL), loaded.get(Role.DECODE)
    if prefill is None or decode is None:
        return
    for field in ENGINES_SHARE:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        # Two directories may hold the same files.
        if ours != theirs and not (
            field == "model" and Path(ours).is_dir() and Path(theirs).is_dir()
        ):
            yield f"{field}: prefill has {ours!r} and decode {theirs!r}; both must have the same"


def _missing_gpus(loaded: Mapping[str, ServiceSettings]) -> Iterator[str]:
    if not any(getattr(settings, "device", "cpu") == "cuda" for settings in loaded.values()):
        return
    cuda = importlib.import_module("duplet_memory.cuda_driver")
    named = os.environ.get(VISIBLE_GPUS, "")
    try:
        cuda.call("cuInit", 0)
        seen = cuda.call("cuDeviceGetCount")
    except cuda.CudaError as error:
        yield (
            f"device: cuda, but no NVIDIA GPU with a driver is here ({error.detail}): see whether "
            "`nvidia-smi` shows one; without --gpu a unit runs on the CPU"
        )
        return
    wanted = len(named.split(","))
    if seen < wanted:
        yield (
            f"device: cuda, but of the GPUs {named} this machine shows {seen}: `nvidia-smi -L` "
            "lists what there is"
        )


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
