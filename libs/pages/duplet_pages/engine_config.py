"""What an I/O process tells its engine process at start, as one JSON argument."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Arrangement = Literal["page-major", "layer-major"]
Dtype = Literal["float32", "bfloat16"]
EngineRole = Literal["prefill", "decode", "monolith"]
Device = Literal["cpu", "cuda"]

SPEAKING_MODEL = "wren"
"""Speaks; its files are `duplet_models`'."""
TINY_MODEL = "tiny"
"""Has random weights, for tests that want arithmetic only."""
RANDOM = "random:"
"""Before the name of a shape that gets random weights."""
RANDOM_SHAPES = (
    "s2-pro",
    "s1-mini",
    "qwen3-0.6b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "small-dual-ar",
    "small-lm",
)
"""What may follow RANDOM; `duplet_engine.shapes` has them."""
_CONFIG = "config.json"
"""Without it a directory is no checkpoint."""


def check_model(model: str) -> None:
    """Whether there is such a model, so far as it can be told without loading it.

    Raises:
        ValueError: there is none; the text says what there is.
    """
    if model in (SPEAKING_MODEL, TINY_MODEL):
        return
    if model.startswith(RANDOM):
        shape = model.removeprefix(RANDOM)
        if shape not in RANDOM_SHAPES:
            raise ValueError(f"there is no shape {shape!r}, but {', '.join(RANDOM_SHAPES)}")
        return
    try:
        is_directory = Path(model).is_dir()
        has_config = is_directory and (Path(model) / _CONFIG).is_file()
    except OSError as error:  # too long a name, or others' files
        raise ValueError(f"{model!r} cannot be read: {error.strerror}") from error
    if not is_directory:
        raise ValueError(
            f"there is no model {model!r}, but {SPEAKING_MODEL}, {TINY_MODEL}, {RANDOM}<shape> "
            "and the path of a checkpoint's directory"
        )
    if not has_config:
        raise ValueError(f"{model!r} is no checkpoint's directory: it has no {_CONFIG}")
    _check_config(Path(model) / _CONFIG)


def _check_config(path: Path) -> None:
    """Whether the file is a JSON object; what it must hold the engine knows.

    Raises:
        ValueError: it is none, or cannot be read.
    """
    try:
        is_object = isinstance(json.loads(path.read_bytes()), dict)
    except OSError as error:  # others' files, or a broken disk
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no JSON, no Unicode, or nested without end
        raise ValueError(f"{str(path)!r} is no JSON: {error}") from error
    if not is_object:
        raise ValueError(f"{str(path)!r} is no JSON object")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine process; `python -m duplet_engine --config JSON --link-fd N`."""

    role: EngineRole
    model: str
    """A built-in model, 'random:<shape>', or the path of a checkpoint's directory."""
    device: Device = "cpu"
    """'cuda': the one GPU that the process sees."""
    dtype: Dtype = "float32"
    """Of weights, arithmetic and KV."""
    pool_pages: int = 2048
    """0, on a GPU: as many as fit."""
    page_rows: int = 16
    slots: int = 16
    """Most sequences one decode step takes."""
    chunk_rows: int = 256
    """Most prompt rows one prefill step computes; on a GPU over all prompts of the step."""
    arrangement: Arrangement = "page-major"
    threads: int = 1
    """Threads of one operator; the unit's processes share the machine's cores."""
    overlap: bool = True
    """On a GPU: launch the next step before the last one is read."""
    longest_step_ns: int = 0
    """Decode: the longest step that is planned; up to it steps are timed before Ready. 0: none."""
    recheck_at_end: bool = False
    """Check the prompt's digests again when a stream ends (fault tests)."""
    damage_pages: int = 0
    """Decode on a CPU, canary's drill only: pages of every prompt that are overwritten."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> EngineConfig:
        return EngineConfig(**json.loads(text))
