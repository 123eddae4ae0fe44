"""How well the built-in model speaks: sentences that it never saw, heard by a phoneme recogniser.

Each text is said in every voice by the engine that serves, then heard; beside it the teacher's own
speech, and what the codec alone leaves of it. Texts of one word up to some sixty; long ones in
pieces, as the front end cuts them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import duplet_models
from bench.results import Report
from duplet_canary.phonemes import edit_distance
from duplet_canary.recognisers import PhonemeRecogniser
from duplet_core.engine import Start
from duplet_core.errors import InvalidInput
from duplet_core.messages import Sampling
from duplet_engine.engine import Engine
from duplet_engine.sequences import open_prefill
from duplet_pages.engine_config import EngineConfig
from duplet_voice.codec import load_codec
from duplet_voice.features import ROWS_PER_SECOND, SAMPLE_RATE
from duplet_voice.front_end import Piece, VoiceFrontEnd
from duplet_voice.speech import Speech
from training.make_voices import code_speech, speak_features
from training.speak import TEACHER_RATE, Teacher
from training.speakers import SPEAKERS

SLOTS = 24
_PAGE_ROWS = 16
_GROUPS = ((1, 1), (2, 2), (3, 3), (4, 8), (9, 20), (21, 40), (41, 70))
"""Sub-groups by number of words."""
_HEARD_SECONDS = 1.2
"""A voice is told from speech that is not shorter: a word or two end before their pitch settles."""
Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Said:
    """One text in one voice."""

    samples: Samples
    rows: int
    stopped: bool


@dataclass(slots=True)
class Score:
    """Phonemes that were wrong, of how many."""

    wrong: int = 0
    phonemes: int = 0

    def add(self, heard: Sequence[str], reference: Sequence[str]) -> None:
        self.wrong += edit_distance(heard, reference)
        self.phonemes += len(reference)

    @property
    def rate(self) -> float:
        return self.wrong / max(self.phonemes, 1)


def choose_texts(path: Path, count: int) -> list[str]:
    """Held-out texts of plain words, as many of every group by length; the longest are several
    sentences in a row."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    texts = list(dict.fromkeys(e["text"] for e in entries if e["kind"] in ("prose", "short")))
    chosen: list[str] = []
    for least, most in _GROUPS:
        fitting = [text for text in texts if least <= len(text.split()) <= most]
        if least > 40:
            fitting = list(_join([text for text in texts if text[-1] in ".!?"], 60))
        chosen += fitting[: -(-count // len(_GROUPS))]
    return chosen


def _join(sentences: list[str], words: int) -> Iterator[str]:
    joined = ""
    for sentence in (s for s in sentences if len(s.split()) > 5):
        if len(f"{joined} {sentence}".split()) > words and joined:
            yield joined
            joined = ""
        joined = f"{joined} {sentence}".strip()


def open_engine(model: Path, threads: int) -> Engine:
    """An engine for `say`; whoever opens it closes it."""
    return Engine(
        EngineConfig("monolith", str(model), pool_pages=SLOTS * 50, slots=SLOTS, threads=threads)
    )


def generate(engine: Engine, pieces: list[Piece], sampling: Sampling) -> list[NDArray[np.int32]]:
    """Output rows of each piece, as the unit would give them; seeds follow one another."""
    pages_each = engine.config.pool_pages // SLOTS
    batch = engine.new_batch()
    free, waiting = list(range(SLOTS)), list(range(len(pieces)))[::-1]
    slots: dict[int, int] = {}
    rows: list[list[list[int]]] = [[] for _ in pieces]
    with torch.inference_mode():
        while waiting or slots:
            while free and waiting:
                number, slot = waiting.pop(), free.pop()
                pages = tuple(range(slot * pages_each, (slot + 1) * pages_each))
                piece = pieces[number]
                drawn = Sampling(sampling.seed + number, *_options(sampling))
                start = Start(number, pages, piece.prompt.tobytes(), 0, 0, drawn)
                sequence = open_prefill(
                    engine.model_config, start, _PAGE_ROWS, engine.config.pool_pages
                )
                while (first := engine.prefill_chunk(sequence)) is None:
                    pass
                rows[number].append(first.tolist())
                packed = first.numpy().astype("<i4").tobytes()
                batch.join(Start(number, pages, packed, len(piece.prompt), piece.max_rows, drawn))
                slots[number] = slot
            seqs = batch.seqs
            step, _ = engine.decode_step(batch)
            for number, row in zip(seqs, step.tolist(), strict=True):
                rows[number].append(row)
                ended = engine.spec.stop_id in (row[0], rows[number][0][0])
                if ended or len(rows[number]) >= pieces[number].max_rows:
                    batch.leave(number)
                    free.append(slots.pop(number))
    return [np.array(r, np.int32) for r in rows]


def _options(sampling: Sampling) -> tuple[float, float, int, int]:
    s = sampling
    return s.temperature, s.top_p, s.top_k, s.repetition_window


def say(
    engine: Engine, model: Path, texts: list[str], voice: str, sampling: Sampling
) -> list[Said]:
    """Texts in a voice, pieces joined; `model` is the directory that the engine reads."""
    front_end = VoiceFrontEnd(engine.spec, model)
    codec = load_codec(model)
    split = [list(front_end.pieces(text, voice)) for text in texts]
    answers = iter(generate(engine, [piece for pieces in split for piece in pieces], sampling))
    said = []
    for pieces in split:
        speech, parts, stopped, count = Speech(engine.spec, codec), [], True, 0
        for _ in pieces:
            rows = next(answers)
            stopped &= bool(rows[-1, 0] == engine.spec.stop_id)
            count += len(rows)
            parts.append(speech.push(rows))
        said.append(Said(np.concatenate([*parts, speech.flush()]), count, stopped))
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True, help="of training.texts --held-out")
    parser.add_argument("--model", type=Path, default=duplet_models.directory("wren"))
    parser.add_argument("--count", type=int, default=42, help="texts a voice")
    parser.add_argument("--voices", nargs="*", default=list(SPEAKERS))
    parser.add_argument("--temperature", type=float, help="the model's own where not given")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--details", type=Path, help="a JSON line for every text and voice")
    parser.add_argument("--dry", action="store_true", help="write no measurement")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = choose_texts(args.texts, args.count)
    engine = open_engine(args.model, args.threads)
    own = engine.spec.sampling
    sampling = Sampling(
        1,
        own.temperature if args.temperature is None else args.temperature,
        own.top_p if args.top_p is None else args.top_p,
        own.top_k,
        own.repetition_window,
    )
    report = Report("voice")
    scores = score_voices(engine, args.model, texts, args.voices, sampling, args.details)
    report_scores(report, scores, args.voices)
    engine.close()
    print(report.table())
    if not args.dry:
        report.save()


@dataclass(slots=True)
class Scores:
    """What all texts in all voices came to."""

    by_case: dict[str, Score]
    said: int = 0
    stopped: int = 0
    listened: int = 0
    identified: int = 0
    rows: int = 0
    teacher_rows: float = 0.0

    def of(self, case: str) -> Score:
        return self.by_case.setdefault(case, Score())


def score_voices(
    engine: Engine,
    model: Path,
    texts: list[str],
    voices: list[str],
    sampling: Sampling,
    details: Path | None,
) -> Scores:
    """Say and hear every text in every voice."""
    recogniser, teacher = PhonemeRecogniser(), Teacher()
    codec, tensors = load_codec(model), load_file(model / "codec.safetensors")
    ears = VoiceFrontEnd(engine.spec, model).voices
    scores = Scores({})
    lines = []
    for voice in voices:
        for text, said in zip(texts, say(engine, model, texts, voice, sampling), strict=True):
            reference = recogniser.reference(text)
            heard = recogniser.hear(said.samples, SAMPLE_RATE)
            words = len(text.split())
            group = next(f"{a} to {b} words" for a, b in _GROUPS if a <= words <= b)
            scores.of(f"model, {voice}").add(heard, reference)
            scores.of(f"model, {group}").add(heard, reference)
            codes = code_speech(teacher, text, SPEAKERS[voice], tensors)
            alone = speak_features(codec.features(codes))
            heard_alone = recogniser.hear(alone, SAMPLE_RATE)
            scores.of(f"codec alone, {voice}").add(heard_alone, reference)
            scores.of(f"codec alone, {group}").add(heard_alone, reference)
            if voice == voices[0]:
                clean = teacher.read(teacher.phonemes(text))[0]
                scores.of("teacher").add(recogniser.hear(clean, TEACHER_RATE), reference)
            try:
                who = ears.identify(said.samples)
            except InvalidInput:
                who = ""
            scores.said += 1
            scores.stopped += said.stopped
            if len(said.samples) >= _HEARD_SECONDS * SAMPLE_RATE:
                scores.listened += 1
                scores.identified += who == voice
            scores.rows += said.rows
            scores.teacher_rows += len(codes)
            wrong = edit_distance(heard, reference)
            lines.append(
                {"voice": voice, "text": text, "wrong": wrong, "of": len(reference), "who": who}
                | {"rows": said.rows, "codec_rows": len(codes), "stopped": said.stopped}
                | {"heard": " ".join(heard), "reference": " ".join(reference)}
            )
    if details is not None:
        details.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return scores


def report_scores(report: Report, scores: Scores, voices: list[str]) -> None:
    """The cases of the measurement."""
    rates = [scores.of(f"model, {voice}").rate for voice in voices]
    report.add("voice_phoneme_error_rate", min(rates), "ratio", "<= 0.09")
    report.add("voice_phoneme_error_rate_worst", max(rates), "ratio", "<= 0.15")
    report.add(
        f"voice identified by ear, of speech of {_HEARD_SECONDS} s and more",
        scores.identified / scores.listened,
        "ratio",
        ">= 0.98",
    )
    report.add("answers that stopped by themselves", scores.stopped / scores.said, "ratio", ">= 1")
    report.add("length against the teacher's", scores.rows / scores.teacher_rows, "ratio")
    report.add("texts said and heard", scores.said, "texts")
    report.add("speech heard", scores.rows / ROWS_PER_SECOND, "s")
    for case in sorted(scores.by_case):
        report.add(f"phoneme error rate: {case}", scores.by_case[case].rate, "ratio")


if __name__ == "__main__":
    main()
