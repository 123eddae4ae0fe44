"""lb's check of a GenerateRequest, as far as it needs no model."""

from __future__ import annotations

from duplet.speech.v1 import speech_pb2 as pb
from duplet_core.errors import InvalidInput, Reason
from duplet_wire.checks import MOST_LABEL_CHARS, MOST_REQUEST_ID_CHARS


def check_request(request: pb.GenerateRequest) -> None:
    """Check labels and counts; prompt and sampling are `duplet_pages.prompt`'s to check.

    What passes here passes the peers' own checks too: a peer that refuses a message closes the
    stream that all requests share.

    Raises:
        InvalidInput: INVALID_REQUEST; the detail names the field and the value.
    """
    _check_length("request_id", request.request_id, MOST_REQUEST_ID_CHARS)
    _check_length("voice", request.voice, MOST_LABEL_CHARS)
    _check_length("session", request.session, MOST_LABEL_CHARS)
    if request.HasField("max_rows"):
        _check_count("max_rows", request.max_rows)
    if request.HasField("rows_per_message"):
        _check_count("rows_per_message", request.rows_per_message)
    if request.HasField("first_rows"):
        _check_count("first_rows", request.first_rows)


def _check_length(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise InvalidInput(
            Reason.INVALID_REQUEST, f"{field}: {len(text)} characters, more than {most}"
        )


def _check_count(field: str, value: int) -> None:
    if value < 1:
        raise InvalidInput(Reason.INVALID_REQUEST, f"{field}: {value} is below 1")
