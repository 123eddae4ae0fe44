"""lb whose prompts come as JSON text: `python -m bench.unpacked_lb`.

The product's prompts are packed integers; only the comparison with what other servers take reads
them so. The text stands where the packed bytes do, and is read in lb's own process.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.admission_forms import PARSERS
from duplet_lb.__main__ import main
from duplet_lb.speech import Speech


def read_json() -> None:
    """From now on this process's lb takes its prompts as JSON."""
    prepare: Any = Speech._prepare

    def prepare_json(speech: Speech, request: Any, *others: Any) -> Any:
        request.prompt = PARSERS["json"](request.prompt)
        return prepare(speech, request, *others)

    setattr(Speech, "_prepare", prepare_json)  # noqa: B010 - its type is another


if __name__ == "__main__":
    read_json()
    sys.exit(main())
