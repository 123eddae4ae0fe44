"""Built-in models as directories of files, each laid out like a published checkpoint."""

from __future__ import annotations

from pathlib import Path

from duplet_core.errors import InvalidInput, Reason

NAMES = ("wren",)
"""Models that come with Duplet."""


def directory(name: str) -> Path:
    """Where a built-in model's files are.

    `config.json` and `model.safetensors` are a checkpoint in S2-Pro's layout; beside them lie
    `codec.safetensors`, `phonemes.json`, `voices.safetensors`, `voices.json` and `LICENSES.md`.

    Raises:
        InvalidInput: INVALID_REQUEST; no such model comes with Duplet.
    """
    if name not in NAMES:
        raise InvalidInput(
            Reason.INVALID_REQUEST, f"model is {name!r}, built in are {', '.join(NAMES)}"
        )
    return Path(__file__).parent / name
