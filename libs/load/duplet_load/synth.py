"""Traces made up: voices of Zipf popularity, prompts of a voice and a sentence, bursts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from duplet_load.trace import Arrival


@dataclass(frozen=True, slots=True)
class Synth:
    """What the trace is like."""

    requests: int = 1_000
    rate: float = 10.0
    """Arrivals a second, on average."""
    burstiness: float = 1.0
    """Coefficient of variation of the times between arrivals: 1 is Poisson, more comes in
    bursts, 0 is a metronome."""
    voices: int = 200
    zipf: float = 1.1
    """Voice n is asked for in proportion to 1 / n**zipf."""
    cold: float = 0.0
    """Share of requests whose voice nobody has used before."""
    prompt_least: int = 1_000
    prompt_most: int = 2_000
    voice_share: float = 0.75
    """Of the prompt; a voice's rows are the same for all its requests."""
    output_least: int = 63
    output_most: int = 420
    seed: int = 1
    label: str = ""
    """In the names of all that is new: traces of different labels share popular voices alone."""


def make_trace(synth: Synth) -> list[Arrival]:
    """The arrivals, in order; the same for the same values."""
    chance = np.random.default_rng(synth.seed)
    count = synth.requests
    at_s = _arrival_times(synth, chance)
    weights = np.arange(1, synth.voices + 1, dtype=np.float64) ** -synth.zipf
    voices = chance.choice(synth.voices, count, p=weights / weights.sum())
    # A voice's reference has one length, however many requests there are; the sentence fills up
    # the prompt.
    spread = synth.prompt_most - synth.prompt_least + 1
    of_voices = np.random.default_rng([synth.seed, synth.voices])
    references = synth.prompt_least + of_voices.integers(spread, size=synth.voices)
    voice_rows = np.maximum(1, (synth.voice_share * references).astype(int))
    whole = synth.prompt_least + chance.integers(spread, size=count)
    sentences = np.maximum(1, ((1.0 - synth.voice_share) * whole).astype(int))
    cold = chance.random(count) < synth.cold
    outputs = chance.integers(synth.output_least, synth.output_most + 1, size=count)
    voice_names = [
        f"cold-{synth.label}{i}" if cold[i] else f"voice-{voices[i]}" for i in range(count)
    ]
    return [
        Arrival(
            float(at_s[i]),
            (
                (voice_names[i], int(voice_rows[voices[i]])),
                (f"sentence-{synth.label}{i}", int(sentences[i])),
            ),
            int(outputs[i]),
        )
        for i in range(count)
    ]


def _arrival_times(synth: Synth, chance: np.random.Generator) -> np.ndarray:
    """Times with gamma-distributed gaps, whose coefficient of variation is the burstiness."""
    mean_s = 1.0 / synth.rate
    if synth.burstiness == 0:
        return np.arange(synth.requests) * mean_s
    shape = synth.burstiness**-2
    return np.cumsum(chance.gamma(shape, mean_s / shape, synth.requests))
