"""What services said last, for a test that fails beside them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

LINES = 60
COLUMNS = 400


class LastWords:
    """A context whose exception gets the end of every log in a folder as a note."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        for log in sorted(self._folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-LINES:]
            said = "\n".join(line[:COLUMNS] for line in lines)
            error.add_note(f"--- the end of {log.name}\n{said}")
