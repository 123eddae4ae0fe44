"""What the tests of the services share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from duplet_unit.unit import owned_run_dir


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with owned_run_dir(None) as folder:
        yield folder
