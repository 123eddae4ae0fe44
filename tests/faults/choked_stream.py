"""A proxy on decode's socket that can stop taking what decode says, while lb's words pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

CHUNK_BYTES = 65_536


class Choke:
    """Forwards connections. Owned by `choked_socket`, which ends its tasks."""

    def __init__(self, real: Path) -> None:
        self._real = real
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """From now on nothing that decode says is read."""
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of lb's."""
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Cut every connection."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(str(self._real))
        pumps = (
            asyncio.create_task(self._pump(reader, up_writer, choked=False)),
            asyncio.create_task(self._pump(up_reader, writer, choked=True)),
        )
        try:
            # A connection that either end cuts is over.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            up_writer.close()
            writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, choked: bool
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if choked:
                await self._open.wait()
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def choked_socket(path: Path) -> AsyncIterator[Choke]:
    """Stand between `path`, a listening Unix socket, and whoever connects from now on."""
    real = path.with_name("real.sock")
    path.rename(real)
    choke = Choke(real)
    server = await asyncio.start_unix_server(choke.take, str(path))
    try:
        yield choke
    finally:
        real.rename(path)
        server.close()
        await choke.end()
