"""The life of a service process: lock, loop, signals, one group of tasks, exit code.

`run_service(settings, main)` gives `main` a Service. `main` starts its parts (child processes
first, then gRPC), waits for `service.draining`, drains, stops its server and returns. SIGTERM
and SIGINT set `draining`; a second one ends the process without waiting.

An exception anywhere is fatal: in `main`, in a task of `service.spawn`, in a callback of the
loop, or reported through `service.fail`. A broken invariant ends the process on the spot,
before another event could act on wrong state; the kernel's word of our exit is what peers
wait for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

import uvloop

from duplet_core.errors import InvariantError
from duplet_core.ids import InstanceId
from duplet_runtime.health import Health
from duplet_runtime.lock import HeldLock, hold_lock
from duplet_runtime.logs import configure_logs, get_logger
from duplet_runtime.settings import (
    BAD_SETTINGS_EXIT,
    ServiceSettings,
    SettingsError,
    prepare_run_dir,
    print_problems,
)

USE_UVLOOP = True
"""Measured on lb's own pattern of messages: docs/decisions/0009-event-loop.md."""

FAILED_EXIT = 1
INVARIANT_EXIT = 70
SECOND_SIGNAL_EXIT = 130

OPEN = "open"
"""The condition that a drain takes away."""

S = TypeVar("S", bound=ServiceSettings)


class Service(Generic[S]):
    """What a service's `main` works with. Lives in one event loop."""

    def __init__(
        self,
        settings: S,
        instance: InstanceId,
        tasks: asyncio.TaskGroup,
        conditions: Iterable[str],
    ) -> None:
        self.settings = settings
        self.instance = instance
        self.health = Health([OPEN, *conditions])
        self.health.set(OPEN, True, "takes new work")
        self.log = get_logger(f"duplet.{settings.role}")
        self.draining = asyncio.Event()
        """Set by `drain`: take nothing new, finish what runs, then return from `main`."""
        self._tasks = tasks
        self._spawned: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Owned by run_service; held until the process ends.
        self.lock: HeldLock | None = None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that lives until it ends or `main` returns; its exception is fatal."""
        task = self._tasks.create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def fail(self, error: BaseException) -> None:
        """End the service because of `error`; for callbacks that have nobody to raise to."""
        if isinstance(error, InvariantError):
            _die(error)
        if not self._failure.done():
            self._failure.set_exception(error)

    async def watch_failure(self) -> None:
        """Raise what `fail` reported."""
        await self._failure

    def cancel_spawned(self) -> None:
        for task in tuple(self._spawned):
            task.cancel()

    def drain(self, why: str) -> None:
        """Begin to drain: not ready any more, and `draining` is set. Once begun, it stays."""
        if not self.draining.is_set():
            self.log.info("draining", why=why)
            self.health.set(OPEN, False, f"draining: {why}")
            self.draining.set()

    def take_signal(self) -> None:
        if self.draining.is_set():
            self.log.warning("second signal: leaving without drain")
            logging.shutdown()
            os._exit(SECOND_SIGNAL_EXIT)
        self.drain("signal")


def new_instance() -> InstanceId:
    """The name of one life of a service: 128 random bits."""
    return InstanceId(secrets.token_hex(16))


def run_service(
    settings: S, main: Callable[[Service[S]], Awaitable[None]], conditions: Iterable[str] = ()
) -> int:
    """Run a service to its end. `conditions`: names that its health must hear of to be ready.

    Returns:
        The exit code: 0 after a drain, 1 after a failure, 2 when the service cannot start with
        its settings, also where that shows only now (`main` raised SettingsError): a line says
        why. A broken invariant does not return: the process exits with 70.
    """
    instance = new_instance()
    configure_logs(settings.role, instance, settings.log_format, settings.log_level)
    try:
        prepare_run_dir(settings.run_dir)
    except SettingsError as error:
        print_problems(settings.role, error)
        return BAD_SETTINGS_EXIT
    factory = uvloop.new_event_loop if USE_UVLOOP else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(_run(settings, instance, main, conditions))


async def _run(
    settings: S,
    instance: InstanceId,
    main: Callable[[Service[S]], Awaitable[None]],
    conditions: Iterable[str],
) -> int:
    try:
        async with asyncio.TaskGroup() as tasks:
            service = Service(settings, instance, tasks, conditions)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, service.take_signal)
            loop.set_exception_handler(lambda _, context: _take_loop_error(service, context))
            service.spawn(service.watch_failure(), "failure watch")
            if await _take_lock(service):
                service.log.info("started", run_dir=str(settings.run_dir), pid=os.getpid())
                for warning in settings.warnings():
                    service.log.warning(warning)
                await main(service)
            service.cancel_spawned()
    except ExceptionGroup as group:
        return _report(settings.role, group)
    get_logger(f"duplet.{settings.role}").info("stopped")
    return 0


async def _take_lock(service: Service[S]) -> bool:
    """Hold the role's lock; False when a signal came while another instance had it."""
    path = service.settings.lock_path(service.settings.role)
    locking = asyncio.ensure_future(
        hold_lock(path, lambda holder: service.log.warning("waiting for lock", holder=holder))
    )
    signalled = asyncio.ensure_future(service.draining.wait())
    try:
        await asyncio.wait({locking, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if not locking.done():
            return False
        service.lock = locking.result()
        return True
    finally:
        locking.cancel()
        signalled.cancel()
        await asyncio.gather(locking, signalled, return_exceptions=True)


def _take_loop_error(service: Service[S], context: dict[str, Any]) -> None:
    error = context.get("exception")
    if error is None:
        service.log.error("event loop", detail=context["message"])
    else:
        service.fail(error)


def _report(role: str, group: BaseExceptionGroup[Any]) -> int:
    """Say what failed. Returns the exit code."""
    code = BAD_SETTINGS_EXIT
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            code = min(code, _report(role, error))
        elif isinstance(error, InvariantError):
            _die(error)
        elif isinstance(error, SettingsError):
            print_problems(role, error)
        else:
            get_logger(f"duplet.{role}").error("failed", exc_info=error)
            code = FAILED_EXIT
    return code


def _die(error: InvariantError) -> None:
    get_logger("duplet").critical("invariant broken", detail=str(error), exc_info=error)
    logging.shutdown()
    os._exit(INVARIANT_EXIT)
