"""Asks services for their health, as a supervisor or a container's health command does.

`duplet-probe ADDRESS [NAME]` exits with 0 when the service at ADDRESS says SERVING for the
health name, `ready` by default, and with 1 otherwise. It is a command of its own because it runs
every few seconds in each container: it loads half of what `duplet` does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from duplet_client import AsyncClient, GenerateError

PROBE_TIMEOUT_S = 1.0


async def is_serving(address: str, name: str) -> bool:
    """Whether the service at `address` (a gRPC target) says SERVING for the health name.

    One connection a question, which lives no longer than the answer: a service that is
    restarting is found as soon as it listens. No answer is a no.
    """
    async with AsyncClient(address) as client:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await client.health(name) == "SERVING"
        except (GenerateError, TimeoutError):
            return False


def main() -> None:
    """Entry point of the `duplet-probe` command."""
    parser = argparse.ArgumentParser(description="Exit with 0 when a service is well.")
    parser.add_argument("address", help="HOST:PORT or unix:PATH")
    parser.add_argument("name", nargs="?", default="ready", help="a health name; default: ready")
    asked = parser.parse_args()
    serving = asyncio.run(is_serving(asked.address, asked.name))
    print(f"{asked.name}: {'serving' if serving else 'not serving'}")
    sys.exit(0 if serving else 1)


if __name__ == "__main__":
    main()
