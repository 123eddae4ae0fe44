"""Pictures of a run; needs matplotlib (`pip install 'duplet-load[plots]'`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from duplet_load.record import Record
from duplet_load.summary import FLOOR


def plot_run(records: Sequence[Record], path: Path) -> None:
    """TTFA over time, its distribution, stream rates and stalls; the suffix says the kind."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    (over_time, spread), (rates, stalls) = figure.subplots(2, 2)
    heard = [record for record in records if record.ttfa_s is not None]
    over_time.scatter([r.at_s for r in heard], [1e3 * (r.ttfa_s or 0) for r in heard], s=6)
    over_time.set(title="TTFA by arrival", xlabel="s", ylabel="ms")
    _distribution(spread, [1e3 * (r.ttfa_s or 0) for r in heard], "TTFA", "ms")
    known = [r.rows_per_second for r in records if r.well and r.rows_per_second is not None]
    _distribution(rates, known, "stream rate", "rows/s")
    rates.axvline(FLOOR, color="tab:red", linestyle="--")
    stalled = [r for r in records if r.stalls]
    stalls.scatter([r.at_s for r in stalled], [1e3 * r.stalled_s for r in stalled], s=10)
    stalls.set(title=f"stalled streams: {len(stalled)}", xlabel="s", ylabel="ms stalled")
    for axes in (over_time, spread, rates, stalls):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _distribution(axes: Axes, values: Sequence[float], title: str, unit: str) -> None:
    if values:
        axes.ecdf(values)
    axes.set(title=title, xlabel=unit, ylabel="share")
