"""What a local unit consists of: its services, their environment, their folder."""

from __future__ import annotations

import fcntl
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from duplet_core.ids import Role
from duplet_runtime.addresses import check_free, check_listen
from duplet_runtime.settings import MONOLITH, prepare_run_dir
from duplet_unit.supervisor import Service

DEFAULT_LISTEN = "127.0.0.1:50051"
LISTEN_VARIABLE = "DUPLET_LB_LISTEN"
RUN_DIR_VARIABLE = "DUPLET_RUN_DIR"

STAGES = ((Role.LB,), (Role.PREFILL, Role.DECODE), (Role.KVPROXY,))
"""Order of the end: lb's streams first; the writer last, for its answers free the others' pages."""

MONOLITH_STAGES = ((Role.LB,), (MONOLITH,))


class UnitError(Exception):
    """The unit cannot be started here; the text says why and what to do."""


def unit_services(run_dir: Path, listen: str, environment: Mapping[str, str]) -> list[Service]:
    """The four services of a unit in `run_dir`, with lb on TCP address `listen`."""
    shared = _environment(run_dir, listen, environment)
    return [
        Service(
            name=role,
            argv=_command(role),
            environment=shared,
            address=dial_address(listen) if role is Role.LB else f"unix:{run_dir}/{role}.sock",
            kill_when_stopped=role is Role.KVPROXY,
        )
        for role in (Role.KVPROXY, Role.DECODE, Role.PREFILL, Role.LB)
    ]


def monolith_services(run_dir: Path, listen: str, environment: Mapping[str, str]) -> list[Service]:
    """lb, and the host that it takes for prefill and decode."""
    shared = _environment(run_dir, listen, environment)
    host = f"unix:{run_dir}/{Role.DECODE}.sock"
    return [
        Service(MONOLITH, _command(MONOLITH), shared, host),
        Service(Role.LB, _command(Role.LB), shared, dial_address(listen)),
    ]


def _environment(run_dir: Path, listen: str, base: Mapping[str, str]) -> dict[str, str]:
    return {**base, RUN_DIR_VARIABLE: str(run_dir), LISTEN_VARIABLE: listen}


def _command(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"duplet_{name}")


def dial_address(listen: str) -> str:
    """Where a client on this machine reaches a server that listens there."""
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "*") else listen


@contextmanager
def owned_run_dir(path: Path | None) -> Iterator[Path]:
    """The unit's folder, this process's alone while the context lasts.

    `path` None: a new one under the temporary folder, removed afterwards with all that is in
    it. One that was named stays.

    Raises:
        UnitError: another `duplet up` has it.
        duplet_runtime.settings.SettingsError: it cannot be made or others may enter it.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="duplet-")) if path is None else path.absolute()
    prepare_run_dir(run_dir)
    try:
        with (run_dir / "up.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UnitError(f"another `duplet up` runs a unit in {run_dir}") from error
            (run_dir / "logs").mkdir(exist_ok=True)
            yield run_dir
    finally:
        if path is None:
            shutil.rmtree(run_dir)


def check_address_is_free(listen: str) -> None:
    """Refuse an address that somebody else answers on: health would then be another's.

    Raises:
        UnitError: `listen` is no address, leaves the port open, or cannot be bound.
    """
    try:
        check_listen(listen)
    except ValueError as error:
        raise UnitError(f"--listen: {error}") from error
    if listen.endswith(":0"):
        raise UnitError(f"--listen: {listen!r}: nobody could know the port")
    try:
        check_free(listen)
    except OSError as error:
        why = error.strerror or str(error)
        raise UnitError(f"cannot listen on {listen}: {why}; use another --listen") from error


def unit_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The services' environment: ours, with readable Python failures."""
    return {**base, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def free_local_address() -> str:
    """A TCP address of this machine on which nobody listens now."""
    return free_local_addresses(1)[0]


def free_local_addresses(count: int) -> list[str]:
    """Different ones. The kernel may give a port twice to who asks for one after the other."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
