"""The clients of a simulated unit: which prompts they send.

A prompt is a voice's rows and then a text of its own. The voices with an even number begin
like the one before them, for a page. Now and then a client sends what was sent before.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from duplet_core.messages import Sampling
from duplet_sim import content
from duplet_sim.content import Rows
from duplet_sim.swarm import Swarm

_VOICES = 1000
"""Contents from here on are voices."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks for."""

    number: int
    """Of the prompt."""
    prompt: Rows
    output_rows: int
    sampling: Sampling
    stops_at_once: bool


class Workload:
    """Draws what clients ask for. Owns the randomness of it."""

    def __init__(self, seed: int, swarm: Swarm) -> None:
        self.dice = Random(f"load {seed}")
        self._swarm = swarm
        self._sent: list[Order] = []

    def voice(self, voice: int) -> Rows:
        """A voice's rows; voice 0 has none."""
        swarm, number = self._swarm, _VOICES + voice
        if voice == 0:
            return ()
        fork = min(swarm.config.page_rows, swarm.voice_rows) if voice % 2 == 0 else 0
        own = content.tags(number, fork, swarm.voice_rows)
        return content.tags(number - 1, 0, fork) + own

    def draw(self, number: int) -> Order:
        """The next order; `number` is a new content."""
        swarm, dice = self._swarm, self.dice
        prompt = self.voice(dice.randint(0, swarm.voices) if swarm.voices else 0)
        prompt += content.tags(number, len(prompt), len(prompt) + dice.randint(1, swarm.text_rows))
        if self._sent and dice.random() < swarm.chances["again"]:
            earlier = dice.choice(self._sent)
            number, prompt = earlier.number, earlier.prompt
        order = Order(
            number,
            prompt,
            dice.randint(1, swarm.longest_output),
            Sampling(dice.choice((0, 0, 2)), 1.0, 1.0, 0, 0),
            dice.random() < swarm.chances["stop_row"],
        )
        self._sent.append(order)
        return order

    def plain(self, number: int, voice: int) -> Order:
        """An order that every unit without faults can serve."""
        prompt = self.voice(voice)
        prompt += content.tags(number, len(prompt), len(prompt) + 1)
        return Order(number, prompt, 2, Sampling(0, 1.0, 1.0, 0, 0), False)
