"""What an engine's messages say about its speed, as metrics of its I/O process."""

from __future__ import annotations

from duplet_core.engine import ChunkDone, FromEngine, StepDone
from duplet_core.playback import NS
from duplet_runtime.metrics import Metrics

STEP_S = (
    *(1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3, 8e-3, 1e-2, 1.2e-2, 1.5e-2),
    *(1.75e-2, 2e-2, 2.38e-2, 3e-2, 4e-2, 5e-2, 0.1, 0.2, 0.5, 1.0),
)
"""42 rows/s are one step in 23.8 ms."""
STREAMS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)
PROMPT_S = (5e-3, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)


class EngineMeter:
    """Told of every message of one engine. Lives in the event loop."""

    def __init__(self, metrics: Metrics, *, prefills: bool, decodes: bool) -> None:
        """`prefills`, `decodes`: which of the two the engine does."""
        if decodes:
            self._step = metrics.histogram("step_seconds", "Time of one decode step", STEP_S)
            self._streams = metrics.histogram("step_streams", "Rows of one step", STREAMS)
        if prefills:
            meaning = "From a prompt's first chunk to its first row"
            self._prompt = metrics.histogram("prompt_seconds", meaning, PROMPT_S)

    def note(self, message: FromEngine) -> None:
        """Take the figures of a message that has some."""
        if isinstance(message, StepDone):
            self._step.observe((message.done_ns - message.started_ns) / NS)
            self._streams.observe(len(message.seqs))
        elif isinstance(message, ChunkDone) and message.first_row is not None:
            self._prompt.observe((message.done_ns - message.started_ns) / NS)
