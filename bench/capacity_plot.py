"""The picture of a capacity run: what goes wrong against streams a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

Curves = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
"""By mix and system: (streams a card, share of streams that stalled or were too slow)."""


def plot_stalls(curves: Curves, path: Path) -> None:
    """One field a mix, one line a system."""
    figure = Figure(figsize=(5 * len(curves), 4), layout="constrained")
    fields = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (mix, systems) in zip(fields, curves.items(), strict=True):
        for name, points in systems.items():
            axes.plot(
                [streams for streams, _ in points],
                [100 * share for _, share in points],
                marker="o",
                label=name,
            )
        axes.set(title=mix, xlabel="streams a card", ylabel="% stalled or below 42 rows/s")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)
