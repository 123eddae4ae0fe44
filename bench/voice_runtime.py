"""What speech costs beside the model: codes to samples, and text to prompts.

CPU seconds of one core, so that what else runs on the machine says nothing. The vocoder's budget is
`vocoder_times_real_time`: rows one by one, as a listener's come, at the pitch of a high voice,
which has most pulses.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bench.results import Report
from duplet_models import directory
from duplet_voice.codec import load_codec
from duplet_voice.features import CEPSTRA, LOG_F0, ROW, ROWS_PER_SECOND, VOICED, split_rows
from duplet_voice.phonemes import Speller, read_text
from duplet_voice.pieces import split_pieces
from duplet_voice.vocoder import Vocoder, pcm16

HIGH_HZ = 260.0
TEXT = (
    "The train leaves in ten minutes from platform 2, and Dr. Brown paid $3.50 for his ticket. "
    "She counted the pages again, and this time none of them was missing. "
)


def time_vocoder(rows: int) -> float:
    """CPU seconds of `rows` voiced rows, pushed one by one, to 16-bit samples."""
    features = np.zeros((rows, ROW), np.float32)
    frames = split_rows(features)
    frames[:, :CEPSTRA] = np.random.default_rng(3).normal(0.0, 0.05, (len(frames), CEPSTRA))
    frames[:, 0] = -5.0
    frames[:, CEPSTRA:LOG_F0] = (-25.0, -8.0)
    frames[:, LOG_F0] = np.log(HIGH_HZ)
    frames[:, VOICED] = 1.0
    vocoder = Vocoder()
    pcm16(vocoder.push(features[:1]))  # its tables are made once
    began_s = time.process_time()
    for row in range(rows):
        pcm16(vocoder.push(features[row : row + 1]))
    pcm16(vocoder.flush())
    return time.process_time() - began_s


def time_codec(rows: int) -> float:
    """CPU seconds of decoding `rows` rows of the built-in codec, one by one."""
    codec = load_codec(directory("wren"))
    codes = np.random.default_rng(3).integers(0, codec.entries, (rows, codec.books))
    began_s = time.process_time()
    for row in range(rows):
        codec.features(codes[row : row + 1])
    return time.process_time() - began_s


def time_text(repeats: int) -> tuple[float, float]:
    """CPU seconds to the first piece of a long text, and from there for each further piece."""
    speller = Speller()
    speller.phonemes("Warm, as Brillgard knows.")
    began_s = time.process_time()
    pieces = split_pieces(speller.sentences(read_text(TEXT * repeats)))
    next(pieces)
    first_s = time.process_time()
    further = sum(1 for _ in pieces)
    return first_s - began_s, (time.process_time() - first_s) / further


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="print only")
    asked = parser.parse_args()
    report = Report("voice_runtime", machine="one core")
    audio_s = asked.rows / ROWS_PER_SECOND
    best_s = min(time_vocoder(asked.rows) for _ in range(3))
    report.add("vocoder_times_real_time", audio_s / best_s, "x real time", ">= 30")
    report.add("codec_times_real_time", audio_s / time_codec(asked.rows), "x real time")
    first_s, piece_s = time_text(100)
    report.add("text_to_first_piece", first_s * 1e3, "ms")
    report.add("text_to_further_piece", piece_s * 1e3, "ms")
    print(report.table())
    if not asked.quick:
        report.save()


if __name__ == "__main__":
    main()
