"""The engine's process: what surrounds the loop."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import sys

import torch

from duplet_core.engine import Ready
from duplet_core.errors import InvalidInput
from duplet_engine.backends import start_backend
from duplet_engine.link import Link
from duplet_engine.load_progress import tell_steps, told_progress
from duplet_engine.step_times import time_steps
from duplet_pages.engine_config import EngineConfig
from duplet_runtime.engine_link import BlockingLink, LinkClosed

_PR_SET_PDEATHSIG = 1
BAD_CONFIG_EXIT = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one engine until Shutdown (exit code 0) or until the link closes (1); 2 means that
    the config asks for what is not there.

    Any other end is a fault of the whole engine: an exception, with its traceback, and a
    non-zero code.
    """
    parent = os.getppid()
    # Where a signal ends the process, the log has the line of Python that it was at.
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="duplet_engine")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--link-fd", required=True, type=int, help="the inherited link")
    options = parser.parse_args(arguments)
    ignore_stop_signals()
    link = BlockingLink.from_fd(options.link_fd)
    try:
        if not die_with(parent):
            return 1
        serve(EngineConfig.from_json(options.config), link)
    except InvalidInput as error:  # the model's files or the settings are at fault
        print(f"duplet_engine: {error.detail}", file=sys.stderr)
        return BAD_CONFIG_EXIT
    except LinkClosed as error:
        print(f"duplet_engine: {error}", file=sys.stderr)
        return 1
    finally:
        link.close()
    return 0


def serve(config: EngineConfig, link: Link) -> None:
    """Load, warm up, time steps where decode asks for it, say Ready, and run the role's loop until
    Shutdown.

    Raises:
        LinkClosed: the I/O process is gone.
        InvalidInput: the config asks for something that is not there.
    """
    torch.set_num_threads(config.threads)
    with torch.inference_mode():
        with told_progress(config.role, config.model) as progress:
            engine, run_loop = start_backend(config, progress)
        times = time_steps(engine, config.longest_step_ns) if config.longest_step_ns else ()
        if times:
            tell_steps(config.role, config.model, times)
        pool = engine.pool
        link.send(
            Ready(
                spec=engine.spec.to_json(),
                pool=pool.description.to_json(),
                pages=pool.description.pages,
                page_rows=config.page_rows,
                slots=config.slots,
                step_times=times,
            ),
            fds=(pool.fd,),
        )
        run_loop(link)
        engine.close()


def ignore_stop_signals() -> None:
    """The I/O process decides when the engine ends: a drain still needs its steps."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when `parent` dies: a service's processes share one
    fate. False when it is dead already.

    A parent that died before `parent` was read is not noticed here, but by the link's end.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent
