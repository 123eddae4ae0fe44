"""Client of a Duplet unit."""

from duplet_client.client import AsyncClient
from duplet_client.errors import GenerateError
from duplet_client.events import Event, Finished, FinishReason, Rows, Started, Usage
from duplet_client.front_end import FrontEnd, front_end, rows_from_text
from duplet_client.prompts import Prompt, pack_prompt
from duplet_client.stream import Generation, SamplingOptions
from duplet_client.timing import Segment, StreamTiming, Timeline
from duplet_client.unit import Condition, Credit, ServiceInfo, Unit

__all__ = [
    "AsyncClient",
    "Condition",
    "Credit",
    "Event",
    "FinishReason",
    "Finished",
    "FrontEnd",
    "GenerateError",
    "Generation",
    "Prompt",
    "Rows",
    "SamplingOptions",
    "Segment",
    "ServiceInfo",
    "Started",
    "StreamTiming",
    "Timeline",
    "Unit",
    "Usage",
    "front_end",
    "pack_prompt",
    "rows_from_text",
]
