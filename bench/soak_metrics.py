"""What a unit's services say that they hold."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from duplet_core.ids import Role


def scrape(address: str) -> dict[str, float]:
    """A service's metrics by name.

    Raises:
        OSError: it does not answer.
    """
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def held_by_unit(metrics: Mapping[str, str]) -> dict[str, float]:
    """Requests, transfers and pages that are not free or cached; empty when there are none.

    `metrics` has each role's address of metrics.
    """
    lb, prefill, decode, kvproxy = (
        scrape(metrics[role]) for role in (Role.LB, Role.PREFILL, Role.DECODE, Role.KVPROXY)
    )
    kept = prefill["duplet_prefill_pages_free"] + prefill["duplet_prefill_pages_cached"]
    held = {
        "lb's requests": lb["duplet_lb_requests"],
        "prefill's transfers": prefill["duplet_prefill_transfers"],
        "prefill's pages": prefill["duplet_prefill_pages_total"] - kept,
        "decode's transfers": decode["duplet_decode_transfers"],
        "decode's pages": decode["duplet_decode_pages_total"] - decode["duplet_decode_pages_free"],
        "kvproxy's transfers": kvproxy["duplet_kvproxy_transfers"],
    }
    return {what: count for what, count in held.items() if count}
