"""What a generation says, in order: Started, Rows any number of times, Finished."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from duplet_client.timing import Timeline


class FinishReason(StrEnum):
    """Why a request ended well."""

    STOP = "STOP"
    LENGTH = "LENGTH"


@dataclass(frozen=True, slots=True)
class Started:
    """The unit has admitted the request."""

    request_id: str
    seed: int
    """With the same prompt and sampling it gives the same rows again."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some output rows."""

    first_index: int
    """Index of the first row here; the request's first output row is 0."""
    rows: NDArray[np.int32]
    """[n, columns], read-only; a view of the message that it owns."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used, in rows and checks."""

    prompt_rows: int
    cached_rows: int
    """Prompt rows whose KV came from the prefix cache."""
    output_rows: int
    kv_checks: int
    """Checks of the KV's digests that were made and passed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended well; nothing follows."""

    reason: FinishReason
    usage: Usage
    timeline: Timeline


Event = Started | Rows | Finished
