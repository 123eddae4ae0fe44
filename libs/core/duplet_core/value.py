"""What machines are told and what they say: classes of values that nobody changes.

mypy takes a `value` for a frozen dataclass and refuses every assignment to a field. At run
time nothing stands in the way: a frozen dataclass stores each field through a call, which
makes it twice as long to make one, and a machine makes several for every event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

Kind = TypeVar("Kind")


@dataclass_transform(frozen_default=True)
def value(kind: type[Kind]) -> type[Kind]:
    """The class as a dataclass that compares and hashes by its fields."""
    return dataclass(slots=True, unsafe_hash=True)(kind)
