"""Checks of landed KV that run beside the steps: begun in one turn, told in a later one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from duplet_core.engine import Verify


class DigestEngine(Protocol):
    """What checks need of `duplet_engine.gpu_engine.GpuEngine`."""

    def launch_digests(self, pages: Sequence[int], valid_rows: Sequence[int]) -> Any: ...
    def digests_done(self, flight: Any) -> bool: ...
    def read_digests(self, flight: Any) -> tuple[bytes, ...]: ...


class Checked(NamedTuple):
    """What came of a check."""

    verify: Verify
    detail: str
    """Which page differs; empty where all match."""


class KvChecks:
    """The checks in flight, oldest first; at most one for each open sequence."""

    def __init__(self, engine: DigestEngine, page_rows: int) -> None:
        self._engine = engine
        self._page_rows = page_rows
        self._flights: deque[tuple[Verify, Any]] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, verify: Verify) -> None:
        """Queue the digests of the pages that hold `verify.rows`; its pages are in the pool."""
        valid = [
            # The prompt's rows only: its last page goes on to hold output.
            min(self._page_rows, verify.rows - index * self._page_rows)
            for index in range(self._wanted(verify))
        ]
        flight = self._engine.launch_digests(verify.pages[: len(valid)], valid)
        self._flights.append((verify, flight))

    def take_done(self, *, wait: bool) -> list[Checked]:
        """Checks that are done, in their order. `wait`: for the oldest one at least."""
        done: list[Checked] = []
        while self._flights:
            verify, flight = self._flights[0]
            if not (wait and not done) and not self._engine.digests_done(flight):
                break
            self._flights.popleft()
            done.append(Checked(verify, self._compare(verify, self._engine.read_digests(flight))))
        return done

    def refusal(self, verify: Verify) -> str:
        """What is wrong with the digests' number, where it is."""
        if verify.rows >= 1 and len(verify.digests) == self._wanted(verify):
            return ""
        return f"{len(verify.digests)} digests for {verify.rows} rows of {self._page_rows} a page"

    def _wanted(self, verify: Verify) -> int:
        return -(-verify.rows // self._page_rows)

    def _compare(self, verify: Verify, found: tuple[bytes, ...]) -> str:
        for index, (have, want) in enumerate(zip(found, verify.digests, strict=True)):
            if have != want:
                return (
                    f"page {verify.pages[index]} (page {index} of {len(found)} of the prompt): "
                    f"digest {have.hex()}, expected {want.hex()}"
                )
        return ""
