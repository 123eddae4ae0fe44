"""Asks services for their health, as a supervisor or a container's health command does."""

from __future__ import annotations

import asyncio

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
