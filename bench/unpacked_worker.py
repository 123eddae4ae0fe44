"""A client process that sends its prompts as JSON text, to `bench.unpacked_lb`."""

from __future__ import annotations

import json
from typing import Any

from duplet_client import AsyncClient
from duplet_load.worker import main


def send_json() -> None:
    """From now on this process's client sends arrays as JSON."""
    generate: Any = AsyncClient.generate

    def generate_json(client: AsyncClient, prompt: Any, **others: Any) -> Any:
        text = json.dumps(prompt.tolist(), separators=(",", ":")).encode()
        return generate(client, text, columns=prompt.shape[1], **others)

    setattr(AsyncClient, "generate", generate_json)  # noqa: B010 - its type is another


if __name__ == "__main__":
    send_json()
    main()
