"""How many pages a GPU holds beside everything else: counted at start, never found out later."""

from __future__ import annotations

from dataclasses import dataclass

from duplet_core.errors import InvalidInput, Reason

KEPT_BYTES = 1 << 30
"""Left free: what the driver, the allocator's rounding and digests take while the engine runs."""
MOST_PAGES = 1 << 18
"""Pages that a pool takes unasked: those of small models are small, and each one costs the I/O
process memory and time."""
_GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A GPU's memory once weights and graphs are there, in bytes."""

    total: int
    free: int
    weights: int
    work: int
    """What graphs and the largest prefill chunk take beside the pool; in use already."""

    def describe(self) -> str:
        """For the log and for refusals."""
        return (
            f"{self.free / _GIB:.1f} GiB of {self.total / _GIB:.1f} are free beside weights "
            f"({self.weights / _GIB:.1f} GiB) and work ({self.work / _GIB:.1f} GiB)"
        )


def fit_pages(use: MemoryUse, page_bytes: int, wanted: int, least: int) -> int:
    """Pages of the pool.

    Args:
        use: memory before the pool is made.
        page_bytes: of one page.
        wanted: pages asked for; 0 for as many as fit, MOST_PAGES at most.
        least: pages that the longest sequence needs.

    Raises:
        InvalidInput: they do not fit; the detail says how much there is.
    """
    fits = max(0, use.free - KEPT_BYTES) // page_bytes
    pages = wanted or min(fits, MOST_PAGES)
    if pages > fits or pages < least:
        raise InvalidInput(
            Reason.INVALID_REQUEST,
            f"pool_pages: {max(pages, least)} pages want "
            f"{max(pages, least) * page_bytes / _GIB:.1f} GiB and {KEPT_BYTES / _GIB:.1f} GiB stay "
            f"free; {use.describe()}: {fits} pages fit",
        )
    return pages
