"""Three forms of one prompt on the wire, and the way of each to a checked packed prompt.

`packed` is what clients send: a GenerateRequest with little-endian int32 bytes. The others are
what comparable servers take: JSON text, read by the standard library (`json`) and by the fastest
parser at hand (`msgspec`), and a message of repeated messages of integers (`repeated`). Each is
turned into an array by NumPy in one call; none gets a Python loop over values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from duplet.speech.v1 import speech_pb2
from duplet_core.errors import InvalidInput, Reason
from duplet_pages.prompt import check_prompt
from duplet_pages.spec import ModelSpec

COLUMNS = 11

SPEC = ModelSpec(
    name="bench",
    fingerprint="none",
    codebooks=COLUMNS - 1,
    vocab=155_776,
    codebook_sizes=(4096,) + (1024,) * 9,
    semantic_first=151_678,
    semantic_last=155_773,
    stop_id=151_645,
    page_rows=16,
    longest_sequence=32_768,
    default_max_rows=2048,
    layers=36,
    kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    kv_hash="none",
    rows_per_second=21.5,
)
"""A real model's widths and ranges, so that the text has numbers of real length."""

_FIELD = descriptor_pb2.FieldDescriptorProto


def make_prompt(rows: int) -> NDArray[np.int32]:
    """A voice and a text behind it, valid under SPEC: int32 [rows, COLUMNS]."""
    draw = np.random.default_rng(rows)
    prompt = np.zeros((rows, COLUMNS), dtype=np.int32)
    voice = rows * 9 // 10
    first_codes = draw.integers(0, SPEC.codebook_sizes[0], voice)
    prompt[:voice, 0] = SPEC.semantic_first + first_codes
    prompt[:voice, 1] = first_codes
    prompt[:voice, 2:] = draw.integers(0, SPEC.codebook_sizes[1], (voice, COLUMNS - 2))
    prompt[voice:, 0] = draw.integers(0, SPEC.stop_id, rows - voice)
    return prompt


def encode_forms(prompt: NDArray[np.int32]) -> dict[str, bytes]:
    """The bytes of each form of int32 [rows, COLUMNS]."""
    rows = prompt.tolist()
    packed = speech_pb2.GenerateRequest(prompt=prompt.astype("<i4").tobytes(), columns=COLUMNS)
    text = json.dumps(rows, separators=(",", ":")).encode()
    nested = _NESTED(rows=[{"values": row} for row in rows])
    return {
        "packed": packed.SerializeToString(),
        "json": text,
        "msgspec": text,
        "repeated": nested.SerializeToString(),
    }


def _make_nested() -> Any:
    """`message Nested { message Row { repeated int32 values = 1; } repeated Row rows = 1; }`"""
    file = descriptor_pb2.FileDescriptorProto(
        name="bench/admission.proto", package="bench", syntax="proto3"
    )
    nested = file.message_type.add(name="Nested")
    row = nested.nested_type.add(name="Row")
    repeated = _FIELD.LABEL_REPEATED
    row.field.add(name="values", number=1, type=_FIELD.TYPE_INT32, label=repeated)
    nested.field.add(
        name="rows",
        number=1,
        type=_FIELD.TYPE_MESSAGE,
        label=repeated,
        type_name=".bench.Nested.Row",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Nested"))


_NESTED = _make_nested()
_DECODER = msgspec.json.Decoder(list[list[int]])


def _unpack(data: bytes) -> bytes:
    return speech_pb2.GenerateRequest.FromString(data).prompt


def _pack_lists(rows: list[list[int]]) -> bytes:
    try:
        return np.array(rows, dtype="<i4").tobytes()
    except (ValueError, OverflowError) as error:
        raise InvalidInput(Reason.INVALID_PROMPT, f"prompt: {error}") from error


def _pack_nested(data: bytes) -> bytes:
    return _pack_lists([row.values[:] for row in _NESTED.FromString(data).rows])


PARSERS: Mapping[str, Callable[[bytes], bytes]] = {
    "packed": _unpack,
    "json": lambda data: _pack_lists(json.loads(data)),
    "msgspec": lambda data: _pack_lists(_DECODER.decode(data)),
    "repeated": _pack_nested,
}
"""From a request's bytes to the packed prompt, not yet checked."""


def admit(form: str, data: bytes) -> bytes:
    """The checked packed prompt of a request's bytes.

    Raises:
        InvalidInput: the prompt is wrong.
    """
    prompt = PARSERS[form](data)
    check_prompt(prompt, COLUMNS, SPEC)
    return prompt
