"""Table and pictures of what `bench.pair` measured: `python -m bench.pair_figures run/pair`.

Adds the run's lines to docs/measurements/pair.jsonl, where they are new, and draws into the same
folder: `pair_capacity.svg` (what goes wrong against streams a card), `pair_ttfa.svg` (TTFA
against them), `pair_slowest.svg` (the slowest 1 % of streams, with packed and unpacked
prompts too), `pair_waterfall.svg` and `pair_burst.svg`, `pair_replay.svg`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.pair_items import BURST, NAME, POINTS, REPLAY, STEADY
from bench.points import Point, read_points
from bench.results import MEASUREMENTS, write_table
from duplet_load.plots import plot_run
from duplet_load.record import Record
from duplet_load.summary import FLOOR
from duplet_unit.waterfall import timelines_from_json
from duplet_unit.waterfall_plot import plot_waterfall

Found = Mapping[str, Mapping[str, Sequence[Point]]]
"""By mix and system."""


def plot_points(
    found: Found,
    value: Callable[[Point], float | None],
    what: str,
    path: Path,
    *,
    by_card: bool = False,
    line: float | None = None,
) -> None:
    """One field a mix, one curve a system: `value` against streams, or streams a card.

    Hollow dots were not carried. `line`: a limit to show.
    """
    figure = Figure(figsize=(5 * len(found), 4), layout="constrained")
    fields = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (mix, systems) in zip(fields, found.items(), strict=True):
        for name, points in systems.items():
            cards = 2 if by_card and not name.startswith("monolith") else 1
            known = [(p.streams / cards, value(p), p.carried) for p in points]
            known = [one for one in known if one[1] is not None]
            streams = [x for x, _, _ in known]
            (curve,) = axes.plot(streams, [y for _, y, _ in known], label=name)
            for x, y, carried in known:
                face = curve.get_color() if carried else "white"
                axes.plot([x], [y], "o", color=curve.get_color(), markerfacecolor=face)
        if line is not None:
            axes.axhline(line, color="tab:red", linestyle="--", linewidth=1)
        axes.set(
            title=f"{mix} (hollow: not carried)",
            xlabel="streams a card" if by_card else "streams",
            ylabel=what,
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def _wrong_percent(point: Point) -> float:
    return 100 * point.wrong_share


def _ttfa_ms(point: Point) -> float | None:
    return None if point.ttfa_p95_s is None else 1e3 * point.ttfa_p95_s


def _slowest(point: Point) -> float | None:
    return point.rate_p1


def plot_all(folder: Path, out: Path) -> None:
    """All pictures of what is there."""
    out.mkdir(parents=True, exist_ok=True)
    if (folder / POINTS).exists():
        found = read_points(folder / POINTS)
        wrong = "% refused, stalled or below 42 rows/s"
        plot_points(found, _wrong_percent, wrong, out / "pair_capacity.svg", by_card=True)
        plot_points(found, _ttfa_ms, "TTFA p95, ms", out / "pair_ttfa.svg", by_card=True)
        slowest = "rows/s of the slowest 1 %"
        plot_points(found, _slowest, slowest, out / "pair_slowest.svg", line=FLOOR)
    for name, picture in ((STEADY, "pair_waterfall.svg"), (BURST, "pair_burst.svg")):
        if (folder / name).exists():
            try:
                timelines = timelines_from_json((folder / name).read_text("utf-8"))
                plot_waterfall(timelines, out / picture)
            except ValueError as error:  # nobody was served to the end; the others have pictures
                print(f"no {picture}: {error}")
    if (folder / REPLAY).exists():
        lines = (folder / REPLAY).read_text("utf-8").splitlines()
        plot_run([Record(**json.loads(line)) for line in lines], out / "pair_replay.svg")


def add_lines(lines: Path, measured: Path) -> int:
    """Add a run's lines to those that are known, where they are new. How many were."""
    known = measured.read_text("utf-8").splitlines() if measured.exists() else []
    new = [line for line in lines.read_text("utf-8").splitlines() if line not in set(known)]
    with measured.open("a", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in new)
    return len(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="--out of bench.pair")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    plot_all(options.folder, options.out)
    measured = options.out / f"{NAME}.jsonl"
    print(f"{add_lines(options.folder / f'{NAME}.jsonl', measured)} new lines in {measured}")
    write_table(measured)


if __name__ == "__main__":
    main()
