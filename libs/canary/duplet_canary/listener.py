"""From rows to what was heard in them: vocoder, recogniser, and whose voice it is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from duplet_canary.ear import Heard
from duplet_canary.phonemes import edit_distance
from duplet_canary.recognisers import Recogniser
from duplet_core.errors import InvalidInput
from duplet_pages.spec import ModelSpec
from duplet_voice.codec import Codec
from duplet_voice.features import SAMPLE_RATE
from duplet_voice.speech import speak_rows
from duplet_voice.vocoder import Samples
from duplet_voice.voices import Voices


class Listener:
    """Hears answers of the built-in voice model."""

    def __init__(
        self, spec: ModelSpec, recogniser: Recogniser, codec: Codec, voices: Voices
    ) -> None:
        self._spec = spec
        self._recogniser = recogniser
        self._codec = codec
        self._voices = voices

    def hear(self, rows: NDArray[np.int32], text: str) -> Heard:
        """`rows`: int32 [n, columns], the whole answer to `text`; none of them is silence."""
        reference = self._recogniser.reference(text)
        if not len(rows):
            return Heard(len(reference), len(reference), "")
        samples = speak_rows(self._spec, self._codec, rows)
        heard = self._recogniser.hear(samples, SAMPLE_RATE)
        return Heard(edit_distance(heard, reference), len(reference), self._identify(samples))

    def _identify(self, samples: Samples) -> str:
        try:
            return self._voices.identify(samples)
        except InvalidInput:  # nothing in it has a pitch
            return ""
