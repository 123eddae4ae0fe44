"""Text front ends: how a model's prompts are made from text and a voice."""

from __future__ import annotations

import functools
import hashlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason
from duplet_pages.engine_config import SPEAKING_MODEL, TINY_MODEL
from duplet_pages.spec import ModelSpec

DEFAULT_VOICE_ROWS = 64

_VOICE_BEGINS = 256
_TEXT_BEGINS = 257
_GENERATE = 258
_FIRST_FREE_ID = 259


class FrontEnd(Protocol):
    """Makes prompts of one model."""

    @property
    def notice(self) -> str:
        """What whoever hears the output must know; empty when it is speech."""

    def rows(self, text: str, voice: str) -> NDArray[np.int32]:
        """A prompt, int32 [rows, columns]; the voice's rows come first and are the same for
        every text, so that requests share them."""


class TinyFrontEnd:
    """The built-in `tiny` model's: UTF-8 bytes as text ids, a voice made up from its name.

    [256, voice rows..., 257, text bytes..., 258]: everything through 257 is the voice's
    shareable prefix.
    """

    notice = "The tiny model's weights are random numbers: its rows are not speech."

    def __init__(self, spec: ModelSpec, voice_rows: int = DEFAULT_VOICE_ROWS) -> None:
        """
        Raises:
            InvalidInput: INVALID_REQUEST; the model's ids leave no room for text or codes, or
                `voice_rows` is negative.
        """
        if spec.codebooks == 0 or spec.semantic_first < _FIRST_FREE_ID:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"model: {spec.name} has {spec.codebooks} codebooks and semantic ids from "
                f"{spec.semantic_first}; its front end needs codebooks and ids from "
                f"{_FIRST_FREE_ID}",
            )
        if voice_rows < 0:
            raise InvalidInput(Reason.INVALID_REQUEST, f"voice_rows: {voice_rows} is below 0")
        self._spec = spec
        self._voice_rows = voice_rows

    def rows(self, text: str, voice: str) -> NDArray[np.int32]:
        """A prompt, int32 [rows, columns].

        Raises:
            InvalidInput: INVALID_REQUEST; the text has no UTF-8 form.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(Reason.INVALID_REQUEST, f"text: {error}") from error
        parts = (
            self._id_rows(_VOICE_BEGINS),
            self._voice(voice),
            self._id_rows(_TEXT_BEGINS),
            self._id_rows(*data),
            self._id_rows(_GENERATE),
        )
        return np.concatenate(parts)

    def _id_rows(self, *ids: int) -> NDArray[np.int32]:
        """Rows of plain ids: int32 [len(ids), columns], codes 0."""
        rows = np.zeros((len(ids), self._spec.columns), dtype=np.int32)
        rows[:, 0] = ids
        return rows

    def _voice(self, name: str) -> NDArray[np.int32]:
        """The voice's semantic rows, int32 [voice_rows, columns], from its name alone."""
        spec = self._spec
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        # Raw words, for NumPy promises their stream; its distributions may change.
        bits = np.random.PCG64(int.from_bytes(digest, "little"))
        words = bits.random_raw(self._voice_rows * spec.codebooks)
        words = words.reshape(self._voice_rows, spec.codebooks)
        semantic_ids = spec.semantic_last - spec.semantic_first + 1
        sizes = np.array(spec.codebook_sizes, dtype=np.uint64)
        sizes[0] = min(sizes[0], semantic_ids)
        rows = np.empty((self._voice_rows, spec.columns), dtype=np.int32)
        rows[:, 1:] = words % sizes
        rows[:, 0] = rows[:, 1] + spec.semantic_first
        return rows


@functools.lru_cache(maxsize=4)
def front_end(spec: ModelSpec, voice_rows: int = DEFAULT_VOICE_ROWS) -> FrontEnd | None:
    """The model's front end; None for a model that takes only rows.

    Raises:
        InvalidInput: INVALID_REQUEST; the model speaks, but what turns text into its phonemes
            is not installed.
    """
    if spec.name == TINY_MODEL:
        return TinyFrontEnd(spec, voice_rows)
    if spec.name == SPEAKING_MODEL:
        # Most clients send rows and need neither its files nor its dictionaries.
        try:
            from duplet_voice.front_end import VoiceFrontEnd
        except ModuleNotFoundError as error:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"text: for {spec.name} install duplet-voice, which turns text into its rows "
                f"({error.name} is missing)",
            ) from error
        return VoiceFrontEnd(spec)
    return None


def rows_from_text(
    spec: ModelSpec, text: str, voice: str, voice_rows: int = DEFAULT_VOICE_ROWS
) -> NDArray[np.int32]:
    """A prompt from text, int32 [rows, columns].

    Raises:
        InvalidInput: INVALID_REQUEST; the model has no front end, or the text does not suit it
            (one that is longer than a request speaks is for `duplet say`).
    """
    made = front_end(spec, voice_rows)
    if made is None:
        raise InvalidInput(
            Reason.INVALID_REQUEST,
            f"text: model {spec.name} has no text front end; send prompt rows",
        )
    if not text.strip():
        raise InvalidInput(Reason.INVALID_REQUEST, f"text: {text!r} says nothing")
    return made.rows(text, voice)
