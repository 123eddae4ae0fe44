"""A request's rows to samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from duplet_core.errors import InvalidInput, Reason
from duplet_pages.spec import ModelSpec
from duplet_voice.codec import Codec
from duplet_voice.vocoder import Samples, Vocoder


class Speech:
    """One listener's speech, of one request or of several one after the other without a gap.

    Owns its vocoder; the codec is shared.
    """

    def __init__(self, spec: ModelSpec, codec: Codec) -> None:
        self._spec = spec
        self._codec = codec
        self._vocoder = Vocoder()

    def push(self, rows: NDArray[np.int32]) -> Samples:
        """Samples that these output rows make final, float32 within (-1, 1) at 22,050 Hz.

        Args:
            rows: [rows, columns]; a stop row has no sound.

        Raises:
            InvalidInput: INVALID_PROMPT; a row is neither speech nor the stop row.
        """
        spec = self._spec
        ids = rows[:, 0]
        spoken = (ids >= spec.semantic_first) & (ids <= spec.semantic_last)
        wrong = np.flatnonzero(~spoken & (ids != spec.stop_id))
        if len(wrong):
            raise InvalidInput(
                Reason.INVALID_PROMPT, f"rows: row {wrong[0]} has id {ids[wrong[0]]}: no speech"
            )
        return self._vocoder.push(self._codec.features(rows[spoken, 1:]))

    def flush(self) -> Samples:
        """The last samples."""
        return self._vocoder.flush()


def speak_rows(spec: ModelSpec, codec: Codec, rows: NDArray[np.int32]) -> Samples:
    """All samples of a whole answer, [rows, columns]; 1,024 a row of speech.

    Raises:
        InvalidInput: as `Speech.push`.
    """
    speech = Speech(spec, codec)
    return np.concatenate([speech.push(rows), speech.flush()])
