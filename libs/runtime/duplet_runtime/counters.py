"""Counters that core's machines raise, by service: they are there from the start, at 0, for an
alert cannot see the first rise of a counter that was not."""

from __future__ import annotations

from duplet_core.ids import Role
from duplet_runtime.settings import MONOLITH

EVERYWHERE = {
    "stale_messages": "Messages of streams that do not count any more",
    "hellos_refused": "Peers refused at Hello",
}
_PROMPTS = {
    "prompt_rows": "Rows of prompts that were started",
    "cached_rows": "Rows of started prompts whose KV was in the prefix cache",
}
_ADMITS = {"admits_refused_within_credit": "Admits that decode refused though lb had credit"}

COUNTERS: dict[str, dict[str, str]] = {
    Role.LB: {"requests_overloaded": "Requests that waited for credit in vain"},
    Role.PREFILL: {
        **_PROMPTS,
        "prefix_cache_forgotten": "Times that the prefix cache was emptied after a mismatch",
    },
    Role.DECODE: {
        **_ADMITS,
        "kv_mismatches": "Checks of landed KV that failed",
        "aborts_resent": "ABORTs said again in a Hello",
        "reports_ignored": "Reports of a writer about pages that are not granted to it",
    },
    Role.KVPROXY: {
        "transfers_landed": "Transfers whose KV is in decode's pages",
        "copies_unknown": "Copies that may still write: their end is not known",
        "grants_ignored": "Second grants of a transfer",
        "writer_red": "Times that withheld ends turned health red",
    },
    MONOLITH: {**_PROMPTS, **_ADMITS},
}
