"""docs/metrics.md and the services' registries agree."""

from __future__ import annotations

from docs.metric_tables import CANARY, PAGE, find_all, page
from duplet_runtime.settings import SERVICE_NAMES


def test_the_page_is_the_codes() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `make tables`"


async def test_no_service_is_missing() -> None:
    found = await find_all()
    assert set(found) == {*SERVICE_NAMES, CANARY}
    for service, families in found.items():
        assert [f.name for f in families if not f.name.startswith(f"duplet_{service}_")] == []


async def test_every_metric_says_what_it_means() -> None:
    for families in (await find_all()).values():
        assert [f.name for f in families if len(f.documentation.split()) < 2] == []
