"""The voices: other speakers made of the teacher's features, and their frames cut into rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duplet_voice.features import BINS, CEPSTRA, LOG_F0, ROW, STACK, VOICED
from training.analysis import cepstrum_matrix, envelope_matrix


@dataclass(frozen=True, slots=True)
class Speaker:
    """How a voice differs from the teacher."""

    description: str
    formants: float = 1.0
    """Frequencies of the envelope are multiplied by this: above 1, a shorter vocal tract."""
    f0: float = 1.0
    """So is the pitch."""
    tempo: float = 1.0
    """Above 1, faster."""


SPEAKERS = {
    "amber": Speaker("a woman, calm; the teacher's own voice"),
    "cedar": Speaker("a man, low and slow", formants=0.86, f0=0.6, tempo=0.97),
    "slate": Speaker("a tenor between amber and cedar", formants=0.93, f0=0.78, tempo=0.94),
    "robin": Speaker("bright, high and quick", formants=1.12, f0=1.3, tempo=1.05),
}
"""By name; the number of a voice in training data is its place here."""


def place_rows(frames: int, tempo: float, offset: int) -> NDArray[np.float64]:
    """Where a recording's rows take their frames, [rows * 4]; the first `offset` and what is left
    of a row at the end are not used."""
    count = (round(frames / tempo) - offset) // STACK * STACK
    return np.minimum((offset + np.arange(max(count, 0))) * tempo, frames - 1.0)


def take_rows(frames: Tensor, places: Tensor, speaker: Speaker) -> Tensor:
    """Rows float32 [m, 176] of `frames [n, 44]` at fractional `places [4 m]`, as said by another
    speaker. A place is never beyond its recording's last frame, so neighbours do not mix."""
    low = places.floor().long()
    high = torch.where(places > low, low + 1, low)
    share = (places - low)[:, None].float()
    taken = frames[low] * (1.0 - share) + frames[high] * share
    taken[:, VOICED] = frames[places.round().long(), VOICED]
    matrix = torch.from_numpy(formant_matrix(speaker.formants)).to(taken)
    taken[:, :CEPSTRA] = taken[:, :CEPSTRA] @ matrix
    taken[:, LOG_F0] += float(np.log(speaker.f0))
    return taken.reshape(-1, ROW)


def formant_matrix(formants: float) -> NDArray[np.float64]:
    """[40, 40]: a mel-cepstrum to that of the envelope stretched along the linear axis."""
    source = np.minimum(np.arange(BINS) / formants, BINS - 1.0)
    stretched = [np.interp(source, np.arange(BINS), curve) for curve in envelope_matrix()]
    return np.asarray(stretched) @ cepstrum_matrix()
