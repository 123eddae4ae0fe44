"""What a run amounts to: percentiles and counts, as JSON, CSV and lines of text."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from duplet_core.playback import NS
from duplet_load.generator import Outcome
from duplet_load.record import Record

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
LOW_SHARES = {"min": 0.0, "p1": 0.01, "p50": 0.5}
FLOOR = 42.0
"""Rows/s below which a stream counts as slow."""


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest of the values that at least `share` of them do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarize(outcome: Outcome) -> dict[str, Any]:
    """Figures of a run; seconds, rows/s and counts. None where nothing was measured."""
    records = outcome.records
    rates = _known(record.rows_per_second for record in records if record.well)
    seconds = (outcome.ended_ns - outcome.began_ns) / NS
    rows = sum(record.rows for record in records)
    return {
        "requests": len(records),
        "outcomes": dict(Counter(record.outcome for record in records)),
        "seconds": seconds,
        "rows": rows,
        "rows_per_second": rows / seconds if seconds > 0 else None,
        "ttft_s": _spread(record.ttft_s for record in records),
        "ttfa_s": _spread(record.ttfa_s for record in records),
        "gap_s": {name: outcome.gaps.quantile(share) for name, share in SHARES.items()},
        "stream_rows_per_second": {n: quantile(rates, share) for n, share in LOW_SHARES.items()},
        "streams_below_floor": sum(rate < FLOOR for rate in rates),
        "stalls": sum(record.stalls for record in records),
        "stalled_streams": sum(record.stalls > 0 for record in records),
        "stalled_s": sum(record.stalled_s for record in records),
        "cached_share": _share(records),
        "kv_checks": outcome.kv_checks,
        "kv_mismatches": outcome.kv_mismatches,
        "generator_lag_s": _spread(record.lag_s for record in records),
        "generator_lateness_s": _spread(outcome.lateness_s),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: Iterable[float | None]) -> dict[str, float | None]:
    known = _known(values)
    return {name: quantile(known, share) for name, share in SHARES.items()}


def _share(records: Iterable[Record]) -> float | None:
    """Prompt rows of finished requests that came from the prefix cache."""
    well = [record for record in records if record.well]
    rows = sum(record.prompt_rows for record in well)
    return sum(record.cached_rows for record in well) / rows if rows else None


def save(outcome: Outcome, folder: Path) -> None:
    """Write summary.json, requests.jsonl (which `duplet waterfall` reads) and requests.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summarize(outcome), indent=2) + "\n", "utf-8")
    records = sorted(outcome.records, key=lambda record: record.number)
    with (folder / "requests.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record.to_fields()) + "\n" for record in records)
    with (folder / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        rows = [{k: v for k, v in r.to_fields().items() if k != "timeline"} for r in records]
        names = [name for name in Record.__slots__ if name != "timeline"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def describe(summary: dict[str, Any]) -> str:
    """The summary for people, some lines."""
    outcomes = ", ".join(f"{n} {name}" for name, n in sorted(summary["outcomes"].items()))
    rates = summary["stream_rows_per_second"]
    return "\n".join(
        (
            f"{summary['requests']} requests in {summary['seconds']:.1f} s: {outcomes}",
            f"{summary['rows']} rows, {_number(summary['rows_per_second'])} rows/s",
            _line("TTFT", summary["ttft_s"]),
            _line("TTFA", summary["ttfa_s"]),
            _line("row gap", summary["gap_s"]),
            f"{'stream rate':12} min {_number(rates['min'])}, p1 {_number(rates['p1'])}, "
            f"p50 {_number(rates['p50'])} rows/s; {summary['streams_below_floor']} "
            f"streams below {FLOOR:g}",
            f"{'stalls':12} {summary['stalls']} in {summary['stalled_streams']} streams, "
            f"{summary['stalled_s']:.3f} s",
            f"{'KV':12} {summary['kv_checks']} checks, {summary['kv_mismatches']} mismatches; "
            f"{100 * (summary['cached_share'] or 0):.0f} % of prompt rows cached",
            _line("own lag", summary["generator_lag_s"]),
            _line("own lateness", summary["generator_lateness_s"]),
        )
    )


def _line(name: str, spread: dict[str, float | None]) -> str:
    told = ", ".join(
        f"{share} {_number(None if value is None else value * 1e3)}"
        for share, value in spread.items()
    )
    return f"{name:12} {told} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
