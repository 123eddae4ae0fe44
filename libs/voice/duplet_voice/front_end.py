"""Text and a voice to prompts of the built-in model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason
from duplet_models import directory
from duplet_pages.spec import ModelSpec
from duplet_voice.phonemes import Speller, read_text
from duplet_voice.pieces import split_pieces
from duplet_voice.voices import load_voices

VOICE_BEGINS: Final = 2
TEXT_BEGINS: Final = 3
GENERATE: Final = 4

_ROWS_A_PHONEME: Final = 2
_ROWS_AROUND: Final = 24
"""More than the slowest recording of the slowest voice takes, by 17 rows; a model that goes on
longer says nothing more."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One request of a text."""

    prompt: NDArray[np.int32]
    """[rows, columns]."""
    phonemes: str
    max_rows: int
    """Speech of these phonemes that is longer has gone astray: it ends by LENGTH."""


class VoiceFrontEnd:
    """The front end of the built-in model.

    A prompt is [voice_begins, the voice's reference, text_begins, phonemes, generate]; everything
    through text_begins is the same for every text of a voice, so that requests share it.
    """

    notice = ""

    def __init__(self, spec: ModelSpec, model: Path | None = None) -> None:
        """
        Args:
            spec: what the unit serves.
            model: directory of the model's files; without one, the built-in model's.

        Raises:
            InvalidInput: INVALID_REQUEST; the files are not of this model.
        """
        model = model if model is not None else directory("wren")
        self.voices = load_voices(model)
        self._spec = spec
        self._speller = Speller()
        self._ids = _read_symbols(model / "phonemes.json", spec)
        for name in self.voices.names:
            shape = self.voices[name].rows.shape
            if len(shape) != 2 or shape[1] != spec.columns:
                raise InvalidInput(
                    Reason.INVALID_REQUEST,
                    f"model: voice {name} has rows of {shape[-1]} integers, "
                    f"{spec.name} takes {spec.columns}",
                )

    def rows(self, text: str, voice: str) -> NDArray[np.int32]:
        """The prompt of a text that is one piece, int32 [rows, columns].

        Raises:
            InvalidInput: INVALID_REQUEST; as `pieces`, or the text needs several.
        """
        pieces = self.pieces(text, voice)
        first = next(pieces)
        if next(pieces, None) is not None:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                "text: it is longer than one request speaks; `duplet say` sends it in pieces",
            )
        return first.prompt

    def pieces(self, text: str, voice: str) -> Iterator[Piece]:
        """The requests that speak a text, in order, at least one; each is made when asked for.

        Raises:
            InvalidInput: INVALID_REQUEST; at once, when the text or the voice does not do.
        """
        reference = self.voices[voice].rows
        phonemes = split_pieces(self._speller.sentences(read_text(text)))
        first = next(phonemes, None)
        if first is None:
            raise InvalidInput(Reason.INVALID_REQUEST, "text: there is no word to speak in it")
        return (
            Piece(self.prompt(reference, piece), piece, self.max_rows(piece))
            for piece in itertools.chain((first,), phonemes)
        )

    def prompt(self, reference: NDArray[np.int32], phonemes: str) -> NDArray[np.int32]:
        """A prompt, int32 [rows, columns], of a reference and of phonemes."""
        ids = [self._ids[symbol] for symbol in phonemes if symbol in self._ids]
        parts = (self._id_rows(VOICE_BEGINS), reference, self._id_rows(TEXT_BEGINS, *ids, GENERATE))
        return np.concatenate(parts)

    def max_rows(self, phonemes: str) -> int:
        """Most rows that speech of these phonemes may take."""
        return min(_ROWS_AROUND + _ROWS_A_PHONEME * len(phonemes), self._spec.default_max_rows)

    def _id_rows(self, *ids: int) -> NDArray[np.int32]:
        """Rows of plain ids: int32 [len(ids), columns], codes 0."""
        rows = np.zeros((len(ids), self._spec.columns), dtype=np.int32)
        rows[:, 0] = ids
        return rows


def _read_symbols(path: Path, spec: ModelSpec) -> dict[str, int]:
    """Phoneme symbols and their ids.

    Raises:
        InvalidInput: INVALID_REQUEST; they are not there, or are no ids of text in this model.
    """
    try:
        symbols = {str(symbol): int(id_) for symbol, id_ in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(Reason.INVALID_REQUEST, f"phonemes: {path}: {error!r}") from error
    for symbol, id_ in symbols.items():
        if not GENERATE < id_ < spec.semantic_first:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"model: phoneme {symbol!r} has id {id_}, text of {spec.name} lies between "
                f"{GENERATE} and {spec.semantic_first}",
            )
    return symbols
